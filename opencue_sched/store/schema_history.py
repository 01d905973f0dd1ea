"""Frame history on the OpenCue versions that queue it (after V49; see ``SchemaFacts.has_frame_history_queue``)."""

from __future__ import annotations

from sqlalchemy import Connection, text

_DRAIN = text("SELECT drained FROM frame_history_drain(:events, false, :one_by_one)")


def drain_frame_history(connection: Connection, *, events: int = 1000, one_by_one: bool = False) -> int:
    """Write up to ``events`` queued events to frame_history; returns how many left the queue.

    OpenCue's own function does it, under a lock shared with every Cuebot: 0 also means that another is draining. It is
    all or nothing unless ``one_by_one``, which drops an event that fails (with a warning in the server's log).
    """
    return int(connection.scalar(_DRAIN, {"events": events, "one_by_one": one_by_one}) or 0)
