"""Which shows this scheduler accounts for, and whether their releases can reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import cast

import redis
from redis.exceptions import WatchError
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import answering
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


# The notes of which shows are counted: what runs of them is in the ledger (accounting.counted).

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Note:
    """``version`` of the show's row when it was counted; ``due``: when to count it again, by Redis TIME, or 0."""

    version: str
    due: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.version}|{self.due:.3f}"

    @classmethod
    def parse(cls, text: str | None) -> Note | None:
        """None for no note, and for one nobody understands."""
        version, found, due = (text or "").partition("|")
        try:
            return cls(version, float(due)) if found else None
        except ValueError:
            return None


def imported_shows(client: redis.Redis) -> dict[str, str]:
    """Shows that are counted for good, each with the version of its row then. Raises NotReady.

    To be read before PostgreSQL is asked for frames that the ledger does not have: a show that is counted in between is
    taken for one that is not, and its frames count twice for a moment rather than not at all.
    """
    with answering():
        texts = cast("Mapping[str, str]", client.hgetall(keys.IMPORTED))
    notes = {show_id: Note.parse(text) for show_id, text in texts.items()}
    return {show_id: note.version for show_id, note in notes.items() if note is not None and not note.due}


def note_imported(client: redis.Redis, versions: Mapping[str, str]) -> None:
    """These shows are counted, as their rows were in these versions: by a flip, or by filling the store.

    A row that was changed since belongs to a show that may have been away meanwhile: it is counted again.
    """
    if versions:
        with answering():
            client.hset(keys.IMPORTED, mapping={show: Note(version).text for show, version in versions.items()})


def forget_others(client: redis.Redis, managed: Callable[[], Collection[str]]) -> list[str]:
    """Forget the shows that are not managed any more; returns them.

    The notes are read before ``managed`` is asked, and nothing is forgotten if any was written since: a show that is
    handed over meanwhile keeps its note. What is left then is found by the next call.
    """
    with answering(), client.pipeline(transaction=True) as pipe:
        for _ in range(_TRIES):
            pipe.watch(keys.IMPORTED)  # type: ignore[no-untyped-call]
            noted = cast("list[str]", pipe.hkeys(keys.IMPORTED))
            gone = sorted(set(noted) - set(managed()))
            if not gone:
                return []
            pipe.multi()
            pipe.hdel(keys.IMPORTED, *gone)
            try:
                pipe.execute()
            except WatchError:
                continue
            return gone
    return []
