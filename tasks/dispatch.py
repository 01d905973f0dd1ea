"""Doors of the dispatch queue."""

from __future__ import annotations

from opencue_sched.celery import app
from opencue_sched.operate.runtime import runtime


@app.task(name="opencue_sched.dispatch.dispatch_cluster")
def dispatch_cluster(posting: str) -> dict[str, object]:
    """Work on one posted cluster, unless somebody else does or it sleeps."""
    report = runtime().dispatch(posting)
    return {"ended": "dropped"} if report is None else report.summary()
