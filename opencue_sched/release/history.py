"""Writing down the frame history that newer OpenCue databases queue, where no Cuebot does it.

The queue grows with every frame that starts or ends; an event that cannot be written must not keep those behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from opencue_sched.release.ending import database_away
from opencue_sched.store.schema_history import Drained, drain_frame_history

_log = structlog.get_logger(__name__)

BATCH = 1000
"""Events of one transaction."""

HISTORY_SECONDS = 15.0
"""No batch is begun after this long."""


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """``events`` left the queue; ``skipped`` of them were not written: refused, or their job has no history."""

    events: int = 0
    skipped: int = 0


def drain_history(
    engine: Engine,
    *,
    batch: int = BATCH,
    seconds: float = HISTORY_SECONDS,
    timer: Callable[[], float] = time.monotonic,
) -> HistoryReport:
    """Drain the queue, batch by batch, to its end or for so long. A failure is logged, and ends it."""
    until = timer() + seconds
    report = HistoryReport()
    while True:
        try:
            drained = _drain(engine, batch)
        except SQLAlchemyError as error:
            _log.error("frame_history_not_drained", error=str(error).strip(), drained=report.events)
            return report
        report = HistoryReport(report.events + drained.events, report.skipped + drained.skipped)
        if drained.events < batch or timer() >= until:
            return report


def _drain(engine: Engine, batch: int) -> Drained:
    """One batch at once or, if the database refuses it, event by event."""
    try:
        with engine.begin() as connection:
            return drain_frame_history(connection, events=batch)
    except DBAPIError as error:
        if database_away(error):
            raise
        _log.warning("frame_history_batch_refused", error=str(error.orig).strip())
    with engine.begin() as connection:
        drained = drain_frame_history(connection, events=batch, one_by_one=True)
    for detail in drained.refused:
        _log.error("frame_history_event_skipped", detail=detail)
    return drained
