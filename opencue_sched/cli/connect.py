"""What commands connect to, for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
import redis
from sqlalchemy import Engine

from opencue_sched.accounting.connection import make_redis
from opencue_sched.errors import NotReady
from opencue_sched.insight.stores import StoreAway, check_postgresql, check_redis
from opencue_sched.placement.host_groups import HostChanges
from opencue_sched.settings import get_settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.schema import SchemaFacts, check_schema


@contextmanager
def database() -> Iterator[Engine]:
    """An engine on the configured database."""
    engine = make_engine(get_settings(), application_name="opencue-sched cli", pool_size=2)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def farm() -> Iterator[tuple[Engine, SchemaFacts]]:
    """An engine on a database that answers and has a schema we can use, and what the schema has.

    Raises StoreUnusable, SchemaMissing or SchemaTooOld, each saying what to do.
    """
    with database() as engine:
        check_postgresql(engine)
        with engine.connect() as connection:
            facts = check_schema(connection)
        yield engine, facts


def tell_hosts_changed(host_ids: Sequence[str]) -> None:
    """Tell every worker's host cache, after the commit. Without Redis they see it at their next refresh."""
    if not host_ids:
        return
    settings = get_settings()
    try:
        with redis_store() as client:
            HostChanges(client, settings.coordination.namespace).publish(host_ids)
    except redis.RedisError as error:
        refresh = settings.host_cache.group_refresh_interval
        click.echo(f"note: Redis does not answer ({error}); workers see the change within {refresh:g} s", err=True)


@contextmanager
def checked_redis() -> Iterator[redis.Redis]:
    """A client of a Redis that answers and does not evict. Raises StoreUnusable saying what to set."""
    with redis_store() as client:
        check_redis(client, get_settings())
        yield client


@contextmanager
def redis_store() -> Iterator[redis.Redis]:
    """A client of the configured Redis. Raises StoreAway when the ledger cannot use it, saying what to set."""
    settings = get_settings()
    client = make_redis(settings.redis_dsn, settings)
    try:
        yield client
    except NotReady as error:
        if isinstance(error.__cause__, redis.RedisError):
            raise StoreAway(f"{error}; set OPENCUE_SCHED_REDIS_URL") from error
        raise
    finally:
        client.close()
