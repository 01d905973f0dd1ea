"""A fleet of real processes on services of its own, for tests that kill, freeze and restart them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from sqlalchemy import Engine, create_engine

from benchmarks.warm_start import WarmFleet
from opencue_sched.coordination.transport import guard_transports
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.settings import Settings
from tests.conftest import PostgresServer
from tests.kit.brief_fleet import brief_fleet, open_counters


@dataclass
class Site:
    """A fleet with the stores it works on. ``settings`` are this process's view of the same."""

    fleet: Fleet
    settings: Settings
    engine: Engine
    client: redis.Redis
    server: EmbeddedRedis


QUICK = {
    "OPENCUE_SCHED_COORDINATION__LEASE_TTL": "3s",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "2s",
    "OPENCUE_SCHED_HOST_CACHE__HOST_STALENESS_THRESHOLD": "1h",
}


@pytest.fixture(scope="session", autouse=True)
def guarded_transports() -> None:
    """Kombu remembers the first transport it made for a scheme: of all tests of a process, it is ours."""
    guard_transports()


@pytest.fixture
def idle_site(database_url: str, engine: Engine, tmp_path: Path) -> Iterator[Site]:
    """An empty fleet with short leases, on a database and a Redis of this test's own."""
    with site_on(database_url, engine, tmp_path) as found:
        yield found


@pytest.fixture
def site(idle_site: Site) -> Site:
    """The same, for files that add to it."""
    return idle_site


@pytest.fixture(scope="module")
def shared_site(
    postgres_server: PostgresServer, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """As ``site``, for all tests of a file."""
    name = f"opencue_sched_shared_{uuid4().hex}"
    url = postgres_server.create(name, template_database)
    engine = create_engine(url)
    with site_on(url, engine, tmp_path_factory.mktemp("shared")) as found:
        yield found
    engine.dispose()
    postgres_server.drop(name)


@contextmanager
def site_on(
    database_url: str, engine: Engine, directory: Path, *, server: EmbeddedRedis | None = None
) -> Iterator[Site]:
    """An empty fleet with short leases, on this database and a Redis of its own: ``server``, or one as any other."""
    with server or EmbeddedRedis() as server, closing(_client(server)) as client:
        environment = {
            "OPENCUE_SCHED_DATABASE_URL": database_url,
            "OPENCUE_SCHED_REDIS_URL": server.url,
            **QUICK,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            settings = Settings()
        open_counters(client)
        with brief_fleet(environment, directory, fleet_type=WarmFleet) as fleet:
            yield Site(fleet, settings, engine, client, server)


def _client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=10.0)
