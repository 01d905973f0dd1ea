"""Recompute: the ledger and the accounting tables, brought to what the proc table says (every two minutes).

Reconciliation by difference of ids (design section 4): mark, snapshot, ledger, apply. Nothing is overwritten, so no
quiet moment is needed and no cycle is ever skipped; a booking that is made meanwhile is left alone because it is
younger than the mark. The same pass takes stock (I1), frees the keys of finished jobs, and refreshes PostgreSQL.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.cas import DEFAULT_GRACE_SECONDS, CasReport, reseed_booked
from opencue_sched.accounting.differences import Cause
from opencue_sched.accounting.drift import Drift, by_kind, drift_of_entries
from opencue_sched.accounting.inventory import Stock, correct, count_by_kind, drift
from opencue_sched.accounting.keys import VertexKind
from opencue_sched.accounting.ledger import Ledger, Mark, answering
from opencue_sched.accounting.reconcile import Pass, reconcile, renew_entries
from opencue_sched.accounting.scripts import chunks, reclaim_calls
from opencue_sched.accounting.sightings import Sightings
from opencue_sched.store import accounting_tables, proc_snapshot

log = structlog.get_logger(__name__)

DEFAULT_AGE_SECONDS = 40.0
_IDS_PER_STATEMENT = 5000
_KEYS_PER_ROUND_TRIP = 2000
_OWNERS: Mapping[VertexKind, tuple[proc_snapshot.Owner, int]] = {
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
    and those put right, by kind and cause. ``drifted``: counters that were off their entries, by vertex kind, which
    only somebody else's writing explains (``stock_complete`` False: not looked at this time). ``passed_over``:
    differences that had changed by the time they were applied. ``oldest_in_flight_seconds`` is by Redis TIME.
    ``tables``: PostgreSQL rows written. ``cas``: of a dual store only.
    """

    shows: int
    procs: int
    entries: int
    causes: Mapping[str, int] = field(default_factory=dict)
    found: Drift = field(default_factory=dict)
    healed_vertices: Drift = field(default_factory=dict)
    drifted: Mapping[str, int] = field(default_factory=dict)
    stock_complete: bool = True
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

    @property
    def moved(self) -> dict[str, int]:
        """Vertices whose counters were put right, by kind."""
        return by_kind(self.healed_vertices)


def recompute(
    engine: Engine,
    ledger: Ledger,
    show_ids: Collection[str] | None = None,
    *,
    age_seconds: float = DEFAULT_AGE_SECONDS,
    sightings: Sightings | None = None,
    cas_max_retries: int = 3,
    publish_grace: float = DEFAULT_GRACE_SECONDS,
    write_tables: bool = True,
    renew: bool = False,
) -> RecomputeReport:
    """One pass over all managed shows, or only over ``show_ids`` (a hint that something was released there).

    ``age_seconds`` is accounting.in_flight_age; ``cas_max_retries`` and ``publish_grace`` (seconds) only matter to a
    store that another program publishes into (accounting.cas). ``renew``: ``show_ids`` may have been unmanaged a moment
    ago, and passes under way may have seen them so. Raises NotReady and SQLAlchemy's errors: then nothing
    or a part was applied, and each part is right by itself.
    """
    started = time.monotonic()
    only = None if show_ids is None else frozenset(show_ids)
    eyes = sightings or Sightings(ledger.client)
    cas: CasReport | None = None
    if renew:
        renew_entries(ledger, only or ())

    def one_pass() -> Pass:
        return reconcile(engine, ledger, only, age_seconds=age_seconds, sightings=eyes)

    if ledger.epoch().dual:
        epoch = ledger.mark().epoch  # the store may have been filled since it was learnt
        done, cas = reseed_booked(ledger, epoch, one_pass, max_retries=cas_max_retries, grace_seconds=publish_grace)
    else:
        done = one_pass()
    stock, found, applied = done.stock, done.found, done.applied
    oldest = found.oldest_in_flight_at
    drifted = _heal_drift(ledger, done.mark, stock)
    foreign = {(kind, Cause.FOREIGN_WRITE): count for kind, count in drifted.items()}
    off = partial(drift_of_entries, stock, done.changes, found.cause_of)
    report = RecomputeReport(
        shows=len(done.snapshot.managed),
        procs=len(done.snapshot.entries),
        entries=len(stock.records),
        causes={cause.value: count for cause, count in found.causes.items() if count},
        found=off() | foreign,
        healed_vertices=off(without=frozenset(applied.passed_over)) | foreign,
        drifted={kind.value: count for kind, count in drifted.items()},
        stock_complete=stock.complete,
        passed_over=len(applied.passed_over),
        in_flight=found.in_flight,
        oldest_in_flight_seconds=0.0 if oldest is None else float(max(0, done.mark.seconds - oldest)),
        reclaimed=reclaim_orphans(engine, ledger, done.mark, stock) if only is None and stock.complete else 0,
        tables=accounting_tables.refresh_tables(engine, only or done.snapshot.managed) if write_tables else {},
        cas=cas,
        seconds=time.monotonic() - started,
    )
    if only is None:
        _remember(ledger, done.mark)
    log.info("recomputed", healed=report.healed, causes=report.causes, seconds=round(report.seconds, 3))
    return report


def _remember(ledger: Ledger, mark: Mark) -> None:
    """When the last whole pass took its mark, for anybody who asks how old it is (operate.store_metrics)."""
    with answering():
        ledger.client.set(keys.RECOMPUTED_AT, mark.seconds)


def _heal_drift(ledger: Ledger, mark: Mark, stock: Stock) -> dict[VertexKind, int]:
    """Correct counters that are off their entries. In a dual store that is the foreign delta, and not drift, but for
    licences, which no decrement of another program is about."""
    if not stock.complete:
        return {}
    differing = drift(stock)
    if mark.epoch.dual:
        differing = {key: off for key, off in differing.items() if key.startswith(keys.LIMIT_PREFIX)}
    if differing:
        log.warning("counters_drifted", vertices=dict(list(differing.items())[:20]), total=len(differing))
        correct(ledger, stock, differing)
    return count_by_kind(differing)


def reclaim_orphans(engine: Engine, ledger: Ledger, mark: Mark, stock: Stock) -> int:
    """Free the keys of jobs and layers that are finished or gone, and of folders and shows that are gone, if they count
    nothing; returns how many."""
    rows: dict[proc_snapshot.Owner, dict[str, str]] = defaultdict(dict)
    for key in stock.readings:
        ref = keys.parse(key)
        if ref is not None and ref.kind in _OWNERS:
            table, place = _OWNERS[ref.kind]
            rows[table][key] = ref.ids[place]
    orphans: list[str] = []
    for table, row_of in rows.items():
        alive: set[str] = set()
        for part in chunks(sorted(set(row_of.values())), _IDS_PER_STATEMENT):
            with engine.begin() as connection:
                alive |= proc_snapshot.alive(connection, table, part)
        orphans += [key for key, row_id in row_of.items() if row_id not in alive]
    freed = 0
    for part in chunks(orphans, _KEYS_PER_ROUND_TRIP):
        freed += sum(int(answer[1]) for answer in ledger.call_under(reclaim_calls(mark.epoch.text, part)))
    return freed
