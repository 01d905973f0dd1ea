"""Where the chaos happens: stores, simulated hosts, and a fleet under a supervisor."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import Engine

from benchmarks.chaos import holds, silent_changes
from benchmarks.chaos.licences import SETTLE_WINDOW_SECONDS
from benchmarks.chaos.sampler import URL_VARIABLE
from benchmarks.workbench import environment_of
from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import GuardedProcess, ServiceFailed, free_port
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.settings import Settings
from opencue_sched.store.schema import upgrade

ALLOCS = ("general", "west")
HOSTS_OF_EACH = 10
CORES_OF_EACH = 8
GPUS_OF_EACH = 1
RUN_SECONDS = (0.2, 1.0)
FAILURE_RATIO = 0.02
# Between two reports of a host.
REPORT_SECONDS = (0.5, 1.0)
COMMIT_DEADLINE_SECONDS = 2.0

# Ages as short as the rules among them allow, so that each kind of recovery fits into the run many times.
ENVIRONMENT = {
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": str(COMMIT_DEADLINE_SECONDS),
    "OPENCUE_SCHED_ACCOUNTING__LIMIT_SETTLE_WINDOW_SECONDS": str(SETTLE_WINDOW_SECONDS),
    "OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS": "3s",
    "OPENCUE_SCHED_ACCOUNTING__LIMIT_RESEED_INTERVAL_SECONDS": "10s",
    "OPENCUE_SCHED_COORDINATION__LEASE_TTL": "3s",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    "OPENCUE_SCHED_QUEUE__ACTIVE_SCAN_INTERVAL": "1s",
    "OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL": "2s",
    "OPENCUE_SCHED_QUEUE__CLUSTER_SATURATED_SLEEP": "1s",
    "OPENCUE_SCHED_QUEUE__JOB_BACK_OFF_DURATION": "3s",
    "OPENCUE_SCHED_QUEUE__RESERVATION_BLOCK_TIME": "3s",
    "OPENCUE_SCHED_RELEASE__LOST_COMPLETION_GRACE": "2s",
    "OPENCUE_SCHED_RQD__TIMEOUT": "1s",
}
_READY = {"worker": "worker_started", "report": "report_service_started", "beat": "beat_started"}
_RESTART_SECONDS = 1.0


@dataclass
class Crew:
    """The fleet's processes under a supervisor: what ends is started again after a moment, as systemd would.

    ``fell`` says which processes ended by themselves after they had been ready: a fault should never bring that about.
    ``starts_failed`` counts ends before that, which are right while a store is away.
    """

    fleet: Fleet
    fell: list[str] = field(default_factory=list)
    starts_failed: Counter[str] = field(default_factory=Counter)
    _down_until: dict[str, float] = field(default_factory=dict)
    _log_from: dict[str, int] = field(default_factory=dict)
    _frozen: dict[str, int] = field(default_factory=dict)

    def names(self, kind: str) -> list[str]:
        """Processes of a kind that run, frozen or not."""
        return [name for name, it in self.fleet.processes.items() if name.startswith(kind) and it.running]

    def at_work(self, kind: str) -> list[str]:
        """Those of them that are not frozen."""
        return [name for name in self.names(kind) if name not in self._frozen]

    def kill(self, name: str, *, down_seconds: float) -> None:
        """SIGKILL; it is started again after ``down_seconds``."""
        self._frozen.pop(name, None)
        self._process(name).kill()
        self._down_until[name] = time.monotonic() + down_seconds

    def freeze(self, name: str) -> None:
        self._frozen[name] = self._process(name).pid
        self._process(name).pause()

    def thaw(self, name: str) -> None:
        """Let a frozen process go on; one that was killed meanwhile is left alone."""
        if self._frozen.pop(name, None) is not None and self._process(name).running:
            self._process(name).resume()

    def tend(self) -> None:
        """Start what is due, and notice what ended by itself."""
        now = time.monotonic()
        for name, process in self.fleet.processes.items():
            if process.running:
                continue
            if name not in self._down_until:
                if self.ready(name):
                    self.fell.append(f"{name} ended with {process.exit_code}: {process.log_tail(3)}")
                else:
                    self.starts_failed[name.rstrip("0123456789")] += 1
                self._down_until[name] = now + _RESTART_SECONDS
            elif now >= self._down_until[name]:
                del self._down_until[name]
                self._log_from[name] = process.log.stat().st_size
                process.start()

    def ready(self, name: str) -> bool:
        """Whether the process said, since its last start, that it is at work."""
        with self._process(name).log.open("rb") as log:
            log.seek(self._log_from.get(name, 0))
            text = log.read().decode(errors="replace")
        return _READY[name.rstrip("0123456789")] in text

    def all_ready(self) -> bool:
        return all(it.running and self.ready(name) for name, it in self.fleet.processes.items())

    def _process(self, name: str) -> GuardedProcess:
        return self.fleet.processes[name]


class Agenda:
    """What is to be done later: ends of faults."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time.monotonic() + seconds, self._count, action))

    def run_due(self, *, everything: bool = False) -> None:
        while self._heap and (everything or self._heap[0][0] <= time.monotonic()):
            heapq.heappop(self._heap)[2]()


class Witness:
    """The sampler's process, and what it has said so far."""

    def __init__(self, database_url: str) -> None:
        self.samples: list[float] = []
        self.booked: list[float] = []
        self.seen: set[str] = set()
        self.violations: list[dict[str, Any]] = []
        self.forbidden: list[dict[str, Any]] = []
        self.judged: dict[str, int] = {}
        self.procs = self.centicores = 0
        self.began = self.ended = time.time()
        url = database_url.replace("+psycopg2", "")
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos.sampler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, URL_VARIABLE: url, "PYTHONPATH": root},
            text=True,
        )
        self._thread = threading.Thread(target=self._read, name="witness", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if not self.samples and said["samples"]:
                self.began = said["samples"][0]
            self.samples += said["samples"]
            self.booked += said["booked"]
            self.seen.update(said["ids"])
            self.violations += said["violations"]
            self.forbidden += said["forbidden"]
            self.judged = said["judged"]
            self.procs, self.centicores = said["procs"], said["centicores"]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Let it finish; afterwards everything it saw is here. Raises ServiceFailed if it had died."""
        assert self._process.stdin is not None
        self.ended = time.time()
        self._process.stdin.close()
        code = self._process.wait(30)
        self._thread.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        if code:
            raise ServiceFailed(f"the sampler ended with {code}")


@dataclass
class Site:
    """Everything a run works with. ``farms`` are the hosts of each allocation, with a report service of their own."""

    postgres: EmbeddedPostgres
    cache: EmbeddedRedis
    settings: Settings
    engine: Engine
    client: redis.Redis
    crew: Crew
    farms: tuple[SimulatedFarm, ...]
    agenda: Agenda = field(default_factory=Agenda)

    def behave(self, **changes: Any) -> None:
        for farm in self.farms:
            farm.behave(**changes)


@contextlib.contextmanager
def site(
    *,
    workers: int,
    beats: int = 2,
    seed: int = 1,
    logs: Path | None = None,
    report_seconds: tuple[float, float] = REPORT_SECONDS,
    fleet_type: type[Fleet] = Fleet,
) -> Iterator[Site]:
    """Stores, hosts and a fleet that is ready. ``logs`` is where the processes' logs stay; without it they go."""
    with contextlib.ExitStack() as stack:
        directory = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencue-sched-chaos-")))
        directory.mkdir(parents=True, exist_ok=True)
        postgres = stack.enter_context(
            EmbeddedPostgres(configuration={"track_commit_timestamp": "on", "max_wal_size": "256MB"}, in_memory=True)
        )
        cache = stack.enter_context(EmbeddedRedis())
        upgrade(postgres.url)
        ports = [free_port() for _ in ALLOCS]
        farms = tuple(_farm(alloc, port, seed, report_seconds) for alloc, port in zip(ALLOCS, ports, strict=True))
        for farm in farms:
            stack.callback(farm.stop)
            farm.start()
        addresses = {name: address for farm in farms for name, address in farm.addresses.items()}
        variables = {
            "OPENCUE_SCHED_DATABASE_URL": postgres.url,
            "OPENCUE_SCHED_REDIS_URL": cache.url,
            "OPENCUE_SCHED_RQD__ADDRESSES": json.dumps(addresses),
            **ENVIRONMENT,
        }
        with environment_of(variables):
            settings = Settings()
        engine = make_engine(settings, application_name="opencue-sched-chaos", pool_size=8)
        stack.callback(engine.dispose)
        client = redis.Redis.from_url(cache.url, decode_responses=True, socket_timeout=30)
        stack.callback(client.close)
        with engine.begin() as connection:
            for alloc in ALLOCS:
                Farm(connection).alloc(alloc)
            holds.plant_witness(connection)
            silent_changes.plant_witness(connection)
        fleet = stack.enter_context(fleet_type(variables, directory))
        stack.callback(_kill_all, fleet)
        _start(fleet, ports, workers, beats)
        yield Site(postgres, cache, settings, engine, client, Crew(fleet), farms)


def _kill_all(fleet: Fleet) -> None:
    """Nothing of theirs is needed any more at the end: draining would only take its time."""
    for process in fleet.processes.values():
        process.kill()


def _farm(alloc: str, port: int, seed: int, report_seconds: tuple[float, float]) -> SimulatedFarm:
    return SimulatedFarm(
        host_specs(HOSTS_OF_EACH, prefix=alloc, cores=CORES_OF_EACH, gpus=GPUS_OF_EACH, tags=(alloc,)),
        behaviour=Behaviour(run_seconds=RUN_SECONDS, failure_ratio=FAILURE_RATIO),
        report_address=f"127.0.0.1:{port}",
        report_seconds=report_seconds,
        seed=seed,
    )


def _start(fleet: Fleet, ports: list[int], workers: int, beats: int) -> None:
    """Everything that takes a while to be ready at once, then the beats."""
    with ThreadPoolExecutor(len(ports) + workers) as threads:
        services = [
            threads.submit(fleet.report_service, f"report{number}", OPENCUE_SCHED_RELEASE__PORT=str(port))
            for number, port in enumerate(ports, start=1)
        ]
        services += [
            threads.submit(fleet.worker, f"worker{number}", "--concurrency", "2") for number in range(1, workers + 1)
        ]
    for service in services:
        service.result()
    for number in range(1, beats + 1):
        fleet.beat(f"beat{number}", OPENCUE_SCHED_INSTANCE=f"beat{number}")
