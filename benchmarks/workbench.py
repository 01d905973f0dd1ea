"""Stores, a fleet and figures, for the length of one benchmark."""

from __future__ import annotations

import contextlib
import os
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from sqlalchemy import Engine, text

from benchmarks.proc_times import parent_of
from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.settings import Settings
from opencue_sched.store.schema import upgrade

_SERVER = text(
    "SELECT xact_commit, xact_rollback, tup_inserted, tup_updated, tup_deleted, tup_returned, tup_fetched, deadlocks "
    "FROM pg_stat_database WHERE datname = current_database()"
)


@dataclass
class Workbench:
    """Where a benchmark works. ``postgres`` is None when the database is somebody else's.

    ``metrics_ports`` has one entry per worker.
    """

    settings: Settings
    engine: Engine
    client: redis.Redis
    fleet: Fleet
    postgres: EmbeddedPostgres | None = None
    metrics_ports: dict[str, int] = field(default_factory=dict)

    def workers(self, count: int, *options: str) -> None:
        """Start ``count`` workers, each with a /metrics port of its own."""
        for number in range(1, count + 1):
            name = f"worker{number}"
            self.metrics_ports[name] = free_port()
            self.fleet.worker(name, *options, OPENCUE_SCHED_QUEUE__METRICS_PORT=str(self.metrics_ports[name]))

    def processes(self) -> dict[str, list[int]]:
        """Process ids by what they are: workers, beat, PostgreSQL, ... Stores must be on this machine."""
        groups: dict[str, list[int]] = {}
        for name, process in self.fleet.processes.items():
            groups.setdefault(name.rstrip("0123456789"), []).append(process.pid)
        with self.engine.connect() as connection:
            backend = connection.execute(text("SELECT pg_backend_pid()")).scalar()
        groups["postgresql"] = [parent_of(int(backend or 0))]
        groups["redis"] = [int(self.client.info("server")["process_id"])]
        return groups

    def counters(self) -> Counter[str]:
        """The workers' counters, summed over workers and labels; host and database counters beside them.

        A counter with a ``reason``, and a bucket of a histogram by its upper end, are named NAME:LABEL.
        """
        sums: Counter[str] = Counter()
        for port in self.metrics_ports.values():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    for sample in family.samples:
                        if sample.name.endswith(("_total", "_sum", "_count")):
                            sums[sample.name] += sample.value
                            if "reason" in sample.labels:
                                sums[f"{sample.name}:{sample.labels['reason']}"] += sample.value
                        elif sample.name.endswith("_bucket"):
                            sums[f"{sample.name}:{float(sample.labels['le']):g}"] += sample.value
        stats = self.client.info("commandstats")
        sums["redis_lua_calls"] = sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
        sums["redis_commands"] = self.client.info("stats")["total_commands_processed"]
        with self.engine.connect() as connection:
            connection.execute(text("SELECT pg_stat_clear_snapshot()"))
            row = connection.execute(_SERVER).one()
        sums.update({f"pg_{name}": value for name, value in row._asdict().items()})
        return sums


@contextlib.contextmanager
def workbench(environment: Mapping[str, str], *, database_url: str | None = None) -> Iterator[Workbench]:
    """Stores from wheels (PostgreSQL only if no ``database_url`` is given), migrated, and an empty fleet."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencue-sched-bench-")))
        postgres = None
        if database_url is None:
            postgres = stack.enter_context(EmbeddedPostgres(configuration={"track_commit_timestamp": "on"}))
            database_url = postgres.url
        cache = stack.enter_context(EmbeddedRedis())
        database_url = Settings(database_url=SecretStr(database_url)).sqlalchemy_url
        upgrade(database_url)
        urls = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": cache.url}
        with environment_of({**urls, **environment}):
            settings = Settings()
        engine = make_engine(settings, application_name="opencue-sched-bench", pool_size=4)
        stack.callback(engine.dispose)
        client = redis.Redis.from_url(cache.url, decode_responses=True, socket_timeout=30)
        stack.callback(client.close)
        fleet = stack.enter_context(Fleet({**urls, **environment}, directory))
        yield Workbench(settings, engine, client, fleet, postgres)


@contextlib.contextmanager
def environment_of(values: Mapping[str, str]) -> Iterator[None]:
    """These variables set in this process's environment, and put back afterwards."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
