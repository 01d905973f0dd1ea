"""Tasks of the accounting queue."""

from __future__ import annotations

from opencue_sched.accounting import caps, show_handover
from opencue_sched.accounting import recompute as reconciliation
from opencue_sched.celery import app
from opencue_sched.worker import metrics
from opencue_sched.worker.task import fence_of, process_of


@app.task(name="opencue_sched.accounting.recompute", acks_late=True)
def recompute() -> dict[str, object]:
    """Reconcile the ledger with proc and refresh the accounting tables (beat, every 2 minutes). Raises FencedOff when a
    leader after that of the message was elected."""
    mine = process_of(app)
    age = mine.settings.accounting.in_flight_age
    ledger = mine.ledger.under(mine.fence(fence_of(recompute)))
    report = reconciliation.recompute(mine.engine, ledger, age_seconds=age)
    metrics.record_recompute(report)
    show_handover.follow_handed_back(mine.engine, mine.ledger, age_seconds=age)
    mine.imported.import_all()
    show_handover.refresh_handed_back(mine.engine, mine.client)
    mine.check_feed(report.unpublished_cores)
    return {"shows": report.shows, "procs": report.procs, "healed": report.healed, "in_flight": report.in_flight}


@app.task(name="opencue_sched.accounting.reseed_limits", acks_late=True)
def reseed_limits() -> dict[str, object]:
    """Copy caps from PostgreSQL into the counters (beat, every 5 minutes). Raises FencedOff as recompute()."""
    mine = process_of(app)
    written, kept = caps.reseed_limits(mine.engine, mine.ledger.under(mine.fence(fence_of(reseed_limits))))
    return {"written": written, "kept": kept}
