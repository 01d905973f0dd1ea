"""Handing a show from Cuebot to this scheduler, and back (design section 4, "Flips").

Cuebots remember for up to 30 s whose a show is. So on the way in its booking is off from the first moment, what runs is
counted and its caps are loaded, the quarantine passes, what was booked meanwhile is counted too, and only then frames
are booked. On the way out booking is off until every commit under way is over; then, while nobody can release a proc of
the show, the accounting tables are brought to what runs, in the transaction that changes the flag.

A process that dies on the way leaves the show with its booking off, which `opencue-sched show list` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy import Engine

from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.domain.errors import NotReady
from opencue_sched.store import admin
from opencue_sched.store.accounting_tables import refresh_tables

log = structlog.get_logger(__name__)

CUEBOT_CACHE_SECONDS = 30.0
"""How long a Cuebot may believe that a show is still its own."""


@dataclass(frozen=True, slots=True)
class Flip:
    """What a flip did. ``counted``: procs the ledger took over, or gave up; ``store_ready`` False: Redis was not open,
    so that the first worker counts everything before it books."""

    changed: bool
    booking: bool
    store_ready: bool = True
    counted: int = 0
    caps: int = 0


def hand_over(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    quarantine_seconds: float,
    age_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Make a show managed by this scheduler."""
    with engine.begin() as connection:
        show = admin.lock_show(connection, show_id)
        if show.managed:
            return Flip(False, show.booking)
        admin.set_show_flag(connection, show_id, "b_booking_enabled", False)
        admin.set_show_flag(connection, show_id, "b_scheduler_managed", True)
    ready, counted, caps = _count(engine, ledger, show_id, age_seconds)
    if quarantine_seconds > 0:
        sleep(quarantine_seconds)
        ready, more, _ = _count(engine, ledger, show_id, age_seconds)
        counted += more
    if show.booking:
        with engine.begin() as connection:
            admin.set_show_flag(connection, show_id, "b_booking_enabled", True)
    log.info("show_managed", show=show_id, counted=counted, store_ready=ready)
    return Flip(True, show.booking, ready, counted, caps)


def hand_back(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    settle_seconds: float,
    age_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Give a show back to Cuebot. ``settle_seconds``: by then every booking under way is committed or refused."""
    with engine.begin() as connection:
        show = admin.lock_show(connection, show_id)
        if not show.managed:
            return Flip(False, show.booking)
        admin.set_show_flag(connection, show_id, "b_booking_enabled", False)
    if settle_seconds > 0:
        sleep(settle_seconds)
    with engine.begin() as connection:
        admin.lock_show(connection, show_id)
        refresh_tables(engine, [show_id])
        admin.set_show_flag(connection, show_id, "b_scheduler_managed", False)
        admin.set_show_flag(connection, show_id, "b_booking_enabled", show.booking)
    ready, counted, _ = _count(engine, ledger, show_id, age_seconds, caps=False)
    log.info("show_unmanaged", show=show_id, retired=counted, store_ready=ready)
    return Flip(True, show.booking, ready, counted)


def _count(
    engine: Engine, ledger: Ledger, show_id: str, age_seconds: float, *, caps: bool = True
) -> tuple[bool, int, int]:
    """Bring the ledger to what runs of the show. A store that is not open is left to its bootstrap."""
    try:
        written = reseed_limits(engine, ledger, [show_id]).written if caps else 0
        return True, recompute(engine, ledger, [show_id], age_seconds=age_seconds).healed, written
    except NotReady as error:
        log.info("flip_left_to_bootstrap", show=show_id, reason=str(error))
        return False, 0, 0
