"""What the way back is told, what it answers, and what it needs of other rooms."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from opencue_sched.domain.farm import ExitStatus, FrameState


class LedgerRelease(Protocol):
    """accounting.ledger.Ledger, as far as it is needed here."""

    def release(self, proc_ids: Sequence[str]) -> int:
        """Give back the bookings of these procs; those already given back do nothing."""


class HostPublisher(Protocol):
    """placement.host_groups.HostChanges, as far as it is needed here."""

    def publish(self, host_ids: Sequence[str]) -> object:
        """Tell every worker's host cache that these hosts changed."""


class KillFate(StrEnum):
    """What is known of a process after trying to end it, or asking about it. Only NOT_RUNNING allows its frame to be
    given away."""

    NOT_RUNNING = "not_running"
    RUNNING = "running"
    UNCONFIRMED = "unconfirmed"
    UNREACHABLE = "unreachable"


class FrameKiller(Protocol):
    """Ends processes on render hosts."""

    def answers(self, host_name: str, seconds: float) -> bool:
        """Whether a host's RQD answers at all within ``seconds``."""

    def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
        """Ask RQD to kill a frame, without waiting for its end. False: RQD could not be asked."""

    def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> KillFate:
        """Kill a frame and wait, for a few seconds, until RQD confirms that it does not run."""

    def confirm_gone(self, host_name: str, frame_id: str, proc_id: str) -> KillFate:
        """Ask RQD, for a few seconds, whether a frame is gone; RUNNING, and left alone, if it runs for this proc."""


@dataclass(frozen=True, slots=True)
class CompletedFrame:
    """The end of a process, as its RQD reports it. Memory in KB, times in seconds; ``llu_time`` is an epoch or 0."""

    proc_id: str
    frame_id: str
    host_name: str
    exit_status: int
    exit_signal: int = 0
    run_time: int = 0
    max_rss_kb: int = 0
    llu_time: int = 0
    nimby_locked: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run to be ended without a report: its process is known not to run any more.

    ``frame_id`` is the frame the proc was seen with, None for a proc without one, and the run is only ended if that
    still holds. ``pinged_at``: give up when a report proved the run alive after that moment. ``host_state``: give up
    when the host is no longer in that state. ``proc_id`` is empty for an orphan frame (RUNNING without a proc).
    """

    proc_id: str
    frame_id: str | None
    state: FrameState = FrameState.WAITING
    exit_status: int = ExitStatus.FRAME_CLEARED
    pinged_at: datetime | None = None
    host_state: str | None = None
    reason: str = ""


class RunVerdict(StrEnum):
    """What became of a report or a request about a run."""

    APPLIED = "applied"
    """The frame was stopped and its proc released."""
    ORPHAN_APPLIED = "orphan_applied"
    """The frame was running without a proc; it was stopped."""
    RELEASED = "released"
    """The proc's frame had been taken off it, or was stopped by somebody else; the proc was released."""
    SUPERSEDED = "superseded"
    """Another proc, or another frame of this proc, has taken over: nothing was changed."""
    WRONG_HOST = "wrong_host"
    """Another host than the proc's reported its end. Nothing was changed."""
    STALE = "stale"
    """The run was over already: a duplicate or late report. Nothing was changed."""
    UNKNOWN = "unknown"
    """Neither the proc nor the frame exists."""
    ALIVE = "alive"
    """A lost run that proved to be alive, or whose host came back. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """One report's or request's end. ``state`` is the frame's new state when it was stopped."""

    proc_id: str
    frame_id: str | None
    verdict: RunVerdict
    state: FrameState | None = None
    exit_status: int | None = None


CompletionOutcome = RunOutcome


@dataclass(frozen=True, slots=True)
class RunsEnded:
    """What one transaction did. ``released`` are procs this call deleted, ``hosts`` those that got room back."""

    outcomes: tuple[RunOutcome, ...]
    released: tuple[str, ...] = ()
    ledger_procs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    finished_jobs: tuple[str, ...] = ()
    freed_frames: int = 0
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """Rules of a farm that runs end under (settings ``release``)."""

    satisfy_only_on_frame_success: bool = True


class EventCounts:
    """Thread-safe event counts for metrics. ``observer`` is told every increase as it happens."""

    def __init__(self, observer: Callable[[str, int], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._observer = observer

    def add(self, event: str, amount: int = 1) -> None:
        """Count ``event``."""
        with self._lock:
            self._counts[event] += amount
        if self._observer is not None:
            self._observer(event, amount)

    def __getitem__(self, event: str) -> int:
        with self._lock:
            return self._counts[event]

    def snapshot(self) -> Mapping[str, int]:
        """All counts at this moment."""
        with self._lock:
            return dict(self._counts)
