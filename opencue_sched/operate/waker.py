"""Turns notifications into sweeps: new work, freed hosts, changed caps - a few milliseconds after their commit.

Everything that arrives while a sweep runs goes into the next one, so a burst of ten thousand notifications costs two
sweeps. Sweeps by beat remain the safety net.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from opencue_sched.coordination.rounds import Rounds

DEBOUNCE_SECONDS = 0.01
_AFTER_AN_ERROR_SECONDS = 0.25

SweepFor = Callable[[frozenset[str], frozenset[str]], float]
"""``sweep(show ids, host ids)`` returns after how many seconds it wants to hear of the same hosts again; 0: never."""


class Waker(Rounds):
    """One thread; ``shows`` and ``hosts`` may be called from any."""

    def __init__(self, sweep: SweepFor) -> None:
        super().__init__(
            "waker",
            self._wake,
            failed="wake_up_left_to_the_next_sweep",
            retry_seconds=_AFTER_AN_ERROR_SECONDS,
            gather_seconds=DEBOUNCE_SECONDS,
        )
        self._sweep = sweep
        self._lock = threading.Lock()
        self._shows: set[str] = set()
        self._hosts: set[str] = set()

    def shows(self, ids: Collection[str]) -> None:
        """These shows have new work, or more room."""
        self._note(self._shows, ids)

    def hosts(self, ids: Collection[str]) -> None:
        """Something was given back on these hosts."""
        self._note(self._hosts, ids)

    def _note(self, into: set[str], ids: Collection[str]) -> None:
        with self._lock:
            into.update(ids)
        self.want()

    def _wake(self) -> float | None:
        with self._lock:
            shows, hosts = frozenset(self._shows), frozenset(self._hosts)
            self._shows.clear()
            self._hosts.clear()
        if not (shows or hosts):
            return None
        again = self._sweep(shows, hosts)
        if again <= 0:
            return None
        with self._lock:
            self._hosts |= hosts
        return again
