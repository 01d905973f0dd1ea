"""The end of a frame: which state it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.exit_rules import (
    NO_RETRY_RUN_TIME_SECONDS,
    STATUSES_NOT_COUNTED_AS_RETRY,
    Completion,
    Reason,
    decide,
    satisfies_depends,
)
from opencue_sched.domain.farm import FrameState

FAILED = Completion(frame_state=FrameState.RUNNING, retries=0, max_retries=3, exit_status=1)
LAST_TRY = replace(FAILED, retries=3)
HOURS_12 = NO_RETRY_RUN_TIME_SECONDS

WAITING, DEAD, EATEN = FrameState.WAITING, FrameState.DEAD, FrameState.EATEN


@pytest.mark.parametrize(
    ("completion", "state", "reason"),
    [
        (replace(FAILED, exit_status=0), FrameState.SUCCEEDED, Reason.SUCCEEDED),
        (FAILED, WAITING, Reason.RETRY),
        (replace(FAILED, retries=2), WAITING, Reason.RETRY),
        (LAST_TRY, DEAD, Reason.RETRIES_USED_UP),
        (replace(FAILED, max_retries=0), DEAD, Reason.RETRIES_USED_UP),
        (replace(LAST_TRY, exit_status=286), WAITING, Reason.SKIP_RETRY),
        (replace(LAST_TRY, exit_signal=119), WAITING, Reason.SKIP_RETRY),
        (replace(FAILED, exit_signal=119, max_retries=0), DEAD, Reason.RETRIES_USED_UP),
        (replace(FAILED, exit_status=256, auto_eat=True), WAITING, Reason.FAILED_LAUNCH),
        (replace(FAILED, exit_signal=256, auto_eat=True), WAITING, Reason.FAILED_LAUNCH),
        (replace(LAST_TRY, exit_status=256), DEAD, Reason.RETRIES_USED_UP),
        (replace(LAST_TRY, host_nimby_locked=True, exit_signal=15), WAITING, Reason.HOST_TAKEN_BACK),
        (replace(LAST_TRY, host_nimby_locked=True, exit_signal=9), DEAD, Reason.RETRIES_USED_UP),
        (replace(LAST_TRY, exit_signal=15), DEAD, Reason.RETRIES_USED_UP),
        (replace(FAILED, auto_eat=True), EATEN, Reason.AUTO_EAT),
        (replace(FAILED, auto_eat=True, exit_status=7, delayed_statuses={7}), EATEN, Reason.AUTO_EAT),
        (replace(LAST_TRY, exit_status=7, delayed_statuses={7}), WAITING, Reason.DELAYED),
        (replace(LAST_TRY, stored_exit_status=33, delayed_statuses={33}), WAITING, Reason.DELAYED),
        (replace(FAILED, timeout_minutes=10, run_time_seconds=600), WAITING, Reason.RETRY),
        (replace(FAILED, timeout_minutes=10, run_time_seconds=601), DEAD, Reason.TIMEOUT),
        (replace(FAILED, timeout_minutes=0, run_time_seconds=HOURS_12), WAITING, Reason.RETRY),
        (replace(FAILED, run_time_seconds=HOURS_12 + 1), DEAD, Reason.RAN_TOO_LONG),
        (replace(FAILED, exit_status=33, run_time_seconds=HOURS_12 + 1), DEAD, Reason.RAN_TOO_LONG),
        (replace(LAST_TRY, exit_status=33), WAITING, Reason.MEMORY_RETRY),
        (replace(LAST_TRY, exit_status=137), WAITING, Reason.MEMORY_RETRY),
        (replace(LAST_TRY, exit_signal=33), WAITING, Reason.MEMORY_RETRY),
        (replace(LAST_TRY, stored_exit_status=33, exit_signal=9), WAITING, Reason.MEMORY_RETRY),
        (replace(FAILED, exit_status=33, auto_eat=True), EATEN, Reason.AUTO_EAT),
    ],
)
def test_the_first_rule_that_matches_decides(completion: Completion, state: FrameState, reason: Reason) -> None:
    decision = decide(completion)
    assert (decision.state, decision.reason) == (state, reason)
    assert decision.stops_frame


@pytest.mark.parametrize(
    ("silent_seconds", "state"), [(9 * 60 + 59, WAITING), (10 * 60 - 1, WAITING), (10 * 60, DEAD), (11 * 60, DEAD)]
)
def test_a_log_that_was_not_written_for_the_log_timeout(silent_seconds: int, state: FrameState) -> None:
    now = 1_700_000_000
    completion = replace(FAILED, log_timeout_minutes=10, log_updated_at=now - silent_seconds, now=now)
    assert decide(completion).state is state


def test_an_unknown_log_time_is_no_timeout() -> None:
    assert decide(replace(FAILED, log_timeout_minutes=1, log_updated_at=0, now=1_700_000_000)).state is WAITING


@pytest.mark.parametrize(
    ("frame_state", "auto_eat", "state"),
    [
        (FrameState.WAITING, False, WAITING),
        (FrameState.EATEN, False, EATEN),
        (FrameState.DEAD, True, EATEN),
        (FrameState.DEAD, False, FrameState.DEPEND),
    ],
)
def test_a_frame_somebody_set_meanwhile_is_not_stopped_again(
    frame_state: FrameState, auto_eat: bool, state: FrameState
) -> None:
    decision = decide(replace(FAILED, frame_state=frame_state, auto_eat=auto_eat, exit_status=0))
    assert (decision.state, decision.stops_frame) == (state, False)


def test_a_memory_kill_is_written_even_though_rqd_reports_a_plain_signal() -> None:
    decision = decide(replace(FAILED, stored_exit_status=33, exit_status=1, exit_signal=9))
    assert (decision.exit_status, decision.memory_failure) == (33, True)


def test_a_frame_that_finished_before_the_memory_kill_reached_it_succeeded() -> None:
    decision = decide(replace(FAILED, stored_exit_status=33, exit_status=0))
    assert (decision.state, decision.exit_status, decision.memory_failure) == (FrameState.SUCCEEDED, 0, False)


def test_other_statuses_are_written_as_reported() -> None:
    assert decide(replace(FAILED, exit_status=137)).exit_status == 137
    assert decide(replace(FAILED, exit_status=286)).exit_status == 286


completions = st.builds(
    Completion,
    frame_state=st.sampled_from(list(FrameState)),
    retries=st.integers(0, 5),
    max_retries=st.integers(0, 5),
    exit_status=st.sampled_from([-1, 0, 1, 33, 137, 256, 286, 299]),
    exit_signal=st.sampled_from([0, 9, 15, 33, 119, 256]),
    run_time_seconds=st.floats(0, 60_000),
    stored_exit_status=st.sampled_from([-1, 0, 33]),
    auto_eat=st.booleans(),
    host_nimby_locked=st.booleans(),
    timeout_minutes=st.integers(0, 600),
    log_timeout_minutes=st.integers(0, 600),
    log_updated_at=st.sampled_from([0, 1_000_000]),
    now=st.integers(1_000_000, 1_100_000),
)


@given(completions)
def test_no_running_frame_is_lost(completion: Completion) -> None:
    # I6: each frame ends terminal or waiting again.
    decision = decide(replace(completion, frame_state=FrameState.RUNNING))
    assert decision.state in (FrameState.SUCCEEDED, WAITING, DEAD, EATEN)
    assert (decision.state is FrameState.SUCCEEDED) == (completion.exit_status == 0)
    if completion.auto_eat:
        assert decision.state is not DEAD


@given(completions)
def test_only_a_running_frame_is_stopped(completion: Completion) -> None:
    assert decide(completion).stops_frame == (completion.frame_state is FrameState.RUNNING)


def test_statuses_that_do_not_count_as_a_try() -> None:
    assert {-1, 256, 286, 299, 301, 302, 399} == STATUSES_NOT_COUNTED_AS_RETRY


def test_an_eaten_frame_satisfies_depends_only_when_asked_to() -> None:
    assert satisfies_depends(FrameState.SUCCEEDED, only_on_success=True)
    assert not satisfies_depends(EATEN, only_on_success=True)
    assert satisfies_depends(EATEN, only_on_success=False)
    assert not satisfies_depends(DEAD, only_on_success=False)
