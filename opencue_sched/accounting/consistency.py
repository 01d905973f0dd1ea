"""The consistency check: does every counter equal the sum of its ledger entries (I1), although bookings go on?

While ``acct:audit`` holds a token, the scripts also log every change of an entry. A counter is read together with the
sequence number of that moment; the ledger, scanned over a longer time, is wound back or forward to the same moment by
the log. So the answer is exact for each vertex under any load. A recompute adds the difference to what is wrong, which
commutes with every booking; the audit only tells of it.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from opencue_sched.accounting import keys
from opencue_sched.accounting.connection import Epoch
from opencue_sched.accounting.entries import Record, amounts
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.ledger import Ledger, answering
from opencue_sched.accounting.scripts import adjust_calls, audit_begin_call, chunks, inventory_calls, lease_drop_call
from opencue_sched.lua_scripts import call_scripts

Amounts = tuple[int, int]

_LIFE_MS = 60_000
_SCAN_COUNT = 1000
_LOG_PAGE = 1000
_CALLS_PER_ROUND_TRIP = 8
_KEYS_PER_ROUND_TRIP = 2000


@dataclass(frozen=True, slots=True)
class EntryChange:
    """An entry that came (``added``) or went, at a sequence number."""

    seq: int
    added: bool
    proc_id: str
    entry: str


@dataclass(frozen=True, slots=True)
class CounterReading:
    """A counter at a sequence number: cores and GPUs, or frames and 0."""

    seq: int
    counted: Amounts


@dataclass(frozen=True, slots=True)
class ConsistencyCheck:
    """The ledger as scanned, the counters as read, and what happened meanwhile.

    ``complete`` is False when another check was under way, or this one outlived its token: then only ``records`` are
    valid, and ``unreadable``, the ids of unreadable entries.
    """

    epoch: Epoch
    records: Mapping[str, Record]
    readings: Mapping[str, CounterReading]
    events: Sequence[EntryChange]
    complete: bool
    unreadable: Sequence[str] = ()


def check_consistency(ledger: Ledger, epoch: Epoch | None = None) -> ConsistencyCheck:
    """Scan the ledger and read every counter, once, under ``epoch`` (default: the store's). Raises NotReady."""
    epoch = epoch or ledger.mark().epoch
    token = uuid.uuid4().hex
    client = ledger.client
    (begun,) = ledger.call_under([audit_begin_call(epoch.text, token, _LIFE_MS)])
    mine = int(begun[1]) == 1
    try:
        unreadable: list[str] = []
        records = {record.proc_id: record for record in ledger.records(unreadable)}
        entries = {record.entry for record in records.values()}
        vertices = vertex_keys(ledger) | {key for entry in entries for key, _, _ in amounts(entry)}
        readings = read_counters(ledger, epoch, sorted(vertices)) if mine else {}
        events = _read_log(ledger) if mine else []
    finally:
        if mine:
            with answering():
                (dropped,), _ = call_scripts(client, [lease_drop_call((keys.AUDIT, keys.AUDIT_LOG), token)])
    return ConsistencyCheck(epoch, records, readings, events, mine and int(dropped) == 1, unreadable)


def vertex_keys(ledger: Ledger) -> set[str]:
    """Every vertex of the store, by SCAN."""
    with answering():
        scanned = cast("Iterable[str]", ledger.client.scan_iter(match=keys.EVERYTHING, count=_SCAN_COUNT))
        return {key for key in scanned if keys.parse(key) is not None}


def read_counters(ledger: Ledger, epoch: Epoch, vertices: Sequence[str]) -> dict[str, CounterReading]:
    """Read counters in pieces; each piece knows its moment."""
    readings: dict[str, CounterReading] = {}
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        left = iter(part)
        for _, seq, *numbers in ledger.call_under(inventory_calls(epoch.text, part)):
            for first, second, key in zip(numbers[::2], numbers[1::2], left, strict=False):
                readings[key] = CounterReading(int(seq), (int(first), int(second)))
    return readings


def _read_log(ledger: Ledger) -> list[EntryChange]:
    events: list[EntryChange] = []
    while True:
        with answering():
            page = cast("list[str]", ledger.client.lrange(keys.AUDIT_LOG, len(events), len(events) + _LOG_PAGE - 1))
        events += map(parse_event, page)
        if len(page) < _LOG_PAGE:
            return events


def parse_event(line: str) -> EntryChange:
    """One line of acct:audit:log: ``seq|+ or -|pk_proc|entry``."""
    seq, sign, proc_id, entry = line.split("|", 3)
    return EntryChange(int(seq), sign == "+", proc_id, entry)


def expected(check: ConsistencyCheck) -> dict[str, Amounts]:
    """For each counter read, the sum of the entries that were in the ledger at the moment it was read."""
    logged: dict[str, list[EntryChange]] = defaultdict(list)
    for event in check.events:
        logged[event.proc_id].append(event)
    sums: dict[str, Amounts] = dict.fromkeys(check.readings, (0, 0))

    def add(entry: str, times: int = 1, only: str | None = None) -> None:
        for key, cores, gpus in amounts(entry):
            if key in sums and only in (None, key):
                sums[key] = sums[key][0] + cores * times, sums[key][1] + gpus * times

    quiet = Counter(record.entry for proc_id, record in check.records.items() if proc_id not in logged)
    for entry, times in quiet.items():
        add(entry, times)
    for events in logged.values():
        for key in {key for event in events for key, _, _ in amounts(event.entry)} & sums.keys():
            present = entry_at(events, check.readings[key].seq)
            if present is not None:
                add(present, only=key)
    return sums


def entry_at(events: Sequence[EntryChange], seq: int) -> str | None:
    """The entry of one proc at ``seq``, given all its events since before that; None when it had none."""
    later = next((event for event in events if event.seq > seq), None)
    if later is not None:
        return None if later.added else later.entry
    return events[-1].entry if events[-1].added else None


def drift(check: ConsistencyCheck) -> dict[str, Amounts]:
    """Counters that differ from their entries, and by how much (counter less entries). Empty when I1 holds."""
    sums = expected(check)
    differing = {}
    for key, reading in check.readings.items():
        off = reading.counted[0] - sums[key][0], reading.counted[1] - sums[key][1]
        if off != (0, 0):
            differing[key] = off
    return differing


def correct(ledger: Ledger, check: ConsistencyCheck, differing: Mapping[str, Amounts]) -> None:
    """Take these differences of ``check`` out of the counters, unless another process has done so since."""
    read_at = min(check.readings[key].seq for key in differing)
    amounts_to_add = [(key, -cores, -gpus) for key, (cores, gpus) in differing.items()]
    calls = adjust_calls(check.epoch.text, amounts_to_add, read_at=read_at)
    for part in chunks(calls, _CALLS_PER_ROUND_TRIP):
        ledger.call_under(part)


def count_by_kind(vertices: Iterable[str]) -> dict[VertexKind, int]:
    """How many of these keys are of which kind."""
    return dict(Counter(ref.kind for key in vertices if (ref := keys.parse(key)) is not None))
