"""Frame history on the OpenCue versions that queue it (after V49; see ``SchemaFacts.has_frame_history_queue``)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, text

# Move queued events into the history by the function of the schema; how many went and were skipped.
_DRAIN = text("SELECT drained, skipped FROM frame_history_drain(:events, false, :one_by_one)")


def drain_frame_history(connection: Connection, *, events: int = 1000, one_by_one: bool = False) -> Row[Any]:
    """Write up to ``events`` queued events to frame_history, the oldest first: how many left the queue (``drained``),
    and how many of these were not written (``skipped``).

    OpenCue's own function does it, under a lock shared with every Cuebot: 0 events also means that another is draining.
    It is all or nothing unless ``one_by_one``, which drops an event that fails and names it in the server's log.
    """
    return connection.execute(_DRAIN, {"events": events, "one_by_one": one_by_one}).one()
