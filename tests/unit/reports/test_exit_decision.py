"""The end of a frame: which state it gets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.states import STATUSES_NOT_COUNTED_AS_RETRY, FrameState
from opencue_sched.reports.run_ends import (
    NO_RETRY_RUN_TIME_SECONDS,
    CompletedFrame,
    ending_of,
    satisfying_states,
    state_after,
)
from opencue_sched.settings import Release
from opencue_sched.store.procs import Run
from tests.unit.reports.test_endings import RUN

FAILED = CompletedFrame("p1", "f1", "node1", exit_status=1)
LAST_TRY = replace(RUN, retries=3)
NO_TRIES = replace(RUN, max_retries=0)
AUTO_EAT = replace(RUN, autoeat=True)
LIMITED = replace(RUN, timeout_minutes=10)
HOURS_12 = NO_RETRY_RUN_TIME_SECONDS

WAITING, DEAD, EATEN = FrameState.WAITING, FrameState.DEAD, FrameState.EATEN


@pytest.mark.parametrize(
    ("run", "report", "state"),
    [
        (RUN, {"exit_status": 0}, FrameState.SUCCEEDED),
        (RUN, {}, WAITING),
        (replace(RUN, retries=2), {}, WAITING),
        (LAST_TRY, {}, DEAD),
        (NO_TRIES, {}, DEAD),
        (LAST_TRY, {"exit_status": 286}, WAITING),
        (LAST_TRY, {"exit_signal": 119}, WAITING),
        (NO_TRIES, {"exit_signal": 119}, DEAD),
        (AUTO_EAT, {"exit_status": 256}, WAITING),
        (AUTO_EAT, {"exit_signal": 256}, WAITING),
        (LAST_TRY, {"exit_status": 256}, DEAD),
        (LAST_TRY, {"nimby_locked": True, "exit_signal": 15}, WAITING),
        (LAST_TRY, {"nimby_locked": True, "exit_signal": 9}, DEAD),
        (LAST_TRY, {"exit_signal": 15}, DEAD),
        (AUTO_EAT, {}, EATEN),
        (replace(LIMITED, run_seconds=600), {}, WAITING),
        (replace(LIMITED, run_seconds=601), {}, DEAD),
        (replace(RUN, run_seconds=HOURS_12), {}, WAITING),
        (replace(RUN, run_seconds=HOURS_12 + 1), {}, DEAD),
        (replace(RUN, run_seconds=HOURS_12 + 1), {"exit_status": 33}, DEAD),
        (LAST_TRY, {"exit_status": 33}, WAITING),
        (LAST_TRY, {"exit_status": 137}, WAITING),
        (LAST_TRY, {"exit_signal": 33}, WAITING),
        (AUTO_EAT, {"exit_status": 33}, EATEN),
    ],
)
def test_the_first_rule_that_matches_decides(run: Run, report: dict[str, int], state: FrameState) -> None:
    assert state_after(replace(FAILED, **report), run, now=0) is state


@pytest.mark.parametrize(
    ("silent_seconds", "state"), [(9 * 60 + 59, WAITING), (10 * 60 - 1, WAITING), (10 * 60, DEAD), (11 * 60, DEAD)]
)
def test_a_log_that_was_not_written_for_the_log_timeout(silent_seconds: int, state: FrameState) -> None:
    report = replace(FAILED, silent_seconds=silent_seconds)
    assert state_after(report, replace(RUN, timeout_llu_minutes=10, run_seconds=3600), now=0) is state


def test_a_log_is_never_silent_for_longer_than_its_run() -> None:
    report = replace(FAILED, silent_seconds=3600)
    assert state_after(report, replace(RUN, timeout_llu_minutes=10, run_seconds=599), now=0) is WAITING


def test_an_unknown_log_time_is_no_timeout() -> None:
    assert state_after(FAILED, replace(RUN, timeout_llu_minutes=1, run_seconds=3600), now=0) is WAITING


def test_the_time_a_report_waited_for_the_database_is_no_part_of_its_run() -> None:
    report = replace(FAILED, received_at=1000.0, silent_seconds=60)
    run = replace(LIMITED, run_seconds=1200, timeout_llu_minutes=2)
    assert state_after(report, run, now=1600.0) is WAITING
    assert state_after(report, run, now=1599.0) is DEAD


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"exit_status": 33}, True),
        ({"exit_status": 137}, True),
        ({"exit_signal": 33}, True),
        ({"exit_signal": 9}, False),
        ({"exit_status": 0, "exit_signal": 33}, False),
    ],
)
def test_what_a_memory_failure_is(fields: dict[str, int], failure: bool) -> None:
    assert ending_of(replace(FAILED, **fields), RUN, now=0).memory_failure is failure


@pytest.mark.parametrize("status", [137, 286])
def test_statuses_are_written_as_reported(status: int) -> None:
    stop = ending_of(replace(FAILED, exit_status=status), RUN, now=0).stop
    assert stop is not None
    assert stop.exit_status == status


reports = st.builds(
    CompletedFrame,
    proc_id=st.just("p1"),
    frame_id=st.just("f1"),
    host_name=st.just("node1"),
    exit_status=st.sampled_from([-1, 0, 1, 33, 137, 256, 286, 299]),
    exit_signal=st.sampled_from([0, 9, 15, 33, 119, 256]),
    silent_seconds=st.sampled_from([0.0, 40_000.0]),
    received_at=st.sampled_from([math.inf, 1_000_000.0]),
    nimby_locked=st.booleans(),
)
runs = st.builds(
    replace,
    st.just(RUN),
    retries=st.integers(0, 5),
    max_retries=st.integers(0, 5),
    autoeat=st.booleans(),
    timeout_minutes=st.integers(0, 600),
    timeout_llu_minutes=st.integers(0, 600),
    run_seconds=st.floats(0, 60_000),
)


@given(reports, runs, st.integers(1_000_000, 1_100_000))
def test_no_running_frame_is_lost(report: CompletedFrame, run: Run, now: int) -> None:
    # Each frame ends terminal or waiting again.
    state = state_after(report, run, now=now)
    assert state in (FrameState.SUCCEEDED, WAITING, DEAD, EATEN)
    assert (state is FrameState.SUCCEEDED) == (report.exit_status == 0)
    if run.autoeat:
        assert state is not DEAD


@given(reports, runs, st.sampled_from(list(FrameState)))
def test_only_a_running_frame_is_stopped(report: CompletedFrame, run: Run, state: FrameState) -> None:
    ending = ending_of(report, replace(run, frame_state=state), now=1_000_000)
    assert (ending.stop is not None) == (state is FrameState.RUNNING)


def test_statuses_that_do_not_count_as_a_try() -> None:
    assert {-1, 256, 286, 299, 301, 302, 399} == STATUSES_NOT_COUNTED_AS_RETRY


def test_an_eaten_frame_satisfying_states_only_when_asked_to() -> None:
    assert satisfying_states(Release()) == {FrameState.SUCCEEDED}
    assert satisfying_states(Release(satisfy_only_on_frame_success=False)) == {FrameState.SUCCEEDED, EATEN}
