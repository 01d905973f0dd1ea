"""Cuebot's notifications as hints (release_feed = "cuebot-notify"): something was released, or a cap changed.

Cuebot names no proc, so a release cannot be taken off by id: its show is reconciled instead. Every worker listens, but
one consumer in the fleet acts, elected by the leader gate; the others forget what they hear. Who is elected begins by
looking at everything, which covers what was said while nobody led, and after each lost connection does so again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.domain.errors import NotReady

log = structlog.get_logger(__name__)

ROLE = "release-feed"
"""The elected role; one for all facilities, since they share the counters."""

DEBOUNCE_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0

ReconcileShows = Callable[[frozenset[str]], object]
LoadCaps = Callable[[frozenset[str]], object]


class ReleaseHints:
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
        self._gate = gate
        self._reconcile = reconcile
        self._load_caps = load_caps
        self._look_at_all = look_at_all
        self._clock = clock
        self._lock = threading.Lock()
        self._shows: set[str] = set()
        self._vertices: set[str] = set()
        self._all = True
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="release-hints", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that acts."""
        return self._gate.lease is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def show(self, show_id: str) -> None:
        """Something of this show was released."""
        with self._lock:
            self._shows.add(show_id)
        self._wanted.set()

    def vertex(self, name: str) -> None:
        """A cap changed: ``sub:{show}:{alloc}``, ``folder:{id}`` or ``job:{id}``."""
        with self._lock:
            self._vertices.add(name)
        self._wanted.set()

    def everything(self) -> None:
        """Hints may have been missed."""
        with self._lock:
            self._all = True
        self._wanted.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wanted.wait(min(self._gate.next_look, _LONGEST_WAIT_SECONDS) + DEBOUNCE_SECONDS)
            self._stopped.wait(DEBOUNCE_SECONDS)
            self._wanted.clear()
            if self._gate.renew() is None:
                self._forget()
            elif not self._stopped.is_set():
                self._follow()
        self._gate.resign()

    def _forget(self) -> None:
        """Another process acts on them. Should this one be elected next, it looks at everything first."""
        with self._lock:
            self._shows.clear()
            self._vertices.clear()
            self._all = True

    def _try_again(self) -> None:
        with self._lock:
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
        except (NotReady, RedisError, SQLAlchemyError) as error:
            log.warning("hints_left_for_later", shows=len(shows), vertices=len(vertices), error=str(error))
            self._try_again()
        except Exception:
            log.exception("hints_left_for_later", shows=len(shows), vertices=len(vertices))
            self._try_again()
        # However many hints arrive, at most half of the time goes into them.
        if shows or vertices or look_at_all:
            self._stopped.wait(self._clock() - began)
