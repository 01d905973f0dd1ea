"""Recompute: the ledger and the accounting tables, brought to what the proc table says (every two minutes).

Reconciliation by difference of ids (design section 4): mark, snapshot, ledger, apply. Nothing is overwritten, so no
quiet moment is needed and no cycle is ever skipped; a booking that is made meanwhile is left alone because it is
younger than the mark. The same pass checks the counters (I1), frees the keys of finished jobs, and refreshes the
accounting tables of PostgreSQL.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, cast

import redis
import structlog
from sqlalchemy import Connection, Engine, Row

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.connection import Epoch
from opencue_sched.accounting.consistency import ConsistencyCheck, check_consistency, vertex_keys
from opencue_sched.accounting.keys import SEPARATORS, Booking, EntryState, Record, VertexKind, amounts, show_of
from opencue_sched.accounting.ledger import (
    Applied,
    Change,
    Ledger,
    Mark,
    Phase,
    answering,
    chunks,
    foreign_calls,
    free_calls,
    reseed_cas_calls,
)
from opencue_sched.domain.farm import Vertices, booked_cores
from opencue_sched.store import accounting as store
from opencue_sched.store.engine import repeatable_read

log = structlog.get_logger(__name__)

DEFAULT_AGE_SECONDS = 40.0
DEFAULT_GRACE_SECONDS = 30.0
_IDS_PER_STATEMENT = 5000
_KEYS_PER_ROUND_TRIP = 2000
_ROWS_BETWEEN_PAUSES = 2000

# What to change so that the ledger says what the proc table says: pure decisions (design section 4, "Recompute").
#
# Three readings are compared, taken in this order: the mark (a sequence number), a snapshot of the proc table, the
# ledger. Everything that happens meanwhile shows as a sequence number above the mark, or as an entry that changed
# before it could be touched, and is left for the next pass.


class Cause(StrEnum):
    """Why an entry differs from the proc table."""

    MISSED_RELEASE = "missed_release"  # confirmed, and its proc is gone: its release was not heard
    CRASHED_BOOKING = "crashed_booking"  # never confirmed, no proc, too old to be committed still
    RETIRED = "retired"  # the show is not managed any more
    MISSING = "missing"  # a proc without entry
    MOVED = "moved"  # job, host or amounts changed since the booking
    LATE_SETTLE = "late_settle"  # committed, but the worker that booked it died before settling


@dataclass(slots=True)
class Differences:
    """``changes`` can be applied at once; ``absent`` are procs without an entry, to be read again first.

    ``cause_of`` has the cause of each change by proc id.
    """

    changes: list[Change] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    cause_of: dict[str, Cause] = field(default_factory=dict)
    in_flight: int = 0
    oldest_in_flight_at: int | None = None

    @property
    def causes(self) -> Counter[Cause]:
        """How many entries differ for which cause."""
        return Counter(self.cause_of.values())

    def add(self, cause: Cause, change: Change) -> None:
        self.changes.append(change)
        self.cause_of[change.proc_id] = cause


def find_differences(
    mark_seq: int,
    snapshot: Mapping[str, str],
    ledger: Iterable[Record],
    *,
    too_old: Collection[str],
    managed: Collection[str],
    only: Collection[str] | None = None,
) -> Differences:
    """Compare ``snapshot`` (proc id to entry, of ``managed`` shows) with the ledger, in all shows or ``only`` in some.

    ``too_old`` are in-flight ids that no commit can belong to any more, as judged *at the mark*. An entry is judged by
    what it was at the mark: judging it by its state when the change is applied loses a live booking.
    """
    found = Differences()
    known: set[str] = set()
    for record in ledger:
        known.add(record.proc_id)
        if record.state is EntryState.IN_FLIGHT:
            found.in_flight += 1
            found.oldest_in_flight_at = min(found.oldest_in_flight_at or record.booked_at, record.booked_at)
        if only is not None and record.show_id not in only:
            continue
        judged = _judge(record, snapshot.get(record.proc_id), mark_seq, record.proc_id in too_old)
        if judged is not None:
            cause, change = judged
            found.add(Cause.RETIRED if change.entry is None and record.show_id not in managed else cause, change)
    found.absent = [
        proc_id
        for proc_id, entry in snapshot.items()
        if proc_id not in known and (only is None or show_of(entry) in only)
    ]
    return found


def _judge(record: Record, actual: str | None, mark_seq: int, too_old: bool) -> tuple[Cause, Change] | None:
    in_flight = record.state is EntryState.IN_FLIGHT
    before_mark = record.changed_seq <= mark_seq
    settled_before_mark = not in_flight and before_mark
    if actual is None:
        if not (settled_before_mark or (in_flight and too_old)):
            return None
        cause = Cause.CRASHED_BOOKING if in_flight else Cause.MISSED_RELEASE
        return cause, Change(record.proc_id, record.changed_seq, None)
    state = EntryState.CONFIRMED if too_old else record.state
    if actual != record.entry:
        if not before_mark:  # a newer snapshot may have moved it
            return None
        return Cause.MOVED, Change(record.proc_id, record.changed_seq, actual, state)
    if in_flight and too_old:
        return Cause.LATE_SETTLE, Change(record.proc_id, record.changed_seq, actual, state)
    return None


def additions(fresh: Mapping[str, str]) -> list[Change]:
    """Changes that add the procs of a fresh read. The script still refuses an id that is tombstoned by then."""
    return [Change(proc_id, None, entry) for proc_id, entry in fresh.items()]


# The proc table as ledger entries, at one moment.


@dataclass(frozen=True, slots=True)
class ProcSnapshot:
    """The proc table at one moment: managed shows, and the entry of each of their procs."""

    managed: frozenset[str]
    entries: Mapping[str, str]


def read_snapshot(engine: Engine, only: Collection[str] | None = None) -> ProcSnapshot:
    """Managed shows and their procs in one transaction that sees one moment."""
    with repeatable_read(engine) as connection:
        return snapshot_of(connection, only)


def snapshot_of(
    connection: Connection, only: Collection[str] | None = None, *, meanwhile: Callable[[], object] = lambda: None
) -> ProcSnapshot:
    """The snapshot a transaction sees; ``meanwhile`` is called now and then while it is read."""
    managed = store.managed_show_ids(connection)
    return ProcSnapshot(managed, entries_of(store.procs(connection, only), meanwhile))


def entries_of(rows: Iterable[Row[Any]], meanwhile: Callable[[], object] = lambda: None) -> dict[str, str]:
    """Procs of store.procs as ledger entries: cores rounded up per proc."""
    entries = {}
    for number, row in enumerate(rows):
        if number % _ROWS_BETWEEN_PAUSES == 0:
            meanwhile()
        if _countable(row.pk_show):
            ids = (row.pk_alloc, row.pk_folder, row.pk_job, row.pk_layer, row.pk_dept)
            alloc, folder, job, layer, dept = (vertex_id if _countable(vertex_id) else "" for vertex_id in ids)
            limits = tuple(limit_id for limit_id in row.limits.split(",") if limit_id and _countable(limit_id))
            vertices = Vertices(row.pk_show, alloc, folder, job, layer, dept, limits)
            entries[row.pk_proc] = Booking(row.pk_proc, vertices, booked_cores(row.centicores), row.gpus).packed()
    return entries


def _countable(vertex_id: str) -> bool:
    """Whether an id can be counted by. One that cannot is left out: nothing can be booked there either, and whatever
    else the proc takes has to count."""
    if not any(separator in vertex_id for separator in SEPARATORS):
        return True
    log.error("vertex_cannot_be_counted", id=vertex_id)
    return False


def may_still_commit(engine: Engine, age_seconds: float) -> bool:
    """Whether what was booked an age ago may still be committed, because PostgreSQL has not ended with its COMMIT.

    That was sent within a commit deadline, at most a third of an age. To be asked before the snapshot is taken: what
    has ended by then is in it.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        stalled = store.unfinished_commits(connection, age_seconds / 3)
    if stalled:
        log.warning("commits_are_stalled", commits=stalled, seconds=age_seconds / 3)
    return stalled > 0


def fresh_additions(engine: Engine, proc_ids: Collection[str]) -> list[Change]:
    """Procs the ledger lacks, as they are now: one that is gone meanwhile is not added."""
    changes: list[Change] = []
    for part in chunks(list(proc_ids), _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            changes += additions(entries_of(store.procs(connection, proc_ids=part)))
    return changes


# Since when an in-flight booking has been seen in flight, by a clock that cannot jump.
#
# Redis TIME alone may not decide that a booking is too old: it can be set forward, and a booking that is just being
# committed would be thrown away. So an age must also have passed on this machine's boot clock since this machine first
# saw the entry at a mark. That is kept in Redis, for each boot of each machine, so that any process of the machine can
# go on where another stopped; without it a judgement is only postponed.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT_SECONDS = 24 * 3600
_AT_ONCE = 500


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say so."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@cache
def boot_id() -> str:
    """A name for this boot of this machine; for this process alone where the system gives none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"process-{uuid.getnode():x}-{time.time_ns():x}"


class FirstSeen:
    """When this machine first saw each in-flight entry, in the hash ``key``. ``clock`` is in seconds, never jumps."""

    def __init__(
        self, client: redis.Redis, *, clock: Callable[[], float] = boot_clock, boot: str | None = None
    ) -> None:
        self._client = client
        self.key = keys.FIRST_SEEN_PREFIX + (boot or boot_id())
        self.clock = clock

    def too_old(self, records: Iterable[Record], mark: Mark, marked_at: float, *, age_seconds: float) -> frozenset[str]:
        """In-flight ids that were too old at ``mark``, which was taken at ``marked_at`` on the boot clock.

        Remembers those seen for the first time, forgets those that are gone.
        """
        with answering():
            stored = dict(cast("Iterable[tuple[str, str]]", self._client.hscan_iter(self.key, count=_AT_ONCE)))
        in_flight = [r for r in records if r.state is EntryState.IN_FLIGHT and r.changed_seq <= mark.seq]
        seen = {r.proc_id: first_seen_at(stored.get(r.proc_id), r, marked_at) for r in in_flight}
        wanted = {r.proc_id: f"{r.changed_seq}|{seen[r.proc_id]!r}" for r in in_flight}
        if wanted != stored:
            with answering(), self._client.pipeline(transaction=False) as pipe:
                pipe.unlink(self.key)
                for part in chunks(list(wanted.items()), _AT_ONCE):
                    pipe.hset(self.key, mapping=dict(part))
                pipe.expire(self.key, _KEPT_SECONDS)
                pipe.execute()
        return frozenset(
            r.proc_id
            for r in in_flight
            if is_too_old(r, seen[r.proc_id], mark.seconds, marked_at, age_seconds=age_seconds)
        )


def first_seen_at(stored: str | None, record: Record, marked_at: float) -> float:
    """When the entry was first seen as it is now; this mark, when it never was."""
    changed, _, seen = (stored or "").partition("|")
    return float(seen) if changed == str(record.changed_seq) else marked_at


def is_too_old(record: Record, first_seen: float, mark_seconds: int, marked_at: float, *, age_seconds: float) -> bool:
    """Both clocks say that an age has passed: Redis TIME since the booking, the boot clock since it was first seen."""
    return mark_seconds - record.booked_at >= age_seconds and marked_at - first_seen >= age_seconds


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass read, found and applied."""

    mark: Mark
    snapshot: ProcSnapshot
    check: ConsistencyCheck
    found: Differences
    applied: Applied

    def entries_now(self) -> dict[str, str]:
        """The ledger after the changes, provided that nobody else changed it meanwhile."""
        entries = {proc_id: record.entry for proc_id, record in self.check.records.items()}
        for change in self.found.changes:
            if change.proc_id in self.applied.passed_over:
                continue
            if change.entry is None:
                entries.pop(change.proc_id, None)
            else:
                entries[change.proc_id] = change.entry
        return entries


def reconcile(
    engine: Engine, ledger: Ledger, only: frozenset[str] | None, *, age_seconds: float, first_seen: FirstSeen
) -> Pass:
    """Bring the ledger to what the proc table says, as far as it can be said for certain now."""
    # The order is the rule: mark, open COMMITs, snapshot, ledger. What happens between two of them is newer than the
    # mark, and is left to the next pass; a COMMIT that has ended before the snapshot is in it.
    marked_at = first_seen.clock()
    mark = ledger.mark()
    stalled = may_still_commit(engine, age_seconds)
    snapshot = read_snapshot(engine, only)
    check = check_consistency(ledger, mark.epoch, heal=True)
    old = first_seen.too_old(check.records.values(), mark, marked_at, age_seconds=age_seconds)
    too_old = frozenset[str]() if stalled else old
    found = find_differences(
        mark.seq, snapshot.entries, check.records.values(), too_old=too_old, managed=snapshot.managed, only=only
    )
    # Read again, because a proc that was released since the snapshot has left the ledger too, and perhaps no tombstone.
    for change in fresh_additions(engine, found.absent):
        found.add(Cause.MISSING, change)
    _lend_before_retiring(engine, ledger, check, found)
    return Pass(mark, snapshot, check, found, ledger.apply(found.changes, epoch=mark.epoch))


def renew_entries(ledger: Ledger, show_ids: Collection[str]) -> None:
    """Give the entries of these shows new sequence numbers, so that no pass that has read them can touch them.

    For shows that are managed again: one that saw them unmanaged would retire entries that are needed by now.
    """
    changes = [
        Change(record.proc_id, record.changed_seq, record.entry, record.state)
        for record in ledger.records()
        if record.show_id in show_ids
    ]
    ledger.apply(changes, epoch=ledger.epoch())


def _lend_before_retiring(engine: Engine, ledger: Ledger, check: ConsistencyCheck, found: Differences) -> None:
    """Count the frames of shows that are not managed any more as foreign before their entries go.

    The other way round a process that read the limits while the show was managed could book its licences again.
    """
    retired = [proc_id for proc_id, cause in found.cause_of.items() if cause is Cause.RETIRED]
    moved = (key for proc_id in retired for key, _, _ in amounts(check.records[proc_id].entry))
    limits = {key for key in moved if key.startswith(keys.LIMIT_PREFIX)}
    if limits:
        load_caps(engine, ledger, sorted(limits))


# The reference's reseed contract, for a store into which another program publishes plain decrements (see "Another
# program's decrements" in docs/accounting.md): a pass ends the reference's ``GET acct:seq -> SQL -> compare-and-swap``,
# in which counters become what the ledger says, if nothing moved. Where something always does, it ends with the foreign
# deltas that can no longer be explained (lua/foreign.lua) instead of being skipped.


def reseed_booked(
    ledger: Ledger,
    epoch: Epoch,
    one_pass: Callable[[], Pass],
    *,
    max_retries: int,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
) -> tuple[Pass, bool]:
    """Reconcile and swap, up to ``max_retries`` times more; returns the last pass, and whether the swap went through.

    ``grace_seconds``: how long after dropping an entry its decrement may still come.
    """
    _dissolve(ledger, epoch, "before", grace_seconds, _hierarchy(vertex_keys(ledger)))
    for _ in range(1 + max_retries):
        done = one_pass()
        if swap_counters(ledger, done):
            return done, True
    _dissolve(ledger, done.mark.epoch, "after", grace_seconds, _stored(ledger, done.check))
    return done, False


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
    return [key for key in vertices if not key.startswith(keys.LIMIT_PREFIX)]


def _dissolve(ledger: Ledger, epoch: Epoch, phase: Phase, grace_seconds: float, vertices: Sequence[str]) -> None:
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        ledger.call_under(foreign_calls(epoch.text, phase, grace_seconds, part))


# One pass over everything.


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What a pass found and did.

    ``causes``: entries that differed, by Cause. ``drifted``: counters that were off their entries, because another
    program wrote to them, by kind of vertex (``check_complete`` False: not looked at this time). ``passed_over``:
    differences that had changed by the time they were applied. ``oldest_in_flight_seconds`` is by Redis TIME.
    ``tables``: PostgreSQL rows written. ``swapped``: of a dual store, whether the counters were written anew.
    """

    shows: int
    procs: int
    entries: int
    causes: Mapping[str, int] = field(default_factory=dict)
    drifted: Mapping[str, int] = field(default_factory=dict)
    check_complete: bool = True
    passed_over: int = 0
    in_flight: int = 0
    oldest_in_flight_seconds: float = 0.0
    reclaimed: int = 0
    tables: Mapping[str, int] = field(default_factory=dict)
    swapped: bool | None = None
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
    swapped: bool | None = None
    if renew:
        renew_entries(ledger, only or ())

    def one_pass() -> Pass:
        return reconcile(engine, ledger, only, age_seconds=age_seconds, first_seen=eyes)

    if ledger.epoch().dual:
        epoch = ledger.mark().epoch  # the store may have been filled since it was learnt
        done, swapped = reseed_booked(ledger, epoch, one_pass, max_retries=cas_max_retries, grace_seconds=publish_grace)
    else:
        done = one_pass()
    # The reading may have taken long. What follows is written outside the scripts, which would look at the fence.
    ledger.check_leader()
    check, found, applied = done.check, done.found, done.applied
    oldest = found.oldest_in_flight_at
    report = RecomputeReport(
        shows=len(done.snapshot.managed),
        procs=len(done.snapshot.entries),
        entries=len(check.records),
        causes={cause.value: count for cause, count in found.causes.items() if count},
        drifted=Counter(vertex[0].value for key in check.healed if (vertex := keys.parse(key))),
        check_complete=check.complete,
        passed_over=len(applied.passed_over),
        in_flight=found.in_flight,
        oldest_in_flight_seconds=0.0 if oldest is None else float(max(0, done.mark.seconds - oldest)),
        reclaimed=reclaim_orphans(engine, ledger, done.mark, check) if only is None and check.complete else 0,
        tables=store.refresh_tables(engine, only or done.snapshot.managed) if write_tables else {},
        swapped=swapped,
        seconds=time.monotonic() - started,
    )
    if only is None:
        with answering():
            ledger.client.set(keys.RECOMPUTED_AT, done.mark.seconds)
    log.info("recomputed", healed=report.healed, causes=report.causes, seconds=round(report.seconds, 3))
    return report


def reclaim_orphans(engine: Engine, ledger: Ledger, mark: Mark, check: ConsistencyCheck) -> int:
    """Free the keys of jobs and layers that are finished or gone, if they count nothing; returns how many."""
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    for key in check.readings:
        kind, ids = keys.parse(key) or (VertexKind.LIMIT, ())
        if kind in (VertexKind.JOB, VertexKind.LAYER):
            rows[kind.value][key] = ids[0]
    freed = 0
    for table, row_of in rows.items():
        alive: set[str] = set()
        for part in chunks(sorted(set(row_of.values())), _IDS_PER_STATEMENT):
            with engine.begin() as connection:
                alive |= store.alive(connection, table, part)
        orphans = [key for key, row_id in row_of.items() if row_id not in alive]
        for piece in chunks(orphans, _KEYS_PER_ROUND_TRIP):
            answers = ledger.call_under(free_calls(mark.epoch.text, piece, idle=True))
            freed += sum(int(answer[1]) for answer in answers)
    return freed
