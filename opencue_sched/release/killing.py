"""Ending processes on render hosts through their RQDs: the FrameKiller that is used outside tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from opencue_sched.dispatch.channels import RqdChannels
from opencue_sched.dispatch.confirm import (
    Confirmation,
    Fate,
    RunningFrameRef,
    Whereabouts,
    answers,
    describe,
    kill,
    kill_and_confirm,
)
from opencue_sched.release.model import KillFate

_log = structlog.get_logger(__name__)


_WORDS = {
    Whereabouts.UNREACHABLE: "its RQD does not answer",
    Whereabouts.OURS: "its RQD took the kill, but still runs it",
    Whereabouts.ANOTHERS: "its RQD runs it for another proc",
    Whereabouts.SETTING_UP: "its RQD is setting a frame up, and cannot say which",
    Whereabouts.ABSENT: "its RQD stopped naming it too late to be asked again",
}


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A frame whose process could not be confirmed dead: where it runs, and why, in words for a person."""

    frame_id: str
    host_name: str
    address: str
    reason: str


class RqdKiller:
    """Kills through the connections of this process. ``tell`` is told, on any thread, of each frame that was not
    confirmed dead."""

    def __init__(self, channels: RqdChannels, *, tell: Callable[[Unconfirmed], None] | None = None) -> None:
        self._channels = channels
        self._tell = tell

    def answers(self, host_name: str, seconds: float) -> bool:
        """Whether a host's RQD answers at all within ``seconds``."""
        return answers(self._channels, host_name, seconds=seconds)

    def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
        """Ask RQD to kill a frame, without waiting for its end. False: RQD could not be asked."""
        try:
            kill(self._channels, host_name, frame_id, reason)
        except grpc.RpcError as error:
            _log.info("kill_not_delivered", host=host_name, frame=frame_id, error=describe(error))
            return False
        return True

    def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> KillFate:
        """Kill a frame and wait until RQD confirms that it does not run (at most rqd.kill_timeout)."""
        return self._fate(RunningFrameRef(host_name, frame_id, proc_id), reason=reason, adopt=False)

    def confirm_gone(self, host_name: str, frame_id: str, proc_id: str) -> KillFate:
        """Whether RQD confirms that a frame does not run; one that runs for this proc is left alone."""
        reason = "another proc has its frame"
        return self._fate(RunningFrameRef(host_name, frame_id, proc_id), reason=reason, adopt=True)

    def _fate(self, ref: RunningFrameRef, *, reason: str, adopt: bool) -> KillFate:
        confirmation = kill_and_confirm(self._channels, ref, reason=reason, adopt=adopt)
        if confirmation.fate is not Fate.UNCONFIRMED:
            return KillFate(confirmation.fate.value)
        if self._tell is not None:
            address = self._channels.address(ref.host_name)
            self._tell(Unconfirmed(ref.frame_id, ref.host_name, address, _reason(confirmation)))
        if not confirmation.killed and confirmation.detail.startswith(Whereabouts.UNREACHABLE.value):
            return KillFate.UNREACHABLE
        return KillFate.UNCONFIRMED


def _reason(confirmation: Confirmation) -> str:
    place, _, detail = confirmation.detail.partition(": ")
    words = _WORDS[Whereabouts(place)]
    return f"{words} ({detail})" if place == Whereabouts.UNREACHABLE else words
