"""Which shows this scheduler accounts for, and whether their releases can reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Engine

from opencue_sched.store import accounting as store

DEFAULT_TTL_SECONDS = 30.0


class ManagedShows:
    """``b_scheduler_managed`` of all shows, remembered for ``ttl`` seconds (Cuebots remember it as long)."""

    def __init__(
        self, engine: Engine, ttl: float = DEFAULT_TTL_SECONDS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._ids: frozenset[str] = frozenset()
        self._read_at = float("-inf")

    def ids(self) -> frozenset[str]:
        """Ids of the managed shows, at most ``ttl`` seconds old. Raises SQLAlchemy's errors when they must be read."""
        with self._lock:
            now = self._clock()
            if now - self._read_at >= self._ttl:
                with self._engine.begin() as connection:
                    self._ids = store.managed_show_ids(connection)
                self._read_at = now
            return self._ids

    def forget(self) -> None:
        """Read again at the next call (a show was flipped)."""
        with self._lock:
            self._read_at = float("-inf")


@dataclass(frozen=True, slots=True)
class FeedCheck:
    """The seed's guardrail. ``misconfigured`` goes to the gauge ``cuebot_redis_publish_misconfigured``."""

    misconfigured: bool
    managed_shows: int
    message: str


def check_release_feed(engine: Engine, release_feed: str) -> FeedCheck:
    """Managed shows exist, but can what deletes their procs tell us? Warn loudly; never refuse to start.

    ``release_feed`` is accounting.release_feed. ``cuebot-redis`` is taken at its word: whether every
    Cuebot publishes cannot be seen from here.
    """
    with engine.begin() as connection:
        managed = len(store.managed_show_ids(connection))
        triggered = store.has_release_trigger(connection)
    if not managed:
        return FeedCheck(False, 0, "no show is managed by this scheduler")
    if release_feed == "proc-trigger" and not triggered:
        return FeedCheck(
            True,
            managed,
            f"{managed} managed shows, but the trigger that announces deleted procs is not in the database: "
            "released cores stay booked until the next recompute. Run `opencue-sched migrate`.",
        )
    if release_feed == "recompute-only":
        return FeedCheck(
            True,
            managed,
            f"{managed} managed shows with accounting.release_feed=recompute-only: cores released by others stay "
            "booked until the next recompute.",
        )
    return FeedCheck(False, managed, f"{managed} managed shows, releases arrive by {release_feed}")
