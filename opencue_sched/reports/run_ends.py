"""The values and rules of the release path: what a run's end is asked for with, what that means for the frame and the
proc it names, and what became of it. Pure: no database, no clock.

The ownership fence comes first: a report may only stop the run it describes. A proc that no longer has the reported
frame means that the run was superseded (retried, eaten, cleared and perhaps booked again), and applying the report
would stop another proc's run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from opencue_sched.domain.names import same_host
from opencue_sched.domain.states import (
    SIGNALS_OF_A_CRASH,
    STATUSES_NOT_OF_A_HOST,
    ExitStatus,
    FrameState,
    signal_words,
)
from opencue_sched.settings import Release
from opencue_sched.store.limit_bindings import LicenceShortage
from opencue_sched.store.procs import Run
from opencue_sched.store.release import FrameStop
from opencue_sched.store.reported_runs import ReportedRun

NO_RETRY_RUN_TIME_SECONDS = 12 * 3600
"""A frame that ran longer than this and failed is not tried again."""

SIGNAL_SKIP_RETRY = 119
"""The signal with which a frame asks to be tried again whatever its retries."""

SIGNAL_TERMINATED = 15
"""SIGTERM: how a host that its user takes back ends its frames."""

_SIGNALS_OF_SHELLS = 128
"""What a shell adds to the number of the signal that killed its command, to make an exit status of it."""

_SMALLEST_EXIT_STATUS, _LARGEST_EXIT_STATUS = -32_768, 32_767
"""frame_history.int_exit_status is a smallint; a Windows process ends with numbers far outside it."""


@dataclass(frozen=True, slots=True)
class CompletedFrame:
    """The end of a process, as its RQD reports it."""

    proc_id: str
    frame_id: str
    host_name: str
    exit_status: int
    exit_signal: int = 0
    max_rss_kb: int = 0
    silent_seconds: float = 0.0
    """How long the frame's log had shown the same time when the report came."""
    received_at: float = math.inf
    """The moment at which the report came, by the clock of `Releaser`; infinity: just now."""
    nimby_locked: bool = False
    """Whether the host was locked because a person uses the machine."""
    name: str = ""
    """The names of job and frame, for the log."""


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run to be ended without a report: its process is known not to run any more."""

    proc_id: str
    """Empty for an orphan frame (RUNNING without a proc)."""
    frame_id: str
    """The frame that the proc was seen with; empty for a proc without one. The run is ended only if the proc still has
    this frame."""
    state: FrameState = FrameState.WAITING
    exit_status: int = ExitStatus.FRAME_CLEARED
    pinged_at: datetime | None = None
    """The moment after which a report that shows the run alive has it left alone."""
    host_state: str | None = None
    """The state of the host; the run is left alone when the host is no longer in it."""
    reason: str = ""
    """Why the run is ended, for the log."""


class RunVerdict(StrEnum):
    """What became of a report or a request about a run."""

    APPLIED = "applied"
    """The frame was stopped and its proc released."""
    ORPHAN_APPLIED = "orphan_applied"
    """The frame was running without a proc; it was stopped."""
    RELEASED = "released"
    """The proc's frame had been taken off it, or another process stopped it; the proc was released."""
    SUPERSEDED = "superseded"
    """Another proc, or another frame of this proc, has taken over: nothing was changed."""
    STALE = "stale"
    """The run was over already: a duplicate or late report. Nothing was changed."""
    UNKNOWN = "unknown"
    """Neither the proc nor the frame exists."""
    ALIVE = "alive"
    """A lost run that proved to be alive, or whose host came back. Nothing was changed."""
    REFUSED = "refused"
    """The end of the run could not be written: the database refused it, or a bug did. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What became of one report, or of one request to end a run."""

    proc_id: str
    frame_id: str
    verdict: RunVerdict
    state: FrameState | None = None
    """The frame's new state, where it was stopped."""
    error: Exception | None = None
    """Why the verdict is REFUSED."""


@dataclass(frozen=True, slots=True)
class RunsEnded:
    """What one transaction did."""

    outcomes: tuple[RunOutcome, ...]
    ledger_procs: tuple[str, ...] = ()
    """Deleted procs whose bookings are still in the ledger."""
    hosts: tuple[str, ...] = ()
    """Hosts that got resources back."""
    finished_jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """What to do about a run."""

    verdict: RunVerdict
    run: Run
    stop: FrameStop | None = None
    """How to stop the run's frame; None: leave the frame as it is."""
    memory_failure: bool = False
    """Whether the frame's layer needs more memory."""
    shortage: LicenceShortage | None = None
    """The licence that the frame did not get: its layer is to be bound to that limit, and to wait."""
    host_failure: bool = False
    """The frame failed, and its host may be to blame."""

    @property
    def releases(self) -> bool:
        """Whether the proc is to be deleted."""
        return self.verdict in (RunVerdict.APPLIED, RunVerdict.RELEASED)


def ending_of(
    request: CompletedFrame | LostRun, run: Run, *, now: float, shortage: LicenceShortage | None = None
) -> Ending:
    """The ending that a report, or a request for a lost run, asks for. ``now``: by the clock of ``received_at``;
    ``shortage``: what the reported exit status means, where a limit has it."""
    verdict = _judge(request, run)
    if isinstance(request, LostRun):
        stop = FrameStop(run.frame_id, run.version, request.state, request.exit_status)
        memory_failure = host_failure = False
    else:
        status = max(_SMALLEST_EXIT_STATUS, min(_LARGEST_EXIT_STATUS, request.exit_status))
        waits = shortage is not None and shortage.delay_minutes > 0
        state = state_after(request, run, now=now, waits=waits)
        stop = FrameStop(run.frame_id, run.version, state, status, request.max_rss_kb)
        memory_failure = request.exit_status != ExitStatus.SUCCESS and is_memory_failure(request) and not waits
        host_failure = shortage is None and is_host_failure(request, run, now=now)
        if state is FrameState.EATEN:
            shortage = None
    stops = verdict in (RunVerdict.APPLIED, RunVerdict.ORPHAN_APPLIED)
    stop_frame, short = (stop, shortage) if stops else (None, None)
    return Ending(verdict, run, stop_frame, memory_failure, short, stops and host_failure)


def out_of_retries(ending: Ending, largest_host_kb: int | None) -> Ending:
    """A frame that died for want of memory is tried again whatever its retries, with more memory. One that had all that
    the largest host has (None: no host could run it) gets as many tries as any other."""
    run, stop = ending.run, ending.stop
    if not ending.memory_failure or stop is None or stop.state is not FrameState.WAITING:
        return ending
    if largest_host_kb is None or run.memory_reserved_kb < largest_host_kb or run.retries < run.max_retries:
        return ending
    return replace(ending, stop=replace(stop, state=FrameState.DEAD))


def _judge(request: CompletedFrame | LostRun, run: Run) -> RunVerdict:
    """The verdict on a request, by its run as the database had it under the locks."""
    if not run.proc_id:
        if isinstance(request, LostRun) and request.proc_id:
            return RunVerdict.STALE
        if not run.frame_id:
            return RunVerdict.UNKNOWN
        if run.frame_state != FrameState.RUNNING:
            return RunVerdict.STALE
        # A frame that still runs although its proc is gone ends with the report of the host it was started on; a later
        # run of it must not.
        ours = isinstance(request, LostRun) or same_host(run.frame_host, request.host_name)
        return RunVerdict.ORPHAN_APPLIED if ours and not run.owner_proc_id else RunVerdict.SUPERSEDED
    if isinstance(request, LostRun):
        if run.proc_frame_id != request.frame_id:
            return RunVerdict.SUPERSEDED
        reported = request.pinged_at is not None and run.pinged_at > request.pinged_at
        if reported or request.host_state not in (None, run.host_state):
            return RunVerdict.ALIVE
    elif run.proc_frame_id and (run.proc_frame_id != request.frame_id or not run.frame_id):
        return RunVerdict.SUPERSEDED
    applies = run.proc_frame_id and run.frame_state == FrameState.RUNNING
    return RunVerdict.APPLIED if applies else RunVerdict.RELEASED


def state_after(report: CompletedFrame, run: Run, *, now: float, waits: bool = False) -> FrameState:
    """The state of a running frame after its process has ended: the first rule that matches. ``waits``: it got no
    licence, and its layer waits for one."""
    if report.exit_status == ExitStatus.SUCCESS:
        return FrameState.SUCCEEDED
    if report.exit_status == ExitStatus.SKIP_RETRY or (
        run.max_retries != 0 and report.exit_signal == SIGNAL_SKIP_RETRY
    ):
        return FrameState.WAITING
    retries_left = run.retries < run.max_retries
    if ExitStatus.FAILED_LAUNCH in (report.exit_status, report.exit_signal) and retries_left:
        return FrameState.WAITING
    if report.nimby_locked and report.exit_signal == SIGNAL_TERMINATED:
        return FrameState.WAITING
    if run.autoeat:
        return FrameState.EATEN
    if waits:
        return FrameState.WAITING
    # A report may have waited for the database, which is no part of its run.
    run_seconds = run.run_seconds - max(0.0, now - report.received_at)
    if run_seconds > NO_RETRY_RUN_TIME_SECONDS or overdue(run, run_seconds, report.silent_seconds):
        return FrameState.DEAD
    return FrameState.WAITING if retries_left or is_memory_failure(report) else FrameState.DEAD


def is_memory_failure(report: CompletedFrame) -> bool:
    """Whether a frame died of memory: RQD says so, or its container was killed.

    frame.int_exit_status does not tell: a start does not reset it, so it is that of the run before.
    """
    return (
        report.exit_status in (ExitStatus.MEMORY_FAILURE, ExitStatus.DOCKER_OOM)
        or report.exit_signal == ExitStatus.MEMORY_FAILURE
    )


def is_host_failure(report: CompletedFrame, run: Run, *, now: float) -> bool:
    """Whether a frame failed in a way that its host may be to blame for: it was not killed, did not want memory and was
    in time."""
    run_seconds = run.run_seconds - max(0.0, now - report.received_at)
    return (
        may_be_of_a_host(report.exit_status, report.exit_signal)
        and not is_memory_failure(report)
        and not overdue(run, run_seconds, report.silent_seconds)
    )


def may_be_of_a_host(exit_status: int, exit_signal: int = 0) -> bool:
    """Whether a frame that ended so may have failed because of its host: nothing killed it, and the status says nothing
    of its memory."""
    if exit_status in STATUSES_NOT_OF_A_HOST:
        return False
    signal_number = exit_signal or exit_status - _SIGNALS_OF_SHELLS
    killed = signal_words(signal_number) and signal_number not in SIGNALS_OF_A_CRASH
    return not killed and signal_number != SIGNAL_SKIP_RETRY


def overdue(run: Run | ReportedRun, run_seconds: float, silent_seconds: float) -> str:
    """Why a frame that has run for so long is over its layer's time limits; empty when it is not.

    ``silent_seconds``: how long its log has shown the same time. No log is silent for longer than its run.
    """
    minutes = run_seconds / 60
    if 0 < run.timeout_minutes < minutes:
        return f"it has run for {minutes:.0f} minutes of {run.timeout_minutes}"
    silent = int(min(silent_seconds, run_seconds)) // 60
    if 0 < run.timeout_llu_minutes <= silent:
        return f"its log has not grown for {silent} minutes of {run.timeout_llu_minutes}"
    return ""


def satisfying_states(settings: Release) -> frozenset[FrameState]:
    """The states of a frame with which what waits for it may go on."""
    eaten = () if settings.satisfy_only_on_frame_success else (FrameState.EATEN,)
    return frozenset((FrameState.SUCCEEDED, *eaten))
