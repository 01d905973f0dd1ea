"""What an error of PostgreSQL or Redis means: for a plan and its COMMIT, for any other work, and for people.

"Store" is either of the two here. PostgreSQL's errors are told apart by SQLSTATE. Where an error has none, because it
comes from libpq, PgBouncer or redis-py, it is told by its text.
"""

from __future__ import annotations

import re
from enum import StrEnum, auto

from redis.exceptions import (
    AuthenticationError,
    DataError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.sentinel import MasterNotFoundError
from sqlalchemy.exc import (
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    SQLAlchemyError,
    TimeoutError,
)

from opencue_sched.clients.postgres import PASSING_REFUSALS
from opencue_sched.clients.prepared import is_outdated

_SERIALIZATION_FAILURE = "40001"
_DEADLOCK_DETECTED = "40P01"
_LOCK_NOT_AVAILABLE = "55P03"
_QUERY_CANCELED = "57014"
_RAISED = "P0001"
_ROW_CLASSES = frozenset({"21", "22", "23", "2F", "38", "39", "54", "P0", "XX"})
"""SQLSTATE classes that blame rows: cardinality, data, integrity, routines, sizes, PL/pgSQL, internal errors."""
_HOST_TEXT = "unable to allocate additional"
"""Words that every refusal of OpenCue's host trigger has."""
_REFUSED_AT_COMMIT = frozenset({"23", "40"})
"""SQLSTATE classes with which the server itself refuses a COMMIT: constraints, rollbacks."""
_COMPLETION_UNKNOWN = "40003"
"""The one SQLSTATE of _REFUSED_AT_COMMIT's classes after which a COMMIT may have happened."""
_REFUSED_CONNECTION_STATES = frozenset(
    {
        "28000",  # the user may not come from this machine, or in this way
        "28P01",  # the password is wrong
        "3D000",  # there is no such database
        "42501",  # the user may not connect to the database
        "42704",  # the URL's ``options`` name a parameter that PostgreSQL does not know
        "22023",  # the URL's ``options`` give a parameter a value that it cannot have
        "42601",  # the URL's ``options`` hold something that is no option
    }
)
"""SQLSTATEs with which PostgreSQL refuses a connection, and will refuse it the next time, too."""
_TOO_MANY_CONNECTIONS = "53300"
_REFUSED_CONNECTIONS = (
    "authentication failed",
    "no password supplied",
    " does not exist",
    "does not support SSL",
    "certificate",
    "invalid sslmode",
)
"""Words of libpq, and of PgBouncer, about a connection that will be refused the next time, too: in English whatever the
server's language."""
_CONNECTION_LIMITS = {
    "too many clients already": "its max_connections",
    "remaining connection slots are reserved": "its max_connections",
    "too many connections for role": "the CONNECTION LIMIT of the role",
    "too many connections for database": "the CONNECTION LIMIT of the database",
    "no more connections allowed": "PgBouncer's max_client_conn",
}
"""The limit that is reached, by the words with which PostgreSQL, or PgBouncer, says that it has no connection left."""
_REFUSED_BY_REDIS = (
    "CERTIFICATE_VERIFY_FAILED",
    "certificate verify failed",
    ":AuthenticationError",
    ":UnverifiedCertificate",
    "NOPERM",
    "DB index is out of range",
    "without any password configured",
)
"""Words of Redis, and of Sentinels as redis-py quotes them, about a connection that will be refused the next time,
too."""
_NO_WRITE_ERRORS = (ReadOnlyError, MasterDownError, OutOfMemoryError)
"""The classes that redis-py has for a Redis that answers and takes no write."""
_NO_WRITE_WORDS = ("READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY Redis", "OOM command not allowed")
"""The words by which such an answer is known where redis-py has no class, or an old Redis quotes it from a script."""


class Failure(StrEnum):
    """Why a plan's transaction failed, as far as that decides what is done about the plan."""

    REPEAT = auto()
    """The transaction collided with another; tried again at once, it may succeed."""
    ROWS = auto()
    """Some job's rows are to blame."""
    BUSY = auto()
    """Some job's rows stay locked."""
    HOST = auto()
    """A host has less idle than its row said."""
    OUTDATED = auto()
    """A table was altered since a statement was planned; the next time it is planned anew."""
    DATABASE = auto()
    """The database is to blame, and nothing in the plan."""


def classify(error: Exception) -> Failure:
    """Why a plan's transaction, which ended in ``error``, failed. OpenCue's triggers all raise P0001, so the host
    trigger's refusals are known by their text."""
    state = _sqlstate(error)
    if state in (_SERIALIZATION_FAILURE, _DEADLOCK_DETECTED):
        return Failure.REPEAT
    if state == _LOCK_NOT_AVAILABLE:
        return Failure.BUSY
    if is_outdated(error):
        return Failure.OUTDATED
    if state == _RAISED and _HOST_TEXT in str(getattr(error, "orig", error)):
        return Failure.HOST
    if state[:2] in _ROW_CLASSES:
        return Failure.ROWS
    return Failure.DATABASE


def waited_too_long(error: Exception) -> bool:
    """Whether a statement that only locks rows took too long: lock_timeout ended it at one row, or statement_timeout
    after it had waited for one row after another. Of any other statement ask ``was_cancelled``."""
    return _sqlstate(error) in (_LOCK_NOT_AVAILABLE, _QUERY_CANCELED)


def was_cancelled(error: BaseException | None) -> bool:
    """Whether a statement ended because it took longer than it may (statement_timeout), or because a person cancelled
    it. False without an error."""
    return _sqlstate(error) == _QUERY_CANCELED


def in_doubt(error: Exception) -> bool:
    """Whether a COMMIT that ended in this error may have happened all the same: yes, unless the server refused it.

    A server that ended an idle transaction before the COMMIT arrived refuses it too, but libpq only reports a closed
    connection, so that counts as doubt.
    """
    state = _sqlstate(error)
    return state[:2] not in _REFUSED_AT_COMMIT or state == _COMPLETION_UNKNOWN


def is_lasting(error: Exception) -> bool:
    """Whether a store refuses in a way that no waiting cures: a wrong password or database, a certificate that cannot
    be verified, a permission that is missing.

    PostgreSQL's refusals of a connection are known by their SQLSTATE, in any language; those of libpq and PgBouncer,
    by their text.
    """
    if isinstance(error, OperationalError):
        state = _sqlstate(error)
        if state in PASSING_REFUSALS:
            return False
        return state in _REFUSED_CONNECTION_STATES or any(words in str(error.orig) for words in _REFUSED_CONNECTIONS)
    if isinstance(error, AuthenticationError | NoPermissionError):
        return True
    return isinstance(error, RedisError) and any(words in str(error) for words in _REFUSED_BY_REDIS)


def limit_reached(error: Exception) -> str:
    """The limit that keeps PostgreSQL from taking another connection, in words; empty where the error says something
    else. Only a server that answers in English says which of three limits it is."""
    text = str(error.orig) if isinstance(error, OperationalError) else ""
    for words, limit in _CONNECTION_LIMITS.items():
        if words in text:
            return limit
    if _sqlstate(error) == _TOO_MANY_CONNECTIONS:
        return "its max_connections, or the CONNECTION LIMIT of the role or database"
    return ""


def has_no_connection_left(error: Exception) -> bool:
    """Whether Redis refuses a connection because it has as many clients as it takes (of PostgreSQL: limit_reached)."""
    return isinstance(error, RedisError) and "max number of clients" in str(error)


def describe(error: Exception) -> str:
    """The error in one line, without the statement and its parameters."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, MasterNotFoundError):
        return _sentinels_said(str(cause))
    state = _sqlstate(error)
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"{lines[0]} (SQLSTATE {state})" if state else lines[0]


def _sentinels_said(text: str) -> str:
    """A short form of redis-py's error for a master that no Sentinel names, which has 500 characters a Sentinel."""
    service, _, details = text.removeprefix("No master found for ").partition(" : ")
    failures = re.findall(r"host=([^,]+),port=(\d+).*?\)> - (?:\w+:)?(\w+)", details)
    words = {
        "AuthenticationError": "refuses the password",
        "ConnectionError": "does not answer",
        "UnverifiedCertificate": "has a certificate that cannot be verified",
    }
    said = ", ".join(f"{host}:{port} {words.get(kind, kind)}" for host, port, kind in failures)
    return f"no Sentinel names a master {service}" + (f": {said}" if said else "")


def failure_reason(error: Exception) -> str:
    """Where and how a pass failed, in one line: ``postgresql: DataError: out of range (SQLSTATE 22003)``."""
    if isinstance(error, SQLAlchemyError):
        where = "postgresql"
    elif isinstance(error, RedisError):
        where = "redis"
    else:
        where = "program"
    return f"{where}: {type(error).__name__}: {describe(error)}"


def _sqlstate(error: BaseException | None) -> str:
    """The SQLSTATE of an error of PostgreSQL; empty for any other error."""
    orig = error.orig if isinstance(error, DBAPIError) else None
    return getattr(orig, "pgcode", None) or ""


def is_trouble(error: Exception) -> bool:
    """Whether ``error`` says that PostgreSQL or Redis is in trouble, so that the same work may succeed later.

    Trouble meets all that use the store; any other error comes again with the same rows. A table or column that the
    schema lacks, or does not grant, is trouble: our statements are constant, so no rows are to blame.
    """
    if isinstance(error, RedisError):
        # An error for which redis-py has no class of its own is a plain ResponseError: only its text says more.
        if type(error) is ResponseError:
            return takes_no_write(error)
        return not isinstance(error, DataError)
    if not isinstance(error, DBAPIError):
        return isinstance(error, TimeoutError | DisconnectionError | PendingRollbackError)
    if _sqlstate(error):
        return classify(error) not in (Failure.ROWS, Failure.HOST)
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)


def takes_no_write(error: ResponseError) -> bool:
    """Whether Redis answers, but takes no write: it is a replica, lost its master or its replicas, is held up by a
    script, or its disk or memory is full.

    Up to Redis 6.2 such an error inside a script is told by its text only. From Redis 7 on, and in Valkey, redis-py
    has a class for the error, and cuts the word that names it from the text.
    """
    return isinstance(error, _NO_WRITE_ERRORS) or any(words in str(error) for words in _NO_WRITE_WORDS)
