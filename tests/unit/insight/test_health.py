"""How a beat that runs tells of stores that went away."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from opencue_sched.beat import LeaderScheduler
from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import Settings
from tests.kit.environment import variables

DATABASE_URL, REDIS_URL = "postgresql://cuebot:sesame@db:5432/cuebot", "redis://:sesame@cache:6379/0?ssl=false"
SETTINGS = Settings(database_url=DATABASE_URL, redis_url=REDIS_URL)
DATABASE_AWAY = OperationalError("SELECT 1", {}, Exception("connection refused\n\tIs the server running?"))
REDIS_AWAY = RedisConnectionError("Error 111 connecting to cache:6379.")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            DATABASE_AWAY,
            "PostgreSQL at postgresql+psycopg2://cuebot:***@db:5432/cuebot does not answer (connection refused); "
            "set OPENCUE_SCHED_DATABASE_URL",
        ),
        (REDIS_AWAY, "Redis at redis://cache:6379/0 does not answer (Error 111 connecting to cache:6379.); set OPE"),
        (BrokerError("Error 111"), "Redis at redis://cache:6379/0 does not answer (Error 111); set OPENCUE_SCHED_RE"),
    ],
)
def test_trouble_is_told_in_a_line_that_names_the_variable_and_no_password(error: Exception, words: str) -> None:
    said = describe_failure(error, SETTINGS)
    assert said.startswith(words)
    assert "sesame" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "url",
    [
        "redis://cuebot:sesame@cache:6379/0",
        "redis://:se%40same@cache:6379/0",
        "rediss://:sesame@cache/0?ssl_password=sesame",
        "unix://:sesame@/run/redis.sock?db=1",
        "unix:///run/redis.sock?password=sesame",
        "sentinel://:sesame@cache:1,b/main?sentinel_password=sesame&db=1",
    ],
)
def test_no_part_of_a_redis_url_that_is_secret_is_told(url: str) -> None:
    said = describe_failure(REDIS_AWAY, Settings(redis_url=url))
    assert said.startswith(f"Redis at {url.partition(':')[0]}://")
    assert "same" not in said
    assert "cuebot" not in said


class CutOff:
    """A gate that stands by and got no answer to its last campaign."""

    trouble = REDIS_AWAY
    next_look = 1.0
    led_elsewhere = False

    def renew(self) -> None:
        return None

    def resign(self) -> None:
        return None


def test_a_beat_that_gets_no_answer_says_so_once_a_minute_of_each_store_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beat = LeaderScheduler(app=Celery(set_as_current=False), lazy=True)
    monkeypatch.setattr(beat, "_show", lambda _: None)
    beat.gate = CutOff()
    with variables(DATABASE_URL=DATABASE_URL, REDIS_URL=REDIS_URL), capture_logs() as logs:
        for seconds in (1.0, 30.0, 61.5):
            monkeypatch.setattr("opencue_sched.beat.boot_clock", lambda now=seconds: now)
            for trouble in (REDIS_AWAY, DATABASE_AWAY):
                beat.gate.trouble = trouble
                assert 0 < beat.tick() <= 0.5
    assert [str(entry["error"]).rpartition(" ")[2] for entry in logs] == [
        "OPENCUE_SCHED_REDIS_URL",
        "OPENCUE_SCHED_DATABASE_URL",
    ] * 2
