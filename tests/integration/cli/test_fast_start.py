"""The command starts fast: it imports a large library only where a command needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from opencue_sched.settings import Settings

LARGE = (
    "sqlalchemy",
    "redis",
    "celery",
    "kombu",
    "pydantic",
    "pydantic_settings",
    "structlog",
    "grpc",
    "alembic",
    "rich",
    "prometheus_client",
    "yaml",
)
NOT_TO_READ = {*LARGE, "sqlalchemy.orm", "rich.console", "asyncpg", "tornado"} - {
    "sqlalchemy",
    "pydantic",
    "pydantic_settings",
    "rich",
}
"""What a command that only reads PostgreSQL does without: of rich it takes the width of a character."""
FOR_LOGS = {"structlog", "rich.console"}
OURS = {
    f"opencue_sched.{package}" for package in ("accounting", "coordination", "dispatch", "farm", "placement", "worker")
}
"""The packages of ours that plan, book and settle."""
START = "import sys; from opencue_sched.cli import main; sys.argv = ['opencue-sched', *{words}]"
RUN = """
try:
    main()
finally:
    print(*(name for name in {large} if name in sys.modules), file=sys.stderr)
"""


def imported(program: str, environment: Mapping[str, str] | None = None) -> set[str]:
    """Which of the large libraries a program of Python has imported at its end."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**variables, **(environment or {})},
    )
    return set(ran.stderr.split())


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_no_large_library_is_imported_to_say_what_the_command_is(option: str) -> None:
    assert imported(START.format(words=[option]) + RUN.format(large=LARGE)) == set()


@pytest.mark.parametrize("module", ["job", "host", "show"])
def test_commands_on_the_database_are_loaded_without_what_only_some_need(module: str) -> None:
    program = f"import sys, opencue_sched.cli.{module}" + RUN.replace("main()", "pass")
    assert imported(program.format(large=sorted(NOT_TO_READ | OURS))) == set()


@pytest.mark.parametrize("words", ["job list", "host list", "show list", "alloc list", "subscription list"])
def test_a_list_is_printed_without_what_only_some_commands_need(words: str, settings: Settings) -> None:
    ran = START.format(words=[*words.split(), "--json"]) + RUN.format(large=sorted((NOT_TO_READ | OURS) - FOR_LOGS))
    environment = {"OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url, "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn}
    assert imported(ran, environment) == set()


def test_what_logs_is_set_up_for_people() -> None:
    program = """
import sys
from opencue_sched.cli.output import log_warnings
log_warnings()
import structlog
structlog.get_logger().info("not_said")
structlog.get_logger().warning("said")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout, "said" in ran.stderr, "not_said" in ran.stderr) == ("", True, False)
