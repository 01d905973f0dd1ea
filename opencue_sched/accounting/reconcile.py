"""Recompute: the ledger and the accounting tables, brought to what the proc table says (every two minutes).

Reconciliation by difference of ids: mark, snapshot, ledger, apply. Nothing is overwritten, so no quiet moment is needed
and no cycle is ever skipped; a booking that is made meanwhile is left alone because it is younger than the mark. The
same pass checks the counters (I1) and refreshes the accounting tables of PostgreSQL.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import redis
import structlog
from sqlalchemy import Engine, Row

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.consistency import ConsistencyCheck, check_consistency, vertex_keys
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import SEPARATORS, Booking, EntryState, Record, amounts
from opencue_sched.accounting.ledger import (
    Cause,
    Change,
    Ledger,
    Mark,
    Phase,
    answering,
    id_calls,
    reseed_cas_calls,
)
from opencue_sched.clients.lua_scripts import chunks
from opencue_sched.clients.postgres import ask, repeatable_read
from opencue_sched.clock import boot_clock, boot_id
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.units import booked_cores
from opencue_sched.store import accounting as store

log = structlog.get_logger(__name__)
DEFAULT_AGE_SECONDS = 40.0
PUBLISH_GRACE_SECONDS = 30.0
"""So long after an entry was dropped, another program's decrement for it may still come."""
_IDS_PER_STATEMENT = 5000
_KEYS_PER_ROUND_TRIP = 2000

# What to change so that the ledger says what the proc table says: pure decisions.
#
# Three readings are compared, taken in this order: the mark (a sequence number), a snapshot of the proc table, the
# ledger. Everything that happens meanwhile shows as a sequence number above the mark, or as an entry that changed
# before it could be touched, and is left for the next pass.


def find_differences(
    mark_seq: int,
    snapshot: Mapping[str, str],
    ledger: Iterable[Record],
    *,
    too_old: Collection[str],
    managed: Collection[str],
    only: Collection[str] | None = None,
) -> tuple[list[Change], list[str]]:
    """Compare ``snapshot`` (proc id to entry, of ``managed`` shows) with the ledger, of all shows or ``only`` some.

    Returns changes that can be applied at once, and procs without an entry, which are to be read again first.

    ``too_old`` are in-flight ids that no commit can belong to any more, as judged *at the mark*. An entry is judged by
    what it was at the mark: judging it by its state when the change is applied loses a live booking.
    """
    changes: list[Change] = []
    known: set[str] = set()
    for record in ledger:
        known.add(record.proc_id)
        if only is not None and record.show_id not in only:
            continue
        change = _judge(record, snapshot.get(record.proc_id), mark_seq, record.proc_id in too_old)
        if change is not None:
            retired = change.entry is None and record.show_id not in managed
            changes.append(replace(change, cause=Cause.RETIRED) if retired else change)
    return changes, [proc_id for proc_id in snapshot if proc_id not in known]


def _judge(record: Record, actual: str | None, mark_seq: int, too_old: bool) -> Change | None:
    in_flight = record.state is EntryState.IN_FLIGHT
    before_mark = record.changed_seq <= mark_seq
    settled_before_mark = not in_flight and before_mark
    seen = partial(Change, record.proc_id, record.changed_seq)
    if actual is None:
        if not (settled_before_mark or (in_flight and too_old)):
            return None
        return seen(None, cause=Cause.CRASHED_BOOKING if in_flight else Cause.MISSED_RELEASE)
    state = EntryState.CONFIRMED if too_old else record.state
    if actual != record.entry:
        # An entry that changed since the mark may have been moved by a newer snapshot.
        return seen(actual, state, Cause.MOVED) if before_mark else None
    return seen(actual, state, Cause.LATE_SETTLE) if in_flight and too_old else None


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
        ids = (row.pk_show, row.pk_alloc, row.pk_folder, row.pk_job, row.pk_layer, row.pk_dept)
        show, alloc, folder, job, layer, dept = (it if SEPARATORS.isdisjoint(it) else "" for it in ids)
        limits = tuple(filter(None, row.limits.split(",")))
        vertices = Vertices(show, alloc, folder, job, layer, dept, limits)
        entries[row.pk_proc] = Booking(row.pk_proc, vertices, booked_cores(row.centicores), row.gpus).packed()
    return entries


def may_still_commit(engine: Engine, age_seconds: float) -> bool:
    """Whether what was booked an age ago may still be committed, because PostgreSQL has not ended with its COMMIT.

    That was sent within a commit deadline, at most a third of an age. To be asked before the snapshot is taken: what
    has ended by then is in it.
    """
    stalled = ask(engine, store.unfinished_commits, age_seconds / 3)
    if stalled:
        log.warning("commits_are_stalled", commits=stalled, seconds=age_seconds / 3)
    return stalled > 0


def fresh_additions(engine: Engine, proc_ids: Sequence[str]) -> list[Change]:
    """Procs the ledger lacks, as they are now: one that is gone meanwhile is not added."""
    changes: list[Change] = []
    for part in chunks(proc_ids, _IDS_PER_STATEMENT):
        with engine.begin() as connection:
            changes += additions(entries_of(store.procs(connection, proc_ids=part)))
    return changes


def additions(entries: Mapping[str, str]) -> list[Change]:
    """Changes that add these procs. The script still refuses an id that is tombstoned by then."""
    return [Change(proc_id, None, entry, cause=Cause.MISSING) for proc_id, entry in entries.items()]


# Since when an in-flight booking has been seen in flight, by a clock that cannot jump.
#
# Redis TIME alone may not decide that a booking is too old: it can be set forward, and a booking that is just being
# committed would be thrown away. So an entry must also stand unchanged since a mark that is an age old by the boot
# clock of this machine. The marks are kept in Redis, for each boot of each machine, so that any process of the machine
# can go on where another stopped; without them a judgement is only postponed.

_KEPT_SECONDS = 24 * 3600


def seen_an_age_ago(client: redis.Redis, mark: Mark, marked_at: float, age_seconds: float) -> int:
    """Keep the mark; returns the number of the newest one that was an age old at ``marked_at``, -1 for none."""
    key = keys.MARKS_PREFIX + boot_id()
    with answering(), client.pipeline(transaction=False) as pipe:
        pipe.zadd(key, {f"{mark.seq:016}": marked_at}, nx=True)  # so that those of one moment are in order too
        pipe.zrevrangebyscore(key, marked_at - age_seconds, "-inf", start=0, num=1)
        pipe.zremrangebyscore(key, "-inf", marked_at - _KEPT_SECONDS)
        pipe.expire(key, _KEPT_SECONDS)
        newest = pipe.execute()[1]
    return int(newest[0]) if newest else -1


def is_too_old(record: Record, seen_seq: int, mark_seconds: int, *, age_seconds: float) -> bool:
    """Both clocks say that an age has passed in flight: Redis TIME since the booking, the boot clock since the mark of
    ``seen_seq``, at which the entry was what it is."""
    in_flight = record.state is EntryState.IN_FLIGHT
    return in_flight and mark_seconds - record.booked_at >= age_seconds and record.changed_seq <= seen_seq


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass read, found and applied. ``procs`` of the ``managed`` shows are in the proc table."""

    mark: Mark
    managed: frozenset[str]
    procs: int
    check: ConsistencyCheck
    changes: Sequence[Change]
    passed_over: Sequence[str]
    seqs: Sequence[int]

    def entries_now(self) -> dict[str, str]:
        """The ledger after the changes, provided that nobody else changed it meanwhile."""
        entries = {proc_id: record.entry for proc_id, record in self.check.records.items()}
        for change in self.changes:
            if change.proc_id in self.passed_over:
                continue
            if change.entry is None:
                entries.pop(change.proc_id, None)
            else:
                entries[change.proc_id] = change.entry
        return entries


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
    old = frozenset(it.proc_id for it in records if is_too_old(it, seen, mark.seconds, age_seconds=age_seconds))
    too_old = frozenset[str]() if stalled else old
    changes, absent = find_differences(mark.seq, entries, records, too_old=too_old, managed=managed, only=only)
    # Read again, because a proc that was released since the snapshot has left the ledger too, and perhaps no tombstone.
    changes += fresh_additions(engine, absent)
    _lend_before_retiring(engine, ledger, check, changes)
    return Pass(mark, managed, len(entries), check, changes, *ledger.apply(changes, epoch=mark.epoch))


def renew_entries(ledger: Ledger, show_id: str) -> None:
    """Give the entries of a show new sequence numbers, so that no pass that has read them can touch them.

    For a show that is managed again: a pass that saw it unmanaged would retire entries that are needed by now.
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


# The reference's reseed contract, for a store into which another program publishes plain decrements (see "Another
# program's decrements" in docs/accounting.md): a pass ends the reference's ``GET acct:seq -> SQL -> compare-and-swap``,
# in which counters become what the ledger says, if nothing moved. Where something always does, it ends with the foreign
# deltas that can no longer be explained (lua/foreign.lua) instead of being skipped.


def reseed_booked(ledger: Ledger, one_pass: Callable[[], Pass], *, max_retries: int) -> Pass:
    """Reconcile and swap, up to ``max_retries`` times more; returns the last pass."""
    epoch = ledger.mark().epoch  # the store may have been filled since it was learnt
    _dissolve(ledger, epoch, "before", _stored(ledger))
    for _ in range(1 + max_retries):
        done = one_pass()
        if swap_counters(ledger, done):
            return done
    _dissolve(ledger, done.mark.epoch, "after", _stored(ledger, done.check))
    return done


def swap_counters(ledger: Ledger, done: Pass) -> bool:
    """Write every counter as the ledger says, if only this pass moved anything since its mark."""
    own = [*done.check.seqs, *done.seqs]
    expected = done.mark.seq + len(own)
    if own != list(range(done.mark.seq + 1, expected + 1)):
        return False  # the numbers of our calls do not follow the mark without a gap: somebody else moved something
    values = counters(done.entries_now().values(), _stored(ledger, done.check))
    for part in chunks(values, _KEYS_PER_ROUND_TRIP):
        answers = ledger.call_under(reseed_cas_calls(done.mark.epoch.text, expected, part))
        if any(int(answer[0]) != 1 for answer in answers):
            return False
    return True


def counters(entries: Iterable[str], stored: Iterable[str]) -> list[tuple[str, int, int]]:
    """Cores and GPUs of each vertex, from the entries; 0 for every stored key without any. Limits are left out."""
    sums = dict.fromkeys(stored, (0, 0))
    for entry in entries:
        for key, cores, gpus in amounts(entry):
            if not key.startswith(keys.LIMIT_PREFIX):
                before = sums.get(key, (0, 0))
                sums[key] = before[0] + cores, before[1] + gpus
    return [(key, cores, gpus) for key, (cores, gpus) in sums.items()]


def _stored(ledger: Ledger, check: ConsistencyCheck | None = None) -> list[str]:
    """Every vertex but the limits that has a counter, also where another consistency check was under way."""
    vertices = check.readings if check is not None and check.complete else vertex_keys(ledger)
    return [key for key in vertices if not key.startswith(keys.LIMIT_PREFIX)]


def _dissolve(ledger: Ledger, epoch: Epoch, phase: Phase, vertices: Sequence[str]) -> None:
    for part in chunks(vertices, _KEYS_PER_ROUND_TRIP):
        ledger.call_under(id_calls("foreign", part, epoch.text, phase, PUBLISH_GRACE_SECONDS))


# One pass over everything.


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What a pass found and did.

    ``causes``: entries that differed, by Cause. ``drifted``: counters that were off their entries, because another
    program wrote to them, by kind of vertex. ``oldest_in_flight_seconds`` is by Redis TIME.
    """

    shows: int
    procs: int
    causes: Mapping[str, int] = field(default_factory=dict)
    drifted: Mapping[str, int] = field(default_factory=dict)
    in_flight: int = 0
    oldest_in_flight_seconds: float = 0.0
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
    clock: Callable[[], float] = boot_clock,
    cas_max_retries: int = 3,
    write_tables: bool = True,
) -> RecomputeReport:
    """One pass over all managed shows, or only over ``show_ids`` (a hint that something was released there).

    ``age_seconds`` is accounting.in_flight_age; ``clock`` is in seconds and never jumps. ``cas_max_retries`` only
    matters to a store that another program publishes into. Raises NotReady and SQLAlchemy's errors: then nothing or a
    part was applied, and each part is right by itself.
    """
    started = time.monotonic()
    only = None if show_ids is None else frozenset(show_ids)
    one_pass = partial(reconcile, engine, ledger, only, age_seconds=age_seconds, clock=clock)
    done = reseed_booked(ledger, one_pass, max_retries=cas_max_retries) if ledger.epoch().dual else one_pass()
    # The reading may have taken long, and what follows is written outside the scripts: have one look at the fence.
    ledger.mark()
    if write_tables:
        store.refresh_tables(engine, only or done.managed)
    if only is None:
        with answering():
            ledger.client.set(keys.RECOMPUTED_AT, done.mark.seconds)
    in_flight = [r.booked_at for r in done.check.records.values() if r.state is EntryState.IN_FLIGHT]
    report = RecomputeReport(
        shows=len(done.managed),
        procs=done.procs,
        causes=Counter(change.cause.value for change in done.changes if change.cause is not None),
        drifted=Counter(vertex[0].value for key in done.check.healed if (vertex := keys.parse(key))),
        in_flight=len(in_flight),
        oldest_in_flight_seconds=max(0.0, done.mark.seconds - min(in_flight, default=done.mark.seconds)),
        seconds=time.monotonic() - started,
    )
    log.info("recomputed", healed=report.healed, causes=report.causes, seconds=round(report.seconds, 3))
    return report
