"""Are PostgreSQL and Redis there and fit for use? Every answer names the setting to change."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError, ProgrammingError, SQLAlchemyError

from opencue_sched.errors import SchedulerError
from opencue_sched.settings import Settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.schema import SchemaFacts, check_schema

if TYPE_CHECKING:
    import redis


class StoreUnusable(SchedulerError):
    """A store may not be used; the message says which and what to set."""


class StoreAway(StoreUnusable):
    """A store does not answer: perhaps a wrong URL, perhaps one that is only just starting."""


def check_stores(engine: Engine, client: redis.Redis, settings: Settings) -> None:
    """Raises StoreUnusable for a store that does not answer or is not fit, and WrongSchema."""
    check_postgresql(engine, settings)
    check_redis(client, settings)


def check_postgresql(engine: Engine, settings: Settings) -> SchemaFacts:
    """What the database has. Raises StoreUnusable and WrongSchema."""
    try:
        with engine.connect() as connection:
            return check_schema(connection)
    except SQLAlchemyError as error:
        # The driver refuses an option of the URL that is none as an error of the program.
        kind = StoreUnusable if isinstance(error, ProgrammingError) else StoreAway
        raise kind(describe_failure(error, settings)) from error


def check_redis(client: redis.Redis, settings: Settings) -> None:
    """Raises StoreUnusable for a Redis that does not answer, is too old, or may evict keys."""
    # What reads PostgreSQL alone starts without them.
    from redis.exceptions import AuthenticationError, RedisError

    from opencue_sched.coordination.board import why_unfit

    where = f"Redis at {_without_password(settings.redis_dsn)}"
    try:
        unfit = why_unfit(client)
    except AuthenticationError as error:
        raise StoreUnusable(f"{where} refuses the password; set OPENCUE_SCHED_REDIS_URL") from error
    except RedisError as error:
        raise StoreAway(describe_failure(error, settings)) from error
    if unfit:
        raise StoreUnusable(f"{where} {unfit}")


def check_broker(settings: Settings) -> None:
    """Check the Redis of the settings alone. Raises StoreUnusable."""
    from opencue_sched.accounting.connection import make_redis

    with closing(make_redis(settings.redis_dsn, settings)) as client:
        check_redis(client, settings)


def check_for_beat(settings: Settings) -> None:
    """Both stores, of which a beat has no engine yet. Raises SchedulerError saying what to do."""
    engine = make_engine(settings, application_name="opencue-sched-beat", pool_size=1)
    try:
        check_postgresql(engine, settings)
    finally:
        engine.dispose()
    check_broker(settings)


def describe_failure(error: Exception, settings: Settings) -> str:
    """A store's error in a line: the store, its reason, the variable that names it, and no password."""
    if isinstance(error, SchedulerError):
        return str(error)
    if isinstance(error, SQLAlchemyError):
        where = make_url(settings.sqlalchemy_url).render_as_string(hide_password=True)
        what = "does not answer" if isinstance(error, OperationalError) else "refuses"
        return f"PostgreSQL at {where} {what} ({reason_of(error)}); set OPENCUE_SCHED_DATABASE_URL"
    return f"Redis at {_without_password(settings.redis_dsn)} does not answer ({error}); set OPENCUE_SCHED_REDIS_URL"


def reason_of(error: SQLAlchemyError) -> str:
    """The first line of what the server or the driver said: the rest is the statement, and a link."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
