"""Turns notifications into sweeps: new work, freed hosts, changed caps - a few milliseconds after their commit.

Everything that arrives while a sweep runs goes into the next one, so a burst of ten thousand notifications costs two
sweeps. Sweeps by beat remain the safety net.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

log = structlog.get_logger(__name__)

DEBOUNCE_SECONDS = 0.01

SweepFor = Callable[[frozenset[str], frozenset[str]], float]
"""``sweep(show ids, host ids)`` returns after how many seconds it wants to hear of the same hosts again; 0: never."""


class Waker:
    """One thread; ``shows`` and ``hosts`` may be called from any."""

    def __init__(self, sweep: SweepFor) -> None:
        self._sweep = sweep
        self._lock = threading.Lock()
        self._shows: set[str] = set()
        self._hosts: set[str] = set()
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def shows(self, ids: Collection[str]) -> None:
        """These shows have new work, or more room."""
        self._note(self._shows, ids)

    def hosts(self, ids: Collection[str]) -> None:
        """Something was given back on these hosts."""
        self._note(self._hosts, ids)

    def _note(self, into: set[str], ids: Collection[str]) -> None:
        with self._lock:
            into.update(ids)
        self._wanted.set()

    def _run(self) -> None:
        again: float | None = None
        while not self._stopped.is_set():
            self._wanted.wait(again)
            again = None
            self._stopped.wait(DEBOUNCE_SECONDS)
            self._wanted.clear()
            with self._lock:
                shows, hosts = frozenset(self._shows), frozenset(self._hosts)
                self._shows.clear()
                self._hosts.clear()
            if not (shows or hosts) or self._stopped.is_set():
                continue
            try:
                if (pause := self._sweep(shows, hosts)) > 0:
                    again = pause
                    with self._lock:
                        self._hosts |= hosts
            except (SQLAlchemyError, RedisError) as error:
                log.warning("wake_up_left_to_the_next_sweep", shows=len(shows), hosts=len(hosts), error=str(error))
            except Exception:
                log.exception("wake_up_left_to_the_next_sweep", shows=len(shows), hosts=len(hosts))
