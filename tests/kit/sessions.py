"""Ending sessions of PostgreSQL in tests, on every version: before 14, pg_terminate_backend does not wait."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.pool import NullPool

from tests.kit.polling import eventually

_TERMINATE = text("SELECT pg_terminate_backend(pid) FROM unnest(CAST(:pids AS int[])) AS pid")
_DEADLOCKS = text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
_LEFT = text("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(CAST(:pids AS int[]))")


def end_sessions(engine: Engine, pids: Collection[int]) -> None:
    """End the sessions with these process ids; when it returns, their transactions are undone and their locks free."""
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(_TERMINATE, {"pids": list(pids)})
        _await_end(connection, pids)


def await_end(engine: Engine, pids: Collection[int]) -> None:
    """Wait until the server has ended the sessions with these process ids by itself."""
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        _await_end(connection, pids)


def count_deadlocks(engine: Engine, *others: Engine) -> int:
    """How many deadlocks there were in the engine's database, those of the sessions of other engines among them. Ends
    all of these sessions: each tells the server what it has counted once a second at most, and when it ends."""
    pids = []
    for each in (engine, *others):
        lent = [each.connect() for _ in range(each.pool.checkedin())]  # type: ignore[attr-defined]
        for connection in lent:
            pids.append(connection.scalar(text("SELECT pg_backend_pid()")))
            connection.close()
        each.dispose()
    with create_engine(engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        # By another session: databases.py keeps those of tests when they are closed.
        connection.execute(_TERMINATE, {"pids": pids})
        _await_end(connection, pids)
        return int(connection.scalar(_DEADLOCKS) or 0)


def _await_end(connection: Connection, pids: Collection[int]) -> None:
    # Within one transaction pg_stat_activity stays as it was first read.
    eventually(lambda: connection.scalar(_LEFT, {"pids": list(pids)}) == 0, what="the end of the sessions")
