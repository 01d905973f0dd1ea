"""What a test leaves in its database is never seen by another test that is given it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

from opencue_sched.clients.postgres import OURS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.databases import TEST_SESSIONS, Databases, PostgresServer

_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"


@pytest.fixture(scope="module")
def databases(postgres_server: PostgresServer, template_database: str) -> Iterator[Databases]:
    databases = Databases(postgres_server, template_database)
    yield databases
    databases.close()


def _execute(url: str, *statements: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


def _contents(url: str) -> dict[str, list[object]]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        tables = connection.execute(text(_TABLES)).scalars().all()
        rows = {
            table: list(connection.execute(text(f"SELECT t::text FROM {table} t ORDER BY 1")).scalars())  # noqa: S608
            for table in tables
        }
        return {**rows, "sequences": [tuple(row) for row in connection.execute(text("SELECT * FROM pg_sequences"))]}


def _taken_after(databases: Databases, used: str) -> list[str]:
    """Give a database back that a test has used; returns those of the three tests that follow."""
    databases.give_back(used)
    taken = []
    for _ in range(3):
        taken.append(databases.take())
        databases.give_back(taken[-1])
    return taken


def test_a_database_is_as_new_when_it_is_used_again(databases: Databases) -> None:
    used = databases.take()
    new = _contents(used)
    ours = create_engine(used, poolclass=NullPool, connect_args={"application_name": f"{OURS}-test"})
    with ours.begin() as connection:
        farm = Farm(connection)
        farm.run(farm.job([LayerSpec(frames=3)]).frames, farm.host(cores=4))
    _execute(
        used,
        "UPDATE service SET str_tags = 'x'",
        "DELETE FROM task_lock",
        "SELECT nextval('layer_output_ser_order_seq')",
    )
    assert _contents(used) != new
    assert used in _taken_after(databases, used)
    assert _contents(used) == new, "as it was emptied for one of them, and none left anything"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE left_behind (a int)",
        "ALTER TABLE layer_output ALTER str_filespec SET DEFAULT ''",
        "ALTER TABLE proc DISABLE TRIGGER opencue_sched_proc_released",
        "CREATE OR REPLACE FUNCTION opencue_sched_notify(channel text, field text, ids text[]) RETURNS void "
        "LANGUAGE sql AS 'SELECT NULL::void'",
        "ANALYZE opencue_sched_version",
        "VACUUM opencue_sched_version",
        "ALTER DATABASE {name} SET work_mem = '1MB'",
        "ALTER DATABASE {name} CONNECTION LIMIT 50",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()",
        "INSERT INTO opencue_sched_quarantine SELECT n, repeat('x', 500), now(), now() FROM generate_series(1, 3000) n",
    ],
)
def test_a_database_with_more_than_rows_left_in_it_is_not_used_again(databases: Databases, statement: str) -> None:
    used = databases.take()
    _execute(used, statement.format(name=make_url(used).database))
    assert used not in _taken_after(databases, used)


def test_a_database_with_a_session_of_its_last_test_is_not_used_again(databases: Databases) -> None:
    used = databases.take()
    session = psycopg2.connect(make_url(used).set(drivername="postgresql").render_as_string(hide_password=False))
    assert used not in _taken_after(databases, used)
    session.close()


def test_a_session_that_was_ended_is_not_lent_again(databases: Databases) -> None:
    # Given an engine whose session was kept for those that follow
    used = databases.take()
    lent = create_engine(used, connect_args={"application_name": TEST_SESSIONS})
    with lent.connect():
        pass
    lent.dispose()
    # When every session of the database is ended
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}' AND pid <> pg_backend_pid()"
    _execute(used, ended.format(make_url(used).database))
    # Then the next engine has one that answers
    with create_engine(used, connect_args={"application_name": TEST_SESSIONS}, poolclass=NullPool).connect() as session:
        assert session.scalar(text("SELECT 1")) == 1
    databases.give_back(used)
