"""Are PostgreSQL and Redis there and fit for use? Every answer names the setting to change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pydantic import ValidationError
from sqlalchemy import Engine
from sqlalchemy.exc import DataError, OperationalError, SQLAlchemyError

from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.domain.redis_url import without_secrets
from opencue_sched.errors import SchedulerError, StoreUnusable, WrongConfiguration
from opencue_sched.settings import Settings, get_settings, setting_problems
from opencue_sched.store.privileges import WRITES_OF_BEATS, Writes, check_privileges
from opencue_sched.store.schema import check_schema, check_writable

if TYPE_CHECKING:
    import redis


_ADVICE = {
    "25006": ("takes no writes", "name the primary in OPENCUE_SCHED_DATABASE_URL (`opencue-sched doctor` says more)"),
    "42501": ("denies what this program does", "docs/tasks/database-user.md has what its user must be granted"),
}
"""What a refusal of PostgreSQL means, by its SQLSTATE, and what to do where that is not to set the URL."""
_MISSING_OBJECT = ("42P01", "42703", "42883")
"""SQLSTATEs of a table, a column and a function that are not there."""


def check_stores(engine: Engine, client: redis.Redis, settings: Settings, writes: Writes) -> None:
    """Check that both stores serve: PostgreSQL's schema, that it takes writes and our user may make these, Redis and
    its user.

    Raises StoreUnusable, WrongSchema and TakesNoWrites, and what the drivers raise for a store that does not answer."""
    ask(engine, check_schema)
    ask(engine, check_writable)
    ask(engine, check_privileges, writes)
    check_service_redis(client, settings)


def check_redis(client: redis.Redis, settings: Settings) -> None:
    """Check that Redis serves. Raises StoreUnusable for a Redis that is too old, or may evict keys, and RedisError."""
    from opencue_sched.clients.redis_client import why_unfit

    if unfit := why_unfit(client):
        raise StoreUnusable(f"Redis at {without_secrets(settings.redis_dsn)} {unfit}")


def check_service_redis(client: redis.Redis, settings: Settings, *, broker: bool = True) -> None:
    """Check that Redis serves a process that runs on. Raises as check_redis does, and also StoreUnusable for a user
    that may not do all that such a process will do."""
    from opencue_sched.insight.redis_access import check_access

    check_redis(client, settings)
    check_access(client, settings, broker=broker)


def check_for_beat(settings: Settings) -> None:
    """Check both stores as check_stores does, on connections of its own: a beat has none yet."""
    from opencue_sched.accounting.epoch import guarded_redis

    engine = make_engine(settings, application_name="opencue-sched-beat", pool_size=1)
    try:
        with guarded_redis(settings.redis_dsn, settings) as client:
            check_stores(engine, client, settings, WRITES_OF_BEATS)
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
    from opencue_sched.clients.store_errors import describe, has_no_connection_left, is_lasting

    what = "refuses" if is_lasting(error) else "does not answer"
    if isinstance(error, SQLAlchemyError):
        what, advice = _meaning_and_advice(error, settings)
        return f"PostgreSQL at {settings.database_shown} {what} ({reason_of(error)}); {advice}"
    from redis.exceptions import AuthenticationError, NoPermissionError

    where = f"Redis at {without_secrets(settings.redis_dsn)}"
    if isinstance(error, NoPermissionError):
        return f"{where} refuses ({describe(error)}); the ACL that its user needs is in docs/run.md"
    if isinstance(error, AuthenticationError):
        return f"{where} refuses the password; set OPENCUE_SCHED_REDIS_URL"
    if has_no_connection_left(error):
        pool = f"up to {settings.accounting.redis_pool_size} (accounting.redis_pool_size)"
        return (
            f"{where} has no connection left: its maxclients is less than the fleet takes, each process {pool} and "
            "those of its broker; raise maxclients (docs/run.md sums them up, under Connections)"
        )
    return f"{where} {what} ({describe(error)}); set OPENCUE_SCHED_REDIS_URL"


def _meaning_and_advice(error: SQLAlchemyError, settings: Settings) -> tuple[str, str]:
    """What an error of PostgreSQL means, and what to do."""
    from opencue_sched.clients.store_errors import limit_reached

    if limit := limit_reached(error):
        pool = settings.database.pool_size
        return "has no connection left", (
            f"raise {limit}, or lower OPENCUE_SCHED_DATABASE__POOL_SIZE: a worker takes up to {pool + 1}, a report "
            f"service {pool}, a beat 2, Flower 1 (docs/run.md sums them up, under Connections)"
        )
    state = getattr(getattr(error, "orig", None), "pgcode", None) or ""
    if state in _ADVICE:
        return _ADVICE[state]
    if state in _MISSING_OBJECT:
        ours = "opencue_sched_" in reason_of(error)
        look = "" if ours else "look whether OPENCUE_SCHED_DATABASE_URL names OpenCue's database, then "
        return "lacks what this program needs", f"{look}run `opencue-sched migrate`"
    return "does not answer" if does_not_answer(error) else "refuses", "set OPENCUE_SCHED_DATABASE_URL"


def does_not_answer(error: Exception) -> bool:
    """Whether ``error`` says that a store does not answer now, and may later."""
    from redis.exceptions import RedisError

    from opencue_sched.clients.store_errors import is_lasting

    return isinstance(error, OperationalError | RedisError) and not is_lasting(error)


def is_wrong_configuration(error: Exception) -> bool:
    """Whether a process that ended in ``error`` would end so again: by its settings, or because a store refuses what
    no waiting cures."""
    if isinstance(error, ValidationError | WrongConfiguration):
        return True
    if not isinstance(error, SQLAlchemyError) and "redis" not in sys.modules:
        return False  # no error of redis-py's, which stays unimported
    from opencue_sched.clients.store_errors import is_lasting

    return is_lasting(error)


def reason_of(error: SQLAlchemyError) -> str:
    """The first line of what the server or the driver said: the rest is the statement, and a link."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]
