"""A connection pool between us and PostgreSQL: what our sessions have set, what they hear, and what stays behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
import redis
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.clients.postgres import make_engine, reading
from opencue_sched.errors import WrongConfiguration
from opencue_sched.insight.audit import Severity
from opencue_sched.insight.doctor import diagnose
from opencue_sched.settings import Settings
from opencue_sched.store import schema
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker.events import WORK_CHANNEL, NotificationListener
from tests.kit.listening import eventually_listen
from tests.kit.pgbouncer import PgBouncer, pgbouncer
from tests.kit.polling import eventually

IN_FORCE = text(
    "SELECT current_setting('statement_timeout'), current_setting('TimeZone'), current_setting('jit'),"
    " current_setting('application_name')"
)
OURS = ("30s", "UTC", "off", "opencue-sched")
THEIRS = ("0", "Asia/Tokyo", "on", "cuebot")
"""What a session has that another program gets, and that nobody has set anything for."""


@pytest.fixture(autouse=True)
def other_defaults(engine: Engine) -> None:
    """The database's own settings are none of ours."""
    assert engine.url.database is not None
    with engine.begin() as connection:
        for setting in ("TimeZone = 'Asia/Tokyo'", "jit = on"):
            connection.execute(text(f'ALTER DATABASE "{engine.url.database}" SET {setting}'))


@pytest.fixture(params=["", "ignore_startup_parameters = options"], ids=["strict", "ignoring"])
def by_session(request: pytest.FixtureRequest, settings: Settings) -> Iterator[PgBouncer]:
    with pgbouncer(settings, pool_mode="session", more=request.param) as pool:
        yield pool


@pytest.fixture
def by_transaction(settings: Settings) -> Iterator[PgBouncer]:
    """With one session of the server for all: whoever comes next gets the one that we had, or an error after 10 s."""
    with pgbouncer(settings, pool_mode="transaction", more="default_pool_size = 1\nquery_wait_timeout = 10") as pool:
        yield pool


@pytest.fixture
def shared(by_transaction: PgBouncer) -> Iterator[Engine]:
    engine = make_engine(by_transaction.settings, connect_seconds=2)
    yield engine
    engine.dispose()


def as_cuebot(settings: Settings) -> tuple[Any, ...]:
    """What another program's session has, through the same pool."""
    url = settings.sqlalchemy_url.replace("+psycopg2", "")
    cuebot = psycopg2.connect(url, application_name="cuebot", options="")
    try:
        with cuebot.cursor() as cursor:
            cursor.execute(str(IN_FORCE))
            found: tuple[Any, ...] = cursor.fetchone()
            return found
    finally:
        cuebot.close()


def test_behind_a_pool_by_session_our_sessions_have_all_we_set(by_session: PgBouncer) -> None:
    engine = make_engine(by_session.settings)
    with engine.connect() as connection:
        assert connection.execute(IN_FORCE).one() == OURS
    engine.dispose()
    # and the program that gets the session next has nothing of it
    assert as_cuebot(by_session.settings) == THEIRS


def test_behind_a_pool_by_session_notifications_are_heard(by_session: PgBouncer, engine: Engine) -> None:
    heard: list[str] = []
    through = make_engine(by_session.settings)
    listener = NotificationListener(through, {WORK_CHANNEL: lambda shows: heard.extend(shows)})
    listener.start()
    try:
        eventually_listen(engine)
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_notify(:c, :p)"), {"c": WORK_CHANNEL, "p": '{"shows": ["show-1"]}'})
        eventually(lambda: heard == ["show-1"])
    finally:
        listener.stop()
        through.dispose()


def test_doctor_is_content_with_a_pool_by_session(by_session: PgBouncer, redis_client: redis.Redis) -> None:
    through = make_engine(by_session.settings)
    report = diagnose(through, redis_client, by_session.settings)
    through.dispose()
    assert [finding.level for finding in report.findings if finding.what == "PostgreSQL"] == [Severity.OK]


def test_where_sessions_are_shared_each_transaction_has_all_we_set_and_leaves_nothing(
    shared: Engine, by_transaction: PgBouncer
) -> None:
    # when each kind of work is done: a transaction, statements alone, a recorded fence
    with shared.begin() as connection:
        assert connection.execute(IN_FORCE).one() == OURS
        connection.execute(text("SET LOCAL statement_timeout = '7s'"))
        assert connection.execute(IN_FORCE).one() == ("7s", *OURS[1:])
    with reading(shared) as connection:
        assert [connection.execute(IN_FORCE).one() for _ in range(2)] == [OURS, OURS]
    assert PersistentFences(shared).claim("cue:beat", 1)
    # then another program finds the session as it was made
    assert as_cuebot(by_transaction.settings) == THEIRS


def test_a_listener_that_is_deaf_says_so_once_a_minute_and_sets_nothing(
    shared: Engine, by_transaction: PgBouncer
) -> None:
    deaf: list[bool] = []
    listener = NotificationListener(shared, {WORK_CHANNEL: lambda **_: None}, on_deaf=deaf.append)
    with capture_logs() as logs:
        listener.start()
        eventually(lambda: logs, 30)
        listener.wake()
        eventually(lambda: len(logs) == 2, 30)
        listener.stop()
    assert [entry["event"] for entry in logs] == ["listener_is_deaf"] * 2
    assert deaf == [True, True]
    assert "pool_mode = session" in logs[0]["cure"]
    assert as_cuebot(by_transaction.settings) == THEIRS


def test_doctor_fails_where_sessions_are_shared(
    shared: Engine, by_transaction: PgBouncer, redis_client: redis.Redis
) -> None:
    report = diagnose(shared, redis_client, by_transaction.settings)
    told = [finding for finding in report.findings if finding.what == "PostgreSQL" and finding.level is Severity.FAIL]
    assert ["pool_mode = session" in finding.remedy for finding in told] == [True]


def test_the_schema_is_not_migrated_where_its_lock_would_not_be_held(by_transaction: PgBouncer) -> None:
    with pytest.raises(WrongConfiguration, match="pool_mode = session"):
        schema.upgrade(by_transaction.settings.sqlalchemy_url)


def test_a_listener_notices_that_it_hears_no_more(
    by_session: PgBouncer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool acknowledges what is sent to it and answers nothing, which TCP does not find out."""
    # given a listener that hears, a minute before its next proof
    heard: list[str] = []
    ahead = [0.0]
    monkeypatch.setattr("opencue_sched.worker.events.boot_clock", lambda: time.monotonic() + ahead[0])
    through = make_engine(by_session.settings, connect_seconds=2)
    reconnects: list[bool] = []
    listener = NotificationListener(
        through, {WORK_CHANNEL: lambda shows: heard.extend(shows)}, on_reconnect=lambda: reconnects.append(True)
    )
    listener.start()
    try:
        eventually_listen(engine)
        # when the pool stands still
        by_session.process.pause()
        with capture_logs() as logs:
            ahead[0] = 61.0
            eventually(lambda: any(entry["event"] == "listener_lost_connection" for entry in logs), 20)
        # then the listener has said so, and is back as soon as the pool is
        by_session.process.resume()
        eventually(lambda: reconnects, 30)

        def notified() -> bool:
            with engine.begin() as connection:
                told = json.dumps({"shows": ["show-1"]})
                connection.execute(text("SELECT pg_notify(:c, :p)"), {"c": WORK_CHANNEL, "p": told})
            return "show-1" in heard

        eventually(notified)
    finally:
        listener.stop()
        through.dispose()
