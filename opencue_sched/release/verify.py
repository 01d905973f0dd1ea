"""Whether a process a host reports is owned by a proc, and what to do if it is not (I5). Pure.

RQD knows frames by frame id only, so a kill must never meet a newer run of the same frame on the same host. The rules
below only kill where that cannot be: the frame belongs to another host, or has been what it is for longer than a report
can be old. Whatever has to wait is killed by the next report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from opencue_proto import report_pb2

from opencue_sched.domain.states import JobState
from opencue_sched.store.reported_runs import ReportedRun, RunUsage

SETTLED_SECONDS = 4.0
"""A frame or proc unchanged for this long is what it was when the report was made: a report older than that (it had to
queue) is not used for verification, and hosts report every five seconds at most."""

_KILLS_IN_A_WINDOW, _KILL_WINDOW_SECONDS = 3, 180.0
_LARGEST_KB = 2**62
_LATEST_EPOCH = 4_102_444_800


class Standing(StrEnum):
    """What is to be done with a reported process."""

    OWNED = "owned"
    KILL = "kill"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Verified:
    """``reason`` says, for the kill message and the log, why a process is not owned."""

    standing: Standing
    reason: str = ""


def verify(run: ReportedRun, proc_id: str, frame_id: str, host_id: str) -> Verified:
    """Judge one reported process of a host."""
    if run.proc_id is not None and run.proc_frame_id == frame_id:
        if run.job_state is JobState.FINISHED:
            return Verified(Standing.KILL, "its job is finished")
        return Verified(Standing.OWNED)
    if run.owner_proc_id is not None and run.owner_host_id == host_id:
        return _settled(run.owner_age, f"proc {run.owner_proc_id} has the frame on this host, not {proc_id}")
    if run.owner_proc_id is not None:
        return Verified(Standing.KILL, f"proc {run.owner_proc_id} has the frame on another host")
    if run.frame_state is None:
        return Verified(Standing.KILL, "its frame does not exist")
    return _settled(run.frame_age, f"no proc has its frame, which is {run.frame_state.value}")


def overdue(run: ReportedRun, reported: report_pb2.RunningFrameInfo, *, now: float) -> str:
    """Why a running frame has to be killed for its layer's time limits; empty when it has not.

    ``now`` is epoch seconds; RQD reports start_time in milliseconds and llu_time in seconds.
    """
    minutes = (now - reported.start_time / 1000) / 60
    if run.timeout_minutes > 0 and reported.start_time > 0 and minutes > run.timeout_minutes:
        return f"it has run for {minutes:.0f} minutes of {run.timeout_minutes}"
    if run.timeout_llu_minutes > 0 and reported.llu_time > 0:
        silent = int(now - reported.llu_time) // 60
        if silent > run.timeout_llu_minutes - 1:
            return f"its log has not grown for {silent} minutes of {run.timeout_llu_minutes}"
    return ""


def usage(run: ReportedRun, reported: report_pb2.RunningFrameInfo) -> RunUsage:
    """The numbers of a running frame. Negative ones, which RQD reports while it cannot tell, become zero."""
    return RunUsage(
        reported.resource_id,
        reported.frame_id,
        run.layer_id,
        run.job_id,
        _kb(reported.rss),
        _kb(reported.max_rss),
        _kb(reported.pss),
        _kb(reported.max_pss),
        _kb(reported.vsize),
        _kb(reported.max_vsize),
        _kb(reported.used_gpu_memory),
        _kb(reported.max_used_gpu_memory),
        _kb(reported.used_swap_memory),
        max(0, min(reported.llu_time, _LATEST_EPOCH)),
    )


class KillThrottle:
    """At most three kills of one frame on one host in three minutes. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tries: dict[tuple[str, str], list[float]] = {}
        self._forget_at = 0.0

    def allows(self, host_name: str, frame_id: str) -> bool:
        """Whether a kill may be sent now; if so it is counted."""
        now = self._clock()
        since = now - _KILL_WINDOW_SECONDS
        with self._lock:
            recent = [at for at in self._tries.get((host_name, frame_id), ()) if at > since]
            if len(recent) >= _KILLS_IN_A_WINDOW:
                return False
            self._tries[host_name, frame_id] = [*recent, now]
            if now >= self._forget_at:
                self._forget_at = now + _KILL_WINDOW_SECONDS
                self._tries = {key: tries for key, tries in self._tries.items() if tries[-1] > since}
            return True


class Absences:
    """How many reports in a row have not named a proc of their host."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def missing(self, host_id: str, proc_ids: Sequence[str]) -> list[str]:
        """Count this report's missing procs of a host; returns those missing from two reports in a row."""
        before = self._counts.pop(host_id, {})
        counts = {proc_id: before.get(proc_id, 0) + 1 for proc_id in proc_ids}
        if counts:
            self._counts[host_id] = counts
        return [proc_id for proc_id, count in counts.items() if count >= 2]


def _settled(age: float, reason: str) -> Verified:
    return Verified(Standing.KILL if age >= SETTLED_SECONDS else Standing.WAIT, reason)


def _kb(value: int) -> int:
    return max(0, min(value, _LARGEST_KB))
