"""What the engine of a process does when its server stops taking writes."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import InternalError, OperationalError, ProgrammingError

from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.clients.store_errors import is_trouble
from opencue_sched.insight.health import check_for_beat
from opencue_sched.settings import Settings
from opencue_sched.store.backlog import fetch_portions
from opencue_sched.store.booking import set_timeouts
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.schema import check_schema
from tests.kit.refusing_postgres import refusing_postgres

WRITE = text("INSERT INTO opencue_sched_fence (name, fence) VALUES ('a', 1)")
PID = text("SELECT pg_backend_pid()")


@pytest.fixture
def pooled(settings: Settings) -> Iterator[Engine]:
    """An engine with three connections in its pool, all to a server that was the primary when they were made."""
    engine = make_engine(settings, pool_size=3)
    connections = [engine.connect() for _ in range(3)]
    for connection in connections:
        connection.execute(text("SET default_transaction_read_only = on"))
        connection.commit()
        connection.close()
    yield engine
    engine.dispose()


def test_after_a_failover_to_a_standby_the_next_connections_are_new(pooled: Engine) -> None:
    """All of them: they were made to the same server, and each would fail once."""
    with pooled.connect() as connection:
        before = connection.execute(PID).scalar_one()
    with pytest.raises(InternalError, match="read-only transaction") as refused, pooled.begin() as connection:
        connection.execute(WRITE)
    assert is_trouble(refused.value)
    for _ in range(3):
        with pooled.begin() as connection:
            assert connection.execute(PID).scalar_one() != before
            assert connection.execute(text("SHOW transaction_read_only")).scalar_one() == "off"
    with pooled.begin() as connection:
        connection.execute(WRITE)


def test_the_fences_of_a_beat_are_recorded_at_the_second_try(pooled: Engine) -> None:
    fences = PersistentFences(pooled)
    with pytest.raises(InternalError):
        fences.claim("cue:beat", 1)
    assert fences.claim("cue:beat", 1)


def test_no_session_compiles_statements(engine: Engine, settings: Settings) -> None:
    """Whatever the database says, and whatever a connection pool in between has handed on."""
    jit = text("SHOW jit")
    with engine.begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{connection.engine.url.database}" SET jit = on'))
    fresh = make_engine(settings)
    with fresh.connect() as connection:
        assert connection.execute(jit).scalar_one() == "off"
        connection.execute(text("SET jit = on"))
        connection.commit()
        set_timeouts(connection, statement=1, lock=1, idle=1, whole=1)
        assert connection.execute(jit).scalar_one() == "off"
        connection.rollback()
        assert connection.execute(jit).scalar_one() == "on"
        fetch_portions(connection, check_schema(connection), {"layer": 1})
        assert connection.execute(jit).scalar_one() == "off"
    fresh.dispose()


def test_a_connection_whose_server_vanished_is_dead_within_seconds(settings: Settings) -> None:
    engine = make_engine(settings, pool_size=1)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        with socket.socket(fileno=os.dup(driver.fileno())) as wire:
            idle, interval, count, unanswered = (
                wire.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
            )
            assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert 0 < idle + count * interval <= 6
    assert 0 < unanswered <= 6000
    engine.dispose()


def test_a_pooled_connection_is_asked_only_when_its_server_said_something(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings: list[object] = []
    ping = type(engine.dialect).do_ping
    monkeypatch.setattr(type(engine.dialect), "do_ping", lambda *them: pings.append(them) or ping(*them))
    lone = make_engine(settings, pool_size=1)
    with lone.begin() as connection:
        connection.execute(text("LISTEN said"))
        before = connection.execute(PID).scalar_one()
        session = connection.connection.dbapi_connection
    for _ in range(3):
        with lone.connect() as connection:
            assert connection.execute(PID).scalar_one() == before
    assert not pings
    # when it said something, but has not ended, then it is asked once, and goes on
    with engine.begin() as other:
        other.execute(text("NOTIFY said"))
    assert select.select([session], [], [], 10)[0]
    for _ in range(3):
        with lone.connect() as connection:
            assert connection.execute(PID).scalar_one() == before
    assert len(pings) == 1
    lone.dispose()


def test_of_a_server_that_ended_all_sessions_nobody_gets_an_error(engine: Engine, settings: Settings) -> None:
    three = make_engine(settings, pool_size=3)
    connections = [three.connect() for _ in range(3)]
    before = {connection.execute(PID).scalar_one() for connection in connections}
    for connection in connections:
        connection.close()
    with engine.begin() as other:
        for pid in before:
            assert other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid}).scalar_one()
    with three.connect() as one, three.connect() as two, three.connect() as third:
        after = {connection.execute(PID).scalar_one() for connection in (one, two, third)}
    assert not before & after
    three.dispose()


def test_what_only_reads_has_no_transaction_around_it(settings: Settings) -> None:
    lone = make_engine(settings, pool_size=1)
    twice = [text("SELECT now()")] * 2
    first, second = ask(lone, lambda it: [it.scalar(now) for now in twice])
    assert first < second
    # and whoever has the connection next has one again
    with lone.begin() as connection:
        assert len({connection.scalar(now) for now in twice}) == 1
    lone.dispose()


def test_an_error_of_the_work_costs_no_connection(settings: Settings) -> None:
    engine = make_engine(settings, pool_size=1)
    with engine.connect() as connection:
        before = connection.execute(PID).scalar_one()
        with pytest.raises(ProgrammingError):
            connection.execute(text("SELECT no_such_column"))
    with engine.connect() as connection:
        assert connection.execute(PID).scalar_one() == before
    engine.dispose()


def test_a_server_lost_after_the_last_answer_is_no_error_of_whoever_had_it(engine: Engine, settings: Settings) -> None:
    """Nothing is sent when a connection is given back. A beat ended when something was: no caller looks for errors of
    the driver itself, and the pool passes them on."""
    lone = make_engine(settings, pool_size=1)
    fences = PersistentFences(lone)

    def lose_the_server(connection: Any, *_: Any) -> None:
        lost.append(connection.info.backend_pid)
        with engine.begin() as other:
            assert other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": lost[-1]}).scalar_one()

    lost: list[int] = []
    for _ in range(2):
        assert fences.claim("cue:beat", 1 + fences.leader("cue:beat").fence)
    event.listen(lone, "reset", lose_the_server)
    for _ in range(2):
        fences.leader("cue:beat")
    assert len(set(lost)) == 2
    lone.dispose()


def test_a_refusal_in_an_encoding_of_the_servers_own_is_an_error_of_the_database(settings: Settings) -> None:
    """The driver raises UnicodeDecodeError, which nobody looks for: it ended a beat."""
    with refusing_postgres(settings, "Das Datenbanksystem f\u00e4hrt herunter".encode("latin-1")) as elsewhere:
        with pytest.raises((UnicodeDecodeError, psycopg2.OperationalError)) as raised:
            psycopg2.connect(elsewhere.database_url.get_secret_value())
        # Python 3.11.2 loses the server's words in the driver.
        told = r"f\\xe4hrt herunter" if raised.value.args else "UTF-8"
        engine = make_engine(elsewhere)
        with pytest.raises(OperationalError, match=told) as refusal, engine.connect():
            pass
        assert is_trouble(refusal.value)
        with pytest.raises(OperationalError, match=told):
            check_for_beat(elsewhere)
        engine.dispose()
