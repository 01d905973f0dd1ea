"""The real command, in this process, on a database and a Redis of the test's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from typing import Any

import pytest
import structlog
from sqlalchemy import Engine, text

from opencue_sched.cli import main
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Settings, get_settings
from tests.kit.command import Cli, Ran


@pytest.fixture
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The variables a command finds."""
    for name in [name for name in os.environ if name.startswith("OPENCUE_SCHED_TEST_")]:
        monkeypatch.delenv(name)  # the tests' own: the program would warn that it is no setting
    monkeypatch.setenv("OPENCUE_SCHED_DATABASE_URL", settings.sqlalchemy_url)
    monkeypatch.setenv("OPENCUE_SCHED_REDIS_URL", settings.redis_dsn)
    monkeypatch.setenv("OPENCUE_SCHED_INSTANCE", "cli-test")
    monkeypatch.setenv("COLUMNS", "240")
    get_settings.cache_clear()
    yield monkeypatch
    get_settings.cache_clear()
    structlog.reset_defaults()


@pytest.fixture
def cli(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``opencue-sched WORDS...``; ``given`` is its standard input."""

    def run(*words: str, given: str | bytes = "") -> Ran:
        get_settings.cache_clear()
        environment.setattr(sys, "argv", ["opencue-sched", *words])
        content = given.encode() if isinstance(given, str) else given
        environment.setattr(sys, "stdin", TextIOWrapper(BytesIO(content)))
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run


@pytest.fixture
def build(engine: Engine) -> Callable[[Callable[[Farm], Any]], Any]:
    """Lets a function build something on the farm, in a transaction of its own."""

    def run(builder: Callable[[Farm], Any]) -> Any:
        with engine.begin() as connection:
            return builder(Farm(connection))

    return run


@pytest.fixture
def rows(engine: Engine) -> Callable[..., list[Any]]:
    """Rows of a query."""

    def run(sql: str, **parameters: Any) -> list[Any]:
        with engine.connect() as connection:
            return list(connection.execute(text(sql), parameters))

    return run
