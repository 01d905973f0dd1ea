"""A real fleet (processes) on the test's stores, with simulated RQDs speaking real gRPC."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import Engine, text

from benchmarks.warm_start import WarmFleet
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.insight.audit import Report, run_audit
from opencue_sched.settings import Settings
from tests.kit.brief_fleet import brief_fleet, open_counters
from tests.kit.polling import eventually, tail_of

SHORT_TIMES = {
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "2s",
    "OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS": "3s",
    "OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL": "1s",
    "OPENCUE_SCHED_QUEUE__ACTIVE_SCAN_INTERVAL": "1s",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    "OPENCUE_SCHED_RELEASE__LOST_COMPLETION_GRACE": "2s",
}
NONE_IS_LOST = {"OPENCUE_SCHED_RELEASE__LOST_COMPLETION_GRACE": "60s"}
"""Where each frame is to run once: a report service that stands still hears of ends late, and of hosts without them."""


@dataclass
class FleetOnTest:
    fleet: Fleet
    farm: SimulatedFarm
    engine: Engine
    client: redis.Redis
    settings: Settings

    def scalar(self, sql: str, **parameters: Any) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(sql), parameters).scalar()

    def wait_for(self, what: str, check: Callable[[], Any], *, seconds: float = 50.0) -> Any:
        """Poll until ``check`` holds; on failure show the logs of every process."""
        return eventually(
            check, seconds, what, told=tail_of(*(process.log for process in self.fleet.processes.values()))
        )

    def hosts_up(self, count: int) -> None:
        def check() -> bool:
            for spec in self.farm.specs:
                self.farm.report_now(spec.name)
            return (
                self.scalar("SELECT count(*) FROM host JOIN host_stat USING (pk_host) WHERE str_state = 'UP'") >= count
            )

        self.wait_for(f"{count} hosts reporting", check)

    def finished(self, job_id: str) -> bool:
        return self.scalar("SELECT str_state FROM job WHERE pk_job = :job", job=job_id) == "FINISHED"

    def assert_audit(self) -> None:
        """The audit passes, at the latest when what was in flight has come to rest."""

        def audit() -> Report:
            return run_audit(self.engine, self.client, self.settings)

        eventually(lambda: not audit().failed, 30, "a clean audit", told=lambda: "\n".join(audit().lines()))


@contextlib.contextmanager
def fleet_on(
    settings: Settings,
    engine: Engine,
    client: redis.Redis,
    directory: Path,
    *,
    hosts: int = 4,
    cores: int = 4,
    workers: int = 1,
    behaviour: Behaviour | None = None,
    environment: Mapping[str, str] | None = None,
    service: Mapping[str, str] | None = None,
) -> Iterator[FleetOnTest]:
    """Report service, workers and beat as processes; simulated hosts tagged ``general``.

    ``environment`` is for all, ``service`` for the report service alone.
    """
    port = free_port()
    farm = SimulatedFarm(
        host_specs(hosts, cores=cores, tags=("general",)),
        report_address=f"127.0.0.1:{port}",
        report_seconds=(0.5, 1.0),
        behaviour=behaviour,
    ).start()
    variables = {
        **SHORT_TIMES,
        "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_RELEASE__PORT": str(port),
        "OPENCUE_SCHED_RQD__ADDRESSES": json.dumps(farm.addresses),
        **(environment or {}),
    }
    open_counters(client)
    with contextlib.closing(_Stopping(farm)), brief_fleet(variables, directory, fleet_type=WarmFleet) as fleet:
        on_test = FleetOnTest(fleet, farm, engine, client, settings)
        fleet.report_service(**(service or {}))
        on_test.hosts_up(hosts)
        for number in range(1, workers + 1):
            fleet.worker(f"worker{number}")
        fleet.beat()
        yield on_test


class _Stopping:
    def __init__(self, farm: SimulatedFarm) -> None:
        self._farm = farm

    def close(self) -> None:
        self._farm.stop()
