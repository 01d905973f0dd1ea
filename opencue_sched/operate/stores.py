"""Are PostgreSQL and Redis there and fit for use? Every answer names the setting to change."""

from __future__ import annotations

import redis
import structlog
from redis.exceptions import AuthenticationError, RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError, ProgrammingError

from opencue_sched.domain.errors import SchedulerError
from opencue_sched.settings import Settings

log = structlog.get_logger(__name__)

OLDEST_REDIS = (6, 2)


class StoreUnusable(SchedulerError):
    """A store does not answer, or may not be used; the message says which and what to set."""


class StoreAway(StoreUnusable):
    """A store does not answer: perhaps a wrong URL, perhaps one that is only just starting."""


def check_stores(engine: Engine, client: redis.Redis, settings: Settings) -> None:
    """Raises StoreUnusable for a store that does not answer, is too old, or may evict keys."""
    check_postgresql(engine)
    check_redis(client, settings)


def check_postgresql(engine: Engine) -> None:
    """One connection. The password never appears in the message."""
    try:
        with engine.connect():
            log.debug("postgresql_usable")
    except OperationalError as error:
        where = engine.url.render_as_string(hide_password=True)
        reason = str(error.orig).strip().splitlines()[0]
        raise StoreAway(f"PostgreSQL at {where} does not answer ({reason}); set OPENCUE_SCHED_DATABASE_URL") from error
    except ProgrammingError as error:
        reason = str(error.orig).strip().splitlines()[0]
        raise StoreUnusable(f"PostgreSQL cannot be asked ({reason}); set OPENCUE_SCHED_DATABASE_URL") from error


def check_redis(client: redis.Redis, settings: Settings) -> None:
    """Version and eviction policy. A Redis that may evict would lose counters, claims or messages without a sound."""
    address = client.connection_pool.connection_kwargs
    where = f"{address.get('host', address.get('path', '?'))}:{address.get('port', '')}"
    try:
        info = client.info("server")
        policy = client.info("memory").get("maxmemory_policy", "noeviction")
    except AuthenticationError as error:
        raise StoreUnusable(f"Redis at {where} refuses the password; set OPENCUE_SCHED_REDIS_URL") from error
    except RedisError as error:
        raise StoreAway(f"Redis at {where} does not answer ({error}); set OPENCUE_SCHED_REDIS_URL") from error
    version = tuple(int(part) for part in str(info.get("redis_version", "0.0")).split(".")[:2])
    if version < OLDEST_REDIS:
        raise StoreUnusable(f"Redis at {where} is {info['redis_version']}; 6.2 or newer (or Valkey) is needed")
    if policy != "noeviction":
        raise StoreUnusable(
            f"Redis at {where} may evict keys (maxmemory-policy {policy}): counters and claims would vanish. "
            "Set maxmemory-policy to noeviction"
        )
    log.debug("redis_usable", where=where, version=info.get("redis_version"), instance=settings.instance)
