"""Tasks of the sweep queue."""

from __future__ import annotations

from opencue_sched.celery import app
from opencue_sched.worker.task import fence_of, process_of


@app.task(name="opencue_sched.sweep.sweep_clusters", fenced=True)
def sweep_clusters() -> dict[str, object]:
    """Post the clusters that have work and send a message for each (beat, every 2 seconds)."""
    return process_of(app).sweep(may_nap=True, fence=fence_of(sweep_clusters)).summary()
