"""A whole fleet as processes of this machine: workers, beats, Flower, the report service.

The commands are those a studio runs, with the settings in their environment. Used by the demo, the benchmarks and the
end-to-end and chaos tests.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from opencue_sched.embedded.servers.processes import GuardedProcess, ServiceFailed

_PACKAGE = Path(__file__).resolve().parents[3]
_READY_SECONDS = 60.0
"""How long a process may take until it is ready."""
_STOP_SECONDS = 20.0
"""How long a process that was told to stop may take until it is killed."""


class Fleet:
    """Processes started one by one and stopped together, newest first. ``directory`` receives one log per process. Not
    thread-safe."""

    process_type: type[GuardedProcess] = GuardedProcess
    """How each process is started."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("OPENCUE_SCHED_")}
        path = os.pathsep.join(part for part in (str(_PACKAGE), inherited.get("PYTHONPATH", "")) if part)
        self.environment = {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment}
        self.directory = directory
        self.processes: dict[str, GuardedProcess] = {}

    def worker(self, name: str, *options: str, **environment: str) -> GuardedProcess:
        """A Celery worker, known to the fleet as instance ``name``. Returns when it is ready to take messages."""
        process = self._start(
            name,
            [*_celery(), "worker", "--hostname", f"{name}@localhost", "--without-mingle", "--without-gossip", *options],
            {"OPENCUE_SCHED_INSTANCE": name, **environment},
        )
        self._wait_for(process, "worker_started")
        return process

    def beat(self, name: str = "beat", **environment: str) -> GuardedProcess:
        """A Celery beat behind the leader gate."""
        return self._start(name, [*_celery(), "beat", "--schedule", str(self.directory / name)], environment)

    def flower(self, port: int, *options: str, **environment: str) -> GuardedProcess:
        """Flower on loopback."""
        listen = ["--address=127.0.0.1", f"--port={port}"]
        return self._start("flower", [*_celery(), "flower", *listen, *options], environment)

    def report_service(self, name: str = "report-service", **environment: str) -> GuardedProcess:
        """The service that RQDs report to. Returns when it listens."""
        process = self._start(name, [*_command(), "report-service"], environment)
        self._wait_for(process, "report_service_started")
        return process

    def stop(self, name: str) -> None:
        """Stop one process and forget it."""
        self.processes.pop(name).stop()

    def stop_all(self) -> None:
        """Stop everything that still runs, newest first."""
        while self.processes:
            _, process = self.processes.popitem()
            process.stop()

    def ended(self) -> list[str]:
        """Names of processes that are not running any more, though nobody stopped them."""
        return [name for name, process in self.processes.items() if not process.running]

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.directory / f"{name}.log"

    def _start(self, name: str, command: list[str], environment: Mapping[str, str]) -> GuardedProcess:
        """Start a process of the fleet under this name. Raises ServiceFailed if one of that name runs already."""
        if name in self.processes:
            raise ServiceFailed(f"{name} is running already")
        process = self.process_type(
            command,
            log=self.log(name),
            env={**self.environment, **environment},
            cwd=self.directory,
            kill_after=_STOP_SECONDS,
        )
        self.processes[name] = process.start()
        return process

    def _wait_for(self, process: GuardedProcess, event: str) -> None:
        """Wait until the process has logged the event. Raises ServiceFailed when it ended before, or after
        _READY_SECONDS."""
        name, deadline = process.log.stem, time.monotonic() + _READY_SECONDS
        while event not in process.log.read_text(encoding="utf-8", errors="replace"):
            if not process.running:
                raise ServiceFailed(f"{name} ended while starting:\n{process.log_tail()}")
            if time.monotonic() > deadline:
                raise ServiceFailed(f"{name} was not ready in {_READY_SECONDS:.0f} s:\n{process.log_tail()}")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()


def _celery() -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "opencue_sched"]


def _command() -> list[str]:
    return [sys.executable, "-c", "from opencue_sched.cli import main; main()"]
