"""The embedded PostgreSQL and Redis: private, restartable, gone with their owner."""

from __future__ import annotations

from redis import Redis
from sqlalchemy import Engine, text


def test_every_test_gets_a_migrated_database_and_an_empty_redis(engine: Engine, redis_client: Redis) -> None:
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM job")).scalar_one() == 0
    assert redis_client.dbsize() == 0
