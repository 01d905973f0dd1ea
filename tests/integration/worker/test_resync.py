"""After PostgreSQL was away nobody heard what happened meanwhile."""

from __future__ import annotations

from contextlib import closing

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.accounting import managed_show_ids
from opencue_sched.worker.process import Process
from tests.kit.listening import eventually_listen
from tests.kit.polling import eventually

RECENT = 20.0


def test_who_lost_its_connection_wakes_every_managed_show(
    settings: Settings, engine: Engine, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    with engine.begin() as connection:
        Farm(connection).job([LayerSpec(frames=1)])
        managed = managed_show_ids(connection)
    woken: list[str] = []
    app = Celery("missed", broker="memory://", set_as_current=False)
    with closing(app), closing(Process(settings, app)) as worker:
        monkeypatch.setattr(worker.waker, "note", lambda shows: woken.extend(shows))
        worker.listen()
        eventually_listen(engine, 1)
        with engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND application_name = 'opencue-sched-listener'"
                )
            )
        eventually(lambda: woken, RECENT, "the shows of those who heard nothing")
    assert managed
    assert set(woken) == managed
