"""Turns notifications into sweeps: new work, freed hosts, changed caps - a few milliseconds after their commit.

Everything that arrives while a sweep runs goes into the next one, so a burst of ten thousand notifications costs two
sweeps. When a store is in trouble, what arrived is kept for the next try. Sweeps by beat remain the safety net.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.coordination.rounds import Rounds
from opencue_sched.dispatch.store_trouble import is_trouble

DEBOUNCE_SECONDS = 0.01
_AFTER_AN_ERROR_SECONDS = 0.25
_LONGEST_RETRY_SECONDS = 2.0

SweepFor = Callable[[frozenset[str], frozenset[str]], float]
"""``sweep(show ids, host ids)`` returns after how many seconds it wants to hear of the same hosts again; 0: never."""


class Waker(Rounds):
    """One thread; ``shows`` and ``hosts`` may be called from any."""

    def __init__(self, sweep: SweepFor) -> None:
        super().__init__(
            "waker",
            self._wake,
            failed="wake_up_left_for_later",
            retry_seconds=_AFTER_AN_ERROR_SECONDS,
            longest_retry_seconds=_LONGEST_RETRY_SECONDS,
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
        try:
            again = self._sweep(shows, hosts)
        except (SQLAlchemyError, RedisError) as error:
            # A plain sweep does not rouse what rests. What can never be asked for must not keep the others from it.
            if is_trouble(error):
                self._keep(shows, hosts)
            raise
        if again <= 0:
            return None
        self._keep(frozenset(), hosts)
        return again

    def _keep(self, shows: frozenset[str], hosts: frozenset[str]) -> None:
        with self._lock:
            self._shows |= shows
            self._hosts |= hosts
