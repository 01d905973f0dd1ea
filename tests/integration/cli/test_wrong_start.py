"""Celery's commands, and the report service, with settings that make no sense or a database that was not migrated."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from benchmarks.warm_start import ROOT, run
from opencue_sched.beat import LeaderScheduler
from opencue_sched.settings import Settings
from opencue_sched.store.schema import REVISION
from tests.kit.environment import stores_of
from tests.kit.polling import eventually
from tests.kit.wording import lacks


def celery(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``celery -A opencue_sched WORDS...`` on stores that do not answer, to its end."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    stores = {
        "OPENCUE_SCHED_DATABASE_URL": "postgresql://a@127.0.0.1:1/b",
        "OPENCUE_SCHED_REDIS_URL": "redis://127.0.0.1:1/0",
    }
    command = [sys.executable, "-m", "celery", "-A", "opencue_sched", *words]
    return run(command, env={**kept, **stores, **variables}, cwd=ROOT)


@pytest.mark.parametrize("role", ["worker", "beat"])
def test_a_process_with_a_url_of_no_postgresql_says_so_and_is_not_started_again(role: str) -> None:
    ran = celery(role, OPENCUE_SCHED_DATABASE_URL="mysql://someone:sesame@h/d")
    assert ran.returncode == 78
    assert not lacks(ran.stderr, "opencue-sched ", "OPENCUE_SCHED_DATABASE_URL")
    assert "sesame" not in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("role", ["worker", "beat"])
def test_a_process_that_can_tell_nobody_why_it_cannot_start_has_its_exit_status(role: str) -> None:
    # given standard error on a disk that is full, when a process starts with a URL that makes no sense
    command = [sys.executable, "-m", "celery", "-A", "opencue_sched", role]
    variables = {**os.environ, "OPENCUE_SCHED_DATABASE_URL": "mysql://h/d"}
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command, env=variables, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=full, timeout=120, check=False
        )
    # then its supervisor knows that another start would end so again
    assert ran.returncode == 78


@pytest.mark.parametrize(
    "words",
    [
        ("beat", "-S", "celery.beat:PersistentScheduler"),
        ("beat", "--scheduler=celery.beat.Scheduler"),
        ("beat", "--detach", "-S", "celery.beat:PersistentScheduler"),
        ("beat", "--", "beat.scheduler=celery.beat:PersistentScheduler"),
        ("beat", "--detach", "--", "beat.scheduler=celery.beat:PersistentScheduler"),
        ("beat", "--detach", "-S", "opencue_sched", "--", "beat.scheduler=celery.beat:PersistentScheduler"),
        ("worker", "-B", "--scheduler", "celery.beat:PersistentScheduler"),
        ("worker", "--beat", "--", "beat.scheduler=celery.beat:PersistentScheduler"),
        ("worker", "-B", "--detach", "--scheduler", "celery.beat:PersistentScheduler"),
        ("worker", "-B", "--detach", "--", "beat.scheduler=celery.beat:PersistentScheduler"),
        ("worker", "-B", "-S", "opencue_sched", "--", "beat.scheduler=celery.beat:PersistentScheduler"),
    ],
    ids=" ".join,
)
def test_a_beat_with_another_scheduler_is_refused_before_that_scheduler_is_made(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    role, *given = words
    ran = celery(role, "--schedule", str(tmp_path / "schedule"), *given)
    assert ran.returncode == 78, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("opencue-sched ")]
    assert not lacks(said, "celery.beat", "--scheduler", "-S", "beat_scheduler")
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in ran.stderr


def test_a_scheduler_that_cannot_be_imported_is_refused_by_name() -> None:
    ran = celery("beat", "-S", "no.such:Scheduler")
    assert ran.returncode == 78, ran.stderr
    assert not lacks(ran.stderr, "opencue-sched ", "no.such:Scheduler")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("named", ["opencue_sched", "opencue_sched.beat:LeaderScheduler"])
def test_a_beat_given_its_own_scheduler_by_name_goes_on_to_its_stores(named: str) -> None:
    ran = celery("beat", "-S", named)
    assert ran.returncode == 75, ran.stderr


def test_a_worker_warns_of_a_misspelt_variable_in_its_log() -> None:
    ran = celery("worker", OPENCUE_SCHED_QEUEU__METRICS_HOST="10.0.0.1", OPENCUE_SCHED_QUEUE__METRICS_PORT="0")
    warnings = [line for line in ran.stderr.splitlines() if "variable_is_no_setting" in line]
    assert (ran.returncode, len(warnings)) == (75, 1)
    assert '"variable": "OPENCUE_SCHED_QEUEU__METRICS_HOST"' in warnings[0]


@pytest.mark.parametrize("role", ["beat", "flower"])
def test_a_process_whose_redis_does_not_answer_says_so_once_and_may_be_started_again(
    role: str, settings: Settings
) -> None:
    dead = "redis://:sesame@127.0.0.1:1/0"
    ran = celery(role, OPENCUE_SCHED_DATABASE_URL=settings.sqlalchemy_url, OPENCUE_SCHED_REDIS_URL=dead)
    said = [line for line in ran.stderr.splitlines() if "OPENCUE_SCHED_REDIS_URL" in line]
    assert (ran.returncode, len(said)) == (75, 1), ran.stderr
    assert not lacks(said[0], "opencue-sched ", "redis://127.0.0.1:1/0")
    assert "sesame" not in ran.stdout + ran.stderr


def test_a_beat_whose_postgresql_does_not_answer_says_so_once_and_may_be_started_again() -> None:
    ran = celery("beat", OPENCUE_SCHED_DATABASE_URL="postgresql://a:sesame@127.0.0.1:1/b")
    said = [line for line in ran.stderr.splitlines() if "OPENCUE_SCHED_DATABASE_URL" in line]
    assert (ran.returncode, len(said)) == (75, 1), ran.stderr
    assert "sesame" not in ran.stdout + ran.stderr
    assert "Background on this error" not in ran.stderr


@pytest.mark.parametrize(
    ("command", "away"), [("report-service", "DATABASE"), ("report-service", "REDIS"), ("migrate", "DATABASE")]
)
def test_a_command_whose_store_does_not_answer_may_be_started_again(
    command: str, away: str, settings: Settings
) -> None:
    # given a store that does not answer
    urls = {
        "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_RELEASE__PORT": "0",
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    }
    nobody = {"DATABASE": "postgresql://a:sesame@127.0.0.1:1/b", "REDIS": "redis://:sesame@127.0.0.1:1/0"}
    urls[f"OPENCUE_SCHED_{away}_URL"] = nobody[away]

    # when a supervisor starts the command
    words = [sys.executable, "-c", "from opencue_sched.cli import main; main()", command]
    ran = run(words, env={**os.environ, **urls}, cwd=ROOT)

    # then its exit status says that starting it again may help, and its one line names the store
    assert ran.returncode == 75, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if f"OPENCUE_SCHED_{away}_URL" in line]
    assert "does not answer" in said
    assert "sesame" not in ran.stdout + ran.stderr


SERVICES = {
    "worker": ("-m", "celery", "-A", "opencue_sched", "worker", "-P", "solo"),
    "beat": ("-m", "celery", "-A", "opencue_sched", "beat"),
    "report service": ("-c", "from opencue_sched.cli import main; main()", "report-service"),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_whose_log_file_cannot_be_opened_names_the_variable_and_is_not_started_again(
    service: str, settings: Settings, tmp_path: Path
) -> None:
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": settings.database_url.get_secret_value(),
        "OPENCUE_SCHED_REDIS_URL": settings.redis_url.get_secret_value(),
        "OPENCUE_SCHED_LOGGING__PATH": str(tmp_path / "nowhere" / "service.log"),
    }
    ran = run([sys.executable, *SERVICES[service]], env={**os.environ, **variables}, cwd=ROOT)
    assert ran.returncode == 78, ran.stderr
    assert "OPENCUE_SCHED_LOGGING__PATH" in ran.stderr
    assert "nowhere/service.log" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_service_that_cannot_serve_metrics_where_it_should_names_the_variable_and_is_not_started_again(
    service: str, host: str, settings: Settings
) -> None:
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": settings.database_url.get_secret_value(),
        "OPENCUE_SCHED_REDIS_URL": settings.redis_url.get_secret_value(),
        "OPENCUE_SCHED_QUEUE__METRICS_HOST": host,
    }
    ran = run([sys.executable, *SERVICES[service]], env={**os.environ, **variables}, cwd=ROOT)
    assert ran.returncode == 78, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if "OPENCUE_SCHED_QUEUE__METRICS_HOST" in line]
    assert f" {host}:" in said
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("given", "there"),
    [
        ("DROP TABLE opencue_sched_version", "migrate"),
        ("UPDATE opencue_sched_version SET version_num = '0006'", "0006"),
    ],
)
def test_a_service_on_a_database_that_was_not_migrated_says_what_to_run_and_is_not_started_again(
    service: str, given: str, there: str, engine: Engine, settings: Settings
) -> None:
    with engine.begin() as connection:
        connection.execute(text(given))
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": settings.database_url.get_secret_value(),
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    ran = run([sys.executable, *SERVICES[service]], env={**kept, **variables}, cwd=ROOT)
    assert ran.returncode == 78, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if "opencue-sched migrate" in line]
    assert not lacks(said, there, REVISION, "`opencue-sched migrate`")
    assert "Traceback" not in ran.stderr


def test_a_beat_says_which_of_our_tables_is_away_and_goes_on_when_it_is_back(
    engine: Engine, settings: Settings
) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE opencue_sched_fence RENAME TO elsewhere"))
    beat = LeaderScheduler(app=Celery(set_as_current=False), lazy=True)
    with stores_of(settings, QUEUE__METRICS_PORT="0"), closing(beat):
        with capture_logs() as logs:
            beat.tick()
        told = [str(entry.get("error")) for entry in logs if entry["log_level"] == "warning"]
        assert ["opencue_sched_fence" in error for error in told] == [True]

        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE elsewhere RENAME TO opencue_sched_fence"))
        eventually(lambda: beat.tick() and beat.gate and beat.gate.fence, what="the beat leads")
