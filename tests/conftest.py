"""Real services for the tests, and the time each suite took.

The servers come from wheels, once a session, unless OPENCUE_SCHED_TEST_DATABASE_URL or OPENCUE_SCHED_TEST_REDIS_URL
name others (their user must be allowed to create databases; the Redis database is flushed, so that tests on it run one
after the other). OPENCUE_SCHED_EMBEDDED_REDIS names another program to start, such as valkey-server, and
OPENCUE_SCHED_EMBEDDED_POSTGRES a directory with the programs of another PostgreSQL. A service that cannot start fails
the tests that need it. OPENCUE_SCHED_TEST_TEMPLATE names a database to clone in place of one made by our own
migrations: that is how ``make compat`` runs everything on a schema made by Cuebot.
"""

from __future__ import annotations

import functools
import gc
import os
import secrets
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
import structlog
from pydantic import SecretStr
from sqlalchemy import Engine

from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.servers import processes
from opencue_sched.embedded.servers.services import POSTGRES_VARIABLE, EmbeddedPostgres, EmbeddedRedis
from opencue_sched.settings import Queue, Settings
from tests.kit.databases import TEST_SESSIONS, Databases, PostgresServer
from tests.kit.examples import DEEP, examples

# Machines that run these tests are shared and slow at times: no test fails for the time an example takes. And each run
# tries the same examples, so that a change is not told of what others left; `make test-deep` tries others, and more.
hypothesis.settings.register_profile(
    "opencue-sched",
    deadline=None,
    derandomize=not DEEP,
    max_examples=examples(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("opencue-sched")

# What a test has fail is logged as a plain traceback: to draw one with the source and the variables of every frame, as
# structlog does where nothing is configured, takes from a tenth of a second to two.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# Each new connection reads redis-py's version from its package's metadata, which takes longer than to connect.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

_SUITES = ("unit", "integration", "e2e", "chaos")


# A database is used by one test at a time, and emptied after it: what a vacuum would find in between is not worth a new
# process every few seconds, and a plan that hangs on when it came is none that a test can count on.
_CONFIGURATION = {"max_wal_size": "256MB", "autovacuum": "off"}


class RedisServer:
    """A Redis server. ``embedded`` is None when it was given by URL."""

    def __init__(self, url: str, embedded: EmbeddedRedis | None) -> None:
        self.url = url
        self.embedded = embedded


@pytest.fixture(scope="session", autouse=True)
def postgres_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that tests/second_postgres.py plays on another PostgreSQL find it named, and so does what they start."""
    with pytest.MonkeyPatch.context() as patch:
        if programs := getattr(request, "param", None):
            patch.setenv(POSTGRES_VARIABLE, programs)
        yield


@pytest.fixture(scope="session")
def postgres_server(postgres_programs: None) -> Iterator[PostgresServer]:
    """The PostgreSQL server of this test session: one after the other where there are two."""
    given = os.environ.get("OPENCUE_SCHED_TEST_DATABASE_URL")
    embedded = None if given else EmbeddedPostgres(configuration=_CONFIGURATION, in_memory=True).start()
    server = PostgresServer(given or embedded.url, embedded)  # type: ignore[union-attr]
    try:
        yield server
    finally:
        server.close()
        if embedded is not None:
            embedded.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The Redis server of this test session."""
    given = os.environ.get("OPENCUE_SCHED_TEST_REDIS_URL")
    if given:
        yield RedisServer(given, None)
        return
    with EmbeddedRedis() as embedded:
        yield RedisServer(embedded.url, embedded)


@pytest.fixture(scope="session")
def template_database(postgres_server: PostgresServer) -> Iterator[str]:
    """Name of the migrated database that every test's database is a copy of."""
    from opencue_sched.store import schema

    name = f"opencue_sched_template_{secrets.token_hex(4)}"
    try:
        schema.upgrade(postgres_server.create(name, os.environ.get("OPENCUE_SCHED_TEST_TEMPLATE")))
        yield name
    finally:
        postgres_server.drop(name)


@pytest.fixture(scope="session")
def databases(postgres_server: PostgresServer, template_database: str) -> Iterator[Databases]:
    """The migrated databases of this process, one for a test."""
    databases = Databases(postgres_server, template_database)
    try:
        yield databases
    finally:
        databases.close()


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """URL of a migrated database of this test's own, without any row but those of the migrations."""
    url = databases.take()
    try:
        yield url
    finally:
        databases.give_back(url)


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a database of this test's own without any table."""
    name = f"opencue_sched_empty_{secrets.token_hex(6)}"
    url = postgres_server.create(name)
    try:
        yield url
    finally:
        postgres_server.drop(name)


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client of an empty Redis database."""
    client = redis.Redis.from_url(redis_server.url, decode_responses=True, socket_timeout=10.0)
    client.flushdb()
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def settings(database_url: str, redis_server: RedisServer, redis_client: redis.Redis) -> Settings:
    """Settings of a scheduler on this test's database and an empty Redis. Jobs go by rank alone, without a draw."""
    return Settings(
        database_url=SecretStr(database_url),
        redis_url=SecretStr(redis_server.url),
        instance=f"test-{os.getpid()}",
        queue=Queue(priority_draw=0),
    )


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """An engine on this test's database, made as a worker makes its own."""
    engine = make_engine(settings, application_name=TEST_SESSIONS)
    try:
        yield engine
    finally:
        engine.dispose()


class SuiteTimes:
    """Adds up, per folder of tests/, what set-up, test and tear-down took."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = Path(report.nodeid.partition("::")[0]).parts
        suite = next((part for part in parts if part in _SUITES), "other")
        self._seconds[suite] += report.duration
        self._tests[suite].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of each suite (of tests side by side: added up)")
        for suite in (*_SUITES, "other"):
            if suite in self._tests:
                count = len(self._tests[suite])
                terminalreporter.write_line(f"{suite:<12} {self._seconds[suite]:8.1f} s   {count} tests")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run one test after the other where all share one Redis: side by side they would flush it under each other."""
    if os.environ.get("OPENCUE_SCHED_TEST_REDIS_URL") and config.getoption("numprocesses", None):
        config.option.numprocesses = 0


# Thousands of tests and what they import stay to the end: Python's searches for garbage need not walk them, nor begin
# after every 700 objects.
def pytest_collection() -> None:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the tests in the background has SIGINT ignored, nohup SIGHUP, and so would every process a test
    # starts and then interrupts as a Ctrl-C or the end of a terminal does.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    _take_ports_of_our_own()
    config.pluginmanager.register(SuiteTimes(config.rootpath), "suite-times")


def _take_ports_of_our_own() -> None:
    """The port of a server that a test has stopped stays free: no other process of these tests takes it meanwhile."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    processes.PORTS = processes.PORTS[number::count]
