"""A store that is lost while a farm has nothing to do: it is filled all the same, before there is work again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from prometheus_client import REGISTRY
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import StoreState, ensure_bootstrapped, store_state
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch, look_at_store
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker import metrics
from opencue_sched.worker.process import Process
from tests.kit.statements import failing_statements


@pytest.fixture
def process(settings: Settings, engine: Engine) -> Iterator[Process]:
    """A worker's collaborators; the counters are filled, and nothing waits."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.run(farm.job().frames[:1], farm.host())
    app = Celery("idle", broker="memory://", set_as_current=False)
    short = Accounting(commit_deadline=0.025)
    made = Process(settings.model_copy(update={"accounting": short}), app)
    made.bootstrap()
    yield made
    made.close()
    app.close()


def test_a_worker_has_a_lost_store_filled_though_it_has_no_work(process: Process, redis_client: redis.Redis):
    redis_client.flushdb()
    process.keep_counters()
    assert store_state(redis_client) is StoreState.OPEN
    assert REGISTRY.get_sample_value("scheduler_store_ready") == 1
    assert redis_client.hlen(keys.LEDGER) == 1


def test_a_store_that_another_process_filled_is_shown_ready(process: Process, redis_client: redis.Redis):
    """A worker whose own attempt has failed once must not go on saying that nothing is booked."""
    # given a lost store that this worker could not fill, for PostgreSQL was away for a moment
    redis_client.flushdb()
    away = OperationalError("SELECT", {}, Exception("server closed the connection"))
    with failing_statements(process.engine, away), pytest.raises((NotReady, OperationalError)):
        process.keep_counters()
    assert REGISTRY.get_sample_value("scheduler_store_ready") == 0

    # when another one has filled it
    ensure_bootstrapped(
        process.engine,
        make_ledger(process.engine, redis_client, owner="another", accounting=Accounting()),
        wait_age=0.1,
    )
    process.keep_counters()

    # then this one shows it as it is
    assert REGISTRY.get_sample_value("scheduler_store_ready") == 1


def test_a_store_that_is_being_filled_is_not_shown_ready(process: Process, redis_client: redis.Redis):
    process.keep_counters()
    assert REGISTRY.get_sample_value("scheduler_store_ready") == 1
    redis_client.set(keys.EPOCH, Epoch.new("another", state="filling").text)
    metrics.record_store(*look_at_store(redis_client))
    assert REGISTRY.get_sample_value("scheduler_store_ready") == 0
