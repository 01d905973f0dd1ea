"""What a worker does for a periodic message, where a Cuebot may do the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.coordination.keys import reap_lease
from opencue_sched.coordination.leader import exclusive
from opencue_sched.coordination.presence import Presence
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.store.schema import REVISION
from opencue_sched.worker import control
from opencue_sched.worker.process import Process
from tasks import maintenance
from tests.kit.tasks import run_task
from tests.kit.wide_farm import WideFarm


@pytest.fixture
def process(settings: Settings) -> Iterator[Process]:
    app = Celery("periodic", broker="memory://", set_as_current=False)
    short = settings.accounting.model_copy(update={"commit_deadline": 0.5})  # a ledger is filled after four of them
    made = Process(settings.model_copy(update={"accounting": short}), app)
    yield made
    made.close()
    app.close()


def test_what_was_found_of_the_schema_is_logged_as_what_it_is(process: Process) -> None:
    with capture_logs() as logs:
        process.start("w1@here", 1, time.sleep)
    (found,) = [entry for entry in logs if entry["event"] == "schema_found"]
    assert found["revision"] == REVISION
    assert found["has_start_after"] == process.facts.has_start_after


def test_one_reap_at_a_time_in_the_fleet(process: Process, engine: Engine, settings: Settings) -> None:
    """Beat sends one every 30 seconds, and one may take longer."""
    # given a proc of a finished job on a host nobody hears of any more, and a reap under way in another process
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host()
        farm.run(farm.job().frames, host)
        connection.execute(text("UPDATE host_stat SET str_state = 'DOWN'"))
    with exclusive(process.client, reap_lease(settings.coordination.namespace, None), seconds=60.0):
        # then another message does nothing
        assert run_task(maintenance.reap, process) == {"reaped": False}
        assert procs(engine) == 1

    # and the next one, when that has ended, does it
    summary = run_task(maintenance.reap, process)
    assert (summary["reaped"], summary["procs_released"]) == (True, 1)
    assert procs(engine) == 0


def test_a_quarantine_that_is_over_is_forgotten_with_the_next(engine: Engine) -> None:
    with engine.begin() as connection:
        quarantine_jobs(connection, {"over": "bad"}, -1)
        quarantine_jobs(connection, {"not over": "bad"}, 600)
        kept = connection.execute(text("SELECT pk_job FROM opencue_sched_quarantine")).scalars().all()
    assert kept == ["not over"]


def test_a_history_that_cannot_be_drained_fails_no_reap(process: Process) -> None:
    # given a database that should have a queue, and has none
    process.facts = replace(process.facts, has_frame_history_queue=True)
    with capture_logs() as logs:
        summary = run_task(maintenance.reap, process)
    assert (summary["reaped"], summary["history_events"]) == (True, 0)
    assert "frame_history_not_drained" in [entry["event"] for entry in logs]


def procs(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM proc")).scalar_one())


def test_the_first_worker_of_a_fleet_is_the_one_before_which_none_is_at_work(
    process: Process, settings: Settings
) -> None:
    """It counts before it books. Those that only just start are no help: all may have been started together."""
    process.membership.join("celery@here", queues=lambda: ["cue:q:work:type:dispatch"], capacity=1)
    namespace = settings.coordination.namespace
    other = Presence(process.client, namespace, types=["dispatch"], group="other", instance="other")
    assert process.membership.is_first()
    other.announce()
    other.refresh(state="starting")
    assert process.membership.is_first()
    other.refresh(state="paused")
    assert not process.membership.is_first()
    other.withdraw()
    assert process.membership.is_first()


def test_workers_audit_and_read_the_clusters_anew_by_remote_control(process: Process, engine: Engine) -> None:
    worker = SimpleNamespace(app=SimpleNamespace(process=process))
    said = json.loads(json.dumps(control.accounting_audit(worker)))
    assert said["failed"], "the counters were never filled"
    assert len(said["findings"]) > 1
    assert process.sweeper.clusters == frozenset()
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(tags=["old"], hostname_tag=False)
        farm.job()
        farm.job([LayerSpec(frames=1, tags="new")])
    process.sweep()
    with engine.begin() as connection:
        connection.execute(text("UPDATE host_tag SET str_tag = 'new' WHERE str_tag = 'old'"))
    before = set(process.postings.posted())
    process.sweep()
    assert set(process.postings.posted()) == before, "the set of clusters is read now and then"
    assert control.reload_clusters(worker) == {"ok": "reloading"}
    process.sweep()
    assert set(process.postings.posted()) > before


def test_a_reservation_task_that_grants_a_host_tells_every_cache(
    process: Process, engine: Engine, settings: Settings
) -> None:
    farm = WideFarm.made(engine, settings)
    farm.blocked(settings.queue.reservation_block_time)
    process.changes.publish(["another"])
    cursor, _ = process.changes.since(None)
    assert run_task(maintenance.keep_promises, process)["granted"] == 1
    assert process.changes.since(cursor)[1] == farm.reservations().keys()
    cursor, _ = process.changes.since(cursor)
    farm.execute("UPDATE job SET b_paused = true WHERE pk_job = :job", job=farm.job)
    assert run_task(maintenance.keep_promises, process)["ended"] == 1
    assert len(process.changes.since(cursor)[1] or ()) == 1
    assert run_task(maintenance.keep_promises, process) == {"kept": True, "granted": 0, "renewed": 0, "ended": 0}
