"""Tasks of the maintenance queue."""

from __future__ import annotations

from opencue_sched.celery import app
from opencue_sched.worker.task import fence_of, runtime


@app.task(name="opencue_sched.maintenance.reap", acks_late=True)
def reap() -> dict[str, object]:
    """Put right what hosts and processes left behind (beat, every 30 seconds)."""
    return runtime().reap()


@app.task(name="opencue_sched.maintenance.recover_depends", acks_late=True)
def recover_depends() -> dict[str, object]:
    """Finish what a process that died after a completion left undone (beat, every minute)."""
    return runtime().recover_depends()


@app.task(name="opencue_sched.maintenance.keep_promises", acks_late=True, fenced=True)
def keep_promises() -> dict[str, object]:
    """Hold hosts for wide frames that never start, and end what nobody needs any more (beat, every 15 s at most)."""
    return runtime().keep_promises(fence=fence_of(keep_promises))
