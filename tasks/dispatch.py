"""Doors of the dispatch queue."""

from __future__ import annotations

from opencue_sched.celery import app
from opencue_sched.operate.door import runtime


@app.task(name="opencue_sched.dispatch.dispatch_cluster")
def dispatch_cluster(posting: str, ticket: int | None = None, reply: str | None = None) -> dict[str, object]:
    """Work on one posted cluster, unless somebody else does, it sleeps, or the message is an answered copy."""
    return runtime().dispatch(posting, ticket=ticket, reply=reply)
