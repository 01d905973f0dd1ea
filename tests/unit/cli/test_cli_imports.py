"""The command starts fast: it imports a large library only where a command needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
)
START = "import sys; from opencue_sched.cli import main; sys.argv = ['opencue-sched', *{words}]"
RUN = """
try:
    main()
finally:
    print(*(name for name in {large} if name in sys.modules), file=sys.stderr)
"""


def imported(program: str) -> set[str]:
    """Which of the large libraries a program of Python has imported at its end."""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(ran.stderr.split())


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_no_large_library_is_imported_to_say_what_the_command_is(option: str) -> None:
    assert imported(START.format(words=[option]) + RUN.format(large=LARGE)) == set()


@pytest.mark.parametrize("module", ["job", "host", "show"])
def test_commands_on_the_database_import_neither_grpc_nor_celery(module: str) -> None:
    program = f"import sys, opencue_sched.cli.{module}" + RUN.replace("main()", "pass").format(large=LARGE)
    assert imported(program) & {"grpc", "celery", "kombu", "alembic"} == set()
