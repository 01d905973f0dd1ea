"""Services that lose their terminal, and go on without it; and how they end, at SIGHUP as at SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

CELERY = [sys.executable, "-m", "celery", "-A", "opencue_sched"]
STRUCK = ["--scheduler", "tests.integration.worker.struck_beat:StruckScheduler"]
SERVICES = {
    "beat": [*CELERY, "beat"],
    "struck beat": [*CELERY, "beat", *STRUCK],
    "worker with a struck beat": [*CELERY, "worker", "-B", *STRUCK],
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
    process = subprocess.Popen(command, env={**kept, **variables}, cwd=ROOT, process_group=0)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the beat of a worker is a process of its own
            os.killpg(process.pid, signal.SIGKILL)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_beat_hands_over_when_it_is_told_to_stop_while_it_holds_a_lock(
    engine: Engine, settings: Settings, redis_client: redis.Redis, tmp_path: Path, number: signal.Signals
) -> None:
    # given a beat that is told to stop as it sends messages, while it holds a lock that it needs to hand over
    open_counters(redis_client)
    keys, log = beat_keys("cue", None), tmp_path / "log"
    with running("struck beat", settings, log, ">/dev/null 2>&1", first=f"export STRUCK_BY={int(number)};") as beat:
        # when it leads and sends, then it ends, and has handed over once, though it was told again meanwhile
        eventually(lambda: beat.poll() is not None, 60, "the end of the beat", told=lambda: str(events(log)))
    assert beat.returncode == 0
    assert redis_client.exists(keys.fence)
    assert not redis_client.exists(keys.lease)
    assert events(log).count("struck_beat_closes") == 1


def test_a_beat_within_a_worker_hands_over_when_it_is_told_to_stop_while_it_holds_a_lock(
    engine: Engine, settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # given a worker with a beat that is told to stop so
    open_counters(redis_client)
    keys, log = beat_keys("cue", None), tmp_path / "log"
    # and whose lease does not expire meanwhile
    strike = f"export STRUCK_BY={int(signal.SIGTERM)} OPENCUE_SCHED_COORDINATION__LEASE_TTL=180;"
    with running("worker with a struck beat", settings, log, ">/dev/null 2>&1", first=strike) as worker:
        # when that beat leads and sends, then it hands over, and the worker ends well when it is told to as well
        eventually(lambda: redis_client.exists(keys.fence), 60, "a leader", told=lambda: str(events(log)))
        eventually(lambda: not redis_client.exists(keys.lease), 30, "the end", told=lambda: str(events(log)))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    assert events(log).count("struck_beat_closes") == 1


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
