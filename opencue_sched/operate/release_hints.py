"""Cuebot's notifications as hints (release_feed = "cuebot-notify"): something was released, or a cap changed.

Cuebot names no proc, so a release cannot be taken off by id: its show is reconciled instead. Every worker listens, but
one consumer in the fleet acts, elected by the leader gate; the others forget what they hear. Who is elected begins by
looking at everything, which covers what was said while nobody led, and after each lost connection does so again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.rounds import STOP_SECONDS, Rounds

ROLE = "release-feed"
"""The elected role; one for all facilities, since they share the counters."""

DEBOUNCE_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0

ReconcileShows = Callable[[frozenset[str]], object]
LoadCaps = Callable[[frozenset[str]], object]


class ReleaseHints(Rounds):
    """One thread. ``show``, ``vertex`` and ``everything`` may be called from any.

    ``reconcile(show ids)`` and ``load_caps(vertex names)`` follow hints, ``look_at_all()`` reads everything again.
    """

    def __init__(
        self,
        gate: LeaderGate,
        *,
        reconcile: ReconcileShows,
        load_caps: LoadCaps,
        look_at_all: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "release-hints",
            self._lead_or_forget,
            failed="hints_left_for_later",
            retry_seconds=DEBOUNCE_SECONDS,
            longest_retry_seconds=_LONGEST_WAIT_SECONDS,
            gather_seconds=DEBOUNCE_SECONDS,
        )
        self._gate = gate
        self._reconcile = reconcile
        self._load_caps = load_caps
        self._look_at_all = look_at_all
        self._clock = clock
        self._lock = threading.Lock()
        self._shows: set[str] = set()
        self._vertices: set[str] = set()
        self._all = True

    @property
    def leads(self) -> bool:
        """Whether this process is the one that acts."""
        return self._gate.lease is not None

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        ended = super().stop(timeout)
        if ended:
            self._gate.resign()
        return ended

    def show(self, show_id: str) -> None:
        """Something of this show was released."""
        with self._lock:
            self._shows.add(show_id)
        self.want()

    def vertex(self, name: str) -> None:
        """A cap changed: ``sub:{show}:{alloc}``, ``folder:{id}`` or ``job:{id}``."""
        with self._lock:
            self._vertices.add(name)
        self.want()

    def everything(self) -> None:
        """Hints may have been missed."""
        with self._lock:
            self._all = True
        self.want()

    def _lead_or_forget(self) -> float:
        if self._gate.renew() is None:
            self._forget()
        else:
            self._follow()
        return min(self._gate.next_look, _LONGEST_WAIT_SECONDS)

    def _forget(self) -> None:
        """Another process acts on them. Should this one be elected next, it looks at everything first."""
        with self._lock:
            self._shows.clear()
            self._vertices.clear()
            self._all = True

    def _follow(self) -> None:
        with self._lock:
            shows, vertices, look_at_all = frozenset(self._shows), frozenset(self._vertices), self._all
            self._shows.clear()
            self._vertices.clear()
            self._all = False
        began = self._clock()
        try:
            if look_at_all:
                self._look_at_all()
            if vertices:
                self._load_caps(vertices)
            if shows and not look_at_all:
                self._reconcile(shows)
        except Exception:
            with self._lock:
                self._all = True
            raise
        finally:
            # However many hints arrive, at most half of the time goes into them.
            if shows or vertices or look_at_all:
                self.pause(self._clock() - began)
