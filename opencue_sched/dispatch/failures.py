"""What a database error says about a plan: repeat it, blame a job's rows, or give up."""

from __future__ import annotations

from enum import StrEnum, auto

from redis.exceptions import DataError, RedisError, ResponseError
from sqlalchemy.exc import (
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    SQLAlchemyError,
    TimeoutError,
)

_SERIALIZATION_FAILURE = "40001"
_DEADLOCK_DETECTED = "40P01"
_LOCK_NOT_AVAILABLE = "55P03"
_QUERY_CANCELED = "57014"
_RAISED = "P0001"

_ROW_CLASSES = frozenset({"21", "22", "23", "2F", "38", "39", "54", "P0", "XX"})
"""SQLSTATE classes that blame rows: cardinality, data, integrity, routines, sizes, PL/pgSQL, internal errors."""

_HOST_TEXT = "unable to allocate additional"
"""How OpenCue's host trigger begins its refusals (facts B)."""

_REFUSED_AT_COMMIT = frozenset({"23", "40"})
_COMPLETION_UNKNOWN = "40003"


class Failure(StrEnum):
    """REPEAT: the transaction met another one. ROWS: some job's rows are to blame. BUSY: some job's rows stay locked.
    HOST: a host had less than it said. DATABASE: nothing to do with the plan."""

    REPEAT = auto()
    ROWS = auto()
    BUSY = auto()
    HOST = auto()
    DATABASE = auto()


def classify(error: Exception) -> Failure:
    """By SQLSTATE; the host trigger's refusals by their text, because OpenCue raises everything as P0001."""
    state = _sqlstate(error)
    if state in (_SERIALIZATION_FAILURE, _DEADLOCK_DETECTED):
        return Failure.REPEAT
    if state == _LOCK_NOT_AVAILABLE:
        return Failure.BUSY
    if state == _RAISED and _HOST_TEXT in str(getattr(error, "orig", error)):
        return Failure.HOST
    if state[:2] in _ROW_CLASSES:
        return Failure.ROWS
    return Failure.DATABASE


def waited_too_long(error: Exception) -> bool:
    """Whether a statement that only locks rows ended because it took too long: at one row, or at one after another."""
    return _sqlstate(error) in (_LOCK_NOT_AVAILABLE, _QUERY_CANCELED)


def in_doubt(error: Exception) -> bool:
    """Whether a COMMIT that ended in this error may have happened all the same: unless the server said it refuses.

    A server that had ended a paused transaction before the COMMIT arrived says so too, but libpq only reports that the
    connection is closed, so that counts as doubt.
    """
    state = _sqlstate(error)
    return state[:2] not in _REFUSED_AT_COMMIT or state == _COMPLETION_UNKNOWN


def describe(error: Exception) -> str:
    """One line without the statement and its parameters."""
    cause = getattr(error, "orig", None) or error
    state = _sqlstate(error)
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"{lines[0]} (SQLSTATE {state})" if state else lines[0]


def _sqlstate(error: Exception) -> str:
    orig = error.orig if isinstance(error, DBAPIError) else None
    return getattr(orig, "pgcode", None) or ""


# Whether an error of a store says that the store is in trouble, or that what it was asked for cannot be done.
#
# Trouble passes, and meets every cluster alike: it says nothing of the one whose pass met it. Any other error comes
# again with the next pass over the same rows.

_MISSING_CLASSES = frozenset({"0A", "3F", "42"})
"""SQLSTATE of what our statements name but cannot use: a schema, table, column or function. They are constant, so all
clusters meet that."""
_TROUBLE_CLASSES = frozenset({"08", "40", "53", "55", "57", "58"}) | _MISSING_CLASSES
"""The others: connections, other transactions, resources, locks, operators and time-outs, the system."""
_TROUBLE_STATES = frozenset({"25006", "25P03"})
"""A server that takes no writes, as after a failover; a transaction that was idle for too long."""
_TOO_LARGE_CLASS = "54"
"""Program limits: the driver calls them operational, but the same statement fails again."""
_TROUBLE_WORDS = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "TRYAGAIN", "UNKILLABLE"})
"""First words of what Redis answers to every script while it is so; the driver has classes for other states."""


def is_trouble(error: Exception) -> bool:
    """Whether ``error``, raised by SQLAlchemy or redis-py, is a store's own and not that of the work."""
    if type(error) is ResponseError:
        return str(error).partition(" ")[0] in _TROUBLE_WORDS
    if isinstance(error, RedisError):
        return not isinstance(error, DataError)
    return isinstance(error, SQLAlchemyError) and _is_trouble_of_postgresql(error)


def is_missing(error: Exception) -> bool:
    """Whether PostgreSQL answers and only lacks what ``migrate`` or a GRANT brings back; nothing tells when."""
    return _sqlstate(error)[:2] in _MISSING_CLASSES


def _is_trouble_of_postgresql(error: SQLAlchemyError) -> bool:
    if not isinstance(error, DBAPIError):
        return isinstance(error, TimeoutError | DisconnectionError | PendingRollbackError)
    state = _sqlstate(error)
    if state[:2] == _TOO_LARGE_CLASS:
        return False
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return state[:2] in _TROUBLE_CLASSES or state in _TROUBLE_STATES
