"""Who holds a limit, and how much more may run under it, read from Redis for the planner.

Two sorts of limits need this: limits that count machines, each of which takes one seat, however many frames run there;
and limits of frames that a licence server reports, or that are not enforced. What any other limit has left is its
maximum less a counter (Ledger.caps).

The script that books decides, by the same rules: change lua/includes/seats.lua together with this module. The keys are
read one after another, so the numbers here are not of one moment.
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
    """The setting ``accounting.limit_settle_window_seconds``: a frame that started fewer seconds before the server was
    asked need not be in its report."""
    booked_before_seconds: float
    """The commit deadline: a frame starts at most this many seconds after it is booked."""

    def bound(self, reported_at: float, redis_ahead_seconds: float) -> int:
        """The second of Redis TIME after which a booking counts beside a report, because the report need not show it.

        ``reported_at``: when the server was asked, in epoch seconds of the database's clock. ``redis_ahead_seconds``:
        how far Redis TIME is ahead of that clock. The result is rounded down, so that the bound is never too late.
        """
        return math.floor(reported_at - self.window_seconds - self.booked_before_seconds + redis_ahead_seconds)


def reads_of_machines(limit_id: str) -> list[Read]:
    """The reads of a limit that counts machines, whose answers ``seats_of`` takes in this order.

    The first answer names the machines. Their counters are read after these reads.
    """
    fields = ("int_running", "int_max_value", "int_machines", "opens_at", "after")
    return [
        ["ZRANGE", keys.MACHINES_PREFIX + limit_id, 0, -1, "WITHSCORES"],
        ["SMEMBERS", keys.other_machines(limit_id)],
        ["SMEMBERS", keys.past_machines(limit_id)],
        ["HMGET", keys.limit(limit_id), *fields],
        ["HGET", keys.limit(f"{limit_id}@"), "int_running"],
        ["ZCARD", keys.started(limit_id)],
    ]


READS_OF_MACHINES = 6
"""How many reads ``reads_of_machines`` returns."""


def seats_of(
    answers: Iterator[object], frames_on: Mapping[str, int], most: int, name: str, redis_seconds: int
) -> Seats:
    """The seats of a limit that counts machines.

    ``answers``: what Redis answered to ``reads_of_machines``. ``frames_on``: how many frames run under the limit, by
    machine. ``most``: the maximum of a limit that was never seeded as one that counts machines. ``redis_seconds``: the
    Redis TIME. Raises TypeError and ValueError for a damaged key.
    """
    machines, others, past, fields, listed, dated = (next(answers) for _ in range(READS_OF_MACHINES))
    if not (
        isinstance(machines, list) and isinstance(others, set) and isinstance(past, set) and isinstance(fields, list)
    ):
        raise TypeError("a key of a limit is damaged")
    running, seeded_maximum, seeded_threshold, opens_at, after = fields
    # Below the threshold any machine may start frames, from there on only one that holds the limit.
    threshold = int(seeded_threshold) if seeded_threshold else most
    maximum = int(seeded_maximum) if seeded_threshold else most
    bound = _number(after)

    # A score above 0 is when the last frame there was booked; a score below 0, when the last frame ended, negated.
    scores = {machine: float(score) for machine, score in machines}
    with_frames = {machine for machine, score in scores.items() if score > 0 and frames_on.get(machine, 0) > 0}
    younger = {machine for machine, score in scores.items() if score > bound}

    # Each frame whose machine is not known counts as a machine. The entries that list no machine are those that do not
    # list ``L@``, and those that have a start under ``L``: they were made while the limit counted frames.
    with_start = dated if isinstance(dated, int) else 0
    without_machine = max(0, _number(running) - _number(listed) + with_start)
    use = len(younger | others) + without_machine
    holders = with_frames | others | past
    if _is_open(threshold, opens_at, redis_seconds):
        return Seats(frozenset(holders), math.inf, name)

    # A worker of the release before leaves machines without frames in the set. They use seats until a recompute, but
    # there is nothing on them that could be kept from going on.
    left_behind = younger - with_frames - others
    too_many = use - len(left_behind) - maximum
    if too_many > 0:
        # As many machines of ours as are too many take no more frames: the last by name, which are the same for every
        # process. A reported machine is ours if frames of ours run there, or the last of them ended after the bound.
        ended_after = {machine for machine, score in scores.items() if after and -score > bound}
        ours = sorted((younger & (with_frames | others)) | (others & (ended_after | with_frames)))
        holders = set(ours[: max(0, len(ours) - too_many)])
    return Seats(frozenset(holders), max(0, threshold - use), name)


def reads_of_frames(limit_id: str) -> list[Read]:
    """The reads of a limit of frames that a licence server reports, whose answers ``headroom_of`` takes in this order.

    ``read_of_starts`` is made from the first answer.
    """
    fields = ("int_running", "int_frames", "int_settled", "opens_at", "after")
    return [
        ["HMGET", keys.limit(limit_id), *fields],
        ["HGET", keys.limit(f"{limit_id}@"), "int_running"],
        ["ZCARD", keys.started(limit_id)],
    ]


READS_OF_FRAMES = 3
"""How many reads ``reads_of_frames`` returns."""


def read_of_starts(limit_id: str, fields: object) -> Read:
    """The read of how many frames were booked after the bound; ``fields``: the first answer to ``reads_of_frames``."""
    bound = fields[-1] if isinstance(fields, list) else None
    return ["ZCOUNT", keys.started(limit_id), f"({bound or 0}", "+inf"]  # "(": the bound itself is not counted


def headroom_of(answers: Iterator[object], started: object, most: int, name: str, redis_seconds: int) -> Headroom:
    """The headroom of a limit of frames that a licence server reports.

    ``answers``: what Redis answered to ``reads_of_frames``; ``started``: to ``read_of_starts``. ``most``: the maximum
    of a limit that was never seeded as one that is reported. ``redis_seconds``: the Redis TIME. Raises TypeError and
    ValueError for a damaged key.
    """
    fields, listed, dated = (next(answers) for _ in range(READS_OF_FRAMES))
    if not isinstance(fields, list):
        raise TypeError("a key of a limit is damaged")
    running, seeded_most, settled, opens_at, _ = fields
    # Entries that were made while the limit counted machines list ``L@`` as well, and have no start under ``L``.
    with_start = min(_number(listed), _number(dated))
    # Beside the tokens of the report count the frames that were booked after the bound, and all whose start is unknown.
    pending = min(with_start, _number(started))
    without_start = max(0, _number(running) - with_start)
    use = _number(settled) + pending + without_start
    threshold = int(seeded_most) if seeded_most else most
    return Headroom(None if _is_open(threshold, opens_at, redis_seconds) else threshold, use, name)


def _is_open(threshold: int, opens_at: str | None, redis_seconds: int) -> bool:
    """Whether a limit refuses nothing: any number is allowed (below 0), or its report has become too old since its caps
    were loaded. ``opens_at``: the second at which the report becomes too old; empty for never."""
    return threshold < 0 or bool(opens_at and int(opens_at) < redis_seconds)


def _number(answer: object) -> int:
    """The number in an answer of Redis, 0 where there is none. Raises ValueError for an answer that is an error."""
    return int(str(answer or 0))
