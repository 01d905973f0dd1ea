"""Ending processes on render hosts through their RQDs: the FrameKiller that is used outside tests."""

from __future__ import annotations

import grpc
import structlog

from opencue_sched.dispatch.channels import RqdChannels
from opencue_sched.dispatch.confirm import Fate, RunningFrameRef, Whereabouts, answers, describe, kill, kill_and_confirm
from opencue_sched.release.model import KillFate

_log = structlog.get_logger(__name__)


class RqdKiller:
    """Kills through the connections of this process."""

    def __init__(self, channels: RqdChannels) -> None:
        self._channels = channels

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
        confirmation = kill_and_confirm(self._channels, RunningFrameRef(host_name, frame_id, proc_id), reason=reason)
        if confirmation.fate is Fate.NOT_RUNNING:
            return KillFate.NOT_RUNNING
        if not confirmation.killed and confirmation.detail.startswith(Whereabouts.UNREACHABLE.value):
            return KillFate.UNREACHABLE
        return KillFate.UNCONFIRMED
