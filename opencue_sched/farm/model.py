"""The values of the release path: what a run's end is asked for with, and what became of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from opencue_sched.domain.farm import ExitStatus, FrameState


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


@dataclass(frozen=True, slots=True)
class RunsEnded:
    """What one transaction did. ``ledger_procs`` are deleted procs whose bookings are still in the ledger, ``hosts``
    those that got resources back."""

    outcomes: tuple[RunOutcome, ...]
    ledger_procs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    finished_jobs: tuple[str, ...] = ()
    attempts: int = 1


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
