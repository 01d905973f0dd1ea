"""Everything the demo starts, in the order in which a studio would, and stops again whatever happens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, create_engine

from opencue_sched.embedded.fleet import Fleet
from opencue_sched.embedded.processes import ServiceFailed, free_port, private_directory, remove_directory
from opencue_sched.embedded.real_rqd import RealRqdFarm
from opencue_sched.embedded.services import EmbeddedPostgres, EmbeddedRedis

Say = Callable[[str], None]

SHOW = "demo"
_COMMAND_SECONDS = 60
_COMMIT_DEADLINE_SECONDS = 2
_IN_FLIGHT_AGE_SECONDS = 6


@dataclass(frozen=True, slots=True)
class Stage:
    """A farm that is up. ``frames_directory`` and ``logs`` are in the private directory."""

    fleet: Fleet
    engine: Engine
    directory: Path
    frames_directory: Path
    flower_url: str
    metrics_urls: tuple[str, ...]

    def command(self, *arguments: str) -> str:
        """Run ``opencue-sched ARGUMENTS`` as a user would; its output. Raises ServiceFailed with what it said."""
        ended = subprocess.run(
            [sys.executable, "-c", "from opencue_sched.cli import main; main()", *arguments],
            env=self.fleet.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
        if ended.returncode != 0:
            said = (ended.stdout + ended.stderr).strip()
            raise ServiceFailed(f"opencue-sched {' '.join(arguments)} failed with status {ended.returncode}: {said}")
        return ended.stdout


@contextlib.contextmanager
def stage(*, hosts: int, cores: int, workers: int, say: Say) -> Iterator[Stage]:
    """Stores, report service, RQDs, workers, beat and Flower, all on free ports of loopback."""
    with contextlib.ExitStack() as stack:
        directory = private_directory("demo")
        stack.callback(remove_directory, directory)
        say("PostgreSQL and Redis from wheels")
        postgres = stack.enter_context(EmbeddedPostgres())
        cache = stack.enter_context(EmbeddedRedis())
        report_port, flower_port = free_port(), free_port()
        say("real RQDs (their environment is made at the first run)")
        rqds = RealRqdFarm(
            hosts,
            report_address=f"127.0.0.1:{report_port}",
            directory=directory,
            cores=cores,
            tags=("general",),
            facility="local",
        )
        fleet = stack.enter_context(
            Fleet(
                {
                    "OPENCUE_SCHED_DATABASE_URL": postgres.url,
                    "OPENCUE_SCHED_REDIS_URL": cache.url,
                    "OPENCUE_SCHED_RELEASE__PORT": str(report_port),
                    "OPENCUE_SCHED_RQD__ADDRESSES": json.dumps(rqds.addresses),
                    "OPENCUE_SCHED_SUBMISSION__LOG_ROOT": str(directory / "render-logs"),
                    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": str(_COMMIT_DEADLINE_SECONDS),
                    "OPENCUE_SCHED_ACCOUNTING__IN_FLIGHT_AGE": str(_IN_FLIGHT_AGE_SECONDS),
                    "OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS": "10",
                    "OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL": "2",
                },
                directory,
            )
        )
        engine = create_engine(postgres.url, pool_size=2)
        stack.callback(engine.dispose)
        frames_directory = directory / "frames"
        frames_directory.mkdir()
        metrics = tuple(free_port() for _ in range(workers))
        ready = Stage(
            fleet=fleet,
            engine=engine,
            directory=directory,
            frames_directory=frames_directory,
            flower_url=f"http://127.0.0.1:{flower_port}",
            metrics_urls=tuple(f"http://127.0.0.1:{port}/metrics" for port in metrics),
        )
        say("schema, show and subscription")
        ready.command("migrate")
        _open_show(ready, cores=hosts * cores)
        say("report service, then the RQDs")
        fleet.report_service()
        stack.enter_context(rqds)
        say("workers, beat and Flower")
        for number, port in enumerate(metrics, 1):
            fleet.worker(f"worker{number}", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(port))
        fleet.beat()
        fleet.flower(flower_port)
        yield ready


def _open_show(ready: Stage, *, cores: int) -> None:
    ready.command("show", "create", SHOW, "--managed")
    ready.command("subscription", "create", SHOW, "local.general", str(cores))
