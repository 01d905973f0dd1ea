"""Recompute: the ledger and the accounting tables, brought to what the proc table says (every two minutes).

Reconciliation by difference of ids (design section 4): mark, snapshot, ledger, apply. Nothing is overwritten, so no
quiet moment is needed and no cycle is ever skipped; a booking that is made meanwhile is left alone because it is
younger than the mark. The same pass takes stock (I1), frees the keys of finished jobs, and refreshes PostgreSQL.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.differences import Cause, Scope, additions, find_differences
from opencue_sched.accounting.entries import Booking, amounts
from opencue_sched.accounting.inventory import Stock, correct, count_by_kind, drift, take_stock
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.ledger import Ledger, Mark
from opencue_sched.accounting.scripts import Change, chunks, reclaim_calls
from opencue_sched.accounting.sightings import Sightings
from opencue_sched.domain.farm import Vertices
from opencue_sched.domain.units import booked_cores
from opencue_sched.store import accounting as store
from opencue_sched.store import accounting_tables, proc_snapshot

log = structlog.get_logger(__name__)

DEFAULT_AGE_SECONDS = 40.0
_IDS_PER_STATEMENT = 5000
_KEYS_PER_ROUND_TRIP = 2000


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What a pass found and did.

    ``causes``: entries put right, by Cause. ``drifted``: counters that were off their entries, by vertex kind, which
    only somebody else's writing explains (``stock_complete`` False: not looked at this time). ``moved``: vertices whose
    counters changed, by kind. ``passed_over``: differences that had changed by the time they were applied.
    ``oldest_in_flight_seconds`` is by Redis TIME. ``tables``: PostgreSQL rows written.
    """

    shows: int
    procs: int
    entries: int
    causes: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    drifted: Mapping[str, int] = field(default_factory=dict)
    stock_complete: bool = True
    passed_over: int = 0
    in_flight: int = 0
    oldest_in_flight_seconds: float = 0.0
    reclaimed: int = 0
    tables: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def healed(self) -> int:
        """Entries and counters that were not as they should be."""
        return sum(self.causes.values()) + sum(self.drifted.values())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The proc table at one moment: managed shows, and the entry of each of their procs."""

    managed: frozenset[str]
    entries: Mapping[str, str]


def recompute(
    engine: Engine,
    ledger: Ledger,
    show_ids: Collection[str] | None = None,
    *,
    age_seconds: float = DEFAULT_AGE_SECONDS,
    sightings: Sightings | None = None,
    write_tables: bool = True,
) -> RecomputeReport:
    """One pass over all managed shows, or only over ``show_ids`` (a hint that something was released there).

    ``age_seconds`` is accounting.in_flight_age. Raises NotReady (nothing was, or only part of it was applied; each part
    is right by itself) and SQLAlchemy's errors.
    """
    started = time.monotonic()
    sightings = sightings or Sightings(ledger.client)
    only = None if show_ids is None else frozenset(show_ids)
    marked_at = sightings.clock()
    mark = ledger.mark()
    snapshot = read_snapshot(engine, only)
    stock = take_stock(ledger)
    too_old = sightings.too_old(stock.records.values(), mark, marked_at, age_seconds=age_seconds)
    scope = Scope(snapshot.managed, only)
    found = find_differences(mark.seq, snapshot.entries, stock.records.values(), too_old=too_old, scope=scope)
    changes = [*found.changes, *_fresh_additions(engine, found.absent)]
    found.causes[Cause.MISSING] = len(changes) - len(found.changes)
    applied = ledger.apply(changes, epoch=mark.epoch)
    drifted = _heal_drift(ledger, mark, stock)
    full = only is None
    oldest = found.oldest_in_flight_at
    report = RecomputeReport(
        shows=len(snapshot.managed),
        procs=len(snapshot.entries),
        entries=len(stock.records),
        causes={cause.value: count for cause, count in found.causes.items() if count},
        moved=_kinds_moved(stock, changes, frozenset(applied.passed_over)),
        drifted=drifted,
        stock_complete=stock.complete,
        passed_over=len(applied.passed_over),
        in_flight=found.in_flight,
        oldest_in_flight_seconds=0.0 if oldest is None else float(max(0, mark.seconds - oldest)),
        reclaimed=reclaim_orphans(engine, ledger, mark, stock) if full and stock.complete else 0,
        tables=accounting_tables.refresh_tables(engine, only or snapshot.managed) if write_tables else {},
        seconds=time.monotonic() - started,
    )
    log.info("recomputed", healed=report.healed, causes=report.causes, drifted=drifted, seconds=report.seconds)
    return report


def read_snapshot(engine: Engine, only: Collection[str] | None = None) -> Snapshot:
    """Managed shows and their procs in one transaction that sees one moment."""
    with repeatable_read(engine) as connection:
        return snapshot_of(connection, only)


@contextmanager
def repeatable_read(engine: Engine) -> Iterator[Connection]:
    """A transaction whose statements all see the same moment."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        yield connection


def snapshot_of(connection: Connection, only: Collection[str] | None = None) -> Snapshot:
    """The snapshot a transaction sees."""
    managed = store.managed_show_ids(connection)
    return Snapshot(managed, entries_of(proc_snapshot.procs(connection, only)))


def entries_of(rows: Iterable[proc_snapshot.ProcRow]) -> dict[str, str]:
    """Procs as ledger entries: cores rounded up per proc."""
    return {row.proc_id: _booking(row).packed() for row in rows}


def _booking(row: proc_snapshot.ProcRow) -> Booking:
    vertices = Vertices(row.show_id, row.alloc_id, row.folder_id, row.job_id, row.layer_id, row.dept_id, row.limit_ids)
    return Booking(row.proc_id, vertices, booked_cores(row.centicores), row.gpus)


def _fresh_additions(engine: Engine, proc_ids: Collection[str]) -> list[Change]:
    """Procs the ledger lacks, as they are now: one that is gone meanwhile is not added."""
    changes: list[Change] = []
    for part in chunks(list(proc_ids), _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            changes += additions(entries_of(proc_snapshot.procs_by_id(connection, part)))
    return changes


def _heal_drift(ledger: Ledger, mark: Mark, stock: Stock) -> dict[str, int]:
    """Correct counters that are off their entries. In a dual store that is the foreign delta, and not drift."""
    if not stock.complete or mark.epoch.dual:
        return {}
    differing = drift(stock)
    if differing:
        log.warning("counters_drifted", vertices=dict(list(differing.items())[:20]), total=len(differing))
        correct(ledger, mark.epoch, differing)
    return {kind.value: count for kind, count in count_by_kind(differing).items()}


def _kinds_moved(stock: Stock, changes: Iterable[Change], passed_over: Collection[str]) -> dict[str, int]:
    touched: set[str] = set()
    for change in changes:
        if change.proc_id in passed_over:
            continue
        known = stock.records.get(change.proc_id)
        entries = {entry for entry in (change.entry, known.entry if known else None) if entry is not None}
        if len(entries) == 1 and known is not None and change.entry is not None:
            continue
        touched |= {key for entry in entries for key, _, _ in amounts(entry)}
    return {kind.value: count for kind, count in count_by_kind(touched).items()}


def reclaim_orphans(engine: Engine, ledger: Ledger, mark: Mark, stock: Stock) -> int:
    """Free the keys of jobs and layers that are finished or gone and count nothing; returns how many."""
    refs = {key: ref for key in stock.readings if (ref := keys.parse(key)) is not None}
    jobs = {ref.ids[0]: key for key, ref in refs.items() if ref.kind is VertexKind.JOB}
    layers = {ref.ids[0]: key for key, ref in refs.items() if ref.kind is VertexKind.LAYER}
    alive: set[str] = set()
    for part in chunks(list(jobs), _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            alive |= proc_snapshot.unfinished_jobs(connection, part)
    for part in chunks(list(layers), _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            alive |= proc_snapshot.unfinished_layers(connection, part)
    orphans = [key for row_id, key in (*jobs.items(), *layers.items()) if row_id not in alive]
    freed = 0
    for part in chunks(orphans, _KEYS_PER_ROUND_TRIP):
        freed += sum(int(answer[1]) for answer in ledger.call_under(reclaim_calls(mark.epoch.text, part)))
    return freed
