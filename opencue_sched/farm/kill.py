"""Kills: ending processes on render hosts through their RQDs, and the threads the report service does it in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import grpc
import structlog

from opencue_sched.dispatch.rqd import (
    Confirmation,
    Fate,
    RqdChannels,
    RunningFrameRef,
    Whereabouts,
    answers,
    describe,
    kill,
    kill_and_confirm,
)
from opencue_sched.farm.completion import database_away

_log = structlog.get_logger(__name__)

KILL_THREADS = 8
MOST_HOSTS_WITH_KILLS = 2_000

_WORDS = {
    Whereabouts.UNREACHABLE: "its RQD does not answer",
    Whereabouts.OURS: "its RQD took the kill, but still runs it",
    Whereabouts.ANOTHERS: "its RQD runs it for another proc",
    Whereabouts.SETTING_UP: "its RQD is setting a frame up, and cannot say which",
    Whereabouts.ABSENT: "its RQD stopped naming it too late to be asked again",
}


class KillFate(StrEnum):
    """What is known of a process after trying to end it, or asking about it. Only NOT_RUNNING allows its frame to be
    given away."""

    NOT_RUNNING = "not_running"
    RUNNING = "running"
    UNCONFIRMED = "unconfirmed"
    UNREACHABLE = "unreachable"


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


class KillPool:
    """Threads in which processes are ended, so that no host report waits for an RQD. Thread-safe.

    A host has one job at a time; what a job leaves undone is found again by the next report of its host.
    """

    def __init__(self, *, threads: int = KILL_THREADS, most_hosts: int = MOST_HOSTS_WITH_KILLS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kills")
        self._most_hosts = most_hosts
        self._lock = threading.Lock()
        self._hosts: set[str] = set()
        self._closed = False

    def submit(self, host_id: str, work: Callable[[], None]) -> bool:
        """Have ``work`` done for a host; False when that host's last is not, too many wait, or the pool is closed."""
        with self._lock:
            if self._closed or host_id in self._hosts or len(self._hosts) >= self._most_hosts:
                return False
            self._hosts.add(host_id)
            self._threads.submit(self._run, host_id, work)
            return True

    def close(self) -> None:
        """Drop what waits; what is under way ends by itself (rqd.kill_timeout)."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, host_id: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            (_log.warning if database_away(error) else _log.exception)("kills_failed", host=host_id, error=str(error))
        finally:
            with self._lock:
                self._hosts.discard(host_id)
