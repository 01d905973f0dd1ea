"""Commits a whole plan in one PostgreSQL transaction.

Every proc of the plan ends in exactly one of three ways. ``committed``: its rows are there. ``lost``: they certainly
are not, and its booking in Redis is to be rolled back. ``unknown``: the connection broke during COMMIT, the
booking must not be touched, and the next recompute finds out. A proc that no longer fits the locked rows, today's caps
or what its layer and job ask for today is lost, and no other proc with it. A plan that fails because of some job's rows
is cut in halves by job until that job is alone: this job is quarantined, and everything else is committed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import VertexCaps, VertexKind
from opencue_sched.clients.store_errors import Failure, classify, describe, in_doubt, waited_too_long, was_cancelled
from opencue_sched.domain.clusters import normalise_tags
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.units import CENTICORES_PER_CORE, cap_cores, enforced
from opencue_sched.errors import (
    AllocationOverBurst,
    BookingError,
    CapChanging,
    CapExceeded,
    DatabaseFailure,
    FrameLost,
    HostExhausted,
    HostHeld,
    HostLocked,
    LayerChanged,
)
from opencue_sched.placement.policies.reservations import against_reservation
from opencue_sched.placement.policy import MAX_FRAMES
from opencue_sched.settings import Settings
from opencue_sched.store import booking as store
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.store.reservations import reservation_of
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

# Shares of accounting.commit_deadline: moments, counted from the booking in Redis, and lengths of time. The last COMMIT
# is sent by _COMMIT_BEFORE + _IDLE: a client that pauses for longer than _IDLE finds that the server has ended its
# transaction.
_QUEUE_BEFORE = 0.35
"""The moment until which a commit waits for others of its process. The rest is for its own statements."""
_STATEMENTS_BEFORE = 0.5
"""The moment by which the first statement must be sent: one that takes _STATEMENT ends before _COMMIT_BEFORE."""
_STATEMENT = 0.3
"""The longest that one statement may take."""
_LOCK = 0.2
"""The longest that one statement may wait for a lock: less than _STATEMENT, so that the wait fails by itself."""
_HOST_LOCK = 0.02
"""The longest wait for a host's row: the transaction of a report locks it for milliseconds."""
_COMMIT_BEFORE = 0.8
"""The moment by which the last statement before COMMIT must be sent."""
_IDLE = 0.15
"""The longest that the server waits for the next statement of the transaction."""
_WHOLE = 0.95
"""The moment at which the server ends the transaction: _COMMIT_BEFORE + _IDLE."""

_RETRY_PAUSE_SECONDS = 0.02
"""The longest pause before a transaction is repeated. Its length is random, so that the two that met do not meet again;
it is short, because the hosts of the plan wait for it within the commit deadline."""
_TOO_LATE = "the commit deadline passed before the plan could be committed"
"""The reason, for people, of procs for which no time was left."""
_PREFIX = "acct:"
"""The beginning of each vertex key in Redis. ``store.read_caps`` names vertices by what follows it."""

Lost = tuple[PlannedProc, BookingError]
"""A planned proc that was not committed, and why."""
Terms = Mapping[str, Mapping[str, str]]
"""The terms under which limits accepted a booking, by proc id, then by limit id (BookAnswers.terms). A limit that is
nothing but its maximum has none."""


class CommitQueue:
    """Orders the commits of one process: those that lock the same hosts or counters run one after the other.
    Thread-safe; a thread whose turn it is for some rows must not ask for others.

    Without the queue, of two plans for one host the second finds the host locked and loses what it planned there. Plans
    of clusters that share a job meet in the job's counters, where each waits for the other's COMMIT while it holds rows
    that a third waits for, until one runs out of time. In the queue the second waits before it holds anything.
    Transactions of other processes are still met at the row.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[object, frozenset[str]] = {}
        """The ids of hosts and jobs of each commit that waits or is under way, in the order in which the commits asked.
        The key is an object that the commit makes. Under the condition's lock."""

    @property
    def commits(self) -> int:
        """How many commits wait or are under way."""
        with self._changed:
            return len(self._asked)

    @contextmanager
    def on(self, ids: Collection[str], *, wait_seconds: float) -> Iterator[bool]:
        """Wait until all commits that asked before for one of these ids of hosts and jobs are done, but not for longer
        than ``wait_seconds``. Yields whether they were done in time.

        Commits go in the order in which they asked: none waits in a circle, and a plan of many hosts is not overtaken
        for ever.
        """
        ticket, rows = object(), frozenset(ids)
        with self._changed:
            before = {asked for asked, asked_rows in self._asked.items() if not rows.isdisjoint(asked_rows)}
            self._asked[ticket] = rows
        try:
            with self._changed:
                in_time = self._changed.wait_for(lambda: before.isdisjoint(self._asked), timeout=wait_seconds)
            yield in_time
        finally:
            with self._changed:
                del self._asked[ticket]
                self._changed.notify_all()


FIRST_PLAN_FRAMES = 250
"""How many frames the first plan of a shard may have, or the first with a show that is new to the process: the commit
takes a quarter of a full plan's time."""


class PlanSizes:
    """How many frames the next plan of each shard may have. Thread-safe.

    The first plan may have FIRST_PLAN_FRAMES, and so may the first with a show that this process did not plan before.
    After a commit that took longer than it may, the bound is half of the frames that this commit had; after each other
    commit it is doubled, up to MAX_FRAMES.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bounds: defaultdict[str, int] = defaultdict(lambda: FIRST_PLAN_FRAMES)  # by shard; under the lock
        self._known: set[str] = set()  # ids of shows that were planned; under the lock

    def most(self, shard: str, show_ids: Collection[str] = ()) -> int:
        """The bound of the shard's next plan, which is to have frames of these shows."""
        with self._lock:
            if not self._known.issuperset(show_ids):
                self._known.update(show_ids)
                self._bounds[shard] = min(self._bounds[shard], FIRST_PLAN_FRAMES)
            return self._bounds[shard]

    def forget(self, show_id: str) -> None:
        """Note that a show may not be planned now. The first plan with it afterwards is a small one again, so that its
        first frames start soon."""
        with self._lock:
            self._known.discard(show_id)

    def committed(self, shard: str) -> None:
        """Note that a plan of the shard was committed in time."""
        with self._lock:
            self._bounds[shard] = min(2 * self._bounds[shard], MAX_FRAMES)

    def cancelled(self, shard: str, frames: int) -> None:
        """Note that the commit of a plan of ``frames`` frames, or one of its statements, took longer than it may."""
        with self._lock:
            bound = self._bounds[shard] = max(1, min(self._bounds[shard], frames // 2))
        log.warning("plans_halved", shard=shard, frames=frames, next_frames=bound)


@dataclass(slots=True)
class CommitResult:
    """How every proc of the plan ended."""

    committed: list[PlannedProc] = field(default_factory=list)
    """Procs whose rows are there. Their ``frame.version`` is the one after the start, which later guards compare."""
    lost: list[Lost] = field(default_factory=list)
    """Procs whose rows are certainly not there, those of quarantined jobs among them."""
    unknown: list[Lost] = field(default_factory=list)
    """Procs whose COMMIT broke off. They must stay booked."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Why jobs were left out, by job id."""
    sent_at: float = 0.0
    """``clock()`` just before the first COMMIT that succeeded was sent; 0 where none succeeded. The time to launch
    counts from here, so a pause before COMMIT was answered counts as well."""
    cancelled: bool = False
    """Whether a transaction ended because a statement took too long, or all of them together."""


def commit_plan(
    engine: Engine,
    procs: Sequence[PlannedProc],
    caps: Mapping[str, VertexCaps],
    settings: Settings,
    *,
    facts: SchemaFacts,
    booked_at: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    queue: CommitQueue | None = None,
    terms: Terms | None = None,
    begins: Callable[[], None] = lambda: None,
) -> CommitResult:
    """Write the plan's bookings. Never raises for what the database does: see CommitResult.

    ``caps`` and ``terms`` are those the ledger booked the plan under (``BookAnswers``). ``booked_at`` is ``clock()``
    from before that booking (default: now), from which the commit deadline counts. ``queue`` is that of the process.
    ``begins`` is called when the plan's turn in the queue has come, before each of its transactions; not when the
    wait for that turn was given up.
    """
    began = clock() if booked_at is None else booked_at
    run = _Commit(engine, caps, settings, facts, began, clock, queue or CommitQueue(), terms or {}, begins)
    run.commit(procs)
    quarantine(engine, run.result.quarantined, settings)
    return run.result


def quarantine(engine: Engine, reasons: Mapping[str, str], settings: Settings) -> None:
    """Leave the jobs of ``reasons`` (id -> why) alone for ``queue.job_back_off_duration``."""
    for job_id, reason in reasons.items():
        log.error("job_quarantined", job=job_id, reason=reason)
    if not reasons:
        return
    try:
        with engine.begin() as connection:
            quarantine_jobs(connection, reasons, settings.queue.job_back_off_duration)
    except SQLAlchemyError as error:  # the next pass meets the same jobs, and says the same of them
        log.error("quarantine_not_stored", job_ids=sorted(reasons), error=describe(error))


@dataclass(slots=True)
class _Commit:
    """The state of one commit_plan call."""

    engine: Engine
    caps: Mapping[str, VertexCaps]
    """The caps and use under which the ledger booked the plan, by vertex key."""
    settings: Settings
    facts: SchemaFacts
    booked_at: float
    """When the booking in Redis began, by ``clock``: shares of the deadline count from there."""
    clock: Callable[[], float]
    queue: CommitQueue
    terms: Terms
    begins: Callable[[], None]
    result: CommitResult = field(default_factory=CommitResult)
    planned_anew: bool = False
    """Whether the commit was repeated because PostgreSQL's plans for its statements were outdated (Failure.OUTDATED),
    which is done once."""

    @property
    def deadline(self) -> float:
        """How many seconds after the booking in Redis the commit must be over."""
        return self.settings.accounting.commit_deadline

    def commit(self, procs: Sequence[PlannedProc]) -> None:
        """Commit these procs in one transaction, or as much of them as can be when it fails."""
        while procs:
            try:
                self._transaction(procs)
            except DatabaseFailure as too_late:
                # From _check_time. Where that was called because PostgreSQL had refused a lock, the refusal is the
                # context, and may be why the time ran out: then this plan was not too large.
                self.result.cancelled |= self._ran_out_of_time(too_late.__context__)
                self.result.lost += [(proc, too_late) for proc in procs]
            except SQLAlchemyError as error:
                failure = classify(error)
                self.result.cancelled |= self._ran_out_of_time(error)
                if failure is Failure.REPEAT:
                    # The pause is random, so that the two that met do not meet again.
                    time.sleep(random.uniform(0, _RETRY_PAUSE_SECONDS))
                    continue
                if failure is Failure.OUTDATED and not self.planned_anew:
                    self.planned_anew = True
                    continue
                self._cut(procs, failure, describe(error))
            return

    def _cut(self, procs: Sequence[PlannedProc], failure: Failure, reason: str) -> None:
        """Commit each half of the jobs by itself, until the job that is to blame is alone; one with bad rows is then
        quarantined. No job is to blame for a failure of the database, so nothing is cut."""
        jobs = list(dict.fromkeys(proc.job.id for proc in procs))
        if failure in (Failure.DATABASE, Failure.OUTDATED):
            log.error("commit_failed", procs=len(procs), error=reason)
        elif len(jobs) > 1:
            first = set(jobs[: len(jobs) // 2])
            self.commit([proc for proc in procs if proc.job.id in first])
            self.commit([proc for proc in procs if proc.job.id not in first])
            return
        elif failure is Failure.ROWS:
            self.result.quarantined[jobs[0]] = reason
        lost = HostExhausted(reason) if failure is Failure.HOST else DatabaseFailure(reason)
        self.result.lost += [(proc, lost) for proc in procs]

    def _transaction(self, procs: Sequence[PlannedProc]) -> None:
        """Commit these procs in one transaction, after the transactions of this process that lock some of the same
        hosts, or counters of the same jobs."""
        patience = max(0.0, _QUEUE_BEFORE * self.deadline - self._elapsed())
        locked = {proc.host.id for proc in procs} | {proc.job.id for proc in procs}
        # A commit whose turn does not come in time goes on without it: one before it may hang in its COMMIT.
        with self.queue.on(locked, wait_seconds=patience) as in_time:
            if in_time:
                self.begins()
            with self.engine.connect() as connection:
                if self._is_late(_STATEMENTS_BEFORE):  # which says nothing of the size of this plan
                    self.result.lost += [(proc, DatabaseFailure(_TOO_LATE)) for proc in procs]
                    return
                with connection.begin() as transaction:
                    committed, lost = self._write(connection, procs)
                    sent_at = self.clock()
                    try:
                        self._check_time()
                        transaction.commit()
                    except SQLAlchemyError as error:
                        if not in_doubt(error):
                            raise
                        failure = DatabaseFailure(describe(error), outcome_unknown=True)
                        self.result.unknown += [(proc, failure) for proc in committed]
                        committed = []
        # Nothing is recorded before the outcome is known: a transaction that failed is repeated, or cut.
        if committed and not self.result.committed:
            self.result.sent_at = sent_at
        self.result.committed += committed
        self.result.lost += lost

    def _write(self, connection: Connection, procs: Sequence[PlannedProc]) -> tuple[list[PlannedProc], list[Lost]]:
        """Lock, decide, write: in this order. Returns the procs that were written, and those that are lost."""
        # The server's time-outs first: they, not this client's clock, end a transaction whose process was paused.
        self._check_time()
        store.set_timeouts(
            connection,
            statement=_STATEMENT * self.deadline,
            lock=_LOCK * self.deadline,
            idle=_IDLE * self.deadline,
            whole=_WHOLE * self.deadline - self._elapsed(),
        )
        # (a) Frames, without waiting: one that is locked is being started, retried or killed, and is lost to this plan.
        #     What the plan rests on is read with them: the plan may have been made from what was known seconds ago.
        self._check_time()
        kept, lost = fit_frames(procs, *store.lock_frames(connection, procs, self.facts))
        if not kept:
            return [], lost
        # (b) Hosts, then caps, which stay as they are until COMMIT.
        hosts = self._lock_hosts(connection, {proc.host.id for proc in kept})
        self._check_time()
        now = store.read_caps(connection, by_vertex(kept))
        kept, under_other_terms = fit_terms(kept, self.terms, now)
        kept, without_cap = fit_caps(kept, self.caps, now)
        kept, without_host = fit_hosts(kept, hosts)
        lost += under_other_terms + without_cap + without_host
        # (c) Write. This alone may wait for as long as _LOCK: for counters that another transaction has locked. When
        #     the wait runs out, what was written is taken back, and the procs whose counters are free are written
        #     again. The frames and hosts stay locked.
        try:
            committed, taken_over = self._start(connection, kept)
        except SQLAlchemyError as error:
            if not waited_too_long(error):
                raise
            self._check_time()
            store.take_back_writes(connection)
            free = store.lock_free_stats(connection, {proc.layer.id for proc in kept}, {proc.job.id for proc in kept})
            busy = DatabaseFailure("the counters of the layer or job stayed locked by another transaction")
            lost += [(proc, busy) for proc in kept if not {proc.layer.id, proc.job.id} <= free]
            committed, taken_over = self._start(
                connection, [proc for proc in kept if {proc.layer.id, proc.job.id} <= free]
            )
        return committed, lost + taken_over

    def _lock_hosts(self, connection: Connection, host_ids: set[str]) -> dict[str, Row[Any]]:
        """Lock the rows of hosts. Returns the rows that could be locked, by host id.

        On a full farm a locked host is mostly one on which other frames have just ended, in a transaction of some tens
        of milliseconds: that is waited for. Such transactions lock hosts in the same order, so none waits in a circle.
        No transaction is waited for longer than the lock's time-out.
        """
        self._check_time()
        try:
            return store.lock_hosts(connection, host_ids, wait_seconds=_HOST_LOCK * self.deadline)
        except SQLAlchemyError as error:
            if not waited_too_long(error):
                raise
            self._check_time()
        return store.lock_free_hosts(connection, host_ids)

    def _start(self, connection: Connection, procs: list[PlannedProc]) -> tuple[list[PlannedProc], list[Lost]]:
        """Insert the rows of procs, lower what their hosts have idle, and start their frames. Returns the procs that
        were written, and those that are lost because their frame got another proc."""
        if not procs:
            return [], []
        self._check_time()
        inserted = store.insert_procs(connection, procs)
        kept = [proc for proc in procs if proc.proc_id in inserted]
        lost: list[Lost] = [
            (proc, FrameLost("the frame got another proc")) for proc in procs if proc.proc_id not in inserted
        ]
        if not kept:
            return [], lost
        self._check_time()
        store.take_from_hosts(connection, kept)
        # Frames last: this locks the counters of their layers and jobs, for which plans of other clusters wait.
        self._check_time()
        versions = store.start_frames(connection, kept, self.settings.queue.uncounted_exit_statuses, self.facts)
        return [replace(proc, frame=replace(proc.frame, version=versions[proc.frame.id])) for proc in kept], lost

    def _elapsed(self) -> float:
        """Seconds since the booking in Redis began."""
        return self.clock() - self.booked_at

    def _is_late(self, share: float) -> bool:
        """Whether this share of the commit's deadline is over."""
        return self._elapsed() > share * self.deadline

    def _check_time(self) -> None:
        """Raise DatabaseFailure when it is too late to send anything more."""
        if self._is_late(_COMMIT_BEFORE):
            raise DatabaseFailure(_TOO_LATE)

    def _ran_out_of_time(self, error: BaseException | None) -> bool:
        """Whether a transaction that has ended took too long by itself: not where it collided with another, or a lock
        was not granted. ``error`` is what the database said last, if it refused anything.

        Where the server ends a transaction for its time (transaction_timeout, from PostgreSQL 17), the connection is
        lost, which tells nothing: then the clock decides.
        """
        if isinstance(error, SQLAlchemyError) and classify(error) is not Failure.DATABASE:
            return False
        return was_cancelled(error) or self._is_late(_COMMIT_BEFORE)


# What of a plan still holds against the locked rows and today's caps.

_RESTS_ON = (
    "its layer's minimum of cores",
    "its layer's maximum of cores",
    "its layer's GPUs",
    "its layer's GPU memory",
    "its layer's tags",
    "its layer's threads",
    "its job's OS",
    "its job's folder",
    "its job's department",
)
"""What must not have changed at all, in the order of `_planned_on` and `_now`."""


def fit_frames(
    procs: Iterable[PlannedProc], frames: Mapping[str, int], layers: Mapping[str, Row[Any]]
) -> tuple[list[PlannedProc], list[Lost]]:
    """Keep the procs whose frame was locked, if the layer and job still ask for what was planned and count under the
    same limits.

    ``frames``: the memory in KB that each locked frame asks for now, by frame id; ``layers``: the layers as they are
    now, by id (both from ``store.lock_frames``). A frame may ask for less memory than was planned. A limit may have
    been deleted: it bounds nothing any more.
    """
    kept: list[PlannedProc] = []
    lost: list[Lost] = []
    now = {layer_id: _now(layer) for layer_id, layer in layers.items()}
    for proc in procs:
        memory_kb = frames.get(proc.frame.id)
        if memory_kb is None:
            lost.append((proc, FrameLost("the frame was started, changed, paused or taken by another transaction")))
        elif changed := _changed(proc, memory_kb, layers[proc.layer.id], now[proc.layer.id]):
            lost.append((proc, LayerChanged(changed)))
        else:
            kept.append(proc)
    return kept, lost


def _changed(proc: PlannedProc, memory_kb: int, layer: Row[Any], now: tuple[object, ...]) -> str:
    """What is no longer as it was planned, in words; empty where all is."""
    planned = _planned_on(proc)
    if planned != now:
        different = [what for what, then, today in zip(_RESTS_ON, planned, now, strict=True) if then != today]
        return f"{', '.join(different)} changed since it was planned"
    # The plan must have every limit of the layer that exists, and none that the layer does not name. A limit that was
    # deleted is still named.
    if not set(layer.limit_ids) <= set(proc.vertices.limit_ids) <= set(layer.named_limit_ids):
        return "its layer's limits changed since it was planned"
    if layer.quarantined:
        return "its job is quarantined"
    if memory_kb > proc.resources.memory_kb:
        return f"it asks for {memory_kb} KB of memory, and {proc.resources.memory_kb} were planned"
    return ""


def _planned_on(proc: PlannedProc) -> tuple[object, ...]:
    """What a plan rested on for this proc, in the order of _RESTS_ON."""
    layer, vertices = proc.layer, proc.vertices
    return (
        layer.cores_min_centicores,
        layer.cores_max_centicores,
        layer.gpus_min,
        layer.gpu_memory_min_kb,
        layer.tags,
        layer.threadable,
        proc.job.os_name,
        vertices.folder_id,
        vertices.dept_id,
    )


def _now(layer: Row[Any]) -> tuple[object, ...]:
    """What a plan rests on as the commit has read it under its locks, in the order of _RESTS_ON."""
    return (
        layer.int_cores_min,
        layer.int_cores_max,
        layer.int_gpus_min,
        layer.int_gpu_mem_min,
        normalise_tags(layer.str_tags),
        layer.b_threadable,
        layer.str_os or None,
        layer.pk_folder,
        layer.pk_dept,
    )


def fit_hosts(procs: Iterable[PlannedProc], hosts: Mapping[str, Row[Any]]) -> tuple[list[PlannedProc], list[Lost]]:
    """Keep, in plan order, what really fits the locked hosts (store.lock_hosts).

    A host that is not among ``hosts`` is locked by another transaction. A host that went down, was locked by a person
    or changed its allocation since the plan takes nothing. A reserved host takes what its reservation allows; once a
    frame of the layer that it is reserved for is placed there, the reservation is over.
    """
    kept: list[PlannedProc] = []
    lost: list[Lost] = []
    used: set[str] = set()
    left = {host.id: (host.centicores, host.memory_kb, host.gpus, host.gpu_memory_kb) for host in hosts.values()}
    reserved = {host.id: reservation_of(host) for host in hosts.values()}
    for proc in procs:
        name, host, takes = proc.host.name, hosts.get(proc.host.id), proc.resources
        wanted = (takes.cores * CENTICORES_PER_CORE, takes.memory_kb, takes.gpus, takes.gpu_memory_kb)
        if host is None:
            lost.append((proc, HostLocked(f"host {name} is locked by another transaction, or gone")))
        elif not host.up:
            lost.append((proc, HostExhausted(f"host {name} is no longer UP and OPEN")))
        elif host.alloc_id != proc.vertices.alloc_id:
            lost.append((proc, HostExhausted(f"host {name} was moved to another allocation")))
        elif any(want > has for want, has in zip(wanted, left[host.id], strict=True)):
            text = f"host {name} has (centicores, KB, GPUs, GPU KB) {left[host.id]} left, not {wanted}"
            lost.append((proc, HostExhausted(text)))
        elif host.id not in used and against_reservation(reserved[host.id], proc.layer, left[host.id][0], host.now):
            lost.append((proc, HostHeld(f"host {name} is kept for a wide frame of another layer")))
        else:
            if host.hold_layer == proc.layer.id:
                used.add(host.id)
            cores, memory, gpus, gpu_memory = (has - want for want, has in zip(wanted, left[host.id], strict=True))
            left[host.id] = cores, memory, gpus, gpu_memory
            kept.append(proc)
    return kept, lost


def by_vertex(procs: Iterable[PlannedProc]) -> dict[str, list[PlannedProc]]:
    """The procs under each vertex that has caps, by its kind and ids, as ``store.read_caps`` takes them."""
    found: dict[str, list[PlannedProc]] = defaultdict(list)
    for proc in procs:
        for key in keys.capped(proc.vertices):
            found[key.removeprefix(_PREFIX)].append(proc)
    return found


def fit_terms(
    procs: Iterable[PlannedProc], decided: Terms, now: Mapping[str, Row[Any]]
) -> tuple[list[PlannedProc], list[Lost]]:
    """Keep the procs whose limits accepted them under the terms that the limits have ``now`` (by vertex, see
    ``store.read_caps``).

    Terms are a limit's type, enforcement, soft value, maximum and report; a limit that is nothing but its maximum has
    none (store.limit_types). They are only compared: nothing is counted here.
    """
    kept: list[PlannedProc] = []
    lost: list[Lost] = []
    for proc in procs:
        under = decided.get(proc.proc_id, {})
        rows = ((limit_id, now.get(keys.limit(limit_id).removeprefix(_PREFIX))) for limit_id in proc.vertices.limit_ids)
        changed = [limit_id for limit_id, row in rows if row is not None and row.terms != under.get(limit_id, "")]
        if changed:
            text = f"limit {changed[0]} counts otherwise, or was reported, since it was booked"
            lost.append((proc, CapChanging(text)))
        else:
            kept.append(proc)
    return kept, lost


def fit_caps(
    procs: Sequence[PlannedProc], booked_under: Mapping[str, VertexCaps], now: Mapping[str, Row[Any]]
) -> tuple[list[PlannedProc], list[Lost]]:
    """Drop the procs that no longer fit a cap as it is ``now`` (by vertex, see ``store.read_caps``), and all procs
    under a cap that is being changed.

    Procs are dropped from the end of the plan, and only as many as the counter was over the cap right after the
    booking, so that a lowered cap which still has room stops nothing. A cap is compared also where Redis and PostgreSQL
    agree on it: ``booked_under`` is read after the booking, and Redis may have got the lower cap in between. A vertex
    without an entry in ``booked_under`` is not compared.
    """
    errors: dict[str, BookingError] = {}
    for vertex, members in by_vertex(procs).items():
        key, row = f"{_PREFIX}{vertex}", now.get(vertex)
        if row is not None and not row.steady:
            for proc in members:
                errors[proc.proc_id] = CapChanging(f"another transaction is changing the cap of {key}")
        caps = booked_under.get(key)
        if caps is not None:
            _drop(members, _today(caps, row), errors)
    kept = [proc for proc in procs if proc.proc_id not in errors]
    return kept, [(proc, errors[proc.proc_id]) for proc in procs if proc.proc_id in errors]


def _today(caps: VertexCaps, row: Row[Any] | None) -> VertexCaps:
    """The vertex's caps as PostgreSQL has them.

    Where it has no row any more, a subscription was deleted and allows nothing; any other vertex has no cap.
    """
    if caps.kind is VertexKind.SUBSCRIPTION:
        return replace(caps, max_cores=max(0, cap_cores(row.cores)) if row else 0)
    if caps.kind is VertexKind.LIMIT and (caps.counts_machines or (row and row.terms)):
        return replace(caps, max_frames=None)  # see fit_terms
    if caps.kind is VertexKind.LIMIT:
        # In the rows of read_caps the maximum of a limit, a number of frames, is in the column for cores.
        return replace(caps, max_frames=max(0, row.cores) - caps.foreign_frames if row else None)
    max_cores, max_gpus = (enforced(cap_cores(row.cores)), enforced(row.gpus)) if row else (None, None)
    return replace(caps, max_cores=max_cores, max_gpus=max_gpus)


def _drop(members: Sequence[PlannedProc], caps: VertexCaps, errors: dict[str, BookingError]) -> None:
    """Drop members, last first, until the counter as it was after the booking is within the cap again. Each that is
    dropped gets its error in ``errors``, by proc id."""
    pairs = ((caps.cores, caps.max_cores), (caps.gpus, caps.max_gpus), (caps.frames, caps.max_frames))
    over_cores, over_gpus, over_frames = (-math.inf if cap is None else booked - cap for booked, cap in pairs)
    for proc in reversed(members):
        if over_cores <= 0 and over_frames <= 0 and (over_gpus <= 0 or proc.resources.gpus <= 0):
            continue
        if proc.proc_id not in errors:
            lowered = AllocationOverBurst if caps.kind is VertexKind.SUBSCRIPTION else CapExceeded
            errors[proc.proc_id] = lowered(f"the cap of its {caps.kind.value} was lowered below what is booked")
        over_cores -= proc.resources.cores
        over_gpus -= proc.resources.gpus
        over_frames -= 1
