"""What an error of a store means: for a plan and its COMMIT (`classify`, `waited_too_long`, `was_cancelled`,
`in_doubt`), and for any work that met it (`is_trouble`, `is_lasting`). PostgreSQL's errors are told apart by SQLSTATE.
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
"""The one SQLSTATE of these classes after which a COMMIT may have happened."""
_REFUSED_CONNECTION_STATES = ("28000", "28P01", "3D000", "42501", "42704", "22023", "42601")
"""SQLSTATEs of connections that PostgreSQL will refuse the next time, too: the user, or where it comes from; the
password; no such database; no right to connect to it; in the URL's ``options`` a parameter that it does not know, a
value that the parameter cannot have, or what is no option."""
_TOO_MANY_CONNECTIONS = "53300"
_REFUSED_CONNECTIONS = (
    "authentication failed",
    "no password supplied",
    " does not exist",
    "does not support SSL",
    "certificate",
    "invalid sslmode",
)
"""What libpq, or PgBouncer, says of a connection that will be refused the next time, too. They speak English alone."""
_CONNECTION_LIMITS = {
    "too many clients already": "its max_connections",
    "remaining connection slots are reserved": "its max_connections",
    "too many connections for role": "the CONNECTION LIMIT of the role",
    "too many connections for database": "the CONNECTION LIMIT of the database",
    "no more connections allowed": "PgBouncer's max_client_conn",
}
"""Words with which PostgreSQL, or PgBouncer, says that it has no connection left -> the limit that is reached."""
_REFUSED_BY_REDIS = (
    "CERTIFICATE_VERIFY_FAILED",
    "certificate verify failed",
    ":AuthenticationError",
    ":UnverifiedCertificate",
    "NOPERM",
    "DB index is out of range",
    "without any password configured",
)
"""What Redis, or a Sentinel as redis-py quotes it, says of a connection that will be refused the next time, too."""


class Failure(StrEnum):
    """Why a plan's transaction failed."""

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
    """What to do about a plan whose transaction ended in ``error``. OpenCue's triggers all raise P0001, so the host
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
    """Whether a statement that only locks rows ended because it took too long: at one row, or at one after another."""
    return _sqlstate(error) in (_LOCK_NOT_AVAILABLE, _QUERY_CANCELED)


def was_cancelled(error: BaseException | None) -> bool:
    """Whether a statement ended because it took longer than it may: statement_timeout, or a person's cancellation."""
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

    PostgreSQL's refusals of a connection are known by their SQLSTATE, in any language; what has none, by its text.
    """
    if isinstance(error, OperationalError):
        state = _sqlstate(error)
        if state in PASSING_REFUSALS:
            return False
        return state in _REFUSED_CONNECTION_STATES or any(word in str(error.orig) for word in _REFUSED_CONNECTIONS)
    if isinstance(error, AuthenticationError | NoPermissionError):
        return True
    return isinstance(error, RedisError) and any(word in str(error) for word in _REFUSED_BY_REDIS)


def limit_reached(error: Exception) -> str:
    """The limit that keeps PostgreSQL from taking another connection, in words; empty where the error says something
    else. A server that answers in another language than English does not say which of three limits it is."""
    text = str(error.orig) if isinstance(error, OperationalError) else ""
    unknown = (
        "its max_connections, or the CONNECTION LIMIT of the role or database"
        if (_sqlstate(error) == _TOO_MANY_CONNECTIONS)
        else ""
    )
    return next((limit for words, limit in _CONNECTION_LIMITS.items() if words in text), unknown)


def has_no_connection_left(error: Exception) -> bool:
    """Whether Redis has as many clients as it takes."""
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
    """Why a pass failed, in one line after its kind: ``postgresql: DataError: out of range (SQLSTATE 22003)``."""
    kind = "redis" if isinstance(error, RedisError) else "program"
    if isinstance(error, SQLAlchemyError):
        kind = "postgresql"
    return f"{kind}: {type(error).__name__}: {describe(error)}"


def _sqlstate(error: BaseException | None) -> str:
    orig = error.orig if isinstance(error, DBAPIError) else None
    return getattr(orig, "pgcode", None) or ""


def is_trouble(error: Exception) -> bool:
    """Whether ``error`` says that PostgreSQL or Redis is in trouble, so that the same work may succeed later.

    Trouble meets all that use the store; any other error comes again with the same rows. A table or column that the
    schema lacks, or does not grant, is trouble: our statements are constant, so no rows are to blame.
    """
    if isinstance(error, RedisError):
        if type(error) is ResponseError:
            return takes_no_write(error)  # redis-py has no class for each such error
        return not isinstance(error, DataError)
    if not isinstance(error, DBAPIError):
        return isinstance(error, TimeoutError | DisconnectionError | PendingRollbackError)
    if _sqlstate(error):
        return classify(error) not in (Failure.ROWS, Failure.HOST)
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)


_NO_WRITE_ERRORS = (ReadOnlyError, MasterDownError, OutOfMemoryError)
_NO_WRITE_WORDS = ("READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY Redis", "OOM command not allowed")


def takes_no_write(error: ResponseError) -> bool:
    """Whether Redis answers, but takes no write: a replica, one that lost its master or its replicas, one
    that is held up by a script, a full disk, full memory.

    Up to Redis 6.2 an error inside a script is told by its text only; from 7 on, and in Valkey, it has a class of its
    own, and redis-py cuts the word from its text.
    """
    return isinstance(error, _NO_WRITE_ERRORS) or any(word in str(error) for word in _NO_WRITE_WORDS)
