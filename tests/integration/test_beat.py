"""A beat whose stores go away while it runs."""

from __future__ import annotations

from contextlib import closing
from urllib.parse import urlsplit

import pytest
from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.beat import LOG_AGAIN_SECONDS, POLL_SECONDS, LeaderScheduler, make_gate
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.job_events import note_receiver
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.messenger import EVENTS_TASK
from tests.conftest import RedisServer
from tests.kit.environment import stores_of
from tests.kit.frozen_clock import Clock
from tests.kit.lossy_proxy import LossyProxy
from tests.kit.refusing_postgres import refusing_postgres


def test_a_beat_that_gets_no_answer_says_so_once_a_minute_of_each_store_and_goes_on(
    settings: Settings, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("opencue_sched.beat.boot_clock", clock)
    parts = urlsplit(redis_server.url)
    beat = LeaderScheduler(app=Celery(set_as_current=False), lazy=True)

    def tick() -> None:
        assert 0 < beat.tick() <= POLL_SECONDS
        clock.advance(LOG_AGAIN_SECONDS / 2)

    with (
        refusing_postgres(settings, b"the database system is shutting down") as away,
        closing(LossyProxy(str(parts.hostname), int(parts.port or 0))) as proxy,
    ):
        url = settings.redis_dsn.replace(f":{parts.port}", f":{proxy.port}")
        mine = away.model_copy(update={"redis_url": SecretStr(url)})
        beat.gate = make_gate(mine)
        with stores_of(mine), capture_logs() as logs:
            # given a PostgreSQL that takes no connections, and a Redis that is gone as well a minute and a half later
            for _ in range(3):
                tick()
            proxy.close()
            for _ in range(3):
                tick()
    # then the log names each store once a minute, by the variable that has its address
    said = [line for line in logs if line["event"] == "beat_cannot_reach_its_stores"]
    assert [str(line["error"]).rpartition(" ")[2] for line in said] == [
        "OPENCUE_SCHED_DATABASE_URL",
        "OPENCUE_SCHED_DATABASE_URL",
        "OPENCUE_SCHED_REDIS_URL",
        "OPENCUE_SCHED_REDIS_URL",
    ]


def test_events_of_jobs_are_looked_for_only_once_a_worker_had_a_receiver(settings: Settings, engine: Engine) -> None:
    # given a leading beat, where there is no Cuebot and no worker ever had a receiver
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'opencue-sched'"))
    app = Celery("beat", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {"other": {"task": "other", "schedule": 86400.0}}
    app.conf.beat_schedule |= {"send-events": {"task": EVENTS_TASK, "schedule": 86400.0}}
    beat = LeaderScheduler(app=app)
    beat.gate = make_gate(settings)
    beat.census = FleetCensus(settings, lambda: True)

    def fired() -> set[str]:
        """The tasks of which a tick was fired, after another look at the fleet."""
        assert beat.census is not None
        assert beat.gate is not None
        beat.census.look_at_farm()
        beat.tick()
        return {series.partition("@")[0] for series in PersistentFences(engine).leader(beat.gate.keys.name).ticks}

    with closing(app), stores_of(settings), closing(beat):
        # then the tick of the other task alone is fired
        assert fired() == {"other"}
        # and when a worker starts with a receiver, that of events is, too
        with engine.begin() as connection:
            note_receiver(connection, None)
        assert fired() == {"other", "send-events"}
