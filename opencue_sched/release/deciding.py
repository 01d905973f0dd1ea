"""What a report or a request about a run means for the frame and the proc it names. Pure: no database, no clock.

The ownership fence comes first: a report may only stop the run it describes. A proc that no longer has the reported
frame means that the run was superseded (retried, eaten, cleared and perhaps booked again), and applying the report
would stop somebody else's run.
"""

from __future__ import annotations

from dataclasses import dataclass

from opencue_sched.domain.exit_decision import Completion, Decision, decide
from opencue_sched.domain.states import ExitStatus, FrameState
from opencue_sched.release.model import CompletedFrame, LostRun, RunVerdict
from opencue_sched.store.procs import FrameRow, ProcRow, RunRow
from opencue_sched.store.release import FrameStop

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
