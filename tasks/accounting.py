"""Tasks of the accounting queue."""

from __future__ import annotations

from opencue_sched.celery import app
from opencue_sched.worker.task import fence_of, runtime


@app.task(name="opencue_sched.accounting.recompute", acks_late=True)
def recompute() -> dict[str, object]:
    """Reconcile the ledger with proc and refresh the accounting tables (beat, every 2 minutes)."""
    return runtime().recompute(fence=fence_of(recompute))


@app.task(name="opencue_sched.accounting.reseed_limits", acks_late=True)
def reseed_limits() -> dict[str, object]:
    """Copy caps from PostgreSQL into the counters (beat, every 5 minutes)."""
    return runtime().reseed_limits(fence=fence_of(reseed_limits))
