"""Are PostgreSQL and Redis there and fit for use? Every answer names the setting to change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import ValidationError
from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, OperationalError, SQLAlchemyError

from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.errors import SchedulerError
from opencue_sched.settings import Settings, get_settings, setting_problems
from opencue_sched.store.schema import check_schema

if TYPE_CHECKING:
    import redis


class StoreUnusable(SchedulerError):
    """A Redis is too old, or would lose keys without a sound; the message says what to set."""


def check_stores(engine: Engine, client: redis.Redis, settings: Settings) -> None:
    """Raises StoreUnusable and WrongSchema, and what the drivers raise for a store that does not answer."""
    ask(engine, check_schema)
    check_redis(client, settings)


def check_redis(client: redis.Redis, settings: Settings) -> None:
    """Raises StoreUnusable for a Redis that is too old, or may evict keys, and RedisError."""
    from opencue_sched.clients.redis_client import why_unfit

    if unfit := why_unfit(client):
        raise StoreUnusable(f"Redis at {_without_password(settings.redis_dsn)} {unfit}")


def check_for_beat(settings: Settings) -> None:
    """Both stores, of which a beat has no connection yet, as check_stores does."""
    from opencue_sched.accounting.epoch import guarded_redis

    engine = make_engine(settings, application_name="opencue-sched-beat", pool_size=1)
    try:
        with guarded_redis(settings.redis_dsn, settings) as client:
            check_stores(engine, client, settings)
    finally:
        engine.dispose()


def failure_lines(error: Exception) -> list[str]:
    """Why a command or a process ends, for the person who started it: an error of ours, of the settings or of a store;
    none for a bug."""
    if isinstance(error, ValidationError):
        return setting_problems(error)
    if isinstance(error, SchedulerError):
        return [str(error)]
    if isinstance(error, DataError):
        return [reason_of(error)]  # what was typed does not fit; it says into what
    from redis.exceptions import RedisError

    return [describe_failure(error, get_settings())] if isinstance(error, SQLAlchemyError | RedisError) else []


def describe_failure(error: Exception, settings: Settings) -> str:
    """A store's error in a line: the store, its reason, the variable that names it, and no password."""
    if isinstance(error, SchedulerError):
        return str(error)
    if isinstance(error, SQLAlchemyError):
        where = make_url(settings.sqlalchemy_url).render_as_string(hide_password=True)
        what = "does not answer" if isinstance(error, OperationalError) else "refuses"
        return f"PostgreSQL at {where} {what} ({reason_of(error)}); set OPENCUE_SCHED_DATABASE_URL"
    from redis.exceptions import AuthenticationError

    what = "refuses the password" if isinstance(error, AuthenticationError) else f"does not answer ({error})"
    return f"Redis at {_without_password(settings.redis_dsn)} {what}; set OPENCUE_SCHED_REDIS_URL"


def reason_of(error: SQLAlchemyError) -> str:
    """The first line of what the server or the driver said: the rest is the statement, and a link."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]
