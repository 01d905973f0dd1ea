"""Ending sessions of PostgreSQL in tests, on every version: before 14, pg_terminate_backend does not wait."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, Engine, text

from tests.kit.polling import eventually

_TERMINATE = text("SELECT pg_terminate_backend(pid) FROM unnest(CAST(:pids AS int[])) AS pid")
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


def _await_end(connection: Connection, pids: Collection[int]) -> None:
    # Within one transaction pg_stat_activity stays as it was first read.
    eventually(lambda: connection.scalar(_LEFT, {"pids": list(pids)}) == 0, what="the end of the sessions")
