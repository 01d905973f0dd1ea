"""Many lost runs: so many in a transaction, and one that the database refuses keeps none of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DataError, OperationalError
from structlog.testing import capture_logs

from opencue_sched.reports import completion
from opencue_sched.reports.completion import MOST_TOGETHER, Releaser
from opencue_sched.reports.run_ends import LostRun, RunOutcome, RunsEnded, RunVerdict

EndRuns = Callable[..., RunsEnded]


def releaser(monkeypatch: pytest.MonkeyPatch, end_runs: EndRuns) -> Releaser:
    monkeypatch.setattr(completion, "end_runs", end_runs)
    return Releaser(cast(Engine, None))


def runs(*names: str) -> list[LostRun]:
    return [LostRun(name, f"frame-{name}") for name in names]


def ended(requests: Sequence[LostRun]) -> RunsEnded:
    return RunsEnded(tuple(RunOutcome(it.proc_id, it.frame_id, RunVerdict.APPLIED) for it in requests))


def test_transactions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def end_runs(_releaser: Releaser, requests: Sequence[LostRun], _note: object) -> RunsEnded:
        sizes.append(len(requests))
        return ended(requests)

    names = [str(number) for number in range(2 * MOST_TOGETHER + 1)]
    outcomes = releaser(monkeypatch, end_runs).end(runs(*names))
    assert [outcome.proc_id for outcome in outcomes] == names
    assert sizes == [MOST_TOGETHER, MOST_TOGETHER, 1]


def test_a_run_the_database_refuses_is_logged_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_runs(_releaser: Releaser, requests: Sequence[LostRun], _note: object) -> RunsEnded:
        if any(request.proc_id == "bad" for request in requests):
            raise DataError("update", {}, Exception("a value that makes no sense"))
        return ended(requests)

    with capture_logs() as said:
        outcomes = releaser(monkeypatch, end_runs).end(runs("a", "bad", "b"))
    verdicts = [(outcome.proc_id, outcome.verdict) for outcome in outcomes]
    assert verdicts == [("a", RunVerdict.APPLIED), ("bad", RunVerdict.REFUSED), ("b", RunVerdict.APPLIED)]
    refused = [(line["proc"], line["frame"]) for line in said if line["event"] == "lost_run_refused"]
    assert refused == [("bad", "frame-bad")]


def test_a_database_that_is_away_is_not_asked_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def end_runs(_releaser: Releaser, requests: Sequence[LostRun], _note: object) -> RunsEnded:
        asked.append(len(requests))
        raise OperationalError("select", {}, Exception("server closed the connection"))

    with pytest.raises(OperationalError):
        releaser(monkeypatch, end_runs).end(runs("a", "b", "c"))
    assert asked == [3]
