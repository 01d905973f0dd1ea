"""A beat whose stores go away while it runs."""

from __future__ import annotations

from contextlib import closing
from urllib.parse import urlsplit

import pytest
from celery import Celery
from pydantic import SecretStr
from structlog.testing import capture_logs

from opencue_sched.beat import LOG_AGAIN_SECONDS, POLL_SECONDS, LeaderScheduler, make_gate
from opencue_sched.settings import Settings
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
