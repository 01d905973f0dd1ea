"""Handing a show from Cuebot to this scheduler, and back (design section 4, "Flips").

Cuebots remember for up to 30 s whose a show is. So on the way in its booking is off from the first moment, what runs is
counted and its caps are loaded, the quarantine passes, what was booked meanwhile is counted too, and only then frames
are booked. On the way out booking is off until every commit under way is over; then, while nobody can release a proc of
the show, the accounting tables are brought to what runs, in the transaction that changes the flag.

For 30 s after that a Cuebot may still delete procs without decrementing the tables, because it believes that the show
is ours. So a show that was handed back is remembered, and a later recompute brings its tables up to date again.

One process at a time flips a show. One that dies on the way leaves the show with its booking off, which
`opencue-sched show list` shows; flipping again, either way, completes it: that booking was on is kept in Redis.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.managed import forget_others, note_imported
from opencue_sched.accounting.recompute import recompute
from opencue_sched.accounting.reconcile import additions, snapshot_of
from opencue_sched.accounting.show_import import CUEBOT_CACHE_SECONDS
from opencue_sched.errors import NotReady, SchedulerError
from opencue_sched.settings import Settings
from opencue_sched.store import shows
from opencue_sched.store.accounting import managed_show_ids, refresh_tables, show_version

log = structlog.get_logger(__name__)

UNFINISHED_PREFIX = "flip:unfinished:"
"""Before a show's id: a key in Redis that is there while a flip is, and remains when it dies, for a day."""

HANDED_BACK = "handed-back:shows"
"""Sorted set of shows given back to Cuebot, by when every Cuebot knows (Redis TIME, seconds)."""

_UNFINISHED_SECONDS = 24 * 3600
_LOOKED_AFTER_SECONDS = 600


class FlipUnderWay(SchedulerError):
    """Somebody is flipping this show."""


@dataclass(frozen=True, slots=True)
class Flip:
    """What a flip did. ``counted``: procs the ledger took over, or gave up; ``store_ready`` False: Redis was not open,
    so that the first worker counts everything before it books."""

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
    """Make a show managed by this scheduler. ``booking``: whether it books in the end; None: as it is found."""
    with engine.begin() as connection:
        show = shows.lock_show(connection, show_id)
        booking = show.booking if booking is None else booking
        if show.managed and show.booking == booking:
            return Flip(False, show.booking)
        shows.set_show_flag(connection, show_id, "b_booking_enabled", False)
        shows.set_show_flag(connection, show_id, "b_scheduler_managed", True)
        version = show_version(connection, show_id)
        counted = _count_unseen(connection, ledger, show_id)
    ready, more, caps = _count(engine, ledger, show_id, age_seconds)
    counted += more
    if quarantine_seconds > 0:
        sleep(quarantine_seconds)
        ready, more, _ = _count(engine, ledger, show_id, age_seconds)
        counted += more
    with engine.begin() as connection:
        shows.lock_show(connection, show_id)
        alone = show_version(connection, show_id) == version
        if booking:
            shows.set_show_flag(connection, show_id, "b_booking_enabled", True)
        # Had anybody changed the row, the show may have been away: whoever would book there counts it then.
        if ready and alone:
            ready = _note(connection, ledger, show_id)
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
        shows.set_show_flag(connection, show_id, "b_booking_enabled", False)
    if settle_seconds > 0:
        sleep(settle_seconds)
    with engine.begin() as connection:
        shows.lock_show(connection, show_id)
        refresh_tables(engine, [show_id], as_cuebot=True)
        shows.set_show_flag(connection, show_id, "b_scheduler_managed", False)
        shows.set_show_flag(connection, show_id, "b_booking_enabled", booking)
    _remember_handed_back(ledger.client, show_id)
    ready, counted, _ = _count(engine, ledger, show_id, age_seconds, caps=False)
    log.info("show_unmanaged", show=show_id, retired=counted, store_ready=ready)
    return Flip(True, booking, ready, counted)


def notice_flips(engine: Engine, client: redis.Redis) -> list[str]:
    """Shows that are not managed any more, since the last call: whoever gave them back, late Cuebots are made up for.

    A show that comes again is counted before anything is booked there (accounting.counted). Raises NotReady.
    """

    def managed() -> frozenset[str]:
        with engine.begin() as connection:
            return managed_show_ids(connection)

    gone = forget_others(client, managed)
    for show_id in gone:
        _remember_handed_back(client, show_id)
    return gone


def follow_handed_back(engine: Engine, ledger: Ledger, *, age_seconds: float) -> list[str]:
    """What hand_back() does with the flag, for shows of which a Cuebot has just changed the flag and nothing else.

    Until then their tables are as old as the last recompute, and Cuebot books by them. Of all processes that hear of it
    one finds a show gone. Of a commit of ours that had read the flag before, look_after_handed_back() takes care.
    Raises NotReady, RedisError and SQLAlchemy's errors; what is left undone the next recompute does.
    """
    gone = notice_flips(engine, ledger.client)
    if gone:
        rows = sum(refresh_tables(engine, gone, managed=False, as_cuebot=True).values())
        retired = recompute(engine, ledger, gone, age_seconds=age_seconds, write_tables=False).healed
        log.info("shows_handed_back", shows=gone, rows=rows, retired=retired)
    return gone


def look_after_handed_back(engine: Engine, client: redis.Redis) -> int:
    """Bring the tables of shows given back to Cuebot up to date, once every Cuebot knows; returns the rows written.

    Again for ten minutes, because a row that somebody holds is passed over. Raises RedisError.
    """
    now = float(client.time()[0])
    due = [str(show) for show in client.zrange(HANDED_BACK, "-inf", str(now), byscore=True)]
    if not due:
        return 0
    written = sum(refresh_tables(engine, due, managed=False, as_cuebot=True).values())
    client.zremrangebyscore(HANDED_BACK, "-inf", now - _LOOKED_AFTER_SECONDS)
    log.info("tables_of_handed_back_shows", shows=len(due), rows=written)
    return written


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

    ``wait_seconds`` without booking: the quarantine on the way in, the settling on the way out. Raises FlipUnderWay.
    """
    with _only_flip(engine, show_id) as lock:

        def wait(seconds: float) -> None:
            sleep(seconds)
            shows.keep_flip_lock(lock)

        with engine.connect() as connection:
            (show,) = shows.list_shows(connection, show_id)
        booking = show.booking or _was_booking(ledger.client, show_id)
        if show.managed == managed and show.booking == booking:
            _remember(ledger.client, show_id, False)
            return Flip(False, booking)
        _remember(ledger.client, show_id, booking)
        how: dict[str, Any] = {"age_seconds": age_seconds, "booking": booking, "sleep": wait}
        if managed:
            flip = hand_over(engine, ledger, show_id, quarantine_seconds=wait_seconds, **how)
        else:
            flip = hand_back(engine, ledger, show_id, settle_seconds=wait_seconds, **how)
        _remember(ledger.client, show_id, False)
    return flip


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


def _remember(client: redis.Redis, show_id: str, booking: bool) -> None:
    """Keep, or no longer keep, that a show books again after its flip. Without Redis a flip goes on, unremembered."""
    try:
        if booking:
            client.set(UNFINISHED_PREFIX + show_id, "1", ex=_UNFINISHED_SECONDS)
        else:
            client.delete(UNFINISHED_PREFIX + show_id)
    except redis.RedisError as error:
        log.warning("unfinished_flip_not_kept", show=show_id, error=str(error))


def _remember_handed_back(client: redis.Redis, show_id: str) -> None:
    try:
        client.zadd(HANDED_BACK, {show_id: float(client.time()[0]) + CUEBOT_CACHE_SECONDS})
    except redis.RedisError as error:
        log.warning("handed_back_show_not_remembered", show=show_id, error=str(error))


def _count_unseen(connection: Connection, ledger: Ledger, show_id: str) -> int:
    """Count what runs of the show before anybody sees its new flag; how many procs were not counted yet.

    From then on its frames are not foreign to a limit any more: were they not in the ledger, others could book their
    licences again.
    """
    try:
        missing = additions(snapshot_of(connection, [show_id]).entries)
        return ledger.apply(missing, epoch=ledger.epoch()).count
    except NotReady as error:
        log.info("flip_left_to_bootstrap", show=show_id, reason=str(error))
        return 0


def _note(connection: Connection, ledger: Ledger, show_id: str) -> bool:
    """Note that the show is counted as this transaction leaves its row; whether the store took the note."""
    try:
        note_imported(ledger.client, {show_id: str(show_version(connection, show_id))})
    except NotReady as error:
        log.info("flip_left_to_bootstrap", show=show_id, reason=str(error))
        return False
    return True


def _count(
    engine: Engine, ledger: Ledger, show_id: str, age_seconds: float, *, caps: bool = True
) -> tuple[bool, int, int]:
    """Bring the ledger to what runs of the show. A store that is not open is left to its bootstrap."""
    try:
        written = reseed_limits(engine, ledger, [show_id]).written if caps else 0
        return True, recompute(engine, ledger, [show_id], age_seconds=age_seconds, renew=caps).healed, written
    except NotReady as error:
        log.info("flip_left_to_bootstrap", show=show_id, reason=str(error))
        return False, 0, 0
