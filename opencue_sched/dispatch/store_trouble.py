"""Whether an error of a store says that the store is in trouble, or that what it was asked for cannot be done.

Trouble passes, and meets every cluster alike: it says nothing of the one whose pass met it. Any other error comes again
with the next pass over the same rows.
"""

from __future__ import annotations

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
    if isinstance(error, RedisError):
        return _is_trouble_of_redis(error)
    return isinstance(error, SQLAlchemyError) and _is_trouble_of_postgresql(error)


def is_missing(error: Exception) -> bool:
    """Whether PostgreSQL answers and only lacks what ``migrate`` or a GRANT brings back; nothing tells when."""
    return isinstance(error, DBAPIError) and (getattr(error.orig, "pgcode", None) or "")[:2] in _MISSING_CLASSES


def _is_trouble_of_redis(error: RedisError) -> bool:
    if type(error) is ResponseError:
        return str(error).partition(" ")[0] in _TROUBLE_WORDS
    return not isinstance(error, DataError)


def _is_trouble_of_postgresql(error: SQLAlchemyError) -> bool:
    if not isinstance(error, DBAPIError):
        return isinstance(error, TimeoutError | DisconnectionError | PendingRollbackError)
    state = getattr(error.orig, "pgcode", None) or ""
    if state[:2] == _TOO_LARGE_CLASS:
        return False
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return state[:2] in _TROUBLE_CLASSES or state in _TROUBLE_STATES
