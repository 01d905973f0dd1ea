"""Recompute: the ledger and the accounting tables, brought to what the proc table says (every two minutes).

Reconciliation by difference of ids (design section 4): mark, snapshot, ledger, apply. Nothing is overwritten, so no
quiet moment is needed and no cycle is ever skipped; a booking that is made meanwhile is left alone because it is
younger than the mark. The same pass checks the counters (I1), frees the keys of finished jobs, and refreshes the
accounting tables of PostgreSQL.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.connection import Epoch
from opencue_sched.accounting.consistency import ConsistencyCheck, count_by_kind, vertex_keys
from opencue_sched.accounting.entries import amounts
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.ledger import Ledger, Mark, answering
from opencue_sched.accounting.reconcile import (
    Cause,
    Drift,
    FirstSeen,
    Pass,
    drift_of_entries,
    reconcile,
    renew_entries,
)
from opencue_sched.accounting.scripts import Phase, chunks, foreign_calls, free_calls, reseed_cas_calls
from opencue_sched.store import accounting as store

log = structlog.get_logger(__name__)

DEFAULT_AGE_SECONDS = 40.0
DEFAULT_GRACE_SECONDS = 30.0
_KEYS_PER_ROUND_TRIP = 2000

# The reference's reseed contract, for a store into which another program publishes plain decrements (see "Another
# program's decrements" in docs/accounting.md): a pass ends the reference's ``GET acct:seq -> SQL -> compare-and-swap``,
# in which counters become what the ledger says, if nothing moved. Where something always does, it ends with the foreign
# deltas that can no longer be explained (lua/foreign.lua) instead of being skipped.


@dataclass(frozen=True, slots=True)
class CasReport:
    """``swapped``: the overwrite went through, at try number ``tries``. ``dissolved`` counts corrected vertices."""

    swapped: bool
    tries: int
    dissolved: int


def reseed_booked(
    ledger: Ledger,
    epoch: Epoch,
    one_pass: Callable[[], Pass],
    *,
    max_retries: int,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
) -> tuple[Pass, CasReport]:
    """Reconcile and swap, up to ``max_retries`` times more; returns the last pass.

    ``grace_seconds``: how long after dropping an entry its decrement may still come.
    """
    dissolved = _dissolve(ledger, epoch, "before", grace_seconds, _hierarchy(vertex_keys(ledger)))
    tries = 0
    while True:
        tries += 1
        done = one_pass()
        if swap_counters(ledger, done):
            return done, CasReport(True, tries, dissolved)
        if tries > max_retries:
            break
    dissolved += _dissolve(ledger, done.mark.epoch, "after", grace_seconds, _stored(ledger, done.check))
    return done, CasReport(False, tries, dissolved)


def swap_counters(ledger: Ledger, done: Pass) -> bool:
    """Write every counter as the ledger says, if only this pass moved anything since its mark."""
    own = (*done.check.seqs, *done.applied.seqs)
    if not is_undisturbed(done.mark.seq, own):
        return False
    values = counters(done.entries_now().values(), _stored(ledger, done.check))
    expected = done.mark.seq + len(own)
    for part in chunks(values, _KEYS_PER_ROUND_TRIP):
        answers = ledger.call_under(reseed_cas_calls(done.mark.epoch.text, expected, part))
        if any(int(answer[0]) != 1 for answer in answers):
            return False
    return True


def is_undisturbed(mark_seq: int, own_seqs: Sequence[int]) -> bool:
    """Whether the sequence numbers our own calls got follow the mark without a gap: then nobody else moved anything."""
    return list(own_seqs) == list(range(mark_seq + 1, mark_seq + 1 + len(own_seqs)))


def counters(entries: Iterable[str], stored: Iterable[str]) -> list[tuple[str, int, int]]:
    """Cores and GPUs of each vertex, from the entries; 0 for every stored key without any. Limits are left out."""
    sums = dict.fromkeys(stored, (0, 0))
    for entry in entries:
        for key, cores, gpus in amounts(entry):
            if not key.startswith(keys.LIMIT_PREFIX):
                before = sums.get(key, (0, 0))
                sums[key] = before[0] + cores, before[1] + gpus
    return [(key, cores, gpus) for key, (cores, gpus) in sums.items()]


def _stored(ledger: Ledger, check: ConsistencyCheck) -> list[str]:
    """Every vertex that has a counter, also where another consistency check was under way."""
    return _hierarchy(check.readings if check.complete else vertex_keys(ledger))


def _hierarchy(vertices: Iterable[str]) -> list[str]:
    refs = ((key, keys.parse(key)) for key in vertices)
    return [key for key, ref in refs if ref is not None and ref.kind is not VertexKind.LIMIT]


def _dissolve(ledger: Ledger, epoch: Epoch, phase: Phase, grace_seconds: float, vertices: Sequence[str]) -> int:
    corrected = 0
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        answers = ledger.call_under(foreign_calls(epoch.text, phase, grace_seconds, part))
        corrected += sum(int(answer[2]) for answer in answers)
    return corrected


# One pass over everything.

_IDS_PER_STATEMENT = 5000
_OWNERS: Mapping[VertexKind, tuple[store.Owner, int]] = {
    VertexKind.JOB: ("job", 0),
    VertexKind.LAYER: ("layer", 0),
    VertexKind.FOLDER: ("folder", 0),
    VertexKind.SUBSCRIPTION: ("show", 0),
    VertexKind.POINT: ("show", 1),
}
"""The table that says whether a vertex may be freed, and which of the ids in its key is the row's."""


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What a pass found and did.

    ``causes``: entries that differed, by Cause. ``found`` and ``healed_vertices``: vertices whose counters were off,
    and those put right, by kind and cause; ``drifted``: those off their entries, by kind (``check_complete`` False: not
    looked at this time). ``passed_over``: differences that had changed by the time they were applied.
    ``oldest_in_flight_seconds`` is by Redis TIME. ``tables``: PostgreSQL rows written. ``cas``: of a dual store only.
    """

    shows: int
    procs: int
    entries: int
    causes: Mapping[str, int] = field(default_factory=dict)
    found: Drift = field(default_factory=dict)
    healed_vertices: Drift = field(default_factory=dict)
    drifted: Mapping[str, int] = field(default_factory=dict)
    check_complete: bool = True
    passed_over: int = 0
    in_flight: int = 0
    oldest_in_flight_seconds: float = 0.0
    reclaimed: int = 0
    tables: Mapping[str, int] = field(default_factory=dict)
    cas: CasReport | None = None
    seconds: float = 0.0

    @property
    def healed(self) -> int:
        """Entries and counters that were not as they should be."""
        return sum(self.causes.values()) + sum(self.drifted.values())


def recompute(
    engine: Engine,
    ledger: Ledger,
    show_ids: Collection[str] | None = None,
    *,
    age_seconds: float = DEFAULT_AGE_SECONDS,
    first_seen: FirstSeen | None = None,
    cas_max_retries: int = 3,
    publish_grace: float = DEFAULT_GRACE_SECONDS,
    write_tables: bool = True,
    renew: bool = False,
) -> RecomputeReport:
    """One pass over all managed shows, or only over ``show_ids`` (a hint that something was released there).

    ``age_seconds`` is accounting.in_flight_age; ``cas_max_retries`` and ``publish_grace`` (seconds) only matter to a
    store that another program publishes into. ``renew``: ``show_ids`` may have been unmanaged a moment
    ago, and passes under way may have seen them so. Raises NotReady and SQLAlchemy's errors: then nothing
    or a part was applied, and each part is right by itself.
    """
    started = time.monotonic()
    only = None if show_ids is None else frozenset(show_ids)
    eyes = first_seen or FirstSeen(ledger.client)
    cas: CasReport | None = None
    if renew:
        renew_entries(ledger, only or ())

    def one_pass() -> Pass:
        return reconcile(engine, ledger, only, age_seconds=age_seconds, first_seen=eyes)

    if ledger.epoch().dual:
        epoch = ledger.mark().epoch  # the store may have been filled since it was learnt
        done, cas = reseed_booked(ledger, epoch, one_pass, max_retries=cas_max_retries, grace_seconds=publish_grace)
    else:
        done = one_pass()
    check, found, applied = done.check, done.found, done.applied
    oldest = found.oldest_in_flight_at
    drifted = count_by_kind(check.healed)
    foreign = {(kind, Cause.FOREIGN_WRITE): count for kind, count in drifted.items()}
    off = partial(drift_of_entries, check, found.changes, found.cause_of)
    report = RecomputeReport(
        shows=len(done.snapshot.managed),
        procs=len(done.snapshot.entries),
        entries=len(check.records),
        causes={cause.value: count for cause, count in found.causes.items() if count},
        found=off() | foreign,
        healed_vertices=off(without=frozenset(applied.passed_over)) | foreign,
        drifted={kind.value: count for kind, count in drifted.items()},
        check_complete=check.complete,
        passed_over=len(applied.passed_over),
        in_flight=found.in_flight,
        oldest_in_flight_seconds=0.0 if oldest is None else float(max(0, done.mark.seconds - oldest)),
        reclaimed=reclaim_orphans(engine, ledger, done.mark, check) if only is None and check.complete else 0,
        tables=store.refresh_tables(engine, only or done.snapshot.managed) if write_tables else {},
        cas=cas,
        seconds=time.monotonic() - started,
    )
    if only is None:
        with answering():
            ledger.client.set(keys.RECOMPUTED_AT, done.mark.seconds)
    log.info("recomputed", healed=report.healed, causes=report.causes, seconds=round(report.seconds, 3))
    return report


def reclaim_orphans(engine: Engine, ledger: Ledger, mark: Mark, check: ConsistencyCheck) -> int:
    """Free the keys of jobs and layers that are finished or gone, and of folders and shows that are gone, if they count
    nothing; returns how many."""
    rows: dict[store.Owner, dict[str, str]] = defaultdict(dict)
    for key in check.readings:
        ref = keys.parse(key)
        if ref is not None and ref.kind in _OWNERS:
            table, place = _OWNERS[ref.kind]
            rows[table][key] = ref.ids[place]
    orphans: list[str] = []
    for table, row_of in rows.items():
        alive: set[str] = set()
        for part in chunks(sorted(set(row_of.values())), _IDS_PER_STATEMENT):
            with engine.begin() as connection:
                alive |= store.alive(connection, table, part)
        orphans += [key for key, row_id in row_of.items() if row_id not in alive]
    freed = 0
    for part in chunks(orphans, _KEYS_PER_ROUND_TRIP):
        freed += sum(int(answer[1]) for answer in ledger.call_under(free_calls(mark.epoch.text, part, idle=True)))
    return freed
