"""A pytest plugin: one run plays some tests on a second PostgreSQL as well.

    pytest -p tests.second_postgres --second-postgres=/usr/lib/postgresql/15/bin --on-second='tests/integration/store/*'

What is named by ``--on-second`` is played twice, and what is named by ``--on-second-only`` once, on the second one. To
start two runs costs more: each process imports and collects the tests in each, and in the end of each some are idle.
"""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

SECOND = "second-postgres"
"""What the id of a test ends with, or has among its cases, where it is played on the second PostgreSQL."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("second PostgreSQL")
    group.addoption("--second-postgres", metavar="DIR", help="directory of the programs of another PostgreSQL")
    for option, what in (("--on-second", "also"), ("--on-second-only", "only")):
        group.addoption(option, action="append", default=[], metavar="PATTERN", help=f"files played there {what}")


def pytest_configure(config: pytest.Config) -> None:
    for pattern in (*config.getoption("on_second"), *config.getoption("on_second_only")):
        if not any(config.rootpath.glob(pattern)):
            raise pytest.UsageError(f"{pattern} names no file: nothing of it would be played on the second PostgreSQL")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    programs = config.getoption("second_postgres")
    file = metafunc.definition.nodeid.partition("::")[0]

    def named(option: str) -> bool:
        return any(fnmatch(file, pattern) for pattern in config.getoption(option))

    only = named("on_second_only")
    if programs and (only or named("on_second")):
        usual = [] if only else [pytest.param(None, id=pytest.HIDDEN_PARAM)]
        there = pytest.param(programs, id=SECOND)
        metafunc.parametrize("postgres_programs", [*usual, there], indirect=True, scope="session")
