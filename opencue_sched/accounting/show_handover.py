"""A show's way from Cuebot to this scheduler and back (design section 4, "Flips"): the one state machine of it.

::

      Cuebot's --- flag set ---> new --- first import ---> quarantined --- second import ---> ours
         ^                        ^                             |                              |
         |                        +---------------------------- | ------- row changed since ---+
         |                                                      |                              |
         +-- tables written again -- handed back <-- flag cleared, tables written -------------+

========== ======================= ============================================ ============================
state      b_scheduler_managed     acct:counted (ImportNote)                    booked by this scheduler
========== ======================= ============================================ ============================
Cuebot's   off                     none                                         no: Cuebot does
new        on                      none, or one of another version of the row   no: import_show() comes first
quarantined on                     ``due`` is ahead                             no
ours       on                      this version of the row, ``due`` is 0        yes
handed back off                    none; ``handed-back:shows`` has it           no
========== ======================= ============================================ ============================

An *import* brings caps and ledger to what runs of the show. Two things move a show: our own command (flip_show), which
also switches its booking off for as long as it takes; or a Cuebot, which changes the flag and nothing else. Then
the first worker that would book there imports the show (ImportedShows), and a notification makes one process do what is
left of handing it back (follow_handed_back).

Why to wait: a Cuebot remembers for ``CUEBOT_CACHE_SECONDS`` whose a show is. It may book a quarantined show as its own,
which the second import finds; and it may delete procs of a show that was handed back without decrementing the
accounting tables, which are therefore brought up to date once more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog
from redis.exceptions import WatchError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import ImportNote, imported_shows, note_imported, reseed_limits
from opencue_sched.accounting.ledger import Ledger, answering
from opencue_sched.accounting.recompute import RecomputeReport, recompute
from opencue_sched.accounting.reconcile import Cause, additions, snapshot_of
from opencue_sched.errors import NotReady, SchedulerError
from opencue_sched.settings import Settings
from opencue_sched.store import shows
from opencue_sched.store.accounting import (
    has_release_trigger,
    managed_show_ids,
    managed_show_versions,
    refresh_tables,
    show_version,
)

log = structlog.get_logger(__name__)

CUEBOT_CACHE_SECONDS = 30.0
"""How long a Cuebot may believe that a show is still its own, or still ours."""

UNFINISHED_PREFIX = "flip:unfinished:"
"""Before a show's id: a key in Redis that is there while our command is, and remains for a day when that dies."""

HANDED_BACK = "handed-back:shows"
"""Sorted set of shows given back to Cuebot, by when every Cuebot knows (Redis TIME, seconds)."""

_UNFINISHED_SECONDS = 24 * 3600
_REFRESHED_SECONDS = 600
_TRIES = 3


# Whose a show is, for those who only want to know.


class ManagedShows:
    """``b_scheduler_managed`` of all shows, remembered for ``ttl`` seconds. Thread-safe."""

    def __init__(self, engine: Engine, ttl: float = 30.0, *, clock: Callable[[], float] = time.monotonic) -> None:
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
                self._ids, self._read_at = _managed(self._engine), now
            return self._ids


def _managed(engine: Engine) -> frozenset[str]:
    with engine.begin() as connection:
        return managed_show_ids(connection)


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
        managed = len(managed_show_ids(connection))
        triggered = has_release_trigger(connection)
    if not managed:
        return FeedCheck(False, 0, "no show is managed by this scheduler")
    late = "cores released by others stay booked until the next recompute."
    if release_feed == "proc-trigger" and not triggered:
        why = f"the trigger that announces deleted procs is not in the database: {late} Run `opencue-sched migrate`."
        return FeedCheck(True, managed, f"{managed} managed shows, but {why}")
    if release_feed == "recompute-only":
        return FeedCheck(True, managed, f"{managed} managed shows with accounting.release_feed=recompute-only: {late}")
    return FeedCheck(False, managed, f"{managed} managed shows, releases arrive by {release_feed}")


# From new to ours: by the worker that would book the show.


class ImportedShows:
    """Imports a show before its first booking. Thread-safe; remembers per process which shows are ours by now.

    ``cuebots``: some may be there, so that a new show has its quarantine. ``age_seconds`` is accounting.in_flight_age.
    """

    def __init__(self, engine: Engine, ledger: Ledger, *, cuebots: bool, age_seconds: float) -> None:
        self._engine = engine
        self._ledger = ledger
        self._cuebots = cuebots
        self._age = age_seconds
        self._ours: dict[str, tuple[str, str]] = {}

    def admits(self, show_id: str) -> bool:
        """Whether the show is ours, so that its frames may be booked now; imports it if that is what it takes.

        Raises NotReady and SQLAlchemy's errors: then nothing may be booked.
        """
        with self._engine.begin() as connection:
            version = show_version(connection, show_id)
        if version is None:
            return False
        ours = (self._ledger.epoch().text, version)
        if self._ours.get(show_id) == ours:
            return True
        note, now = self._read(show_id)
        wanted = self._next(show_id, note, version, now)
        if wanted != note:
            with answering():
                self._ledger.client.hset(keys.IMPORTED, show_id, wanted.text)
        if wanted.due:
            return False
        self._ours[show_id] = ours
        return True

    def import_all(self) -> list[str]:
        """Import the managed shows that are not ours yet, also those that book nothing; returns those that failed.

        Until a show is imported its frames count as foreign under their licences, and twice once a recompute has found
        them. Raises as admits() does when a store is lost.
        """
        failed = []
        imported = imported_shows(self._ledger.client)
        with self._engine.begin() as connection:
            versions = managed_show_versions(connection)
        for show_id, version in versions.items():
            if imported.get(show_id) == version:
                continue
            # The note is what others go by: another process may have deleted the one that this process remembers.
            self._ours.pop(show_id, None)
            try:
                self.admits(show_id)
            except Exception as error:
                if _is_loss(error):
                    raise
                log.exception("show_not_imported", show=show_id)
                failed.append(show_id)
        return failed

    def _read(self, show_id: str) -> tuple[ImportNote | None, float]:
        """The note of a show, and Redis TIME in seconds."""
        with answering(), self._ledger.client.pipeline(transaction=False) as pipe:
            pipe.hget(keys.IMPORTED, show_id)
            pipe.time()
            text, (seconds, micros) = pipe.execute()
        return ImportNote.parse(text), float(seconds) + float(micros) / 1e6

    def _next(self, show_id: str, note: ImportNote | None, version: str, now: float) -> ImportNote:
        """The note of the show's next state; imports the show on its way there."""
        ours = ImportNote(version)
        quarantined = ImportNote(version, now + CUEBOT_CACHE_SECONDS) if self._cuebots else ours
        if note is None:
            self._import(show_id)
            return quarantined
        if note.due > now:
            return note
        if note.version != version:
            # The show may have been away. Cuebot booked there only if procs are found that the ledger does not have.
            return quarantined if Cause.MISSING in self._import(show_id).causes else ours
        if note.due:
            self._import(show_id)
        return ours

    def _import(self, show_id: str) -> RecomputeReport:
        _, report = import_show(self._engine, self._ledger, show_id, age_seconds=self._age, write_tables=False)
        log.info("show_imported", show=show_id, procs=report.procs, healed=report.healed)
        return report


def import_show(
    engine: Engine, ledger: Ledger, show_id: str, *, age_seconds: float, write_tables: bool
) -> tuple[int, RecomputeReport]:
    """Bring caps and ledger to what PostgreSQL has of the show; returns how many caps were written. Raises NotReady."""
    caps = reseed_limits(engine, ledger, [show_id]).written
    # Passes under way may have seen the show unmanaged: new numbers for its entries keep them from retiring any.
    return caps, recompute(engine, ledger, [show_id], age_seconds=age_seconds, write_tables=write_tables, renew=True)


def _is_loss(error: Exception) -> bool:
    """Whether the stores are lost, which no show is to blame for: PostgreSQL then says nothing at all."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, NotReady | PoolTimeout)
    silent = isinstance(error, OperationalError | InterfaceError) and not getattr(error.orig, "pgcode", None)
    return silent or error.connection_invalidated


# Our own command: a show is moved either way at once, by one process at a time.


class FlipUnderWay(SchedulerError):
    """Another process is handing this show over, or back."""


@dataclass(frozen=True, slots=True)
class Flip:
    """What our command did. ``counted``: procs the ledger took over, or gave up; ``store_ready`` False: Redis was not
    open, so that the first worker imports the show before it books."""

    changed: bool
    booking: bool
    store_ready: bool = True
    counted: int = 0
    caps: int = 0


def wait_of(settings: Settings, *, managed: bool, cuebots: bool) -> float:
    """Seconds without booking that a flip takes: until Cuebots know, or until no commit of ours is under way."""
    if managed:
        return CUEBOT_CACHE_SECONDS if cuebots else 0.0
    return settings.accounting.commit_deadline


def flip_show(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    managed: bool,
    wait_seconds: float,
    age_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Hand a show over, or back, as the only one who does, completing what a flip that died left.

    ``wait_seconds`` without booking: the quarantine on the way in, the settling on the way out. A flip that dies leaves
    the show with its booking off, which `opencue-sched show list` shows; flipping again, either way, completes it: that
    booking was on is kept in Redis. Raises FlipUnderWay.
    """
    with _only_flip(engine, show_id) as lock:

        def wait(seconds: float) -> None:
            sleep(seconds)
            shows.keep_flip_lock(lock)

        with engine.connect() as connection:
            (show,) = shows.list_shows(connection, show_id)
        booking = show.booking or _was_booking(ledger.client, show_id)
        changes = show.managed != managed or show.booking != booking
        _remember_booking(ledger.client, show_id, changes and booking)
        if not changes:
            return Flip(False, booking)
        how: dict[str, Any] = {"age_seconds": age_seconds, "booking": booking, "sleep": wait}
        if managed:
            flip = hand_over(engine, ledger, show_id, quarantine_seconds=wait_seconds, **how)
        else:
            flip = hand_back(engine, ledger, show_id, settle_seconds=wait_seconds, **how)
        _remember_booking(ledger.client, show_id, False)
    return flip


def hand_over(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    quarantine_seconds: float,
    age_seconds: float,
    booking: bool | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Make a show ours. ``booking``: whether it books in the end; None: as it is found."""
    with engine.begin() as connection:
        show = shows.lock_show(connection, show_id)
        booking = show.booking if booking is None else booking
        if show.managed and show.booking == booking:
            return Flip(False, show.booking)
        # Booking is off until the quarantine is over; a Cuebot in the midst of a booking is found by the second import.
        shows.set_show(connection, show_id, "b_booking_enabled", False)
        shows.set_show(connection, show_id, "b_scheduler_managed", True)
        version = show_version(connection, show_id)
        counted = _import_unseen(connection, ledger, show_id)
    ready, more, caps = _import_if_open(engine, ledger, show_id, age_seconds)
    counted += more
    if quarantine_seconds > 0:
        sleep(quarantine_seconds)
        ready, more, _ = _import_if_open(engine, ledger, show_id, age_seconds)
        counted += more
    with engine.begin() as connection:
        shows.lock_show(connection, show_id)
        alone = show_version(connection, show_id) == version
        if booking:
            shows.set_show(connection, show_id, "b_booking_enabled", True)
        # If the row was changed meanwhile, the show may have been away: it stays new, and is imported before it books.
        if ready and alone:
            ready = _note_ours(connection, ledger, show_id)
    log.info("show_managed", show=show_id, counted=counted, store_ready=ready)
    return Flip(True, booking, ready, counted, caps)


def hand_back(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    settle_seconds: float,
    age_seconds: float,
    booking: bool | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Give a show back to Cuebot. ``settle_seconds``: by then every booking under way is committed or refused.

    ``booking``: whether it books in the end; None: as it is found.
    """
    with engine.begin() as connection:
        show = shows.lock_show(connection, show_id)
        booking = show.booking if booking is None else booking
        if not show.managed:
            return Flip(False, show.booking)
        shows.set_show(connection, show_id, "b_booking_enabled", False)
    if settle_seconds > 0:
        sleep(settle_seconds)
    with engine.begin() as connection:
        # Under this lock nobody can release a proc of the show: so the tables say what runs when the flag changes.
        shows.lock_show(connection, show_id)
        refresh_tables(engine, [show_id], as_cuebot=True)
        shows.set_show(connection, show_id, "b_scheduler_managed", False)
        shows.set_show(connection, show_id, "b_booking_enabled", booking)
    _remember_handed_back(ledger.client, [show_id])
    retired, ready = 0, False
    with _left_to_bootstrap(show_id):
        retired, ready = _retire(engine, ledger, [show_id], age_seconds), True
    log.info("show_unmanaged", show=show_id, retired=retired, store_ready=ready)
    return Flip(True, booking, ready, retired)


@contextlib.contextmanager
def _only_flip(engine: Engine, show_id: str) -> Iterator[Connection]:
    """The lock on flips of this show. Its connection is none of the pool's: it is held for the whole wait."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    connection.detach()
    with contextlib.closing(connection):
        if not shows.lock_flip(connection, show_id):
            raise FlipUnderWay("the show is being handed over or back by somebody else; try again in half a minute")
        try:
            yield connection
        finally:
            try:
                shows.unlock_flip(connection, show_id)
            except SQLAlchemyError as error:
                log.info("flip_lock_went_with_its_session", show=show_id, error=str(error).partition("\n")[0])


def _was_booking(client: redis.Redis, show_id: str) -> bool:
    """Whether the show booked before a flip that died."""
    try:
        return client.get(UNFINISHED_PREFIX + show_id) is not None
    except redis.RedisError as error:
        log.warning("unfinished_flip_not_read", show=show_id, error=str(error))
        return False


def _remember_booking(client: redis.Redis, show_id: str, booking: bool) -> None:
    """Keep, or no longer keep, that a show books again after its flip. Without Redis a flip goes on, unremembered."""
    try:
        if booking:
            client.set(UNFINISHED_PREFIX + show_id, "1", ex=_UNFINISHED_SECONDS)
        else:
            client.delete(UNFINISHED_PREFIX + show_id)
    except redis.RedisError as error:
        log.warning("unfinished_flip_not_kept", show=show_id, error=str(error))


def _import_unseen(connection: Connection, ledger: Ledger, show_id: str) -> int:
    """Add what runs of the show before anybody sees its new flag; how many procs the ledger did not have.

    From then on its frames are not foreign to a limit any more: were they not in the ledger, others could book their
    licences again.
    """
    with _left_to_bootstrap(show_id):
        missing = additions(snapshot_of(connection, [show_id]).entries)
        return ledger.apply(missing, epoch=ledger.epoch()).count
    return 0


def _import_if_open(engine: Engine, ledger: Ledger, show_id: str, age_seconds: float) -> tuple[bool, int, int]:
    """Import the show: whether the store was open, entries put right, caps written."""
    with _left_to_bootstrap(show_id):
        caps, report = import_show(engine, ledger, show_id, age_seconds=age_seconds, write_tables=True)
        return True, report.healed, caps
    return False, 0, 0


def _note_ours(connection: Connection, ledger: Ledger, show_id: str) -> bool:
    """Note that the show is ours with its row as this transaction leaves it; whether the store took the note."""
    with _left_to_bootstrap(show_id):
        note_imported(ledger.client, {show_id: str(show_version(connection, show_id))})
        return True
    return False


@contextlib.contextmanager
def _left_to_bootstrap(show_id: str) -> Iterator[None]:
    """A flip goes on although the store is not open, or lost: its bootstrap imports every managed show."""
    try:
        yield
    except NotReady as error:
        log.info("flip_left_to_bootstrap", show=show_id, reason=str(error))


# From ours to handed back, to Cuebot's: what hand_back() leaves to others, and a Cuebot that changes the flag alone.


def notice_handed_back(engine: Engine, client: redis.Redis) -> list[str]:
    """Note the shows that lost their flag since the last call as handed back, whoever did it; returns them.

    The notes are read before it is asked who is managed, and none is deleted if any was written since: a show that is
    handed over meanwhile keeps its note. What is left then is found by the next call. Raises NotReady.
    """
    with answering(), client.pipeline(transaction=True) as pipe:
        for _ in range(_TRIES):
            pipe.watch(keys.IMPORTED)  # type: ignore[no-untyped-call]
            noted = cast("list[str]", pipe.hkeys(keys.IMPORTED))
            gone = sorted(set(noted) - _managed(engine))
            if not gone:
                return []
            pipe.multi()
            pipe.hdel(keys.IMPORTED, *gone)
            try:
                pipe.execute()
            except WatchError:
                continue
            _remember_handed_back(client, gone)
            return gone
    return []


def follow_handed_back(engine: Engine, ledger: Ledger, *, age_seconds: float) -> list[str]:
    """What hand_back() does with the flag, for shows of which a Cuebot has just changed the flag and nothing else.

    Until then their tables are as old as the last recompute, and Cuebot books by them. Of all processes that hear of it
    one finds a show gone. Of a commit of ours that had read the flag before, refresh_handed_back() takes care.
    Raises NotReady, RedisError and SQLAlchemy's errors; what is left undone the next recompute does.
    """
    gone = notice_handed_back(engine, ledger.client)
    if gone:
        rows = sum(refresh_tables(engine, gone, managed=False, as_cuebot=True).values())
        log.info("shows_handed_back", shows=gone, rows=rows, retired=_retire(engine, ledger, gone, age_seconds))
    return gone


def refresh_handed_back(engine: Engine, client: redis.Redis) -> int:
    """Bring the tables of shows given back to Cuebot up to date, once every Cuebot knows; returns the rows written.

    Again for ten minutes, because a locked row is passed over. Raises RedisError.
    """
    now = float(client.time()[0])
    due = [str(show) for show in client.zrange(HANDED_BACK, "-inf", str(now), byscore=True)]
    if not due:
        return 0
    written = sum(refresh_tables(engine, due, managed=False, as_cuebot=True).values())
    client.zremrangebyscore(HANDED_BACK, "-inf", now - _REFRESHED_SECONDS)
    log.info("tables_of_handed_back_shows", shows=len(due), rows=written)
    return written


def _retire(engine: Engine, ledger: Ledger, show_ids: Sequence[str], age_seconds: float) -> int:
    """Remove the entries of shows that are not managed any more; returns how many. Raises NotReady."""
    return recompute(engine, ledger, show_ids, age_seconds=age_seconds, write_tables=False).healed


def _remember_handed_back(client: redis.Redis, show_ids: Sequence[str]) -> None:
    try:
        known_at = float(client.time()[0]) + CUEBOT_CACHE_SECONDS
        client.zadd(HANDED_BACK, dict.fromkeys(show_ids, known_at))
    except redis.RedisError as error:
        log.warning("handed_back_shows_not_remembered", shows=list(show_ids), error=str(error))
