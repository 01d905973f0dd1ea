"""What commands connect to, for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from sqlalchemy import Engine

from opencue_sched.accounting.connection import make_redis
from opencue_sched.settings import get_settings
from opencue_sched.store.engine import make_engine


@contextmanager
def database() -> Iterator[Engine]:
    """An engine on the configured database."""
    engine = make_engine(get_settings(), application_name="opencue-sched cli", pool_size=2)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def redis_store() -> Iterator[redis.Redis]:
    """A client of the configured Redis."""
    settings = get_settings()
    client = make_redis(settings.redis_dsn, settings)
    try:
        yield client
    finally:
        client.close()
