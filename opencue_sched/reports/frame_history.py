"""Writing down the frame history that newer OpenCue databases queue, where no Cuebot does it.

The queue grows with every frame that starts or ends; an event that cannot be written must not keep those behind it.
"""

from __future__ import annotations

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.store_errors import describe, is_trouble
from opencue_sched.store.frame_history import drain_frame_history

_log = structlog.get_logger(__name__)

HISTORY_EVENTS = 10_000
"""How many events one call writes at most, in one transaction: what 150 frames started and ended a second leave until
the next reap."""


def drain_history(engine: Engine) -> tuple[int, int]:
    """Drain the queue, all at once or, if the database refuses that, event by event. Returns how many events left the
    queue, and how many of these were not written. An error of PostgreSQL is logged and not raised."""
    for one_by_one in (False, True):
        try:
            with engine.begin() as connection:
                left = drain_frame_history(connection, events=HISTORY_EVENTS, one_by_one=one_by_one)
        except SQLAlchemyError as error:
            _log.error("frame_history_not_drained", one_by_one=one_by_one, error=describe(error))
            if is_trouble(error):
                break
        else:
            if left.skipped:
                _log.error("frame_history_events_skipped", events=left.skipped)
            return left.drained, left.skipped
    return 0, 0
