"""What a report or a request about a run means: every ending, without a database."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from opencue_sched.domain.states import ExitStatus, FrameState, JobState
from opencue_sched.reports.run_ends import CompletedFrame, LostRun, RunVerdict, ending_of
from opencue_sched.store.procs import Run

PINGED = datetime(2026, 1, 1, tzinfo=UTC)
FIELDS: dict[str, Any] = {
    "proc_id": "p1",
    "host_id": "h1",
    "host_name": "node1",
    "host_state": "UP",
    "proc_frame_id": "f1",
    "proc_show_id": "s1",
    "memory_reserved_kb": 1000,
    "local": False,
    "pinged_at": PINGED,
    "frame_id": "f1",
    "layer_id": "l1",
    "job_id": "j1",
    "show_id": "s1",
    "frame_state": FrameState.RUNNING,
    "version": 4,
    "retries": 0,
    "frame_age": 100.0,
    "run_seconds": 100.0,
    "frame_host": "node1",
    "owner_proc_id": "p1",
    "owner_host_id": "h1",
    "owner_age": 100.0,
    "job_state": JobState.PENDING,
    "max_retries": 3,
    "autoeat": False,
    "timeout_minutes": 0,
    "timeout_llu_minutes": 0,
    "layer_memory_kb": 1_048_576,
    "layer_open": 1,
    "job_open": 1,
}
RUN: Any = make_dataclass("Found", FIELDS)(**FIELDS)
"""As a row of ``read_runs``."""
WAITING = replace(RUN, frame_state=FrameState.WAITING, owner_proc_id="")
NO_FRAME = replace(RUN, frame_id="", frame_state="", owner_proc_id="")
REPORT = CompletedFrame("p1", "f1", "node1", 0)
LOST = LostRun("p1", "f1", exit_status=ExitStatus.FRAME_ORPHAN)
LOST_ORPHAN = replace(LOST, proc_id="")


def without_proc(run: Run, **fields: str) -> Run:
    found: Any = run
    return replace(found, **{"proc_id": "", "host_name": "", "proc_frame_id": "", **fields})


ORPHAN = without_proc(RUN, owner_proc_id="")
UNKNOWN = without_proc(NO_FRAME)


@pytest.mark.parametrize(
    ("run", "verdict", "stops", "releases"),
    [
        (RUN, RunVerdict.APPLIED, True, True),
        (replace(WAITING, proc_frame_id=""), RunVerdict.RELEASED, False, True),
        (replace(RUN, proc_frame_id="f2"), RunVerdict.SUPERSEDED, False, False),
        (NO_FRAME, RunVerdict.SUPERSEDED, False, False),
        (replace(RUN, host_name="node2"), RunVerdict.APPLIED, True, True),
        (replace(WAITING, host_name="node2", proc_frame_id=""), RunVerdict.RELEASED, False, True),
        (replace(RUN, frame_state=FrameState.EATEN), RunVerdict.RELEASED, False, True),
        (UNKNOWN, RunVerdict.UNKNOWN, False, False),
        (without_proc(WAITING), RunVerdict.STALE, False, False),
        (without_proc(RUN, owner_proc_id="p2"), RunVerdict.SUPERSEDED, False, False),
        (replace(ORPHAN, frame_host="node2"), RunVerdict.SUPERSEDED, False, False),
        (replace(ORPHAN, frame_host=""), RunVerdict.SUPERSEDED, False, False),
        (ORPHAN, RunVerdict.ORPHAN_APPLIED, True, False),
    ],
)
def test_a_report_ends_the_run_it_describes_and_no_other(
    run: Run, verdict: RunVerdict, stops: bool, releases: bool
) -> None:
    ending = ending_of(REPORT, run, now=0)
    assert (ending.verdict, ending.stop is not None, ending.releases) == (verdict, stops, releases)


@pytest.mark.parametrize(
    ("started_on", "reported_by", "same"),
    [
        ("node1", "node1.studio.example", True),
        ("Node1", "node1", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("fe80::1.2", "fe80::1.3", False),
        ("node1", "node2.studio.example", False),
    ],
)
def test_an_orphan_frame_ends_by_the_report_of_the_host_it_was_started_on(
    started_on: str, reported_by: str, same: bool
) -> None:
    report = replace(REPORT, host_name=reported_by)
    ending = ending_of(report, replace(ORPHAN, frame_host=started_on), now=0)
    assert ending.verdict is (RunVerdict.ORPHAN_APPLIED if same else RunVerdict.SUPERSEDED)


@pytest.mark.parametrize(
    ("request_", "run", "verdict", "stops", "releases"),
    [
        (LOST, RUN, RunVerdict.APPLIED, True, True),
        (LOST, without_proc(RUN), RunVerdict.STALE, False, False),
        (LOST, replace(RUN, proc_frame_id="f2"), RunVerdict.SUPERSEDED, False, False),
        (LOST, replace(WAITING, proc_frame_id=""), RunVerdict.SUPERSEDED, False, False),
        (replace(LOST, frame_id=""), NO_FRAME, RunVerdict.SUPERSEDED, False, False),
        (replace(LOST, frame_id=""), replace(NO_FRAME, proc_frame_id=""), RunVerdict.RELEASED, False, True),
        (LOST, WAITING, RunVerdict.RELEASED, False, True),
        (replace(LOST, pinged_at=PINGED), RUN, RunVerdict.APPLIED, True, True),
        (replace(LOST, pinged_at=PINGED - timedelta(seconds=1)), RUN, RunVerdict.ALIVE, False, False),
        (replace(LOST, host_state="UP"), RUN, RunVerdict.APPLIED, True, True),
        (replace(LOST, host_state="DOWN"), RUN, RunVerdict.ALIVE, False, False),
        (LOST_ORPHAN, UNKNOWN, RunVerdict.UNKNOWN, False, False),
        (LOST_ORPHAN, without_proc(WAITING), RunVerdict.STALE, False, False),
        (LOST_ORPHAN, without_proc(RUN), RunVerdict.SUPERSEDED, False, False),
        (LOST_ORPHAN, ORPHAN, RunVerdict.ORPHAN_APPLIED, True, False),
    ],
)
def test_a_lost_run_is_ended_only_as_it_was_seen(
    request_: LostRun, run: Run, verdict: RunVerdict, stops: bool, releases: bool
) -> None:
    ending = ending_of(request_, run, now=0)
    assert (ending.verdict, ending.stop is not None, ending.releases) == (verdict, stops, releases)
    if ending.stop is not None:
        assert (ending.stop.version, ending.stop.exit_status) == (4, 301)


def test_an_exit_status_is_brought_to_what_every_table_can_hold() -> None:
    endings = [ending_of(replace(REPORT, exit_status=status), RUN, now=0) for status in (0, 1, 40_000, -1_073_741_819)]
    assert [ending.stop and ending.stop.exit_status for ending in endings] == [0, 1, 32_767, -32_768]
