"""Commit: one PostgreSQL transaction for a whole plan (design 3.6).

Every proc of the plan ends in exactly one of three ways. ``committed``: its rows are there. ``lost``: they certainly
are not, and its booking in Redis is to be rolled back. ``unknown``: the connection broke during COMMIT, the
booking must not be touched, and the next recompute finds out. A plan that fails because of some job's rows is cut in
halves by job until that job is alone; it is quarantined and everything else is committed.
"""

from __future__ import annotations

import operator
import random
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.keys import VertexCaps
from opencue_sched.dispatch.failures import Failure, classify, describe, in_doubt, waited_too_long
from opencue_sched.dispatch.trim import Lost, fit_caps, fit_hosts, read_current_caps
from opencue_sched.domain.farm import PlannedProc
from opencue_sched.errors import DatabaseFailure, FrameLost, HostExhausted
from opencue_sched.settings import Settings
from opencue_sched.store import booking as store
from opencue_sched.store.jobs import quarantine_jobs
from opencue_sched.store.release import undo_bookings
from opencue_sched.store.schema import SchemaFacts


class CommitTurns:
    """Commits of one process that lock the same hosts or counters follow each other. Thread-safe; a thread that holds a
    turn must not ask for a second one.

    Without turns, of two plans for one host the second finds it locked and loses what it planned there. Plans of
    clusters that share a job meet in the job's counters, where each waits for the other's COMMIT while it holds rows
    that a third waits for, until one runs out of time. Here the second waits before it holds anything. Transactions of
    other processes are met at the row.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[object, frozenset[str]] = {}

    def asked(self) -> int:
        """How many are at work or wait for their turn."""
        with self._changed:
            return len(self._asked)

    @contextmanager
    def on(self, ids: Collection[str], *, wait_seconds: float) -> Iterator[bool]:
        """Wait until all that asked before for one of these ids of hosts and jobs are done, but not for longer than
        ``wait_seconds``; whether they were in time.

        In the order in which they asked: none waits in a circle, and a plan of many hosts is not overtaken for ever.
        """
        ticket, rows = object(), frozenset(ids)
        with self._changed:
            self._asked[ticket] = rows
        try:
            with self._changed:
                mine = self._changed.wait_for(lambda: self._is_next(ticket, rows), timeout=wait_seconds)
            yield mine
        finally:
            with self._changed:
                del self._asked[ticket]
                self._changed.notify_all()

    def _is_next(self, ticket: object, rows: frozenset[str]) -> bool:
        for asked, wanted in self._asked.items():
            if asked is ticket:
                break
            if not rows.isdisjoint(wanted):
                return False
        return True


log = structlog.get_logger(__name__)

# Shares of accounting.commit_deadline, counted from the booking in Redis. The last COMMIT is sent by COMMIT_BEFORE plus
# IDLE at the latest, because a client that pauses longer than IDLE finds its transaction ended by the server.
_TURN_BEFORE = 0.35
_STATEMENTS_BEFORE = 0.5
_STATEMENT = 0.3
_LOCK = 0.2
_COMMIT_BEFORE = 0.8
_IDLE = 0.15
_WHOLE = 0.95

_RETRY_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class CommittedProc:
    """A proc whose rows are committed. ``version`` is frame.int_version after the start: what later guards compare."""

    planned: PlannedProc
    version: int | None


@dataclass(slots=True)
class CommitResult:
    """How every proc of the plan ended, each group in plan order.

    ``unknown`` must stay booked. ``quarantined``: job id -> why. ``lowered``: keys of vertices whose cap in PostgreSQL
    is lower than in Redis; load them again. ``sent_at``: ``clock()`` before the first COMMIT that succeeded, so
    that a pause while it was answered counts. ``statements`` counts SQL statements, ``deadlocks`` the transactions that
    PostgreSQL asked to repeat.
    """

    committed: list[CommittedProc] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    unknown: list[tuple[PlannedProc, DatabaseFailure]] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    lowered: set[str] = field(default_factory=set)
    sent_at: float | None = None
    statements: int = 0
    transactions: int = 0
    deadlocks: int = 0


def commit_plan(
    engine: Engine,
    procs: Sequence[PlannedProc],
    caps: Mapping[str, VertexCaps],
    settings: Settings,
    *,
    facts: SchemaFacts,
    booked_at: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    turns: CommitTurns | None = None,
) -> CommitResult:
    """Write the plan's bookings. Never raises for what the database does: see CommitResult.

    ``caps`` are those the ledger booked the plan under (``BookAnswers.caps``). ``booked_at`` is ``clock()`` from before
    that booking (default: now), from which the commit deadline counts. ``turns`` are those of the process.
    """
    if not procs:
        return CommitResult()
    began = clock() if booked_at is None else booked_at
    run = _Commit(engine, caps, settings, facts, began, clock, turns or CommitTurns())
    run.commit(_one_per_frame(procs, run.result.lost))
    run.store_quarantine()
    result, order = run.result, {proc.proc_id: position for position, proc in enumerate(procs)}
    result.committed.sort(key=lambda it: order[it.planned.proc_id])
    result.lost.sort(key=lambda pair: order[pair[0].proc_id])
    result.unknown.sort(key=lambda pair: order[pair[0].proc_id])
    return result


def compensate(connection: Connection, committed: Iterable[CommittedProc]) -> frozenset[str]:
    """Undo committed procs whose frames certainly do not run; ids of the procs this call removed. Idempotent.

    The caller owns the transaction, and releases the ledger entries after it.
    """
    started = [(proc.planned, proc.version) for proc in committed]
    return undo_bookings(connection, started) if started else frozenset()


class _OutOfTimeError(Exception):
    """The commit deadline leaves no room for another statement."""


class _Commit:
    """The state of one commit_plan call."""

    def __init__(
        self,
        engine: Engine,
        caps: Mapping[str, VertexCaps],
        settings: Settings,
        facts: SchemaFacts,
        booked_at: float,
        clock: Callable[[], float],
        turns: CommitTurns,
    ) -> None:
        self.result = CommitResult()
        self._engine = engine
        self._caps = caps
        self._settings = settings
        self._facts = facts
        self._clock = clock
        self._turns = turns
        self._booked_at = booked_at
        self._deadline = settings.accounting.commit_deadline

    def commit(self, procs: Sequence[PlannedProc]) -> None:
        """Commit these procs in one transaction, or as much of them as can be when it fails."""
        while procs:
            try:
                self._transaction(procs)
                return
            except _OutOfTimeError:
                self._fail(procs, DatabaseFailure("the commit deadline passed before the plan could be committed"))
                return
            except SQLAlchemyError as error:
                failure = classify(error)
                if failure is Failure.REPEAT:
                    # The pause is random, so that the two that met do not meet again.
                    self.result.deadlocks += 1
                    time.sleep(random.uniform(0, _RETRY_PAUSE_SECONDS))
                elif failure is Failure.DATABASE:
                    log.error("commit_failed", procs=len(procs), error=describe(error))
                    self._fail(procs, DatabaseFailure(describe(error)))
                    return
                else:
                    self._cut(procs, failure, error)
                    return

    def _cut(self, procs: Sequence[PlannedProc], failure: Failure, error: SQLAlchemyError) -> None:
        """Commit each half of the jobs by itself; a job that is alone is the culprit."""
        jobs = list(dict.fromkeys(proc.job.id for proc in procs))
        if len(jobs) > 1:
            first = set(jobs[: len(jobs) // 2])
            self.commit([proc for proc in procs if proc.job.id in first])
            self.commit([proc for proc in procs if proc.job.id not in first])
            return
        reason = describe(error)
        if failure is Failure.ROWS:
            self.result.quarantined[jobs[0]] = reason
            log.error("job_quarantined", job=jobs[0], procs=len(procs), reason=reason)
        if failure is Failure.HOST:
            self.result.lost += [(p, HostExhausted(reason, proc_id=p.proc_id, host=p.host.name)) for p in procs]
        else:
            self._fail(procs, DatabaseFailure(reason))

    def _transaction(self, procs: Sequence[PlannedProc]) -> None:
        """One transaction, after those of this process that lock some of its hosts, or counters of its jobs."""
        patience = max(0.0, _TURN_BEFORE * self._deadline - self._elapsed())
        locked = {proc.host.id for proc in procs} | {proc.job.id for proc in procs}
        with self._turns.on(locked, wait_seconds=patience):
            self._check_time(_STATEMENTS_BEFORE)
            self._carry_out(procs)

    def _carry_out(self, procs: Sequence[PlannedProc]) -> None:
        with self._engine.connect() as connection:
            self.result.transactions += 1
            with connection.begin() as transaction:
                committed, lost, lowered = self._write(connection, procs)
                sent_at = self._clock()
                try:
                    self._check_time(_COMMIT_BEFORE)
                    transaction.commit()
                except SQLAlchemyError as error:
                    if not in_doubt(error):
                        raise
                    log.error("commit_outcome_unknown", procs=len(committed), error=describe(error))
                    failure = DatabaseFailure(describe(error), outcome_unknown=True)
                    self.result.unknown += [(proc.planned, failure) for proc in committed]
                    committed = []
        # Nothing is recorded before the outcome is known: a transaction that failed is repeated, or cut.
        if committed and self.result.sent_at is None:
            self.result.sent_at = sent_at
        self.result.committed += committed
        self.result.lost += lost
        self.result.lowered |= lowered

    def _write(
        self, connection: Connection, procs: Sequence[PlannedProc]
    ) -> tuple[list[CommittedProc], list[Lost], frozenset[str]]:
        """Lock, decide, write: the steps (a) to (d) of design 3.6."""
        # The server's time-outs first: they, not this client's clock, end a transaction whose process was paused.
        self._next()
        store.set_timeouts(connection, self._times())
        # (a) Frames, without waiting: one that is locked is being started, retried or killed, and is lost to this plan.
        self._next()
        frames = store.lock_frames(connection, procs, self._facts)
        kept, lost = _split(
            procs,
            frames,
            operator.attrgetter("frame.id"),
            "the frame was started, changed, paused or taken by another transaction",
        )
        if not kept:
            return [], lost, frozenset()
        # (b) Hosts, without waiting either, then caps, which stay as they are until COMMIT.
        self._next()
        hosts = store.lock_hosts(connection, {p.host.id for p in kept})
        self._next()
        kept, without_cap, lowered = fit_caps(kept, self._caps, read_current_caps(connection, kept))
        kept, without_host = fit_hosts(kept, hosts)
        lost += without_cap + without_host
        if not kept:
            return [], lost, lowered
        # (c) and (d) Write. Only this can wait, for counters that another transaction has locked. After a wait that was
        # too long what was written is taken back, and the procs whose counters are free are written again.
        try:
            committed, taken_over = self._start(connection, kept)
        except SQLAlchemyError as error:
            if not waited_too_long(error):
                raise
            kept, busy = self._with_free_counters(connection, kept)
            committed, taken_over = self._start(connection, kept)
            lost += busy
        return committed, lost + taken_over, lowered

    def _start(self, connection: Connection, procs: list[PlannedProc]) -> tuple[list[CommittedProc], list[Lost]]:
        """Insert procs, lower hosts and start frames, for procs that fit; the others are lost."""
        if not procs:
            return [], []
        self._next()
        inserted = store.insert_procs(connection, procs)
        kept, taken_over = _split(procs, inserted, operator.attrgetter("proc_id"), "the frame got another proc")
        if not kept:
            return [], taken_over
        reported_free = self._settings.rqd.dry_run_mode
        self._next(2 if reported_free else 1)
        store.take_from_hosts(connection, kept, reported_free=reported_free)
        # Frames last: this locks the counters of their layers and jobs, for which plans of other clusters wait.
        self._next()
        versions = store.start_frames(connection, kept)
        return [CommittedProc(p, versions[p.frame.id]) for p in kept], taken_over

    def _with_free_counters(
        self, connection: Connection, procs: list[PlannedProc]
    ) -> tuple[list[PlannedProc], list[Lost]]:
        """After a wait that was too long: the procs whose counters are free, now locked, and the others as lost.

        The frames and hosts this transaction has locked stay its own.
        """
        self._next(3)
        store.take_back_writes(connection)
        free = store.lock_free_stats(connection, {p.layer.id for p in procs}, {p.job.id for p in procs})
        error = DatabaseFailure("the counters of the layer or job stayed locked by another transaction")
        kept = [proc for proc in procs if proc.layer.id in free and proc.job.id in free]
        return kept, [(proc, error) for proc in procs if proc.layer.id not in free or proc.job.id not in free]

    def store_quarantine(self) -> None:
        """Write down who is quarantined. Without the database only the caller knows."""
        if not self.result.quarantined:
            return
        try:
            with self._engine.begin() as connection:
                quarantine_jobs(connection, self.result.quarantined, self._settings.queue.job_back_off_duration)
                self.result.statements += 1
        except SQLAlchemyError as error:
            log.error("quarantine_not_stored", job_ids=sorted(self.result.quarantined), error=describe(error))

    def _fail(self, procs: Sequence[PlannedProc], failure: DatabaseFailure) -> None:
        self.result.lost += [(proc, failure) for proc in procs]

    def _elapsed(self) -> float:
        return self._clock() - self._booked_at

    def _next(self, statements: int = 1) -> None:
        """Count statements about to be sent, unless it is too late for them."""
        self._check_time(_COMMIT_BEFORE)
        self.result.statements += statements

    def _check_time(self, share: float) -> None:
        if self._elapsed() > share * self._deadline:
            raise _OutOfTimeError

    def _times(self) -> store.TransactionTimes:
        return store.TransactionTimes(
            statement=_STATEMENT * self._deadline,
            lock=_LOCK * self._deadline,
            idle=_IDLE * self._deadline,
            whole=_WHOLE * self._deadline - self._elapsed(),
        )


def _frame_lost(proc: PlannedProc, text: str) -> FrameLost:
    return FrameLost(text, proc_id=proc.proc_id, host=proc.host.name, layer_id=proc.layer.id)


def _split(
    procs: Iterable[PlannedProc], kept_ids: Container[str], key: Callable[[PlannedProc], str], text: str
) -> tuple[list[PlannedProc], list[Lost]]:
    """Those whose ``key`` is among ``kept_ids``, and the others as FrameLost because of ``text``."""
    kept: list[PlannedProc] = []
    lost: list[Lost] = []
    for proc in procs:
        if key(proc) in kept_ids:
            kept.append(proc)
        else:
            lost.append((proc, _frame_lost(proc, text)))
    return kept, lost


def _one_per_frame(procs: Sequence[PlannedProc], lost: list[Lost]) -> list[PlannedProc]:
    """The first proc planned for each frame; the others join ``lost``."""
    by_frame: dict[str, PlannedProc] = {}
    for proc in procs:
        by_frame.setdefault(proc.frame.id, proc)
    again = [proc for proc in procs if by_frame[proc.frame.id] is not proc]
    lost += [(proc, _frame_lost(proc, "the plan has the frame twice")) for proc in again]
    return list(by_frame.values())
