"""Stores, a fleet and figures, for the length of one benchmark."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import redis
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from sqlalchemy import Engine, text

from benchmarks.proc_times import BENCHMARK, Reading, parent_of, read
from opencue_sched.clients.postgres import OURS, make_engine
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.settings import Settings
from opencue_sched.store.schema import upgrade

_SERVER = text(
    "SELECT xact_commit, xact_rollback, tup_inserted, tup_updated, tup_deleted, tup_returned, tup_fetched, deadlocks "
    "FROM pg_stat_database WHERE datname = current_database()"
)

_SESSIONS = text("SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database()")
_ROOT = Path(__file__).resolve().parents[1]

APPLICATION_NAME = "opencue-sched-bench"
"""Of the benchmark's own sessions: those that write the farm, end frames and look."""
_NAMES_OF_OTHERS = (APPLICATION_NAME, "opencue-sched-beat")

WORKERS = "workers"
THEIR_SESSIONS = "their PostgreSQL"
OUR_SESSIONS = "PostgreSQL of the benchmark"
REDIS = "Redis"
THE_REST = "the rest"
_REST = ("postgresql", "beat", BENCHMARK)


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
        """Start workers until there are ``count``, each with a /metrics port of its own."""
        for number in range(len(self.metrics_ports) + 1, count + 1):
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

    def cpu(self) -> Reading:
        """CPU seconds so far in five groups, and of the whole machine: of the workers, of the PostgreSQL backends of
        their sessions, of those of this process's (which end frames), of Redis, and of the rest: PostgreSQL's other
        processes, beat, this process.

        Sessions live as long as their process, so the backends of two readings are the same.
        """
        groups = self.processes()
        with self.engine.connect() as connection:
            sessions = [(int(pid), str(name)) for pid, name in connection.execute(_SESSIONS)]
        groups[THEIR_SESSIONS] = [pid for pid, name in sessions if is_of_a_worker(name)]
        groups[OUR_SESSIONS] = [pid for pid, name in sessions if name == APPLICATION_NAME]
        reading = read(groups)
        seconds = reading.groups
        backends = seconds[THEIR_SESSIONS] + seconds[OUR_SESSIONS]
        spent = {
            WORKERS: seconds["worker"],
            THEIR_SESSIONS: seconds[THEIR_SESSIONS],
            OUR_SESSIONS: seconds[OUR_SESSIONS],
            REDIS: seconds["redis"],
            THE_REST: sum(seconds.get(name, 0.0) for name in _REST) - backends,
        }
        return Reading(spent, reading.machine)

    def samples(self, name: str) -> list[float]:
        """The samples of a gauge or counter of each worker; workers that do not have it, or not yet, are left out."""
        return [
            sample.value
            for port in self.metrics_ports.values()
            for family in _families(port)
            for sample in family.samples
            if sample.name == name and not math.isnan(sample.value)
        ]

    def counters(self) -> Counter[str]:
        """The workers' counters, summed over workers and labels; host and database counters beside them.

        A counter with a ``reason``, and a bucket of a histogram by its upper end, are named NAME:LABEL.
        """
        sums: Counter[str] = Counter()
        for port in self.metrics_ports.values():
            for family in _families(port):
                for sample in family.samples:
                    value = cast(int, sample.value)  # a float, which a Counter adds up as well as its type's int
                    if sample.name.endswith(("_total", "_sum", "_count")):
                        sums[sample.name] += value
                        if "reason" in sample.labels:
                            sums[f"{sample.name}:{sample.labels['reason']}"] += value
                    elif sample.name.endswith("_bucket"):
                        sums[f"{sample.name}:{float(sample.labels['le']):g}"] += value
        stats = self.client.info("commandstats")
        sums["redis_lua_calls"] = sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
        sums["redis_commands"] = self.client.info("stats")["total_commands_processed"]
        with self.engine.connect() as connection:
            connection.execute(text("SELECT pg_stat_clear_snapshot()"))
            row = connection.execute(_SERVER).one()
        sums.update({f"pg_{name}": value for name, value in row._asdict().items()})
        return sums


def is_of_a_worker(application_name: str) -> bool:
    """Whether a session is one of a worker, or of its listener."""
    return application_name.startswith(OURS) and application_name not in _NAMES_OF_OTHERS


def _families(port: int) -> Iterable[Metric]:
    """What a worker's /metrics shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


@contextlib.contextmanager
def code_of(commit: str) -> Iterator[Path]:
    """The files of another commit of this repository, for as long as they are needed."""
    with tempfile.TemporaryDirectory(prefix="opencue-sched-code-") as directory:
        archive = Path(directory, "code.tar")
        code = Path(directory, "code")
        code.mkdir()
        for command in (
            ["git", "archive", "--output", str(archive), commit],
            ["tar", "-xf", str(archive), "-C", str(code)],
        ):
            subprocess.run(command, cwd=_ROOT, check=True)
        yield code


@contextlib.contextmanager
def workbench(
    environment: Mapping[str, str],
    *,
    database_url: str | None = None,
    code: Path | None = None,
    configuration: Mapping[str, str] | None = None,
    fleet_type: type[Fleet] = Fleet,
) -> Iterator[Workbench]:
    """Stores from wheels (PostgreSQL only if no ``database_url`` is given), migrated, and an empty fleet.

    ``configuration``: what else is in PostgreSQL's configuration.
    ``code``: where the fleet's processes have their code from (`code_of`), if not from here.
    ``fleet_type``: how they are started.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencue-sched-bench-")))
        postgres = None
        if database_url is None:
            more = {"track_commit_timestamp": "on", **(configuration or {})}
            postgres = stack.enter_context(EmbeddedPostgres(configuration=more))
            database_url = postgres.url
        cache = stack.enter_context(EmbeddedRedis())
        database_url = Settings(database_url=SecretStr(database_url)).sqlalchemy_url
        upgrade(database_url)
        urls = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": cache.url}
        with environment_of({**urls, **environment}):
            settings = Settings()
        engine = make_engine(settings, application_name=APPLICATION_NAME, pool_size=4)
        stack.callback(engine.dispose)
        client = redis.Redis.from_url(cache.url, decode_responses=True, socket_timeout=30)
        stack.callback(client.close)
        path = {"PYTHONPATH": str(code)} if code else {}
        fleet = stack.enter_context(fleet_type({**urls, **path, **environment}, directory))
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
