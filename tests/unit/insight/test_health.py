"""How trouble with a store is told."""

from __future__ import annotations

import pytest
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy.exc import OperationalError

from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import Settings
from tests.kit.wording import lacks

DATABASE_URL, REDIS_URL = "postgresql://cuebot:sesame@db:5432/cuebot", "redis://:sesame@cache:6379/0?ssl=false"
SETTINGS = Settings(database_url=DATABASE_URL, redis_url=REDIS_URL)
DATABASE_AWAY = OperationalError("SELECT 1", {}, Exception("connection refused\n\tIs the server running?"))
REDIS_AWAY = RedisConnectionError("Error 111 connecting to cache:6379.")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            DATABASE_AWAY,
            ["postgresql+psycopg2://cuebot:***@db:5432/cuebot", "connection refused", "OPENCUE_SCHED_DATABASE_URL"],
        ),
        (REDIS_AWAY, ["redis://cache:6379/0", "Error 111", "OPENCUE_SCHED_REDIS_URL"]),
        (BrokerError("Error 111"), ["redis://cache:6379/0", "does not answer", "Error 111", "OPENCUE_SCHED_REDIS_URL"]),
    ],
)
def test_trouble_is_told_in_a_line_that_names_the_variable_and_no_password(error: Exception, words: list[str]) -> None:
    said = describe_failure(error, SETTINGS)
    assert not lacks(said, *words)
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
    assert f" {url.partition(':')[0]}://" in said
    assert "same" not in said
    assert "cuebot" not in said
