"""What is sent to PostgreSQL, and what it reads for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, event

# What a session has counted and not told yet.
_ROWS_READ = """
    SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(oid)), 0) FROM pg_class
     WHERE relkind IN ('r', 'i') AND oid > 16384
"""

_Named = TypeVar("_Named")


@contextmanager
def listening(engine: Engine | type[Engine], name: str, listener: Callable[..., object]) -> Iterator[None]:
    """Have ``listener`` called at an event of an engine, or of all of this process."""
    event.listen(engine, name, listener)
    try:
        yield
    finally:
        event.remove(engine, name, listener)


def naming(row_id: str, act: Callable[[], object]) -> Callable[..., None]:
    """A listener that acts at each statement that has this id among its parameters."""

    def look(*seen: object) -> None:
        if row_id in str(seen[3]):
            act()

    return look


@contextmanager
def after_each_snapshot(engine: Engine, act: Callable[[], object]) -> Iterator[None]:
    """Act whenever a transaction whose statements all see the same moment has read its rows."""

    def ended(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") == "REPEATABLE READ":
            act()

    with listening(engine, "commit", ended), listening(engine, "rollback", ended):
        yield


@contextmanager
def once_after_snapshot(engine: Engine, act: Callable[[], object]) -> Iterator[None]:
    """Act when the first such transaction has read its rows."""
    waiting = [act]
    with after_each_snapshot(engine, lambda: waiting and waiting.pop()()):
        yield


def counted_rows(connection: Connection) -> int:
    """How many rows, and entries of indexes, PostgreSQL has read in this transaction."""
    with connection.connection.cursor() as cursor:
        cursor.execute(_ROWS_READ)
        return int((cursor.fetchone() or (0,))[0])


def assert_reads_grow_with_what_is_named(
    early: Connection, late: Connection, send: Callable[[Connection, Sequence[_Named]], None], named: Sequence[_Named]
) -> None:
    """No statement that ``send`` sends for all that is named reads more on the connection that planned it ``early``, on
    an empty farm, than on the ``late`` one, which plans it now; and none reads four times as much for twice as many."""
    rows = []
    for connection, share in ((early, 1), (early, 2), (late, 1), (late, 2)):
        with rows_handled(connection) as handled:
            send(connection, named[: len(named) * share // 2])
        rows.append(handled)
        connection.rollback()
    half, whole, half_late, whole_late = rows
    of_all = zip(whole, whole_late, strict=True)
    assert [(of_early, of_late) for of_early, of_late in of_all if of_early > 100 + 1.1 * of_late] == []
    of_both = zip(half + half_late, whole + whole_late, strict=True)
    assert [(of_half, of_whole) for of_half, of_whole in of_both if of_whole > 100 + 3 * of_half] == []


@contextmanager
def rows_handled(connection: Connection, of: str = "EXECUTE ") -> Iterator[list[int]]:
    """How many rows each prepared statement, or each that begins like ``of``, has handled that the connection sends
    meanwhile: those that the steps of its plan have handed on, and those that they have looked at in vain.

    Each statement is explained after its message was sent, by doing once more what is then taken back.
    """
    handled: list[int] = []

    def explain(_connection: Connection, cursor: Any, *_: object) -> None:
        with connection.connection.cursor() as other:
            for sent in cursor.query.decode().split(";"):
                if sent.strip().startswith(of):
                    other.execute(f"SAVEPOINT explained; EXPLAIN (ANALYZE, FORMAT JSON) {sent}")
                    handled.append(round(_rows_of(other.fetchone()[0][0]["Plan"])))
                    other.execute("ROLLBACK TO SAVEPOINT explained; RELEASE SAVEPOINT explained")

    event.listen(connection, "after_cursor_execute", explain)
    try:
        yield handled
    finally:
        event.remove(connection, "after_cursor_execute", explain)


def _rows_of(node: Mapping[str, Any], above: str = "") -> float:
    """The rows that a step of a plan, and all below it, have handed on or looked at in vain."""
    below = sum(_rows_of(step, node["Node Type"]) for step in node.get("Plans", ()))
    if node["Node Type"] == "Bitmap Index Scan" and above == "Bitmap Heap Scan":
        return below  # its rows are counted above, without the versions that were taken back and wait for a vacuum
    in_vain = sum(rows for what, rows in node.items() if what.startswith("Rows Removed by "))
    return (node["Actual Rows"] + in_vain) * node["Actual Loops"] + below


@contextmanager
def failing_statements(engine: Engine, error: Exception) -> Iterator[None]:
    """Whatever is asked of PostgreSQL through the engine meanwhile ends with the error."""

    def fail(*_: object) -> None:
        raise error.with_traceback(None)  # not with that of the last time it was raised

    with listening(engine, "before_cursor_execute", fail):
        yield


@contextmanager
def rows_read(engine: Engine) -> Iterator[list[int]]:
    """How many rows, and entries of indexes, PostgreSQL reads in each transaction that is committed meanwhile."""
    read: list[int] = []
    before = 0

    def begin(connection: Connection) -> None:
        nonlocal before
        before = counted_rows(connection)

    def commit(connection: Connection) -> None:
        read.append(counted_rows(connection) - before)

    with listening(engine, "begin", begin), listening(engine, "commit", commit):
        yield read
