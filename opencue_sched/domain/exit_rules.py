"""What becomes of a frame whose process has ended (facts F, "State decision" and "Steps").

Two rules are firmer than Cuebot's. A frame that exits with 0 is written with 0, even when a memory kill had been
ordered meanwhile. And the optimizer does not lower a layer's memory when nothing was measured.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from opencue_sched.domain.farm import ExitStatus, FrameState

NO_RETRY_RUN_TIME_SECONDS = 12 * 3600
"""A frame that ran longer than this and failed is not tried again."""

SIGNAL_SKIP_RETRY = 119
"""The signal with which a frame asks to be tried again whatever its retries."""

SIGNAL_TERMINATED = 15
"""SIGTERM: how a host that its user takes back ends its frames."""

MEMORY_FLOOR_KB = 262_144
"""The least memory a layer asks for, and the margin the optimizer leaves above the most that was used."""

MEMORY_INCREASE_KB = 2_097_152
"""How much more memory a layer asks for after a memory failure when its service does not say."""

STATUSES_NOT_COUNTED_AS_RETRY: frozenset[int] = frozenset(
    {
        ExitStatus.NONE,
        ExitStatus.FAILED_LAUNCH,
        ExitStatus.SKIP_RETRY,
        ExitStatus.FRAME_CLEARED,
        ExitStatus.FRAME_ORPHAN,
        ExitStatus.FAILED_KILL,
        ExitStatus.DOWN_HOST,
    }
)
"""Exit statuses of the run before that do not count as a try when the frame starts again (facts C, step 4)."""


class Reason(StrEnum):
    """Which rule decided, for the log."""

    SET_BY_HAND = "set_by_hand"
    SUCCEEDED = "succeeded"
    SKIP_RETRY = "skip_retry"
    FAILED_LAUNCH = "failed_launch"
    HOST_TAKEN_BACK = "host_taken_back"
    AUTO_EAT = "auto_eat"
    DELAYED = "delayed"
    LOG_TIMEOUT = "log_timeout"
    TIMEOUT = "timeout"
    RAN_TOO_LONG = "ran_too_long"
    RETRIES_USED_UP = "retries_used_up"
    MEMORY_RETRY = "memory_retry"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Completion:
    """A frame as the database has it, and the report of its end.

    ``stored_exit_status`` is frame.int_exit_status: a memory kill is ordered by storing 33 there first. Timeouts are in
    minutes, 0 is none. ``log_updated_at`` and ``now`` are epoch seconds, the first 0 when unknown.
    """

    frame_state: FrameState
    retries: int
    max_retries: int
    exit_status: int
    exit_signal: int = 0
    run_time_seconds: float = 0
    stored_exit_status: int = ExitStatus.NONE
    auto_eat: bool = False
    host_nimby_locked: bool = False
    timeout_minutes: int = 0
    log_timeout_minutes: int = 0
    log_updated_at: float = 0
    now: float = 0
    delayed_statuses: Set[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """``exit_status`` is what to write. ``stops_frame`` is False when the frame is not RUNNING any more, so that there
    is nothing to write. ``memory_failure``: raise the layer's memory and switch its optimizer off."""

    state: FrameState
    exit_status: int
    reason: Reason
    stops_frame: bool
    memory_failure: bool


def decide(completion: Completion) -> Decision:
    """The state of a frame after its process has ended: the first rule that matches."""
    state, reason = _first_match(completion)
    return Decision(
        state=state,
        exit_status=_status_to_write(completion),
        reason=reason,
        stops_frame=completion.frame_state is FrameState.RUNNING,
        memory_failure=completion.exit_status != ExitStatus.SUCCESS and is_memory_failure(completion),
    )


def is_memory_failure(completion: Completion) -> bool:
    """Whether the frame died of memory: RQD says so, its container was killed, or the kill was ordered for that."""
    return (
        completion.exit_status in (ExitStatus.MEMORY_FAILURE, ExitStatus.DOCKER_OOM)
        or completion.exit_signal == ExitStatus.MEMORY_FAILURE
        or completion.stored_exit_status == ExitStatus.MEMORY_FAILURE
    )


def satisfies_depends(state: FrameState, *, only_on_success: bool) -> bool:
    """Whether frames that wait for this one may go on (``release.satisfy_only_on_frame_success``)."""
    return state is FrameState.SUCCEEDED or (state is FrameState.EATEN and not only_on_success)


def _status_to_write(completion: Completion) -> int:
    if completion.exit_status != ExitStatus.SUCCESS and completion.stored_exit_status == ExitStatus.MEMORY_FAILURE:
        return ExitStatus.MEMORY_FAILURE
    return completion.exit_status


def _first_match(completion: Completion) -> tuple[FrameState, Reason]:
    if completion.frame_state in (FrameState.WAITING, FrameState.EATEN):
        return completion.frame_state, Reason.SET_BY_HAND
    if completion.frame_state is FrameState.DEAD:
        return (FrameState.EATEN if completion.auto_eat else FrameState.DEPEND), Reason.SET_BY_HAND
    if completion.exit_status == ExitStatus.SUCCESS:
        return FrameState.SUCCEEDED, Reason.SUCCEEDED
    if completion.exit_status == ExitStatus.SKIP_RETRY or (
        completion.max_retries != 0 and completion.exit_signal == SIGNAL_SKIP_RETRY
    ):
        return FrameState.WAITING, Reason.SKIP_RETRY
    retries_left = completion.retries < completion.max_retries
    if ExitStatus.FAILED_LAUNCH in (completion.exit_status, completion.exit_signal) and retries_left:
        return FrameState.WAITING, Reason.FAILED_LAUNCH
    if completion.host_nimby_locked and completion.exit_signal == SIGNAL_TERMINATED:
        return FrameState.WAITING, Reason.HOST_TAKEN_BACK
    if completion.auto_eat:
        return FrameState.EATEN, Reason.AUTO_EAT
    if _status_to_write(completion) in completion.delayed_statuses:
        return FrameState.WAITING, Reason.DELAYED
    timed_out = _timed_out(completion)
    if timed_out is not None:
        return FrameState.DEAD, timed_out
    if is_memory_failure(completion):
        return FrameState.WAITING, Reason.MEMORY_RETRY
    if not retries_left:
        return FrameState.DEAD, Reason.RETRIES_USED_UP
    return FrameState.WAITING, Reason.RETRY


def _timed_out(completion: Completion) -> Reason | None:
    if completion.log_timeout_minutes > 0 and completion.log_updated_at > 0:
        minutes_silent = int(completion.now - completion.log_updated_at) // 60
        if minutes_silent > completion.log_timeout_minutes - 1:
            return Reason.LOG_TIMEOUT
    if completion.timeout_minutes > 0 and completion.run_time_seconds > completion.timeout_minutes * 60:
        return Reason.TIMEOUT
    if completion.run_time_seconds > NO_RETRY_RUN_TIME_SECONDS:
        return Reason.RAN_TOO_LONG
    return None
