"""Limits that are more than their maximum, as the ledger has them: who holds one, and how many more may.

The same rules as lua/includes/seats.lua, for the planner; the script decides. What is read here is not of one instant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opencue_sched.accounting import keys
from opencue_sched.domain.caps import Headroom, Seats

Read = list[str | int]
"""A command of Redis that only reads."""


@dataclass(frozen=True, slots=True)
class Settling:
    """The times that decide whether a report of a licence server shows what runs."""

    window_seconds: float
    """A frame that started fewer seconds before the server was asked need not be in the report (as Cuebot's
    setting)."""
    booked_before_seconds: float
    """A frame is booked at most so long before it starts: the commit deadline."""

    def bound(self, reported_at: float, redis_ahead_seconds: float) -> int:
        """The second of Redis TIME after which bookings count beside a report, given when the server was asked by the
        database's clock, and how far Redis TIME is ahead of that. Rounded down, so that it is never too late."""
        return math.floor(reported_at - self.window_seconds - self.booked_before_seconds + redis_ahead_seconds)


def reads_of_machines(limit_id: str) -> list[Read]:
    """What is asked of a limit that counts machines, first."""
    others = keys.other_machines(limit_id)
    fields = ("int_running", "int_max_value", "int_machines", "opens_at", "after")
    return [
        ["ZRANGE", keys.MACHINES_PREFIX + limit_id, 0, -1, "WITHSCORES"],
        ["SMEMBERS", others],
        ["SMEMBERS", keys.past_machines(limit_id)],
        ["HMGET", keys.limit(limit_id), *fields],
        ["HGET", keys.limit(f"{limit_id}@"), "int_running"],
        ["ZCARD", keys.started(limit_id)],
    ]


READS_OF_MACHINES = 6
"""How many answers the reads of a limit that counts machines have."""


def seats_of(
    answers: Iterator[object], frames_on: Mapping[str, int], most: int, name: str, redis_seconds: int
) -> Seats:
    """The seats of a limit, from what was read of it.

    ``frames_on``: the counters of its machines. ``most``: the maximum that counts where the limit was never seeded.
    Raises TypeError and ValueError for a damaged key.
    """
    since, others, past, fields, known, dated = (next(answers) for _ in range(READS_OF_MACHINES))
    if not (isinstance(since, list) and isinstance(others, set) and isinstance(past, set) and isinstance(fields, list)):
        raise TypeError("a key of a limit is damaged")
    running, stored_most, stored, opens_at, after = fields
    maximum = int(stored_most) if stored else most
    threshold = int(stored) if stored else most
    bound = int(after or 0)
    booked = {machine: float(score) for machine, score in since}
    holding = {machine for machine, score in booked.items() if score > 0 and frames_on.get(machine, 0) > 0}
    young = {machine for machine, score in booked.items() if score > bound}
    of_frames = dated if isinstance(dated, int) else 0
    use = len(young | others) + max(0, int(running or 0) - int(str(known or 0)) + of_frames)
    holders = holding | others | past
    if threshold < 0 or (opens_at and int(opens_at) < redis_seconds):
        return Seats(frozenset(holders), math.inf, name)
    # Machines that a worker of the release before has left there are none to be stopped.
    too_many = use - len(young - holding - others) - maximum
    if too_many > 0:
        left_since = {machine for machine, score in booked.items() if after and -score > bound}
        ours = sorted((young & (holding | others)) | (others & (left_since | holding)))
        holders = set(ours[: max(0, len(ours) - too_many)])
    return Seats(frozenset(holders), max(0, threshold - use), name)


def reads_of_frames(limit_id: str) -> list[Read]:
    """What is asked of a limit of frames that is more than its maximum, first."""
    fields = ("int_running", "int_frames", "int_settled", "opens_at", "after")
    return [
        ["HMGET", keys.limit(limit_id), *fields],
        ["HGET", keys.limit(f"{limit_id}@"), "int_running"],
        ["ZCARD", keys.started(limit_id)],
    ]


READS_OF_FRAMES = 3
"""How many answers `reads_of_frames` has."""


def read_of_starts(limit_id: str, fields: object) -> Read:
    """What is asked then, given the answer to the first of reads_of_frames."""
    after = fields[-1] if isinstance(fields, list) else None
    return ["ZCOUNT", keys.started(limit_id), f"({after or 0}", "+inf"]


def headroom_of(answers: Iterator[object], started: object, most: int, name: str, redis_seconds: int) -> Headroom:
    """The headroom of a limit, from what was read of it first, and then. ``most``: the maximum that counts where the
    limit was never seeded. Raises TypeError and ValueError for a damaged key."""
    fields, known, dated = (next(answers) for _ in range(READS_OF_FRAMES))
    if not isinstance(fields, list):
        raise TypeError("a key of a limit is damaged")
    running, frames, settled, opens_at, _ = fields
    counted, with_start = int(running or 0), min(int(str(known or 0)), int(str(dated)))
    use = int(settled or 0) + min(with_start, int(str(started))) + max(0, counted - with_start)
    threshold = int(frames) if frames else most
    if threshold < 0 or (opens_at and int(opens_at) < redis_seconds):
        return Headroom(None, use, name)
    return Headroom(threshold, use, name)
