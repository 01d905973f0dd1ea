"""Rows that PostgreSQL reads for the statements of a worker, by the function of the store that asks.

Celery imports this file into a worker (``--include row_meter``); it knows no other module of the benchmarks, so that a
worker of another commit can have it as well. It counts as long as the file named SWITCH is in the worker's directory:
PostgreSQL is then asked before and after each statement, which costs time, so a phase of its own is watched. The counts
are on the worker's /metrics, as ``benchmark_rows_returned_total{reason="MODULE.FUNCTION"}``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prometheus_client import Counter
from sqlalchemy import Engine, event

SWITCH = "row-meter.on"
SERIES = "benchmark_rows_returned"

_STORE, _OURS = "opencue_sched.store.", "opencue_sched."
# What only passes statements on; the second is where older commits have it.
_NO_READERS = ("opencue_sched.clients.", "opencue_sched.store.engine")
_ROWS_BEFORE = "opencue_sched_row_meter"
# What this session has counted and not told yet, of tables and indexes but PostgreSQL's own.
_PENDING = (
    "SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(oid)), 0) FROM pg_class "
    "WHERE relkind IN ('r', 'i', 'm', 't') AND oid >= 16384"
)
# Without a transaction block all that was counted is told when this statement ends, and counting begins anew.
_TELL = "SELECT pg_stat_force_next_flush()"


def install(engine: Engine | type[Engine], switch: Path) -> Counter:
    """Count the statements of an engine, or of all there are, while ``switch`` exists."""
    rows_returned = Counter(SERIES, "Rows that PostgreSQL read for statements, by who asked.", ["reason"])

    def before(connection: Any, cursor: Any, *_: Any) -> None:
        if switch.exists():
            connection.info[_ROWS_BEFORE] = _pending(cursor, begins=True)

    def after(connection: Any, cursor: Any, *_: Any) -> None:
        began_with = connection.info.pop(_ROWS_BEFORE, None)
        if began_with is not None:
            rows_returned.labels(_reader()).inc(max(0, _pending(cursor) - began_with))

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    return rows_returned


def _pending(cursor: Any, *, begins: bool = False) -> int:
    session = cursor.connection
    with session.cursor() as meter:
        if begins and session.autocommit:
            meter.execute(_TELL)
            return 0
        meter.execute(_PENDING)
        return int(meter.fetchone()[0])


def _reader() -> str:
    """The function of the store through which the statement was sent; else the one of ours that sent it."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if module.startswith(_OURS) and not module.startswith(_NO_READERS) and not function.startswith("<"):
            in_the_store = module.startswith(_STORE)
            if found is None or in_the_store:
                found = f"{module.rpartition('.')[2]}.{function}"
            if not in_the_store:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return found or "other"


if __name__ == Path(__file__).stem:
    install(Engine, Path(SWITCH))
