"""Processes whose PostgreSQL user may not write what they are there to write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sqlalchemy import Engine

from benchmarks.warm_start import ROOT, run
from opencue_sched.settings import Settings
from tests.kit.database_users import as_user, database_user, run_all
from tests.kit.wording import lacks

PROCESSES = {
    "worker": ("-m", "celery", "-A", "opencue_sched", "worker", "-P", "solo"),
    "beat": ("-m", "celery", "-A", "opencue_sched", "beat"),
    "report service": ("-c", "from opencue_sched.cli import main; main()", "report-service"),
}
MIGRATIONS = {
    "migrate": ("-c", "from opencue_sched.cli import main; main()", "migrate"),
    "alembic": ("-m", "alembic", "upgrade", "head"),
}


def start(process: tuple[str, ...], settings: Settings) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
        "OPENCUE_SCHED_RELEASE__PORT": "0",
    }
    return run([sys.executable, *process], env={**kept, **variables}, cwd=ROOT)


@pytest.mark.parametrize(
    ("process", "missing"),
    [
        ("worker", "INSERT on proc"),
        ("beat", "INSERT on opencue_sched_fence"),
        ("report service", "DELETE on proc"),
    ],
)
def test_a_process_whose_database_user_may_only_read_names_what_it_lacks_and_is_not_started_again(
    process: str, missing: str, engine: Engine, settings: Settings
) -> None:
    # given a user that may read everything
    with database_user(engine) as user:
        run_all(engine, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}")

        # when a process starts as that user
        ran = start(PROCESSES[process], as_user(settings, user))

    # then it ends for good, and says who lacks what, and what to do
    assert ran.returncode == 78, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if "refuses" in line]
    grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}"
    assert not lacks(said, missing, grant, "docs/tasks/database-user.md")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_whose_database_user_may_nothing_is_not_started_again(
    process: str, engine: Engine, settings: Settings
) -> None:
    with database_user(engine) as user:
        ran = start(PROCESSES[process], as_user(settings, user))
    assert ran.returncode == 78, ran.stderr
    assert not lacks(ran.stderr, "PostgreSQL", "docs/tasks/database-user.md")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("process", MIGRATIONS)
def test_a_migration_as_a_user_that_owns_nothing_is_not_started_again(
    process: str, engine: Engine, settings: Settings
) -> None:
    # given a database to migrate, and a user that may read it
    with database_user(engine) as user:
        run_all(
            engine,
            "UPDATE opencue_sched_version SET version_num = '0024'",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}",
        )

        # when that user migrates
        ran = start(MIGRATIONS[process], as_user(settings, user))

    # then the migration ends for good, and says who is to run it
    assert ran.returncode == 78, ran.stderr
    assert not lacks(
        ran.stderr,
        "the database user may not do this",
        "as the owner of OpenCue's tables",
        "docs/tasks/database-user.md",
    )
    assert "Traceback" not in ran.stderr
