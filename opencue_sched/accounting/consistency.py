"""The consistency check: does every counter equal the sum of its ledger entries, although bookings go on?

While ``acct:audit`` holds a token, the scripts also log every change of an entry. A counter is read together with the
sequence number of that moment; the ledger, scanned over a longer time, is wound back or forward to the same moment by
the log. So the answer is exact for each vertex under any load. A recompute then adds the difference to a wrong counter
(which commutes with every booking), only while it has the token: no other check adds it again. The audit only reports.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import structlog

from opencue_sched.accounting import keys
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import Record, amounts
from opencue_sched.accounting.ledger import Ledger, adjust_calls, answering, id_calls, machines_calls
from opencue_sched.clients.lua_scripts import call_script, chunks

log = structlog.get_logger(__name__)

Amounts = tuple[int, int]
"""Whole cores and GPUs."""

_LEASE = (keys.AUDIT, keys.AUDIT_LOG)
"""The keys of the lease under which one process checks: the lease, and the log of changes that goes with it."""
_LIFE_MS = 60_000  # never renewed: a check that takes longer corrects nothing more and is not ``complete``
_SCAN_COUNT = 1000
"""How many keys one step of a SCAN looks at."""
_LOG_PAGE = 1000
"""How many lines of the log one read takes."""
_CALLS_PER_ROUND_TRIP = 8
"""How many calls of scripts that write go together."""
_KEYS_PER_ROUND_TRIP = 2000
"""How many vertices, or places, are read together: with more, each round trip has a larger answer; with fewer, the scan
takes longer, and more changes must be wound back to its instant."""
_NO_MACHINE = "-"
"""Stands for any machine of a limit whose key is damaged: no host has this name."""


@dataclass(frozen=True, slots=True)
class EntryChange:
    """An entry that came into the ledger or went out of it: a line of acct:audit:log."""

    seq: int
    """The sequence number of that change."""
    added: bool
    """True for an entry that came, False for one that went."""
    proc_id: str
    entry: str
    """The entry as text."""


@dataclass(frozen=True, slots=True)
class ConsistencyCheck:
    """What one consistency check has read and corrected."""

    epoch: Epoch
    records: Mapping[str, Record]
    """The ledger as scanned."""
    readings: Mapping[str, tuple[int, Amounts]]
    """Each counter: the sequence number at which it was read, then its cores and GPUs; for a limit, its frames and
    0."""
    events: Sequence[EntryChange]
    """The changes of entries while the check was under way."""
    complete: bool
    """False when another check was under way, or this one outlived its token: then only ``records`` and ``seqs`` are
    valid."""
    healed: Mapping[str, Amounts] = field(default_factory=dict)
    """The counters that were corrected, each with what it was off by."""
    seqs: Sequence[int] = ()
    """The sequence numbers of our own corrections."""
    wrong_machines: Sequence[str] = ()
    """Keys of the counters of limits' frames on machines that were not machines of their limits, or the reverse, or of
    frames whose starts were not all known."""


def check_consistency(ledger: Ledger, epoch: Epoch | None = None, *, heal: bool = False) -> ConsistencyCheck:
    """Scan the ledger and read every counter, once, under ``epoch`` (default: the store's). With ``heal`` correct the
    counters that are off their entries. Raises NotReady."""
    epoch = epoch or ledger.mark().epoch
    token = uuid.uuid4().hex
    # A second check at once would empty the log of the first, and correct what that has corrected.
    with answering(ledger.client):
        mine = bool(call_script(ledger.client, "lease_take", _LEASE, [f"{token}|0", _LIFE_MS]))
    try:
        records = {record.proc_id: record for record in ledger.records()}
        entries = {record.entry for record in records.values()}
        stored = _stored_keys(ledger)
        vertices = {key for key in stored if keys.parse(key)} | {
            key for entry in entries for key, _, _ in amounts(entry)
        }
        readings = read_counters(ledger, epoch, sorted(vertices)) if mine else {}
        events = _read_log(ledger) if mine else []
        check = ConsistencyCheck(epoch, records, readings, events, mine)
        if heal and mine:
            check = correct(ledger, check, token)
        check = replace(
            check, wrong_machines=check_machines(ledger, epoch, stored | vertices, records.values(), heal=heal)
        )
    finally:
        if mine:
            with answering(ledger.client):
                dropped = bool(call_script(ledger.client, "lease_drop", _LEASE, [token]))
    return check if mine and dropped else replace(check, complete=False, healed={})


def correct(ledger: Ledger, check: ConsistencyCheck, token: str) -> ConsistencyCheck:
    """Take out of each counter what it is off by, while the token is still held; returns the check with what was done.

    In a dual store (lua/includes/ledger.lua) this is done to limits only. What another counter is off by may be a
    decrement of the other program whose entry is not released yet, or the reverse: lua/foreign.lua judges these.
    """
    differing = {
        key: off for key, off in drift(check).items() if not check.epoch.dual or key.startswith(keys.LIMIT_PREFIX)
    }
    if not differing:
        return check
    log.warning("counters_drifted", vertices=dict(list(differing.items())[:20]), total=len(differing))
    calls = adjust_calls(check.epoch.text, token, [(key, -cores, -gpus) for key, (cores, gpus) in differing.items()])
    answers = [answer for part in chunks(calls, _CALLS_PER_ROUND_TRIP) for answer in ledger.call_under(part)]
    return replace(check, healed=differing, seqs=[int(answer[1]) for answer in answers if int(answer[2])])


def check_machines(
    ledger: Ledger, epoch: Epoch, stored: Collection[str], records: Iterable[Record], *, heal: bool
) -> list[str]:
    """Compare the machines of every limit, and the starts of frames, with what is counted. With ``heal`` put right what
    differs, which a worker of an older release, or another program, has left.

    A place is a limit and a machine, or a limit of frames. Each place is judged within one call, so exactly under any
    load. ``stored`` are the keys of the store. Returns the keys of the counters of the places that differed.
    """
    places = {pair for key in stored if (pair := keys.limit_and_machine(key))}
    places |= {
        (limit_id, machine)
        for key in stored
        if key.startswith(keys.STARTED_PREFIX)
        for limit_id, _, machine in [key.removeprefix(keys.STARTED_PREFIX).partition("@")]
    }
    starts = defaultdict[tuple[str, str], set[str]](set)
    for record in records:
        for place in keys.starts_of(record.entry):
            starts[place].add(record.proc_id)
    limits = sorted(
        key.removeprefix(keys.MACHINES_PREFIX)
        for key in stored
        if key.startswith(keys.MACHINES_PREFIX) and ":" not in key.removeprefix(keys.MACHINES_PREFIX)
    )
    with answering(ledger.client), ledger.client.pipeline(transaction=False) as pipe:
        for limit_id in limits:
            pipe.zrange(keys.MACHINES_PREFIX + limit_id, 0, -1)
        answers = pipe.execute(raise_on_error=False)
    for limit_id, machines in zip(limits, answers, strict=True):
        # Where the key is no sorted set, the answer is an error, and the script says the same of any machine.
        places |= {(limit_id, machine) for machine in (machines if isinstance(machines, list) else [_NO_MACHINE])}
    wrong, left = _differing(ledger, epoch, sorted((*place, "") for place in places | starts.keys()), heal=heal)
    if heal and (wrong or left):
        ids = {place: starts[place] | _noted(ledger, place) for place in {(limit, on) for limit, on, _ in wrong + left}}
        _differing(ledger, epoch, sorted((*place, id_) for place in ids for id_ in ids[place]), heal=True)
    found = [keys.limit(f"{limit_id}@{machine}") for limit_id, machine, _ in wrong]
    if found:
        log.warning("machines_of_limits_differed", machines=found[:20], total=len(found))
    return found


def _noted(ledger: Ledger, place: tuple[str, str]) -> set[str]:
    """The procs of which a start is noted at a limit, or on a machine of it."""
    limit_id, machine = place
    with answering(ledger.client):
        noted = ledger.client.zrange(keys.started(f"{limit_id}@{machine}" if machine else limit_id), 0, -1)
    return set(cast("list[str]", noted))


def _differing(
    ledger: Ledger, epoch: Epoch, places: Sequence[tuple[str, str, str]], *, heal: bool
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Two lists of places: where the script says that the counters differ, and where a worker of an older release has
    left starts."""
    wrong: list[tuple[str, str, str]] = []
    left: list[tuple[str, str, str]] = []
    for part in chunks(places, _KEYS_PER_ROUND_TRIP):
        calls = machines_calls(epoch.text, part, heal=heal)
        size = len(calls[0].args[2:]) // 3
        for number, (_, *positions) in enumerate(ledger.call_under(calls)):
            for at in map(int, positions):
                (wrong if at > 0 else left).append(part[number * size + abs(at) - 1])
    return wrong, left


def vertex_keys(ledger: Ledger) -> set[str]:
    """Every vertex of the store, by SCAN."""
    return {key for key in _stored_keys(ledger) if keys.parse(key) is not None}


def _stored_keys(ledger: Ledger) -> set[str]:
    """All keys of the accounting in the store, by SCAN."""
    with answering(ledger.client):
        return set(cast("Iterable[str]", ledger.client.scan_iter(match=keys.EVERYTHING, count=_SCAN_COUNT)))


def read_counters(ledger: Ledger, epoch: Epoch, vertices: Sequence[str]) -> dict[str, tuple[int, Amounts]]:
    """Each counter, with the sequence number at which it was read: cores and GPUs, or frames and 0 for a limit.

    Counters are read in pieces; those of one piece have the same number.
    """
    read: list[tuple[int, Amounts]] = []
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        for _, seq, *numbers in ledger.call_under(id_calls("inventory", part, epoch.text)):
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            read += [(int(seq), (int(cores), int(gpus))) for cores, gpus in pairs]
    return dict(zip(vertices, read, strict=True))


def _read_log(ledger: Ledger) -> list[EntryChange]:
    """The changes of entries since the check began, in their order."""
    events: list[EntryChange] = []
    while True:
        with answering(ledger.client):
            page = cast("list[str]", ledger.client.lrange(keys.AUDIT_LOG, len(events), len(events) + _LOG_PAGE - 1))
        for line in page:
            seq, sign, proc_id, entry = line.split("|", 3)
            events.append(EntryChange(int(seq), sign == "+", proc_id, entry))
        if len(page) < _LOG_PAGE:
            return events


def drift(check: ConsistencyCheck) -> dict[str, Amounts]:
    """Counters that differ from the sum of the entries that were in the ledger when they were read, and by how much
    (counter less entries). Empty when every counter is that sum."""
    logged: dict[str, list[EntryChange]] = defaultdict(list)
    for event in check.events:
        logged[event.proc_id].append(event)
    off = {key: counted for key, (_, counted) in check.readings.items()}

    def take(entry: str, times: int = 1, only: str | None = None) -> None:
        for key, cores, gpus in amounts(entry):
            if key in off and only in (None, key):
                off[key] = off[key][0] - cores * times, off[key][1] - gpus * times

    quiet = Counter(record.entry for proc_id, record in check.records.items() if proc_id not in logged)
    for entry, times in quiet.items():
        take(entry, times)
    for events in logged.values():
        for key in {key for event in events for key, _, _ in amounts(event.entry)} & off.keys():
            present = entry_at(events, check.readings[key][0])
            if present is not None:
                take(present, only=key)
    return {key: differing for key, differing in off.items() if differing != (0, 0)}


def entry_at(events: Sequence[EntryChange], seq: int) -> str | None:
    """The entry of one proc at ``seq``, given all its events since before that; None when it had none."""
    later = next((event for event in events if event.seq > seq), None)
    if later is not None:
        return None if later.added else later.entry
    return events[-1].entry if events[-1].added else None
