"""Which errors of a store count against the cluster whose pass met them."""

from __future__ import annotations

import psycopg2.errors
import pytest
import redis.exceptions
from psycopg2 import errors
from sqlalchemy import exc

from opencue_sched.clients.store_errors import in_doubt, is_trouble


def of_driver(kind: type[psycopg2.Error]) -> exc.DBAPIError:
    """As SQLAlchemy raises an error of psycopg2."""
    original = kind("no")
    wrapped = exc.DBAPIError.instance("SELECT", {}, original, psycopg2.Error)
    assert isinstance(wrapped, exc.DBAPIError)
    return wrapped


class Coded(Exception):
    """An error that carries an SQLSTATE, which those of psycopg2 get from the server only."""

    def __init__(self, pgcode: str) -> None:
        super().__init__(pgcode)
        self.pgcode = pgcode


@pytest.mark.parametrize(
    "kind",
    [
        errors.AdminShutdown,
        errors.LockNotAvailable,
        errors.QueryCanceled,
        errors.DeadlockDetected,
        errors.TooManyConnections,
        psycopg2.OperationalError,
        psycopg2.InterfaceError,
    ],
)
def test_a_store_that_is_away_or_busy_says_nothing_of_a_cluster(kind):
    assert is_trouble(of_driver(kind))


@pytest.mark.parametrize("kind", [errors.NumericValueOutOfRange, errors.RaiseException, errors.DataCorrupted])
def test_what_fails_again_with_the_same_rows_is_the_clusters(kind):
    assert not is_trouble(of_driver(kind))


@pytest.mark.parametrize("state", ["42P01", "42703", "42883", "42501", "3F000"])
def test_what_constant_statements_cannot_use_is_missing_for_all_clusters(state):
    assert is_trouble(exc.ProgrammingError("SELECT", {}, Coded(state)))


@pytest.mark.parametrize(("state", "trouble"), [("25006", True), ("25P03", True), ("XX001", False), ("57P01", True)])
def test_internal_errors_are_told_apart_by_their_state(state, trouble):
    assert is_trouble(exc.InternalError("UPDATE", {}, Coded(state))) is trouble


@pytest.mark.parametrize(
    ("state", "doubt"),
    [
        ("23505", False),
        ("40001", False),
        ("40003", True),
        ("25P03", True),
        ("57P01", True),
        ("58030", True),
        ("", True),
    ],
)
def test_a_commit_is_in_doubt_unless_the_server_refuses_it(state, doubt):
    assert in_doubt(exc.OperationalError("COMMIT", {}, Coded(state))) is doubt


def test_a_statement_that_is_too_large_stays_so():
    assert not is_trouble(exc.OperationalError("SELECT", {}, Coded("54001")))


@pytest.mark.parametrize(
    "error",
    [
        exc.TimeoutError("QueuePool limit reached"),
        exc.PendingRollbackError("invalidated"),
        exc.ProgrammingError("SELECT", {}, Exception("gone"), connection_invalidated=True),
        redis.exceptions.ConnectionError("refused"),
        redis.exceptions.TimeoutError("late"),
        redis.exceptions.ReadOnlyError("replica"),
        redis.exceptions.OutOfMemoryError("full"),
        redis.exceptions.ResponseError("BUSY Redis is busy running a script"),
        redis.exceptions.ResponseError("MISCONF Redis cannot save"),
    ],
)
def test_connections_pools_and_states_of_servers_are_trouble(error):
    assert is_trouble(error)


@pytest.mark.parametrize(
    "error",
    [
        exc.StatementError("bad parameter", "SELECT", {}, ValueError("x")),
        redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        redis.exceptions.ResponseError("user_script:12: malformed ledger entry: x"),
        redis.exceptions.DataError("Invalid input of type: 'NoneType'"),
    ],
)
def test_what_cannot_be_asked_for_is_no_trouble(error):
    assert not is_trouble(error)
