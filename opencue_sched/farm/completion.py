"""The release path: ends runs, whether their RQDs report the end (completions) or nobody ever will (lost runs)."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from opencue_sched.accounting.ledger import Ledger
from opencue_sched.dispatch.hosts import HostChanges
from opencue_sched.domain.exit_rules import Completion, Decision, decide, satisfies_depends
from opencue_sched.domain.farm import ExitStatus, FrameState
from opencue_sched.errors import SchedulerError
from opencue_sched.farm.model import CompletedFrame, EventCounts, LostRun, RunOutcome, RunsEnded, RunVerdict
from opencue_sched.store import depends, procs, release
from opencue_sched.store.procs import DeletedProc, FrameRow, ProcRow, RunRow
from opencue_sched.store.release import ChangedFrame, FrameStop, StoppedFrame

# What a report or a request about a run means for the frame and the proc it names. Pure: no database, no clock.
#
# The ownership fence comes first: a report may only stop the run it describes. A proc that no longer has the reported
# frame means that the run was superseded (retried, eaten, cleared and perhaps booked again), and applying the report
# would stop somebody else's run.

_SMALLEST_EXIT_STATUS, _LARGEST_EXIT_STATUS = -32_768, 32_767
"""frame_history.int_exit_status is a smallint; a Windows process ends with numbers far outside it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What to do about one run. ``stop`` and ``release`` may both be None: then nothing is to be done.

    ``memory_failure`` asks for a higher memory requirement of the layer; it is only known together with a proc.
    """

    verdict: RunVerdict
    stop: FrameStop | None = None
    release: ProcRow | None = None
    frame: FrameRow | None = None
    memory_failure: bool = False


def end_completed(report: CompletedFrame, run: RunRow, *, now: float) -> Ending:
    """The ending that a report asks for. ``now`` is epoch seconds."""
    proc, frame = run.proc, run.frame
    if proc is None:
        return _end_without_proc(report, frame, now=now)
    if _short(proc.host_name) != _short(report.host_name):
        return Ending(RunVerdict.WRONG_HOST)
    if proc.frame_id is None:
        return Ending(RunVerdict.RELEASED, release=proc)
    if proc.frame_id != report.frame_id or frame is None:
        return Ending(RunVerdict.SUPERSEDED)
    if frame.state is not FrameState.RUNNING:
        return Ending(RunVerdict.RELEASED, release=proc, frame=frame)
    decision = _decide(report, frame, now=now)
    return Ending(RunVerdict.APPLIED, _stop(report, frame, decision), proc, frame, decision.memory_failure)


def end_lost(request: LostRun, run: RunRow) -> Ending:
    """The ending of a run whose process is gone without a report."""
    proc, frame = run.proc, run.frame
    if not request.proc_id:
        if frame is None:
            return Ending(RunVerdict.UNKNOWN)
        if frame.state is not FrameState.RUNNING:
            return Ending(RunVerdict.STALE)
        if frame.owner_proc_id is not None:
            return Ending(RunVerdict.SUPERSEDED)
        return Ending(RunVerdict.ORPHAN_APPLIED, _stop_lost(request, frame), None, frame)
    if proc is None:
        return Ending(RunVerdict.STALE)
    if proc.frame_id != request.frame_id:
        return Ending(RunVerdict.SUPERSEDED)
    if request.pinged_at is not None and proc.pinged_at > request.pinged_at:
        return Ending(RunVerdict.ALIVE)
    if request.host_state is not None and proc.host_state != request.host_state:
        return Ending(RunVerdict.ALIVE)
    if frame is None or frame.state is not FrameState.RUNNING:
        return Ending(RunVerdict.RELEASED, release=proc, frame=frame)
    return Ending(RunVerdict.APPLIED, _stop_lost(request, frame), proc, frame)


def storable_exit_status(status: int) -> int:
    """An exit status every table can hold: outside a smallint it becomes the nearest one (never 0)."""
    return max(_SMALLEST_EXIT_STATUS, min(_LARGEST_EXIT_STATUS, status))


def _end_without_proc(report: CompletedFrame, frame: FrameRow | None, *, now: float) -> Ending:
    """A frame that still runs although its proc is gone ends with this report; a later run of it must not.

    The report only counts if it comes from the host the frame was started on.
    """
    if frame is None:
        return Ending(RunVerdict.UNKNOWN)
    if frame.state is not FrameState.RUNNING:
        return Ending(RunVerdict.STALE)
    if frame.owner_proc_id is not None or _short(frame.host_name) != _short(report.host_name):
        return Ending(RunVerdict.SUPERSEDED)
    decision = _decide(report, frame, now=now)
    return Ending(RunVerdict.ORPHAN_APPLIED, _stop(report, frame, decision), None, frame)


def _decide(report: CompletedFrame, frame: FrameRow, *, now: float) -> Decision:
    # frame.int_exit_status is that of the run before (a start does not reset it): a memory failure then must not make
    # every later failure one, so it is not passed on as a stored memory kill.
    return decide(
        Completion(
            frame_state=frame.state,
            retries=frame.retries,
            max_retries=frame.max_retries,
            exit_status=report.exit_status,
            exit_signal=report.exit_signal,
            run_time_seconds=report.run_time,
            stored_exit_status=ExitStatus.NONE,
            auto_eat=frame.autoeat,
            host_nimby_locked=report.nimby_locked,
            timeout_minutes=frame.timeout_minutes,
            log_timeout_minutes=frame.timeout_llu_minutes,
            log_updated_at=report.llu_time,
            now=now,
        )
    )


def _stop(report: CompletedFrame, frame: FrameRow, decision: Decision) -> FrameStop:
    return FrameStop(
        frame.id,
        frame.version,
        decision.state,
        storable_exit_status(decision.exit_status),
        max_rss_kb=max(0, report.max_rss_kb),
        lag_seconds=1,
    )


def _stop_lost(request: LostRun, frame: FrameRow) -> FrameStop:
    return FrameStop(frame.id, frame.version, request.state, request.exit_status, keep_checkpoint=False)


def _short(host_name: str | None) -> str:
    """A host name without its domain; addresses stay whole."""
    name = (host_name or "").lower()
    return name if name.replace(".", "").isdigit() or ":" in name else name.partition(".")[0]


# One transaction that ends any number of runs: frames stopped, procs released, dependencies met, jobs finished.
#
# Everything a completion leads to is in the same transaction, so a process that dies leaves either all of it or none.
# The locks are taken in one order: completed frames, procs, hosts, layer_stat, job_stat, and only then the frames that
# depend on what was completed (a DEPEND frame is locked by nobody who waits for a counter). Dependencies reach into
# other layers and jobs, whose counters must be locked before our own are changed. Which ones is foreseen from unlocked
# counters; when that proves wrong (a layer turned out to be complete) the transaction starts over with the wider set,
# which costs a rollback once a layer at most.

_log = structlog.get_logger(__name__)

_RETRIABLE_SQLSTATES = frozenset({"40P01", "40001", "55P03"})
_ATTEMPTS = 8
_LONGEST_RETRY_SECONDS = 0.2

Request = CompletedFrame | LostRun
_Result = TypeVar("_Result")


class WiderLocks(Exception):
    """The transaction must start over with these counters locked as well."""

    def __init__(self, counters: release.Counters) -> None:
        super().__init__("counters of dependents were not locked")
        self.counters = counters


def end_runs(
    engine: Engine, requests: Sequence[Request], only_on_success: bool, *, clock: Callable[[], float] = time.time
) -> RunsEnded:
    """End runs in one transaction; the outcomes are in the order of ``requests``.

    ``only_on_success``: release.satisfy_only_on_frame_success.

    Deadlocks (with a Cuebot or a person in psql; not with our own) and serialization failures are retried. Any other
    database error leaves everything unchanged and is raised.
    """
    ended, attempts = with_counters(
        engine, lambda connection, wider: _end(connection, requests, only_on_success, clock(), wider)
    )
    return replace(ended, attempts=attempts)


def with_counters(engine: Engine, step: Callable[[Connection, release.Counters], _Result]) -> tuple[_Result, int]:
    """Run ``step`` in a transaction, again with more counters locked when it finds it needs them (WiderLocks).

    Deadlocks and serialization failures are retried too. Returns its result and the number of attempts.
    """
    wider = release.Counters()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with engine.begin() as connection:
                result = step(connection, wider)
            return result, attempt
        except WiderLocks as found:
            wider |= found.counters
        except DBAPIError as error:
            if attempt == _ATTEMPTS or sqlstate(error) not in _RETRIABLE_SQLSTATES:
                raise
            _log.info("release_retried", sqlstate=sqlstate(error), attempt=attempt)
            time.sleep(random.uniform(0, _LONGEST_RETRY_SECONDS))
    raise RuntimeError("the counters to lock for ended runs kept growing")


def database_away(error: BaseException) -> bool:
    """Whether the database could not be reached or did not finish in time: the same may work later."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, (OperationalError, InterfaceError, PoolTimeout))


def sqlstate(error: DBAPIError) -> str:
    """The five-character code of a database error; empty when the connection was lost."""
    return str(getattr(error.orig, "pgcode", None) or "")


def _end(
    connection: Connection, requests: Sequence[Request], only_on_success: bool, now: float, wider: release.Counters
) -> RunsEnded:
    runs = [(request.proc_id, request.frame_id or "") for request in requests]
    procs.lock_runs(connection, {proc for proc, _ in runs if proc}, {frame for _, frame in runs if frame})
    endings = _endings(requests, procs.read_runs(connection, runs), now)
    stops = [ending.stop for ending in endings if ending.stop is not None]
    releases = {ending.release.id: ending.release for ending in endings if ending.release is not None}
    if not stops and not releases:
        return RunsEnded(tuple(_outcome(request, ending) for request, ending in zip(requests, endings, strict=True)))

    managed = procs.managed_shows(connection, {proc.show_id for proc in releases.values() if proc.show_id})
    held = _foreseen(connection, endings, only_on_success) | wider
    procs.lock_hosts(connection, {proc.host_id for proc in releases.values()})
    release.lock_counters(connection, held)

    stopped = {frame.id: frame for frame in release.stop_frames(connection, stops)} if stops else {}
    deleted = _release_procs(connection, list(releases), managed)
    release.count_usage(connection, stopped.values())
    finished_jobs = follow(connection, list(stopped.values()), held, only_on_success)
    _adapt_memory(connection, endings, stopped)
    release.count_shows(
        connection,
        [
            (ending.frame.show_id, stopped[ending.frame.id].success)
            for ending in endings
            if ending.stop is not None and ending.frame is not None and ending.frame.id in stopped
        ],
    )
    outcomes = tuple(
        _outcome(request, ending, stopped.get(ending.frame.id) if ending.stop and ending.frame else None)
        for request, ending in zip(requests, endings, strict=True)
    )
    return RunsEnded(
        outcomes,
        tuple(proc.id for proc in deleted if proc.show_id in managed and not proc.local),
        tuple({proc.host_id: None for proc in deleted}),
        tuple(finished_jobs),
    )


def _endings(requests: Sequence[Request], rows: Sequence[procs.RunRow], now: float) -> list[Ending]:
    """Each request's ending; of several that name one frame or proc only the first does anything."""
    endings: list[Ending] = []
    frames: set[str] = set()
    released: set[str] = set()
    for request, row in zip(requests, rows, strict=True):
        ending = end_completed(request, row, now=now) if isinstance(request, CompletedFrame) else end_lost(request, row)
        repeated = (ending.stop is not None and ending.stop.frame_id in frames) or (
            ending.release is not None and ending.release.id in released
        )
        if repeated:
            ending = Ending(RunVerdict.STALE)
        if ending.stop is not None:
            frames.add(ending.stop.frame_id)
        if ending.release is not None:
            released.add(ending.release.id)
        endings.append(ending)
    return endings


def _foreseen(connection: Connection, endings: Sequence[Ending], only_on_success: bool) -> release.Counters:
    """The counters this transaction is going to change, as far as can be told without their locks."""
    stopping = [(ending.stop, ending.frame) for ending in endings if ending.stop is not None and ending.frame]
    own = release.Counters(
        frozenset(frame.layer_id for _, frame in stopping), frozenset(frame.job_id for _, frame in stopping)
    )
    over = [frame for stop, frame in stopping if stop.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    satisfying = [frame for stop, frame in stopping if satisfies_depends(stop.state, only_on_success=only_on_success)]
    ending_layers, ending_jobs = [frame.layer_id for frame in over], [frame.job_id for frame in over]
    found = depends.find_depends(
        connection,
        frames={frame.id for frame in satisfying},
        frame_layers={frame.layer_id for frame in satisfying},
        layers={frame.layer_id for frame in satisfying if frame.layer_open <= ending_layers.count(frame.layer_id)},
        jobs={frame.job_id for frame in over if frame.job_open <= ending_jobs.count(frame.job_id)},
    )
    return own | depends.counters_of_dependents(connection, found)


def _release_procs(connection: Connection, proc_ids: Sequence[str], managed: frozenset[str]) -> list[DeletedProc]:
    if not proc_ids:
        return []
    deleted = procs.delete_procs(connection, proc_ids)
    procs.restore_hosts(connection, deleted)
    procs.decrement_local_accounts(connection, [proc for proc in deleted if proc.local])
    unmanaged = [proc for proc in deleted if not proc.local and proc.show_id not in managed]
    procs.decrement_accounts(connection, unmanaged)
    return deleted


def follow(
    connection: Connection, changed: Sequence[ChangedFrame], held: release.Counters, only_on_success: bool
) -> list[str]:
    """Meet the dependencies on frames that are over now; returns the jobs that finished. Raises WiderLocks when
    counters of dependents are not among ``held``, the locked ones."""
    over = [frame for frame in changed if frame.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    if not over:
        return []
    satisfying = [frame for frame in over if satisfies_depends(frame.state, only_on_success=only_on_success)]
    layers = depends.complete_layers(connection, {frame.layer_id for frame in satisfying})
    jobs = depends.complete_jobs(connection, {frame.job_id for frame in over})
    found = depends.find_depends(
        connection,
        frames={frame.id for frame in satisfying},
        frame_layers={frame.layer_id for frame in satisfying},
        layers=layers,
        jobs=jobs,
    )
    needed = depends.counters_of_dependents(connection, found)
    if not held.covers(needed):
        raise WiderLocks(needed)
    finished = depends.finish_jobs(connection, jobs)
    depends.satisfy_depends(connection, found)
    return finished


def _adapt_memory(connection: Connection, endings: Sequence[Ending], stopped: dict[str, StoppedFrame]) -> None:
    """The layer's memory requirement follows what its frames need (b_optimize), and grows after a memory failure."""
    peaks: dict[str, int] = {}
    for frame in stopped.values():
        if frame.state is FrameState.SUCCEEDED and frame.max_rss_kb > 0:
            peaks[frame.layer_id] = max(peaks.get(frame.layer_id, 0), frame.max_rss_kb)
    failed: dict[str, int] = {}
    for ending in endings:
        if ending.memory_failure and ending.frame and ending.release and ending.frame.id in stopped:
            layer_id = ending.frame.layer_id
            failed[layer_id] = max(failed.get(layer_id, 0), ending.release.memory_reserved_kb)
    release.lower_layer_memory(connection, {layer: rss for layer, rss in peaks.items() if layer not in failed})
    for layer_id, memory_kb in release.raise_layer_memory(connection, failed).items():
        _log.info("layer_memory_raised", layer=layer_id, memory_kb=memory_kb)


def _outcome(request: Request, ending: Ending, stopped: StoppedFrame | None = None) -> RunOutcome:
    if stopped is None:
        return RunOutcome(request.proc_id, request.frame_id, ending.verdict)
    return RunOutcome(request.proc_id, request.frame_id, ending.verdict, stopped.state, stopped.exit_status)


RUNS_PER_TRANSACTION = 50
"""Lost runs ended in one transaction, whose locks booking and reports wait for."""


@dataclass(frozen=True, slots=True)
class Releaser:
    """Ends runs, then gives their bookings back and tells the host caches.

    ``only_on_success``: release.satisfy_only_on_frame_success. ``asked_for``: a person has the runs ended, so that
    nobody need be warned.
    """

    engine: Engine
    only_on_success: bool = True
    ledger: Ledger | None = None
    changes: HostChanges | None = None
    counts: EventCounts | None = None
    clock: Callable[[], float] = time.time
    asked_for: bool = False

    def complete(self, reports: Sequence[CompletedFrame]) -> list[RunOutcome | DBAPIError]:
        """Apply completions that arrived together, in one transaction, and answer each in its place.

        The place of a report that the database refuses holds the error. An unreachable database is raised
        (DBAPIError): all reports are still to be done then.
        """
        answers = self._end(reports)
        for report, answer in zip(reports, answers, strict=True):
            if isinstance(answer, RunOutcome):
                self._count(f"completion_{answer.verdict.value}")
                _log_outcome(report, answer)
            else:
                _log.error(
                    "completion_refused",
                    proc=report.proc_id,
                    frame=report.frame_id,
                    host=report.host_name,
                    error=str(answer.orig).strip(),
                )
        return answers

    def end_lost(self, requests: Sequence[LostRun]) -> list[RunOutcome]:
        """End lost runs. Their processes must be known not to run. A run the database refuses is logged and kept."""
        outcomes: list[RunOutcome] = []
        for start in range(0, len(requests), RUNS_PER_TRANSACTION):
            part = requests[start : start + RUNS_PER_TRANSACTION]
            for request, answer in zip(part, self._end(part), strict=True):
                if isinstance(answer, DBAPIError):
                    error = str(answer.orig).strip()
                    _log.error("lost_run_refused", proc=request.proc_id, frame=request.frame_id, error=error)
                    continue
                outcomes.append(answer)
                already_over = answer.verdict is RunVerdict.STALE
                (_log.debug if already_over else _log.info if self.asked_for else _log.warning)(
                    "lost_run_ended",
                    proc=request.proc_id,
                    frame=request.frame_id,
                    reason=request.reason,
                    verdict=answer.verdict.value,
                    state=answer.state,
                )
        return outcomes

    def publish_hosts(self, host_ids: Sequence[str]) -> None:
        """Tell the host caches of hosts that were changed, after the commit."""
        changes = self.changes
        if changes is not None and host_ids:
            self._tell("host_changes", lambda: changes.publish(host_ids), hosts=host_ids)

    def _end(self, requests: Sequence[Request]) -> list[RunOutcome | DBAPIError]:
        """End runs in one transaction or, when the database refuses that, in one each: a row it refuses must not keep
        the others from ending."""
        try:
            ended = end_runs(self.engine, requests, self.only_on_success, clock=self.clock)
        except DBAPIError as error:
            if database_away(error):
                raise
            if len(requests) == 1:
                return [error]
            return [answer for request in requests for answer in self._end([request])]
        ledger = self.ledger
        if ledger is not None and ended.ledger_procs:
            self._tell("ledger_release", lambda: ledger.release(ended.ledger_procs), procs=ended.ledger_procs)
        self.publish_hosts(ended.hosts)
        for job_id in ended.finished_jobs:
            _log.info("job_finished", job=job_id)
        return list(ended.outcomes)

    def _tell(self, step: str, tell: Callable[[], object], **ids: Sequence[str]) -> None:
        try:
            tell()
        except Exception as error:
            # What is committed stands, and its caller must not hear that it failed: the notification of the proc
            # table and the next recompute bring the same.
            expected = isinstance(error, SchedulerError | RedisError)
            (_log.warning if expected else _log.exception)("announce_failed", step=step, error=str(error), **ids)
            self._count(f"{step}_failed")

    def _count(self, event: str) -> None:
        if self.counts is not None:
            self.counts.add(event)


def _log_outcome(report: CompletedFrame, outcome: RunOutcome) -> None:
    fields = {
        "proc": report.proc_id,
        "frame": report.frame_id,
        "name": report.name,
        "host": report.host_name,
        "exit_status": report.exit_status,
        "exit_signal": report.exit_signal,
    }
    if outcome.verdict in (RunVerdict.APPLIED, RunVerdict.ORPHAN_APPLIED):
        _log.debug("frame_completed", state=outcome.state, verdict=outcome.verdict.value, **fields)
    elif report.exit_status == 0 and outcome.verdict is not RunVerdict.STALE:
        _log.warning("successful_result_discarded", verdict=outcome.verdict.value, **fields)
    else:
        _log.info("completion_ignored", verdict=outcome.verdict.value, **fields)


# Completions that arrive together are applied together: one transaction, and one fsync, for all that wait.
#
# RQD never sends a completion again, so one that could not be written is kept here and tried until PostgreSQL is back,
# whatever its caller was answered meanwhile. Only a full queue or a process that dies loses it, and then the frame is
# found missing by its host's next reports.

MOST_TOGETHER = 64
MOST_WAITING = 20_000
_FIRST_RETRY_SECONDS, _LONGEST_BATCH_RETRY_SECONDS = 0.2, 5.0

Apply = Callable[[Sequence[CompletedFrame]], Sequence[RunOutcome | DBAPIError]]
"""Answers each report; raises DBAPIError when the database is away and all are still to be done."""


class NotAccepting(SchedulerError):
    """The service is stopping, or too many completions wait for the database."""


@dataclass(slots=True, eq=False)
class _Waiting:
    report: CompletedFrame
    done: Future[RunOutcome] = field(default_factory=Future)


class CompletionBatcher:
    """One thread that applies completions in the order they arrive. ``submit`` is thread-safe."""

    def __init__(self, apply: Apply, *, counts: EventCounts | None = None, most_waiting: int = MOST_WAITING) -> None:
        self._apply = apply
        self._counts = counts or EventCounts()
        self._most_waiting = most_waiting
        self._queue: deque[_Waiting] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> int:
        """Accept nothing more, apply what waits for up to ``timeout`` seconds; returns how many could not be."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout)
        self._give_up.set()
        self._thread.join(timeout=_LONGEST_BATCH_RETRY_SECONDS)
        with self._wake:
            left, self._queue = list(self._queue), deque()
        for waiting in left:
            waiting.done.set_exception(NotAccepting("the report service stopped"))
        if left:
            _log.error("completions_abandoned", procs=[waiting.report.proc_id for waiting in left])
        return len(left)

    @property
    def waiting(self) -> int:
        """Completions not yet applied."""
        with self._wake:
            return len(self._queue)

    def submit(self, report: CompletedFrame) -> Future[RunOutcome]:
        """Queue a completion; the future ends with its outcome, or the error the database refused it with."""
        with self._wake:
            if self._stopping:
                raise NotAccepting("the report service is stopping")
            if len(self._queue) >= self._most_waiting:
                self._counts.add("completion_queue_full")
                raise NotAccepting(f"{len(self._queue)} completions wait for the database already")
            waiting = _Waiting(report)
            self._queue.append(waiting)
            self._wake.notify()
            return waiting.done

    def _run(self) -> None:
        retry_after = _FIRST_RETRY_SECONDS
        together = MOST_TOGETHER
        while not self._give_up.is_set():
            batch = self._next(together)
            if not batch:
                return
            try:
                self._apply_batch(batch)
            except (DBAPIError, PoolTimeout) as error:
                # One at a time until it works again, in case it is one report that makes the statement time out.
                self._counts.add("completion_retry")
                _log.warning("completions_kept", waiting=self.waiting, error=str(error).partition("\n")[0])
                self._give_up.wait(retry_after)
                retry_after = min(retry_after * 2, _LONGEST_BATCH_RETRY_SECONDS)
                together = 1
                self._rotate(batch)
            else:
                retry_after, together = _FIRST_RETRY_SECONDS, MOST_TOGETHER

    def _next(self, together: int) -> list[_Waiting]:
        """The completions at the head of the queue, which stay in it until they are applied. Empty: stop."""
        with self._wake:
            while not self._queue:
                if self._stopping:
                    return []
                self._wake.wait()
            return [self._queue[index] for index in range(min(together, len(self._queue)))]

    def _rotate(self, batch: Sequence[_Waiting]) -> None:
        """A single completion that keeps failing goes to the end, so that it does not hold up the others."""
        with self._wake:
            if len(batch) == 1 and len(self._queue) > 1:
                self._queue.rotate(-1)

    def _apply_batch(self, batch: Sequence[_Waiting]) -> None:
        try:
            answers = self._apply([waiting.report for waiting in batch])
        except (DBAPIError, PoolTimeout):
            raise
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    self._apply_batch([waiting])
                return
            _log.exception("completion_failed", proc=batch[0].report.proc_id, host=batch[0].report.host_name)
            self._finish(batch[0], error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            self._finish(waiting, answer)

    def _finish(self, waiting: _Waiting, answer: RunOutcome | BaseException) -> None:
        with self._wake:
            if waiting not in self._queue:
                return
            self._queue.remove(waiting)
        if isinstance(answer, BaseException):
            self._counts.add("completion_refused")
            waiting.done.set_exception(answer)
        else:
            waiting.done.set_result(answer)
