"""A PostgreSQL that answers and takes no writes: a hot standby, and a database that is read only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from benchmarks.warm_start import ROOT, run
from opencue_sched.settings import Settings
from tests.kit.command import Cli
from tests.kit.standby import standby_server

STARTS = {
    "worker": ("-m", "celery", "-A", "opencue_sched", "worker", "-P", "solo"),
    "beat": ("-m", "celery", "-A", "opencue_sched", "beat"),
    "report service": ("-c", "from opencue_sched.cli import main; main()", "report-service"),
    "migrate": ("-c", "from opencue_sched.cli import main; main()", "migrate"),
    "alembic": ("-m", "alembic", "upgrade", "head"),
}


@pytest.fixture(scope="module")
def standby() -> Iterator[str]:
    """URL of a migrated database on a hot standby."""
    with standby_server() as server:
        yield server.url


@pytest.fixture
def read_only(engine: Engine, settings: Settings) -> str:
    """URL of a database whose sessions begin read only."""
    assert engine.url.database is not None
    with engine.begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{engine.url.database}" SET default_transaction_read_only = on'))
    return settings.sqlalchemy_url


@pytest.fixture(params=["standby", "read_only"])
def no_writes(request: pytest.FixtureRequest) -> tuple[str, str]:
    """URL of a database that takes no writes, and what is said of it."""
    words = {"standby": "target_session_attrs=read-write", "read_only": "default_transaction_read_only"}
    return request.getfixturevalue(request.param), words[request.param]


@pytest.mark.parametrize("role", STARTS)
def test_no_start_is_made_on_a_database_that_takes_no_writes(
    role: str, no_writes: tuple[str, str], settings: Settings
) -> None:
    # given stores that answer, of which one takes no writes
    url, why = no_writes
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
        "OPENCUE_SCHED_RELEASE__PORT": "0",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}

    # when a process starts there
    ran = run([sys.executable, *STARTS[role]], env={**kept, **variables}, cwd=ROOT)

    # then it ends, to be started again, and says what to do
    assert ran.returncode == 75, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if why in line]
    assert "OPENCUE_SCHED_DATABASE_URL" in said
    assert "Traceback" not in ran.stderr


def test_doctor_fails_where_nothing_can_be_written(
    cli: Cli, environment: pytest.MonkeyPatch, no_writes: tuple[str, str]
) -> None:
    url, why = no_writes
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", url)
    ran = cli("doctor", "--json")
    (told,) = [found for found in ran.json["findings"] if (found["what"], found["level"]) == ("PostgreSQL", "FAIL")]
    assert ran.status == 1
    assert why in told["text"] + told["remedy"]
    assert "OPENCUE_SCHED_DATABASE_URL" in told["remedy"]


def test_a_command_that_would_write_says_that_nothing_can_be_written(
    cli: Cli, environment: pytest.MonkeyPatch, no_writes: tuple[str, str]
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", no_writes[0])
    ran = cli("show", "create", "demo")
    assert (ran.status, ran.out) == (1, "")
    assert "read-only transaction" in ran.err, "as PostgreSQL says it"
    # and one that reads reads
    assert cli("show", "list").status == 0
