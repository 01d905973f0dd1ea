"""Who owns a reported process, and time limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opencue_proto import report_pb2

from opencue_sched.domain.states import FrameState, JobState
from opencue_sched.reports.reported_runs import SETTLED_SECONDS, unowned, usage
from opencue_sched.reports.run_ends import overdue
from opencue_sched.store.procs import Run
from tests.kit.wording import lacks
from tests.unit.reports.test_endings import RUN as OWNED

GONE = replace(OWNED, proc_id="", proc_frame_id="", owner_proc_id="", owner_host_id="")


@pytest.mark.parametrize(
    ("run", "check"),
    [
        (OWNED, "owned"),
        (replace(OWNED, job_state=JobState.FINISHED), "kill"),
        (replace(OWNED, proc_frame_id="f2", owner_proc_id=""), "kill"),
        (replace(OWNED, proc_frame_id="", owner_proc_id=""), "kill"),
        (replace(GONE, owner_proc_id="p2", owner_host_id="h2", owner_age=0.0), "kill"),
        (replace(GONE, owner_proc_id="p2", owner_host_id="h1", owner_age=1.0), "wait"),
        (replace(GONE, owner_proc_id="p2", owner_host_id="h1", owner_age=5.0), "kill"),
        (replace(GONE, frame_state=FrameState.WAITING, frame_age=1.0), "wait"),
        (replace(GONE, frame_state=FrameState.WAITING, frame_age=5.0), "kill"),
        (replace(GONE, frame_state=FrameState.SUCCEEDED, frame_age=1.0), "wait"),
        (replace(GONE, frame_state=FrameState.SUCCEEDED, frame_age=5.0), "kill"),
        (replace(GONE, frame_id="", frame_state=""), "kill"),
    ],
)
def test_orphan_check(run: Run, check: str) -> None:
    reason, age = unowned(run, "p1", "h1")
    assert check == ("owned" if not reason else "kill" if age >= SETTLED_SECONDS else "wait")


def test_time_limits() -> None:
    limited = replace(OWNED, timeout_minutes=10, timeout_llu_minutes=5)
    assert overdue(limited, 60.0, 60.0) == ""
    assert overdue(limited, 600.0, 299.0) == ""
    assert not lacks(overdue(limited, 660.0, 0.0), "11 ", "10")
    assert overdue(limited, 420.0, 320.0).count("5") == 2
    assert overdue(limited, 60.0, 320.0) == ""
    assert overdue(limited, 420.0, 0.0) == ""
    assert overdue(OWNED, 660.0, 320.0) == ""


def test_numbers_rqd_could_not_tell_become_zero() -> None:
    used = usage(OWNED, report_pb2.RunningFrameInfo(resource_id="p1", frame_id="f1", rss=-1, llu_time=-5))
    assert (used.rss, used.llu_time, used.layer_id) == (0, 0, "l1")
