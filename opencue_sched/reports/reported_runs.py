"""Whether a process a host reports is owned by a proc, and what to do if it is not. Pure.

RQD knows frames by frame id only, so a kill must never meet a newer run of the same frame on the same host. The rules
below only kill where that cannot be: the frame belongs to another host, or has been what it is for longer than a
report can be old. Whatever has to wait is killed by the next report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from opencue_proto import report_pb2

from opencue_sched.domain.states import JobState
from opencue_sched.errors import InvalidInput
from opencue_sched.reports.reported_host import LATEST_EPOCH, LONGEST_ID, MOST_KB, SHOWN_CHARACTERS
from opencue_sched.store.reported_runs import ReportedRun, Usage

_FRAME_MEMORY = ("rss", "max_rss", "pss", "max_pss", "used_gpu_memory", "max_used_gpu_memory")
_frame_memory = attrgetter(*_FRAME_MEMORY)
_virtual_memory = attrgetter("vsize", "max_vsize", "used_swap_memory")


def check_frame(frame: report_pb2.RunningFrameInfo, where: str, *, needs_ids: bool = False) -> None:
    """Refuse (InvalidInput) a frame whose ids cannot be ids or whose memory no host has. ``where`` begins its text."""
    for key, value in (("resource_id", frame.resource_id), ("frame_id", frame.frame_id)):
        if len(value) > LONGEST_ID or not value.isprintable() or (needs_ids and not value):
            raise InvalidInput(f"{where}{key} {value[:SHOWN_CHARACTERS]!r} is not an id")
    memory = _frame_memory(frame)
    if max(memory) > MOST_KB:
        key, value = next(each for each in zip(_FRAME_MEMORY, memory, strict=True) if each[1] > MOST_KB)
        raise InvalidInput(f"{where}{key} {value} KB of frame {frame.frame_id} is more than any host has")


SETTLED_SECONDS = 4.0
"""A frame or proc unchanged for this long is what it was when the report was made: a report older than that (it had to
queue) is not used for verification, and hosts report every five seconds at most."""


def unowned(run: ReportedRun, proc_id: str, host_id: str) -> tuple[str, float]:
    """Why no proc owns a reported process of a host, empty when one does, and for how many seconds that has been so:
    infinity where the process can be killed at once."""
    if run.proc_id and run.frame_id and run.proc_frame_id == run.frame_id:
        return ("its job is finished" if run.job_state == JobState.FINISHED else ""), math.inf
    if run.owner_proc_id and run.owner_host_id == host_id:
        return f"proc {run.owner_proc_id} has the frame on this host, not {proc_id}", run.owner_age
    if run.owner_proc_id:
        return f"proc {run.owner_proc_id} has the frame on another host", math.inf
    if not run.frame_state:
        return "its frame does not exist", math.inf
    return f"no proc has its frame, which is {run.frame_state}", run.frame_age


def usage(run: ReportedRun, reported: report_pb2.RunningFrameInfo) -> Usage:
    """What a host reports of a frame that a proc of it has. Negative numbers, which RQD reports while it cannot tell,
    become zero."""
    memory = (*_frame_memory(reported), *_virtual_memory(reported))
    if min(memory) < 0:
        memory = tuple(max(0, kb) for kb in memory)
    llu_time = max(0, min(reported.llu_time, LATEST_EPOCH))
    ids = (reported.resource_id, reported.frame_id, run.layer_id, run.job_id)
    return Usage._make((*ids, run.layer_memory_kb, *memory, llu_time))


class LogSilences:
    """How long the logs of running frames have shown the same time, by the clock of this process.

    A log's time is by the clock of its host, or of a file server: it is compared with nothing but itself. So a log is
    silent since its present time was first seen here, and in a service that starts every silence begins anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, dict[str, tuple[int, float]]] = {}
        """Host -> proc -> the log's time, and when that was first seen. The thread that handles the report of a host
        replaces what is known of the host as a whole; any thread reads."""

    def note(self, host_name: str, frames: Sequence[report_pb2.RunningFrameInfo]) -> None:
        """Keep the times of the logs of everything that runs on a host, in place of what was known of it."""
        now, seen = self._clock(), self._seen.get(host_name, {})
        shown: dict[str, tuple[int, float]] = {}
        for frame in frames:
            before = seen.get(frame.resource_id)
            known = before is not None and before[0] == frame.llu_time
            shown[frame.resource_id] = before if before and known else (frame.llu_time, now)
        self._seen[host_name] = shown

    def seconds(self, host_name: str, frame: report_pb2.RunningFrameInfo) -> float:
        """How long a frame's log has shown the time that it is reported with; 0 when that is new, or unknown."""
        llu_time, since = self._seen.get(host_name, {}).get(frame.resource_id, (0, 0.0))
        return self._clock() - since if 0 < llu_time == frame.llu_time else 0.0
