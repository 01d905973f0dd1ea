"""A worker and the census of a leading beat, both in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.settings import Rqd, Settings
from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.process import Process
from tests.integration.worker.metered import Gate


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("metrics", broker="memory://", set_as_current=False)
    yield made
    made.close()


@pytest.fixture
def process(settings: Settings, engine: Engine, redis_client, app: Celery) -> Iterator[Process]:
    """What a worker has, in this process; its counters are open."""
    # Beside a Cuebot the shows of these tests would have to wait for half a minute before they are booked.
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'opencue-sched'"))
    changed = settings.model_copy(
        update={
            "rqd": Rqd(dry_run_mode=True),
            "queue": settings.queue.model_copy(update={"cluster_saturated_sleep": 0.001}),
        }
    )
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    made = Process(changed, app)
    yield made
    made.close()


@pytest.fixture
def gate() -> Gate:
    """The gate by which this process shows figures of the fleet, whatever beat another test had here."""
    made = Gate()
    fleet_metrics.watch_gate(cast(LeaderGate, made))
    return made


@pytest.fixture
def census(process: Process, gate: Gate) -> Iterator[FleetCensus]:
    """What the leading beat has, in this process."""
    made = FleetCensus(process.settings, lambda: gate.fence is not None)
    yield made
    made.close()
