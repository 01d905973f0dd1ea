"""Completions that wait together, and those that cannot be applied yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from opencue_sched.reports.completion_batcher import MOST_WAITING, CompletionBatcher, NotAccepting
from opencue_sched.reports.run_ends import CompletedFrame, RunOutcome, RunVerdict
from tests.kit.counted import Counted
from tests.kit.polling import MOST_SECONDS, eventually


def report(name: str) -> CompletedFrame:
    return CompletedFrame(name, f"frame-{name}", "host", 0)


def applied(reports: Sequence[CompletedFrame]) -> list[RunOutcome]:
    return [RunOutcome(each.proc_id, each.frame_id, RunVerdict.APPLIED) for each in reports]


def test_what_waits_is_applied_together_and_in_order() -> None:
    # given a database that is busy with the first completion
    gate = threading.Event()
    batches: list[list[str]] = []

    def apply(reports: Sequence[CompletedFrame]) -> list[RunOutcome]:
        batches.append([each.proc_id for each in reports])
        gate.wait(10)
        return applied(reports)

    batcher = CompletionBatcher(apply, Counted())
    batcher.start()
    first = batcher.submit(report("a"))
    eventually(lambda: bool(batches))

    # when more arrive meanwhile
    others = [batcher.submit(report(name)) for name in "bcd"]
    gate.set()

    # then they are applied in one go
    assert [done.result(MOST_SECONDS).proc_id for done in (first, *others)] == ["a", "b", "c", "d"]
    assert batches == [["a"], ["b", "c", "d"]]
    assert batcher.stop(10) == 0


def test_completions_are_kept_while_the_database_is_away() -> None:
    # given a database that fails three times, once by giving out no connection
    gone = OperationalError("select", {}, Exception("gone"))
    failures = iter([gone, PoolTimeout("all connections are in use"), gone])

    def apply(reports: Sequence[CompletedFrame]) -> list[RunOutcome]:
        if (failure := next(failures, None)) is not None:
            raise failure
        return applied(reports)

    counts = Counted()
    batcher = CompletionBatcher(apply, counts)
    batcher.start()
    done = [batcher.submit(report(name)) for name in "ab"]
    assert {each.result(30).verdict for each in done} == {RunVerdict.APPLIED}
    assert counts["completion_retry"] == 3
    batcher.stop(10)


def test_one_that_cannot_be_applied_does_not_hold_up_the_others() -> None:
    def apply(reports: Sequence[CompletedFrame]) -> list[RunOutcome]:
        if any(each.proc_id == "bad" for each in reports):
            raise OperationalError("select", {}, Exception("statement timeout"))
        return applied(reports)

    batcher = CompletionBatcher(apply, Counted())
    bad = batcher.submit(report("bad"))
    others = [batcher.submit(report(name)) for name in "ab"]
    batcher.start()
    assert [done.result(30).proc_id for done in others] == ["a", "b"]
    assert batcher.stop(0.1) == 1
    with pytest.raises(NotAccepting):
        bad.result(MOST_SECONDS)


def test_a_full_or_stopping_queue_says_so() -> None:
    batcher = CompletionBatcher(applied, Counted())
    kept = [batcher.submit(report(f"a{number}")) for number in range(MOST_WAITING)]
    with pytest.raises(NotAccepting, match=str(MOST_WAITING)):
        batcher.submit(report("b"))
    batcher.start()
    assert {end.result(60).verdict for end in kept} == {RunVerdict.APPLIED}
    batcher.stop(10)
    with pytest.raises(NotAccepting, match="stopping"):
        batcher.submit(report("c"))
