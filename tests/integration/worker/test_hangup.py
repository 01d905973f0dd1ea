"""Services that lose their terminal: they go on without it, and end at SIGHUP as at SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine

from benchmarks.warm_start import ROOT
from opencue_sched.coordination.keys import beat_keys
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.settings import Settings
from tests.kit.brief_fleet import open_counters
from tests.kit.polling import eventually
from tests.kit.terminal import MAIN

SERVICES = {
    "beat": [sys.executable, "-m", "celery", "-A", "opencue_sched", "beat"],
    "report service": [sys.executable, "-c", MAIN, "report-service"],
}


@contextmanager
def running(
    service: str, settings: Settings, log: Path, redirection: str, first: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A service with a log file, started by a shell that does something ``first`` and redirects its standard files."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
        "OPENCUE_SCHED_RELEASE__PORT": str(free_port()),
        "OPENCUE_SCHED_LOGGING__PATH": str(log),
    }
    command = ["sh", "-c", f'{first} exec "$@" {redirection}', "sh", *SERVICES[service]]
    process = subprocess.Popen(command, env={**kept, **variables}, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events(log: Path) -> list[str]:
    return [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("redirection", [">/dev/null 2>&1", "<&- >&- 2>&-"], ids=["quiet", "closed"])
def test_a_report_service_drains_when_its_terminal_hangs_up(
    engine: Engine, settings: Settings, redis_client: redis.Redis, tmp_path: Path, redirection: str
) -> None:
    # given a report service that has nobody to tell anything but its log
    log = tmp_path / "log"
    with running("report service", settings, log, redirection) as service:
        eventually(lambda: "report_service_started" in events(log), 60, told=lambda: str(events(log)))
        # when it is sent SIGHUP, then it ends as at SIGTERM
        service.send_signal(signal.SIGHUP)
        assert service.wait(60) == 0
    assert events(log)[-1] == "report_service_stopped"


@pytest.mark.parametrize("redirection", [">/dev/null 2>&1", "<&- >&- 2>&-"], ids=["quiet", "closed"])
def test_a_beat_hands_over_when_its_terminal_hangs_up(
    engine: Engine, settings: Settings, redis_client: redis.Redis, tmp_path: Path, redirection: str
) -> None:
    # given a beat that leads
    open_counters(redis_client)
    lease, log = beat_keys("cue", None).lease, tmp_path / "log"
    with running("beat", settings, log, redirection) as beat:
        eventually(lambda: redis_client.exists(lease), 60, told=lambda: str(events(log)))
        # when it is sent SIGHUP, then it has given its lease back when it ends
        beat.send_signal(signal.SIGHUP)
        assert beat.wait(60) == 0
    assert not redis_client.exists(lease)


def test_nohup_is_heeded(engine: Engine, settings: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    # given a report service that was started so that it ignores SIGHUP
    log = tmp_path / "log"
    with running("report service", settings, log, ">/dev/null 2>&1", first="trap '' HUP;") as service:
        eventually(lambda: "report_service_started" in events(log), 60, told=lambda: str(events(log)))
        # when it is sent that, then it goes on, and does what it is told next
        service.send_signal(signal.SIGHUP)
        service.send_signal(signal.SIGUSR1)
        eventually(lambda: "log_level_changed" in events(log), 60, told=lambda: str(events(log)))
        assert service.poll() is None
