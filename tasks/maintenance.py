"""Tasks of the maintenance queue."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict

from opencue_sched.celery import app
from opencue_sched.coordination.keys import events_lease, move_lease, reap_lease
from opencue_sched.coordination.leader import exclusive
from opencue_sched.worker import metrics
from opencue_sched.worker.task import fence_of, process_of

REAP_LEASE_SECONDS = 60.0
"""The time after which a reap begins nothing more. After the death of its process the next reap waits for as long."""

MOVE_LEASE_SECONDS = 60.0
"""The time after which a run that moves finished jobs begins no further portion."""

EVENTS_LEASE_SECONDS = 30.0
"""The time after which a run takes no event more. After the death of its process the next run waits for as long."""


@app.task(name="opencue_sched.maintenance.reap", acks_late=True)
def reap() -> dict[str, object]:
    """Put right what hosts and processes left behind (beat, every 30 seconds), unless another process of the fleet is
    at it."""
    from opencue_sched.reports import frame_history, reaper
    from opencue_sched.reports.completion import Releaser
    from opencue_sched.reports.early_failures import note_early_failures
    from opencue_sched.rqd.kill import RqdKiller

    mine = process_of(app)
    key = reap_lease(mine.settings.coordination.namespace, mine.settings.scheduler.facility)
    with exclusive(mine.client, key, seconds=REAP_LEASE_SECONDS) as first:
        if not first:
            return {"reaped": False}
        count = metrics.record_event
        releaser = Releaser(mine.engine, mine.settings.release, count=count, sender=mine.announcements)
        report = reaper.reap(releaser, RqdKiller(mine.channels), scope=mine.scope, stopping=mine.stopping)
        drains = mine.facts.has_frame_history_queue and not mine.stopping()
        events, skipped = frame_history.drain_history(mine.engine) if drains else (0, 0)
        # A Cuebot takes the reports, and writes nothing down of frames that its hosts break. Once the history has them.
        early = note_early_failures(mine.engine) if mine.scope.beside_cuebot and not mine.stopping() else 0
    figures = {**asdict(report), "hosts_down": len(report.hosts_down)}
    return {"reaped": True, "history_events": events, "history_skipped": skipped, "early_failures": early, **figures}


@app.task(name="opencue_sched.maintenance.recover_depends", acks_late=True)
def recover_depends() -> dict[str, object]:
    """Finish what a process that died after a completion left undone (beat, every minute)."""
    from opencue_sched.reports import recovery

    mine = process_of(app)
    return {**recovery.recover_depends(mine.engine, mine.settings.release, scope=mine.scope)}


@app.task(name="opencue_sched.maintenance.move_finished_jobs", acks_late=True)
def move_finished_jobs() -> dict[str, object]:
    """Move jobs that finished some days ago to the history tables (beat, every 10 minutes), unless a Cuebot does,
    another process of the fleet is at it, or it is switched off."""
    from opencue_sched.reports import finished_jobs

    mine = process_of(app)
    after = mine.settings.release.move_finished_jobs_after
    if not after or mine.facts.origin == "cuebot":
        return {"moves": False}
    key = move_lease(mine.settings.coordination.namespace, mine.settings.scheduler.facility)
    with exclusive(mine.client, key, seconds=MOVE_LEASE_SECONDS) as first:
        if not first:
            return {"moves": False}
        moved = finished_jobs.move_finished_jobs(mine.engine, after, scope=mine.scope, stopping=mine.stopping)
    return {"moves": True, **asdict(moved)}


@app.task(name="opencue_sched.maintenance.send_events", acks_late=True)
def send_events() -> dict[str, object]:
    """Tell the farm's own receiver of jobs that ended and frames that died (when one is written, and by beat every 5
    seconds once a worker had a receiver), unless another process of the fleet is at it, or a Cuebot is there, which has
    mails."""
    from opencue_sched.reports import job_events
    from opencue_sched.reports.event_receivers import receiver_of

    mine = process_of(app)
    if mine.scope.beside_cuebot:
        return {"sending": False}
    key = events_lease(mine.settings.coordination.namespace, mine.settings.scheduler.facility)
    with ExitStack() as lease:
        if not lease.enter_context(exclusive(mine.client, key, seconds=EVENTS_LEASE_SECONDS)):
            return {"sending": False}
        mine.event_wakes.taken_up()

        def hand_over() -> None:
            lease.close()
            mine.event_wakes.wake_again()

        figures = job_events.send_events(
            mine.engine,
            receiver_of(mine.settings.events),
            facility=mine.settings.scheduler.facility,
            count=metrics.record_job_events,
            stopping=mine.stopping,
            begins_no_more=hand_over,
        )
    return {"sending": True, **figures}


@app.task(name="opencue_sched.maintenance.keep_promises", acks_late=True, fenced=True)
def keep_promises() -> dict[str, object]:
    """Reserve hosts for wide frames that never start, and end reservations that are not needed any more.

    By beat, every 15 seconds at most. Raises FencedOff when a leader after that of the message was elected.
    """
    from opencue_sched.dispatch import reservations

    mine = process_of(app)
    in_use, role, fence = mine.ledger.cores_in_use, mine.leader_keys.name, fence_of(keep_promises)
    report = reservations.keep_reservations(mine.engine, mine.settings, mine.facts, in_use, role=role, fence=fence)
    # After the COMMIT: caches read the hosts again, and clusters that may use them look.
    if report.changed:
        mine.hosts.changed(report.changed)
        mine.wake((), report.changed)
    return report.summary()
