"""What a report or a request about a run means: every ending, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from opencue_sched.domain.farm import ExitStatus, FrameState, JobState
from opencue_sched.farm.completion import end_completed, end_lost, storable_exit_status
from opencue_sched.farm.model import CompletedFrame, LostRun, RunVerdict
from opencue_sched.store.procs import FrameRow, ProcRow, RunRow

PINGED = datetime(2026, 1, 1, tzinfo=UTC)
PROC = ProcRow("p1", "h1", "node1", "UP", "f1", "s1", 1000, PINGED)
FRAME = FrameRow(
    id="f1",
    layer_id="l1",
    job_id="j1",
    show_id="s1",
    state=FrameState.RUNNING,
    version=4,
    retries=0,
    exit_status=-1,
    host_name="node1",
    owner_proc_id="p1",
    job_state=JobState.PENDING,
    max_retries=3,
    autoeat=False,
    timeout_minutes=0,
    timeout_llu_minutes=0,
    services="",
    layer_open=1,
    job_open=1,
)
ORPHAN = replace(FRAME, owner_proc_id=None)
WAITING = replace(FRAME, state=FrameState.WAITING, owner_proc_id=None)
REPORT = CompletedFrame("p1", "f1", "node1", 0)
LOST = LostRun("p1", "f1", exit_status=ExitStatus.FRAME_ORPHAN)
LOST_ORPHAN = replace(LOST, proc_id="")


@pytest.mark.parametrize(
    ("run", "verdict", "stops", "releases"),
    [
        (RunRow(PROC, FRAME), RunVerdict.APPLIED, True, True),
        (RunRow(replace(PROC, frame_id=None), WAITING), RunVerdict.RELEASED, False, True),
        (RunRow(replace(PROC, frame_id="f2"), FRAME), RunVerdict.SUPERSEDED, False, False),
        (RunRow(PROC, None), RunVerdict.SUPERSEDED, False, False),
        (RunRow(replace(PROC, host_name="node2"), FRAME), RunVerdict.WRONG_HOST, False, False),
        (RunRow(replace(PROC, host_name="node2", frame_id=None), WAITING), RunVerdict.WRONG_HOST, False, False),
        (RunRow(PROC, replace(FRAME, state=FrameState.EATEN)), RunVerdict.RELEASED, False, True),
        (RunRow(None, None), RunVerdict.UNKNOWN, False, False),
        (RunRow(None, WAITING), RunVerdict.STALE, False, False),
        (RunRow(None, replace(FRAME, owner_proc_id="p2")), RunVerdict.SUPERSEDED, False, False),
        (RunRow(None, replace(ORPHAN, host_name="node2")), RunVerdict.SUPERSEDED, False, False),
        (RunRow(None, replace(ORPHAN, host_name=None)), RunVerdict.SUPERSEDED, False, False),
        (RunRow(None, ORPHAN), RunVerdict.ORPHAN_APPLIED, True, False),
    ],
)
def test_a_report_ends_the_run_it_describes_and_no_other(
    run: RunRow, verdict: RunVerdict, stops: bool, releases: bool
) -> None:
    ending = end_completed(REPORT, run, now=0)
    assert (ending.verdict, ending.stop is not None, ending.release is not None) == (verdict, stops, releases)


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
    ending = end_completed(report, RunRow(None, replace(ORPHAN, host_name=started_on)), now=0)
    assert ending.verdict is (RunVerdict.ORPHAN_APPLIED if same else RunVerdict.SUPERSEDED)


@pytest.mark.parametrize(
    ("request_", "run", "verdict", "stops", "releases"),
    [
        (LOST, RunRow(PROC, FRAME), RunVerdict.APPLIED, True, True),
        (LOST, RunRow(None, FRAME), RunVerdict.STALE, False, False),
        (LOST, RunRow(replace(PROC, frame_id="f2"), FRAME), RunVerdict.SUPERSEDED, False, False),
        (LOST, RunRow(replace(PROC, frame_id=None), WAITING), RunVerdict.SUPERSEDED, False, False),
        (replace(LOST, frame_id=None), RunRow(PROC, None), RunVerdict.SUPERSEDED, False, False),
        (replace(LOST, frame_id=None), RunRow(replace(PROC, frame_id=None), None), RunVerdict.RELEASED, False, True),
        (LOST, RunRow(PROC, WAITING), RunVerdict.RELEASED, False, True),
        (replace(LOST, pinged_at=PINGED), RunRow(PROC, FRAME), RunVerdict.APPLIED, True, True),
        (replace(LOST, pinged_at=PINGED - timedelta(seconds=1)), RunRow(PROC, FRAME), RunVerdict.ALIVE, False, False),
        (replace(LOST, host_state="UP"), RunRow(PROC, FRAME), RunVerdict.APPLIED, True, True),
        (replace(LOST, host_state="DOWN"), RunRow(PROC, FRAME), RunVerdict.ALIVE, False, False),
        (LOST_ORPHAN, RunRow(None, None), RunVerdict.UNKNOWN, False, False),
        (LOST_ORPHAN, RunRow(None, WAITING), RunVerdict.STALE, False, False),
        (LOST_ORPHAN, RunRow(None, FRAME), RunVerdict.SUPERSEDED, False, False),
        (LOST_ORPHAN, RunRow(None, ORPHAN), RunVerdict.ORPHAN_APPLIED, True, False),
    ],
)
def test_a_lost_run_is_ended_only_as_it_was_seen(
    request_: LostRun, run: RunRow, verdict: RunVerdict, stops: bool, releases: bool
) -> None:
    ending = end_lost(request_, run)
    assert (ending.verdict, ending.stop is not None, ending.release is not None) == (verdict, stops, releases)
    if ending.stop is not None:
        assert (ending.stop.version, ending.stop.exit_status, ending.stop.lag_seconds) == (4, 301, 0)
        assert not ending.stop.keep_checkpoint


def test_an_exit_status_is_brought_to_what_every_table_can_hold() -> None:
    stored = [storable_exit_status(status) for status in (0, 1, 40_000, -1_073_741_819)]
    assert stored == [0, 1, 32_767, -32_768]
