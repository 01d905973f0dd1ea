"""Recompute: the ledger and the accounting tables, brought to what the proc table says (every two minutes).

Reconciliation by difference of ids: mark, snapshot, ledger, apply. Nothing is overwritten, so no quiet moment is needed
and no cycle is ever skipped; a booking that is made meanwhile is left alone because it is younger than the mark. The
same pass checks the counters against the ledger and refreshes the accounting tables of PostgreSQL.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Engine, Row

from opencue_sched.accounting import keys
from opencue_sched.accounting.age_marks import DEFAULT_AGE_SECONDS, is_too_old, seen_an_age_ago
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.consistency import ConsistencyCheck, check_consistency
from opencue_sched.accounting.damage import close_store
from opencue_sched.accounting.differences import Pass, find_differences
from opencue_sched.accounting.foreign_decrements import reseed_booked
from opencue_sched.accounting.keys import Booking, EntryState, amounts
from opencue_sched.accounting.last_recompute import Found
from opencue_sched.accounting.ledger import Cause, Change, Ledger, answering
from opencue_sched.clients.lua_scripts import chunks
from opencue_sched.clients.postgres import ask, repeatable_read
from opencue_sched.clock import boot_clock
from opencue_sched.domain.caps import SEPARATORS, Vertices
from opencue_sched.domain.units import booked_cores
from opencue_sched.errors import StoreDamaged
from opencue_sched.store import accounting as store
from opencue_sched.store.accounting_tables import refresh_tables

log = structlog.get_logger(__name__)
_IDS_PER_STATEMENT = 5000
"""How many procs one statement looks up."""


# The proc table as ledger entries, at one moment.


def read_snapshot(engine: Engine, only: Collection[str] | None = None) -> tuple[frozenset[str], dict[str, str]]:
    """Managed shows, and the entry of each of their procs, in one transaction that sees one moment."""
    with repeatable_read(engine) as connection:
        return store.managed_show_ids(connection), entries_of(store.procs(connection, only))


def entries_of(rows: Iterable[Row[Any]]) -> dict[str, str]:
    """Procs of store.procs as ledger entries: cores rounded up per proc. A vertex whose id no entry can hold counts
    nothing, so that one odd row does not end every pass."""
    entries = {}
    for row in rows:
        if (row.centicores, row.gpus) != (row.reserved_centicores, row.reserved_gpus):
            log.warning(
                "proc_reserves_what_no_host_has",
                proc=row.pk_proc,
                job=row.pk_job,
                centicores=row.reserved_centicores,
                gpus=row.reserved_gpus,
            )
        ids = (row.pk_show, row.pk_alloc, row.pk_folder, row.pk_job, row.pk_layer, row.pk_dept)
        show, alloc, folder, job, layer, dept = (row_id if SEPARATORS.isdisjoint(row_id) else "" for row_id in ids)
        limits = tuple(
            listed for limit in filter(None, row.limits.split(",")) for listed in _listed(limit, row.pk_host)
        )
        vertices = Vertices(show, alloc, folder, job, layer, dept, limits)
        entries[row.pk_proc] = Booking(row.pk_proc, vertices, booked_cores(row.centicores), row.gpus).packed()
    return entries


def _listed(limit: str, host_id: str) -> tuple[str, ...]:
    """How an entry lists a limit that store.procs has: ``@`` behind its id marks a limit that counts machines, ``~`` a
    limit of frames of which a licence server reports."""
    if limit.endswith("@"):
        return keys.on_machine(limit[:-1], keys.machine_of(host_id))
    return keys.reported(limit[:-1]) if limit.endswith("~") else (limit,)


def may_still_commit(engine: Engine, age_seconds: float) -> bool:
    """Whether a booking that is an age old may still be committed, because PostgreSQL has not finished its COMMIT.

    A COMMIT is sent within a commit deadline of its booking, which is at most a third of an age. Ask before the
    snapshot is taken: then the snapshot has what had been committed at the time of the answer.
    """
    stalled = ask(engine, store.unfinished_commits, age_seconds / 3)
    if stalled:
        log.warning("commits_are_stalled", commits=stalled, seconds=age_seconds / 3)
    return stalled > 0


def fresh_additions(engine: Engine, proc_ids: Sequence[str]) -> list[Change]:
    """Changes that add procs which the ledger lacks, as the procs are now. A proc that is gone meanwhile is not
    added."""
    changes: list[Change] = []
    for part in chunks(proc_ids, _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            changes += additions(entries_of(store.procs(connection, proc_ids=part)))
    return changes


def follow_layers(engine: Engine, ledger: Ledger, layer_ids: Collection[str]) -> int:
    """Count the running frames of these layers under the limits that they have now; returns how many entries moved.

    For layers that got or lost a limit, or whose limit counts something else now, while their frames run. An entry that
    changes meanwhile is left to the process that changed it, and to the next recompute.
    """
    mark = ledger.mark()
    with repeatable_read(engine) as connection:
        entries = entries_of(store.procs(connection, layer_ids=layer_ids))
        managed = store.managed_show_ids(connection)
    changes, _ = find_differences(mark.seq, entries, ledger.records_of(list(entries)), too_old=(), managed=managed)
    if changes:
        ledger.apply(changes, epoch=mark.epoch)
        log.info("entries_follow_limits", layers=len(layer_ids), entries=len(changes))
    return len(changes)


def additions(entries: Mapping[str, str]) -> list[Change]:
    """Changes that add these procs. The script still refuses an id that is tombstoned by then."""
    return [Change(proc_id, None, entry, cause=Cause.MISSING) for proc_id, entry in entries.items()]


def reconcile(
    engine: Engine, ledger: Ledger, only: frozenset[str] | None, *, age_seconds: float, clock: Callable[[], float]
) -> Pass:
    """Bring the ledger to what the proc table says, as far as it can be said for certain now."""
    # The order is the rule: mark, open COMMITs, snapshot, ledger. What happens between two of them is newer than the
    # mark, and is left to the next pass; a COMMIT that has ended before the snapshot is in it.
    marked_at = clock()
    mark = ledger.mark()
    seen = seen_an_age_ago(ledger.client, mark, marked_at, age_seconds)
    stalled = may_still_commit(engine, age_seconds)
    managed, entries = read_snapshot(engine, only)
    check = check_consistency(ledger, mark.epoch, heal=True)
    records = check.records.values()
    if damage := ledger.seq_behind(records, at_least=mark.seq):
        with answering():
            close_store(ledger.client, mark.epoch, damage)
        raise StoreDamaged(damage)
    old = frozenset(
        record.proc_id for record in records if is_too_old(record, seen, mark.seconds, age_seconds=age_seconds)
    )
    too_old = frozenset[str]() if stalled else old
    changes, absent = find_differences(mark.seq, entries, records, too_old=too_old, managed=managed, only=only)
    # Read again, because a proc that was released since the snapshot has left the ledger too, and perhaps no tombstone.
    changes += fresh_additions(engine, absent)
    _lend_before_retiring(engine, ledger, check, changes)
    return Pass(mark, managed, len(entries), check, changes, *ledger.apply(changes, epoch=mark.epoch))


def renew_entries(ledger: Ledger, show_id: str) -> None:
    """Give the entries of a show new sequence numbers, so that no pass that has read them can touch them.

    Called when a show is managed again: a pass that saw it unmanaged would otherwise retire entries that are needed by
    now.
    """
    changes = [
        Change(record.proc_id, record.changed_seq, record.entry, record.state)
        for record in ledger.records()
        if record.show_id == show_id
    ]
    ledger.apply(changes, epoch=ledger.epoch())


def _lend_before_retiring(engine: Engine, ledger: Ledger, check: ConsistencyCheck, changes: Iterable[Change]) -> None:
    """Count the frames of shows that are not managed any more as foreign before their entries go.

    The other way round a process that read the limits while the show was managed could book its licences again.
    """
    retired = [check.records[change.proc_id].entry for change in changes if change.cause is Cause.RETIRED]
    limits = {key for entry in retired for key, _, _ in amounts(entry) if key.startswith(keys.LIMIT_PREFIX)}
    if limits:
        load_caps(engine, ledger, sorted(limits))


# One pass over everything.


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What a pass found and did."""

    shows: int
    procs: int
    causes: Mapping[str, int] = field(default_factory=dict)
    """How many entries differed, by Cause."""
    drifted: Mapping[str, int] = field(default_factory=dict)
    """How many counters were off their entries, by kind of vertex: another program wrote to them."""
    in_flight: int = 0
    """How many bookings were in flight."""
    oldest_in_flight_seconds: float = 0.0
    """The age of the oldest of these, by Redis TIME."""
    seconds: float = 0.0
    """How long the pass took."""
    unpublished_cores: int = 0
    """Cores of procs that ended without the decrement that another program should have published."""

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
    clock: Callable[[], float] = boot_clock,
    cas_max_retries: int = 3,
    write_tables: bool = True,
) -> RecomputeReport:
    """Make one pass over all managed shows, or only over ``show_ids`` (a hint that something was released there).

    ``age_seconds`` is accounting.in_flight_age; ``clock`` is in seconds and never jumps. ``cas_max_retries`` only
    matters to a store that another program publishes into. Raises NotReady and SQLAlchemy's errors: then nothing or a
    part was applied, and each part is right by itself.
    """
    started = time.monotonic()
    only = None if show_ids is None else frozenset(show_ids)
    one_pass = partial(reconcile, engine, ledger, only, age_seconds=age_seconds, clock=clock)
    unpublished_cores = 0
    if ledger.epoch().dual:
        done, unpublished_cores = reseed_booked(ledger, one_pass, max_retries=cas_max_retries)
    else:
        done = one_pass()
    # The reading may have taken long, and what follows is written outside the scripts: have one look at the fence.
    ledger.mark()
    if write_tables:
        refresh_tables(engine, only or done.managed)
    if only is None:
        with answering(ledger.client):
            ledger.client.set(keys.FOUND, Found.of(done).packed())
            ledger.client.set(keys.RECOMPUTED_AT, done.mark.seconds)
    in_flight = [record.booked_at for record in done.check.records.values() if record.state is EntryState.IN_FLIGHT]
    report = RecomputeReport(
        shows=len(done.managed),
        procs=done.procs,
        causes=Counter(change.cause.value for change in done.changes if change.cause is not None),
        drifted=Counter(
            vertex[0].value for key in {*done.check.healed, *done.check.wrong_machines} if (vertex := keys.parse(key))
        ),
        in_flight=len(in_flight),
        oldest_in_flight_seconds=max(0.0, done.mark.seconds - min(in_flight, default=done.mark.seconds)),
        unpublished_cores=unpublished_cores,
        seconds=time.monotonic() - started,
    )
    log.info("recomputed", healed=report.healed, causes=report.causes, seconds=round(report.seconds, 3))
    return report
