"""After PostgreSQL was away every worker has missed the same: one makes up for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.accounting import keys
from opencue_sched.coordination.names import resync_lease
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker import events as events_module
from opencue_sched.worker import metrics
from opencue_sched.worker.runtime import Runtime
from tests.listening import eventually_listen
from tests.polling import eventually

RECENT = 20.0


@pytest.fixture
def fleet(settings: Settings, engine: Engine) -> Iterator[list[Runtime]]:
    """Three workers that listen, over a farm with a job that runs."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.run(farm.job([LayerSpec(frames=3)]).frames, farm.host(cores=64))
    with ExitStack() as stack:
        made = []
        for name in ("one", "two", "three"):
            app = Celery("missed", broker="memory://", set_as_current=False)
            stack.callback(app.close)
            accounting = Accounting(commit_deadline=0.025)
            worker = Runtime(settings.model_copy(update={"instance": name, "accounting": accounting}), app)
            stack.callback(worker.close)
            worker.bootstrap()
            worker.events.start()
            made.append(worker)
            eventually_listen(engine, len(made))
        yield made


def end_listeners(connection: Connection) -> None:
    connection.execute(
        text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'opencue-sched-listener'"
        )
    )


def burst(client: redis.Redis) -> str:
    (subscription,) = client.scan_iter(match=keys.subscription("*", "*"))
    return str(client.hget(subscription, "burst"))


def test_after_a_restart_of_postgresql_one_worker_recomputes(
    fleet: list[Runtime], engine: Engine, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    reports: list[object] = []
    monkeypatch.setattr(metrics, "record_recompute", reports.append)
    # when all connections are lost, and with them what was said then
    with engine.begin() as connection:
        end_listeners(connection)
        gone = connection.execute(
            text("DELETE FROM proc WHERE pk_proc = (SELECT min(pk_proc) FROM proc) RETURNING pk_proc")
        ).scalar_one()
        connection.execute(text("UPDATE subscription SET int_burst = 300"))
    # then it is made up for, not by each of them
    eventually(lambda: not redis_client.hexists(keys.LEDGER, gone), RECENT, "the release nobody heard")
    eventually(lambda: burst(redis_client) == "3", RECENT, "the cap nobody heard")
    eventually_listen(engine, len(fleet))
    eventually(lambda: not redis_client.exists(resync_lease("cue")), RECENT, "the end of it")
    assert len(reports) in (1, 2)


def test_a_resync_that_fails_is_left_to_the_recompute_and_what_is_told_then_is_heard(
    fleet: list[Runtime], engine: Engine, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    tried: list[int] = []

    def fails(*_: object, **__: object) -> object:
        tried.append(1)
        raise OperationalError("SELECT", {}, Exception("the database system is starting up"))

    monkeypatch.setattr(events_module, "recompute", fails)
    with engine.begin() as connection:
        end_listeners(connection)
    eventually(lambda: tried, RECENT, "a try")
    eventually_listen(engine, len(fleet))
    eventually(lambda: not redis_client.exists(resync_lease("cue")), RECENT, "the lease given back")
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 300"))
    eventually(lambda: burst(redis_client) == "3", RECENT, "the cap")
