"""Asks an RQD what it runs (`look`), and makes sure that it does not run a frame (`kill_and_confirm`, and `RqdKiller`
for callers outside a dispatch pass).

What RQD's answers are worth (opencue-rqd 1.37, observed and read in its source; its Rust successor, read):

- ReportStatus lists running frames with the proc they belong to (``resource_id``).
- A frame that was accepted but whose log is still being set up is in no list; its cores are already in
  ``core_info.booked_cores``, so more cores booked than listed means "wait".
- KillRunningFrame answers NOT_FOUND for a frame it does not know. A kill that reaches it between the listing of a frame
  and the start of its process makes RQD kill itself: after a launch a frame of ours is adopted (``adopt``), not killed.
- The Rust RQD refuses to kill without a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import grpc
import structlog
from opencue_proto import report_pb2, rqd_pb2

from opencue_sched.errors import RqdFailure
from opencue_sched.rqd.channels import SHORTEST_TELLING_SECONDS, RqdChannels, describe

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.1
"""The time between two looks at a frame that still runs or is being set up."""


class Whereabouts(StrEnum):
    """Whether a frame runs on a host, and for which proc: the one that was asked about (OURS) or another one."""

    OURS = "ours"
    ANOTHERS = "anothers"
    SETTING_UP = "setting_up"
    """RQD is setting some frame up, perhaps this one."""
    ABSENT = "absent"
    """RQD does not run the frame."""
    UNREACHABLE = "unreachable"
    """The host's own RQD did not answer."""


@dataclass(frozen=True, slots=True)
class FrameSeen:
    """What RQD said about one frame."""

    place: Whereabouts
    detail: str
    """``place`` in words, for an operator."""


@dataclass(frozen=True, slots=True)
class RunningFrameRef:
    """A frame that may run on a host."""

    host_name: str
    frame_id: str
    proc_id: str
    cores_centicores: int = 0
    """The centicores that the frame was launched with; 0 when they are not known, as in all calls of RqdKiller."""


class Fate(StrEnum):
    """What is known of a frame's process after an attempt to end it, or a question about it. After any but NOT_RUNNING
    it may run, unless its host is known to be gone (reaper)."""

    RUNNING = "running"
    """The process runs for the proc that was asked about, and was left alone."""
    NOT_RUNNING = "not_running"
    """RQD confirmed that no process of the frame runs."""
    UNCONFIRMED = "unconfirmed"
    """RQD answered, if only at first, and did not confirm in time that no process runs."""
    UNREACHABLE = "unreachable"
    """The host's own RQD did not answer once."""


def look(channels: RqdChannels, ref: RunningFrameRef, *, timeout: float | None = None) -> FrameSeen:
    """Ask the host's RQD whether it runs the frame, and for which proc."""
    try:
        answer = channels.stub(ref.host_name).ReportStatus(
            rqd_pb2.RqdStaticReportStatusRequest(), timeout=timeout or channels.settings.timeout
        )
    except grpc.RpcError as error:
        return FrameSeen(Whereabouts.UNREACHABLE, f"its RQD does not answer ({describe(error)})")
    except RqdFailure as error:
        return FrameSeen(Whereabouts.UNREACHABLE, str(error))
    seen = frame_seen(answer.host_report, ref)
    words = channels.misnamed(ref.host_name)
    # Another machine answers by this host's name: what that machine runs or does not run says nothing of this host.
    if words and seen.place is not Whereabouts.OURS:
        return FrameSeen(Whereabouts.UNREACHABLE, f"its RQD {words}")
    return seen


def frame_seen(report: report_pb2.HostReport, ref: RunningFrameRef) -> FrameSeen:
    """What a host report says about one frame."""
    listed = 0
    for frame in report.frames:
        listed += frame.num_cores
        if frame.frame_id == ref.frame_id:
            if frame.resource_id == ref.proc_id:
                return FrameSeen(Whereabouts.OURS, "its RQD still runs it")
            return FrameSeen(Whereabouts.ANOTHERS, f"its RQD runs it for another proc, {frame.resource_id}")
    unlisted = report.core_info.booked_cores - listed
    if unlisted > 0 and unlisted >= ref.cores_centicores:
        return FrameSeen(Whereabouts.SETTING_UP, "its RQD is setting a frame up, and cannot say which")
    return FrameSeen(Whereabouts.ABSENT, "its RQD does not name it")


def kill(channels: RqdChannels, host_name: str, frame_id: str, reason: str) -> bool:
    """Ask RQD to kill a frame. Returns False where RQD does not know the frame.

    Raises grpc.RpcError for any other answer. RQD knows frames by frame id only: the frame must still be its proc's, or
    cannot have been booked on this host again (reports/reported_runs.py, SETTLED_SECONDS).
    """
    request = rqd_pb2.RqdStaticKillRunningFrameRequest(frame_id=frame_id, message=reason)
    try:
        channels.stub(host_name).KillRunningFrame(request, timeout=channels.settings.timeout)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return False
        raise
    return True


def kill_and_confirm(
    channels: RqdChannels, ref: RunningFrameRef, *, reason: str, adopt: bool = False, timeout: float | None = None
) -> tuple[Fate, str]:
    """Make sure that a frame does not run on a host. Returns its fate, as RQD confirmed it, and RQD's last words.

    NOT_RUNNING: RQD was asked to kill the frame (or did not know it), and a report taken after that neither lists the
    frame nor shows one being set up. RUNNING, with ``adopt`` only: it runs for ``ref.proc_id`` and is left alone.
    UNCONFIRMED or UNREACHABLE after ``timeout`` seconds (default ``rqd.timeout``). A last look may take
    SHORTEST_TELLING_SECONDS besides, and a last kill ``rqd.timeout``.
    The frame must still belong to ``ref.proc_id`` (see `kill`).
    """
    limit = time.monotonic() + (timeout or channels.settings.timeout)
    answered = killed = asked = False
    while True:
        # A look with less time may end without an answer though its RQD answers all others.
        left = max(SHORTEST_TELLING_SECONDS, limit - time.monotonic())
        seen = look(channels, ref, timeout=min(left, channels.settings.timeout))
        answered = answered or seen.place is not Whereabouts.UNREACHABLE
        if adopt and seen.place is Whereabouts.OURS and not killed:
            return Fate.RUNNING, seen.detail
        if asked and seen.place is Whereabouts.ABSENT:
            return Fate.NOT_RUNNING, seen.detail
        # No kill while RQD sets a frame up: it would kill itself (see above). For an absent frame it is sent: only a
        # report taken after a kill proves that the frame is gone.
        if seen.place in (Whereabouts.OURS, Whereabouts.ANOTHERS, Whereabouts.ABSENT):
            try:
                accepted = kill(channels, ref.host_name, ref.frame_id, reason)
            except grpc.RpcError as error:
                seen = FrameSeen(seen.place, f"its RQD did not confirm the kill ({describe(error)})")
            else:
                asked = True
                killed = killed or accepted
                if not accepted and time.monotonic() < limit:
                    continue  # RQD knew no such frame: no process has to end before the next look
        if time.monotonic() >= limit:
            return Fate.UNCONFIRMED if answered else Fate.UNREACHABLE, seen.detail
        time.sleep(min(_POLL_SECONDS, max(0.0, limit - time.monotonic())))


class RqdKiller:
    """Kills frames through the connections of this process.

    ``notify`` is called, on any thread, for each frame that was not confirmed dead: with its id, its host and address,
    and the reason for a person.
    """

    def __init__(self, channels: RqdChannels, *, notify: Callable[[str, str, str], object] = lambda *_: None) -> None:
        self._channels = channels
        self._notify = notify

    def answers(self, host_name: str, seconds: float) -> bool:
        """Whether a host's own RQD answers within ``seconds``. A refused connection is tried again in that time."""
        return not self.silence(host_name, seconds)

    def silence(self, host_name: str, seconds: float) -> str:
        """Why a host's RQD cannot be talked to, for people: ``(address) does not answer`` within ``seconds``, or
        another host's RQD does. Empty where it can."""
        request = rqd_pb2.RqdStaticReportStatusRequest()
        try:
            self._channels.stub(host_name).ReportStatus(request, timeout=seconds, wait_for_ready=True)
        except (grpc.RpcError, RqdFailure) as error:
            return str(error) if isinstance(error, RqdFailure) else f"({self._address(host_name)}) does not answer"
        return self._channels.misnamed(host_name)

    def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
        """Ask RQD to kill a frame, without waiting for its end. Returns False where RQD could not be asked."""
        try:
            self._channels.check_name(host_name)
            kill(self._channels, host_name, frame_id, reason)
        except (grpc.RpcError, RqdFailure) as error:
            why = describe(error) if isinstance(error, grpc.RpcError) else str(error)
            _log.info("kill_not_delivered", host=host_name, frame=frame_id, error=why)
            return False
        return True

    def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
        """Kill a frame and wait until RQD confirms that it does not run (at most twice rqd.timeout and a second)."""
        return self._end(RunningFrameRef(host_name, frame_id, proc_id), reason, adopt=False)

    def confirm_gone(self, host_name: str, frame_id: str, proc_id: str) -> Fate:
        """Kill a frame that runs for another proc, and wait as `stop` does. A frame that runs for this proc is left
        alone (RUNNING)."""
        return self._end(RunningFrameRef(host_name, frame_id, proc_id), "another proc has its frame", adopt=True)

    def _end(self, ref: RunningFrameRef, reason: str, *, adopt: bool) -> Fate:
        """Kill and confirm, and notify of a frame that was not confirmed dead."""
        fate, detail = kill_and_confirm(self._channels, ref, reason=reason, adopt=adopt)
        if fate in (Fate.UNCONFIRMED, Fate.UNREACHABLE):
            place = f"{ref.host_name} ({self._address(ref.host_name)})"
            self._notify(ref.frame_id, place, detail)
        return fate

    def _address(self, host_name: str) -> str:
        """The address at which a host is dialled, or why it has none: for people."""
        try:
            return self._channels.address(host_name)
        except RqdFailure as error:
            return str(error)
