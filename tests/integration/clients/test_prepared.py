"""Statements that a connection prepares once, also where tables are altered, messages fail or plans are discarded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from opencue_sched.clients.postgres import OURS, ask, engine_at, make_engine, reading
from opencue_sched.clients.postgres_sessions import sessions_of
from opencue_sched.clients.prepared import REPLANNED_SECONDS, is_outdated, prepare_on
from opencue_sched.settings import Settings
from opencue_sched.store.lookups import prepared
from tests.kit.frozen_clock import Clock
from tests.kit.pgbouncer import pgbouncer

GREATER = prepared(
    """
    SELECT set_config('plan_cache_mode', 'force_generic_plan', true);
    SELECT number, name FROM numbers WHERE number > :least AND number < CAST(:most AS int) ORDER BY number
    """
)
KEPT = text("SELECT count(*) AS kept, coalesce(sum(generic_plans), 0) AS times FROM pg_prepared_statements")


@pytest.fixture(autouse=True)
def numbers(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE numbers (number int, name varchar(10))"))
        connection.execute(text("INSERT INTO numbers SELECT n, 'number ' || n FROM generate_series(1, 9) n"))


@pytest.fixture
def two(settings: Settings) -> Iterator[Engine]:
    """An engine of two connections."""
    engine = make_engine(settings, pool_size=2)
    yield engine
    engine.dispose()


def greater(connection: Connection, least: int = 7, most: int = 100) -> list[int]:
    return [row.number for row in connection.execute(GREATER, {"least": least, "most": most})]


def widen(engine: Engine) -> None:
    """Give an answer other types than it was planned with."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE numbers ALTER COLUMN name TYPE text"))


def test_a_connection_plans_a_statement_once_for_whatever_is_asked(engine: Engine) -> None:
    with reading(engine) as connection:
        assert [greater(connection, least) for least in (7, 8, 9, 5)] == [[8, 9], [9], [], [6, 7, 8, 9]]
        assert tuple(connection.execute(KEPT).one()) == (2, 8)


def test_plans_are_made_anew_after_a_while(settings: Settings) -> None:
    clock = Clock()
    engine = engine_at(settings.sqlalchemy_url, application_name=OURS)
    prepare_on(engine, sessions_of(engine), clock)
    with reading(engine) as connection:
        kept = []
        for _ in range(4):
            assert greater(connection) == [8, 9]
            kept.append(tuple(connection.execute(KEPT).one()))
            clock.advance(REPLANNED_SECONDS / 2.4)
    engine.dispose()
    assert kept == [(2, 2), (2, 4), (2, 6), (2, 2)]


def test_what_is_not_marked_is_sent_as_it_is(engine: Engine) -> None:
    with reading(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM numbers")).scalar_one() == 9
        assert connection.execute(KEPT).one().kept == 0


def test_a_table_that_is_altered_costs_one_question_more_whatever_connections_know(engine: Engine, two: Engine) -> None:
    # given two connections that know the statement
    with reading(two) as one, reading(two) as other:
        assert greater(one) == greater(other) == [8, 9]
    # when its answer gets another type
    widen(engine)
    # then both answer, and have planned it anew
    assert ask(two, greater) == [8, 9]
    with reading(two) as one, reading(two) as other:
        assert greater(one) == greater(other) == [8, 9]
        assert [each.execute(KEPT).one().kept for each in (one, other)] == [2, 2]


def test_in_a_transaction_it_is_an_error_once(engine: Engine, two: Engine) -> None:
    with two.begin() as connection:
        assert greater(connection) == [8, 9]
    widen(engine)
    with pytest.raises(DBAPIError) as refused, two.begin() as connection:
        greater(connection)
    assert is_outdated(refused.value)
    with two.begin() as connection:
        assert greater(connection) == [8, 9]


def test_plans_that_somebody_has_discarded_are_made_again(two: Engine) -> None:
    with reading(two) as connection:
        assert greater(connection) == [8, 9]
        connection.execute(text("DEALLOCATE ALL"))
    assert ask(two, greater) == [8, 9]


def test_a_statement_that_another_process_has_prepared_there_is_an_error_once(engine: Engine, two: Engine) -> None:
    # given a connection that has plans of its own, in whose session another process prepares one more
    other = prepared("SELECT name FROM numbers WHERE number = CAST(:number AS int)")
    with two.connect() as connection:
        connection.execute(other, {"number": 9})
        theirs = connection.execute(text("SELECT statement FROM pg_prepared_statements")).scalar_one()
    connection = engine.connect()
    greater(connection)
    connection.exec_driver_sql(theirs)
    connection.commit()
    # when that statement is sent
    with pytest.raises(DBAPIError) as failed:
        connection.execute(other, {"number": 9})
    connection.rollback()
    # then it may be sent again
    assert is_outdated(failed.value)
    assert connection.execute(other, {"number": 9}).scalar_one() == "number 9"
    connection.close()


def test_plans_are_outdated_also_where_the_failing_message_prepared_something(engine: Engine, two: Engine) -> None:
    count = "SELECT count(*) FROM numbers"
    # given two connections that know a statement whose answer then gets another type
    with reading(two) as one, reading(two) as other:
        assert greater(one) == greater(other) == [8, 9]
        widen(engine)
        # when one sends it together with a statement that it does not know
        with pytest.raises(DBAPIError) as refused:
            one.execute(prepared(f"{GREATER.text}; {count}"), {"least": 7, "most": 100})
        assert is_outdated(refused.value)
        # then the other one plans it anew
        assert greater(other) == [8, 9]


def test_after_a_message_that_failed_the_next_one_goes_on_behind_its_savepoint(engine: Engine, two: Engine) -> None:
    rows = "SELECT number FROM numbers WHERE number > :least ORDER BY number FOR UPDATE"
    lock = prepared(f"SAVEPOINT there; {rows} NOWAIT")
    back = prepared(f"ROLLBACK TO SAVEPOINT there; {rows} SKIP LOCKED")
    with engine.begin() as holder, two.begin() as connection:
        holder.execute(text("SELECT FROM numbers WHERE number = 9 FOR UPDATE"))
        with pytest.raises(OperationalError):
            connection.execute(lock, {"least": 7})
        assert connection.execute(back, {"least": 7}).scalars().all() == [8]
    for _ in range(2):
        with two.begin() as connection:
            assert connection.execute(lock, {"least": 7}).scalars().all() == [8, 9]


def test_behind_a_pool_that_shares_sessions_nothing_is_prepared(settings: Settings) -> None:
    with pgbouncer(settings, pool_mode="transaction", more="default_pool_size = 1") as pool:
        engine = make_engine(pool.settings, connect_seconds=2)
        assert [ask(engine, greater, least) for least in (7, 8)] == [[8, 9], [9]]
        with reading(engine) as connection:
            assert connection.execute(KEPT).one().kept == 0
        engine.dispose()


def test_behind_a_pool_by_session_plans_are_kept(settings: Settings) -> None:
    with pgbouncer(settings, pool_mode="session") as pool:
        engine = make_engine(pool.settings, pool_size=1)
        assert [ask(engine, greater, least) for least in (7, 8)] == [[8, 9], [9]]
        with reading(engine) as connection:
            assert tuple(connection.execute(KEPT).one()) == (2, 4)
        engine.dispose()


def test_a_session_that_comes_with_plans_of_another_process_is_no_error(settings: Settings) -> None:
    # given a pool that resets nothing, and a session that a connection which is gone has left
    with pgbouncer(settings, pool_mode="session", more="server_reset_query =") as pool:
        before = make_engine(pool.settings, pool_size=1)
        assert ask(before, greater) == [8, 9]
        before.dispose()
        # when the next connection gets it
        engine = make_engine(pool.settings, pool_size=1)
        with reading(engine) as connection:
            assert connection.execute(KEPT).one().kept == 2
            # then its first statement is answered, at once
            assert greater(connection) == [8, 9]
            assert tuple(connection.execute(KEPT).one()) == (2, 2)
        engine.dispose()


UPWARDS, DOWNWARDS = "SELECT number FROM numbers ORDER BY number", "SELECT number FROM numbers ORDER BY -number"
_of_this_process: list[Engine] = []
"""The engine of a process that was started to be asked."""


def answer(settings: Settings, statement: str) -> list[int]:
    """What a process gets that sends a prepared statement, always by its one connection. Called in that process."""
    if not _of_this_process:
        _of_this_process.append(make_engine(settings, pool_size=1))
    return ask(_of_this_process[0], lambda connection: list(connection.execute(prepared(statement)).scalars()))


def test_a_pool_that_is_switched_to_transactions_gives_no_process_the_answer_of_another(settings: Settings) -> None:
    spawn = get_context("spawn")
    with (
        pgbouncer(settings, pool_mode="session") as pool,
        ProcessPoolExecutor(1, mp_context=spawn) as one,
        ProcessPoolExecutor(1, mp_context=spawn) as other,
    ):

        def answers() -> list[list[int]]:
            asked = ((one, UPWARDS), (other, DOWNWARDS))
            return [process.submit(answer, pool.settings, statement).result() for process, statement in asked]

        # given two processes that have prepared a statement each, on sessions of their own
        before = answers()
        # when the pool gives each transaction the session that came free last
        pool.switch("transaction")
        after = [answers() for _ in range(2)]
    # then each is answered what it has asked
    assert before == [list(range(1, 10)), list(range(9, 0, -1))]
    assert after == [before] * 2
