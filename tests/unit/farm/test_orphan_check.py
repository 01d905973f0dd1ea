"""Who owns a reported process, and time limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opencue_proto import report_pb2

from opencue_sched.domain.farm import FrameState, JobState
from opencue_sched.farm.reports import OrphanCheck, overdue, usage, verify
from opencue_sched.store.procs import Run
from tests.unit.farm.test_endings import RUN as OWNED

GONE = replace(OWNED, proc_id="", proc_frame_id="", owner_proc_id="", owner_host_id="")


@pytest.mark.parametrize(
    ("run", "check"),
    [
        (OWNED, OrphanCheck.OWNED),
        (replace(OWNED, job_state=JobState.FINISHED), OrphanCheck.KILL),
        (replace(OWNED, proc_frame_id="f2", owner_proc_id=""), OrphanCheck.KILL),
        (replace(OWNED, proc_frame_id="", owner_proc_id=""), OrphanCheck.KILL),
        (replace(GONE, owner_proc_id="p2", owner_host_id="h2", owner_age=0.0), OrphanCheck.KILL),
        (replace(GONE, owner_proc_id="p2", owner_host_id="h1", owner_age=1.0), OrphanCheck.WAIT),
        (replace(GONE, owner_proc_id="p2", owner_host_id="h1", owner_age=5.0), OrphanCheck.KILL),
        (replace(GONE, frame_state=FrameState.WAITING, frame_age=1.0), OrphanCheck.WAIT),
        (replace(GONE, frame_state=FrameState.WAITING, frame_age=5.0), OrphanCheck.KILL),
        (replace(GONE, frame_state=FrameState.SUCCEEDED, frame_age=1.0), OrphanCheck.WAIT),
        (replace(GONE, frame_state=FrameState.SUCCEEDED, frame_age=5.0), OrphanCheck.KILL),
        (replace(GONE, frame_id="", frame_state=""), OrphanCheck.KILL),
    ],
)
def test_orphan_check(run: Run, check: OrphanCheck) -> None:
    assert verify(run, "p1", "h1")[0] is check


def test_time_limits() -> None:
    now = 1_000_000.0
    limited = replace(OWNED, timeout_minutes=10, timeout_llu_minutes=5)
    young = report_pb2.RunningFrameInfo(start_time=int((now - 60) * 1000), llu_time=int(now - 60))
    assert overdue(limited, young, now=now) == ""
    old = report_pb2.RunningFrameInfo(start_time=int((now - 660) * 1000), llu_time=int(now))
    assert "11 minutes of 10" in overdue(limited, old, now=now)
    silent = report_pb2.RunningFrameInfo(start_time=int((now - 400) * 1000), llu_time=int(now - 320))
    assert "5 minutes of 5" in overdue(limited, silent, now=now)
    assert overdue(OWNED, old, now=now) == ""


def test_numbers_rqd_could_not_tell_become_zero() -> None:
    used = usage(OWNED, report_pb2.RunningFrameInfo(resource_id="p1", frame_id="f1", rss=-1, llu_time=-5))
    assert (used["rss_kb"], used["llu_time"], used["layer_id"]) == (0, 0, "l1")
