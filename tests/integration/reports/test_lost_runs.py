"""Runs that are ended without a report, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DataError, OperationalError
from structlog.testing import capture_logs

from opencue_sched.reports.completion import MOST_TOGETHER, Releaser
from opencue_sched.reports.run_ends import LostRun, RunVerdict
from tests.kit.statements import failing_statements, listening, naming


def runs(*names: str) -> list[LostRun]:
    """Runs that somebody else has ended meanwhile."""
    return [LostRun(name, f"frame-{name}") for name in names]


@contextmanager
def transactions(engine: Engine) -> Iterator[list[object]]:
    """Grows with each."""
    begun: list[object] = []
    with listening(engine, "begin", begun.append):
        yield begun


def test_transactions_are_bounded(engine: Engine) -> None:
    names = [str(number) for number in range(2 * MOST_TOGETHER + 1)]
    with transactions(engine) as begun:
        outcomes = Releaser(engine).end(runs(*names))
    assert [outcome.proc_id for outcome in outcomes] == names
    assert len(begun) == 3


def test_a_run_the_database_refuses_is_logged_and_the_others_end(engine: Engine) -> None:
    def refuse() -> None:
        raise DataError("update", {}, Exception("a value that makes no sense"))

    with listening(engine, "before_cursor_execute", naming("bad", refuse)), capture_logs() as said:
        outcomes = Releaser(engine).end(runs("a", "bad", "b"))
    verdicts = [(outcome.proc_id, outcome.verdict) for outcome in outcomes]
    assert verdicts == [("a", RunVerdict.STALE), ("bad", RunVerdict.REFUSED), ("b", RunVerdict.STALE)]
    refused = [(line["proc"], line["frame"]) for line in said if line["event"] == "lost_run_refused"]
    assert refused == [("bad", "frame-bad")]


def test_a_database_that_is_away_is_not_asked_run_by_run(engine: Engine) -> None:
    away = OperationalError("select", {}, Exception("server closed the connection"))
    with transactions(engine) as begun, failing_statements(engine, away), pytest.raises(OperationalError):
        Releaser(engine).end(runs("a", "b", "c"))
    assert len(begun) == 1
