"""Frame history on the OpenCue versions that queue it (after V49; see ``SchemaFacts.has_frame_history_queue``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

_DRAIN = text("SELECT drained, skipped FROM frame_history_drain(:events, false, :one_by_one)")


@dataclass(frozen=True, slots=True)
class Drained:
    """``events`` left the queue, ``skipped`` of them without being written; ``refused`` says which of those failed and
    why, in the words of the database, with the id of the event."""

    events: int
    skipped: int = 0
    refused: tuple[str, ...] = ()


def drain_frame_history(connection: Connection, *, events: int = 1000, one_by_one: bool = False) -> Drained:
    """Write up to ``events`` queued events to frame_history, the oldest first.

    OpenCue's own function does it, under a lock shared with every Cuebot: 0 events also means that another is draining.
    It is all or nothing unless ``one_by_one``, which drops an event that fails with a warning.
    """
    with _warnings(connection) as warnings:
        row = connection.execute(_DRAIN, {"events": events, "one_by_one": one_by_one}).one()
    return Drained(row.drained, row.skipped, tuple(warnings.texts))


class _Warnings:
    """Takes what the server says beside its answers. Not iterable: then SQLAlchemy leaves it alone."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def append(self, notice: str) -> None:
        """Keep the first line of a warning; the others say where it was raised."""
        severity, _, message = notice.partition("\n")[0].partition(":")
        if severity == "WARNING":
            self.texts.append(message.strip())


@contextmanager
def _warnings(connection: Connection) -> Iterator[_Warnings]:
    driver: Any = connection.connection.dbapi_connection
    before, driver.notices = driver.notices, _Warnings()
    try:
        yield driver.notices
    finally:
        driver.notices = before
