"""The machines of limits in the store at one moment, since when frames run, and what must be true of both."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import Booking, EntryState, Record

_LOOK = """
local call, found = redis.call, {}
local machines = cjson.decode(ARGV[1])
for i = 2, #ARGV do
  local limit, started = ARGV[i], {}
  for _, machine in ipairs(machines) do
    local key = 'acct:started:' .. limit .. (machine ~= '' and '@' .. machine or '')
    started[#started + 1] = call('ZRANGE', key, 0, -1, 'WITHSCORES')
  end
  local holding = 'acct:machines:' .. limit
  found[#found + 1] = {
    call('HMGET', 'acct:limit:' .. limit, 'int_machines', 'int_max_value', 'int_frames', 'int_settled', 'after'),
    call('ZRANGE', holding, 0, -1, 'WITHSCORES'), call('SMEMBERS', holding .. ':others'),
    call('SMEMBERS', holding .. ':past'), started}
end
return cjson.encode(found)
"""

# A score below 0 is since when a machine has no frame any more.
_OLDER = """
for _, pattern in ipairs({'acct:started:*', 'acct:machines:*'}) do
  for _, key in ipairs(redis.call('KEYS', pattern)) do
    if redis.call('TYPE', key).ok == 'zset' then
      local found = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
      for i = 1, #found, 2 do
        local score = tonumber(found[i + 1])
        redis.call('ZADD', key, score > 0 and score - ARGV[1] or score + ARGV[1], found[i])
      end
    end
  end
end
"""


@dataclass(frozen=True)
class LimitSeen:
    """A limit as the store has it. ``most`` machines may hold it, or frames run where it was reported; None of a limit
    that is nothing but its maximum; -1: any number."""

    id: str
    counts_machines: bool
    most: int | None
    maximum: int
    settled: int
    after: int
    machines: dict[str, int]
    others: frozenset[str]
    past: frozenset[str]
    started: dict[str, dict[str, int]]
    """By machine, and under '' of a limit of frames: each proc with when it was booked."""

    def counts(self, record: Record) -> bool:
        """Whether a frame counts beside a report; one that does not say since when it runs always does."""
        known = any(limit_id == self.id for limit_id, _ in keys.starts_of(record.entry))
        return not known or record.booked_at > self.after

    def machines_of(self, records: Iterable[Record]) -> set[str]:
        """The machines of these entries under this limit."""
        return {
            machine
            for record in records
            for limit_id, machine in keys.starts_of(record.entry)
            if limit_id == self.id and machine
        }


def look_at_limits(client: redis.Redis, limits: Sequence[str], machines: Sequence[str]) -> list[LimitSeen]:
    """All of these limits, at one moment."""
    places = [*machines, ""]
    found = json.loads(cast("str", client.eval(_LOOK, 0, json.dumps(places), *limits)))
    seen = []
    for limit_id, (fields, holding, others, past, started) in zip(limits, found, strict=True):
        machine_most, maximum, frame_most, settled, after = fields
        most = machine_most or frame_most
        by_machine = {place: _scores(starts) for place, starts in zip(places, started, strict=True)}
        numbers = (int(maximum or 0), int(settled or 0), int(after or 0))
        known = int(most) if most else None
        sets = _scores(holding), frozenset(others), frozenset(past)
        seen.append(LimitSeen(limit_id, bool(machine_most), known, *numbers, *sets, by_machine))
    return seen


def _scores(flat: Sequence[str]) -> dict[str, int]:
    flat = list(flat)  # an empty table of Lua is an object of JSON
    return {member: int(score) for member, score in zip(flat[::2], flat[1::2], strict=True)}


def make_older(client: redis.Redis, seconds: int) -> None:
    """Each frame was booked so much earlier."""
    client.eval(_OLDER, 0, seconds)


def check_machines(limits: Iterable[LimitSeen], records: Mapping[str, Record]) -> None:
    """The machines of a limit are exactly the hosts of its entries, each by when its last frame was booked, and a start
    is noted of exactly the entries that say so."""
    starts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for proc_id, record in records.items():
        for place in keys.starts_of(record.entry):
            starts[place][proc_id] = record.booked_at
    for limit in limits:
        for machine, noted in limit.started.items():
            wanted = starts.get((limit.id, machine), {})
            assert noted == wanted, f"{limit.id}@{machine} has the starts {noted}, its entries {wanted}"
        holding = {machine: since for machine, since in limit.machines.items() if since > 0}
        latest = {machine: max(of.values()) for (of_limit, machine), of in starts.items() if of_limit == limit.id}
        latest.pop("", None)
        assert holding == latest, f"{limit.id} has the machines {holding}, its entries {latest}"


def check_seats(
    limits: Iterable[LimitSeen],
    hosts: Iterable[str],
    before: Iterable[Record],
    accepted: Iterable[tuple[Booking, Record]],
) -> None:
    """None of the bookings that were ``accepted``, one after the other, was one that its limits forbade, given the
    entries of ``before``."""
    there, known_hosts = list(before), frozenset(hosts)
    for booking, record in accepted:
        for limit in limits:
            if limit.id in booking.vertices.limit_ids and limit.most is not None and limit.most >= 0:
                why = _forbids(limit, known_hosts, there, booking.machine)
                assert why is None, f"{booking} was accepted, although of {limit.id} {why}"
        there.append(record)


def _forbids(limit: LimitSeen, hosts: frozenset[str], there: Iterable[Record], machine: str) -> str | None:
    """Why the limit certainly takes no frame on the machine."""
    most = limit.most or 0
    frames = [record for record in there if limit.id in record.entry.rpartition("|")[2].split(",")]
    counted = [record for record in frames if limit.counts(record)]
    if not limit.counts_machines:
        use = limit.settled + len(counted)
        return f"{use} of {most} frames run" if use >= most else None
    ours = limit.machines_of(counted)
    unknown = sum(not limit.machines_of([record]) for record in frames)
    use = len(ours | limit.others) + unknown
    if use < most:
        return None
    confirmed = [record for record in frames if record.state is EntryState.CONFIRMED]
    if machine not in limit.machines_of(confirmed) | limit.others | limit.past:
        beside = use - (machine in ours)
        return f"{beside} machines hold {most}, and it is none of them" if beside >= most else None
    artists = len(limit.others - hosts)
    first = sum(name < machine for name in ours) < limit.maximum - artists
    return (
        f"{use} machines hold {limit.maximum}, and it is none of the first"
        if use > limit.maximum and not first
        else None
    )
