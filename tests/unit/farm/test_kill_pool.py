"""Kills in the background: bounded, one job a host, and none that harms another."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from opencue_sched.farm import reports
from opencue_sched.farm.reports import KillPool
from tests.polling import eventually


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[KillPool]:
    monkeypatch.setattr(reports, "KILL_THREADS", 1)
    made = KillPool()
    yield made
    made.close()


def test_a_host_has_one_job_at_a_time(pool: KillPool) -> None:
    # given a job that takes its time, and one that waits behind it
    over = threading.Event()
    done: list[str] = []
    assert pool.submit("a", lambda: over.wait(30) and None)
    assert pool.submit("b", lambda: done.append("b"))
    # when more comes, then it is left to the next report
    assert not pool.submit("a", lambda: done.append("a"))
    # and there is room again afterwards
    over.set()
    eventually(lambda: pool.submit("a", lambda: done.append("a again")))
    eventually(lambda: done == ["b", "a again"])


def test_a_job_that_fails_is_logged_and_the_next_one_done(pool: KillPool) -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("no such thing")

    with capture_logs() as said:
        pool.submit("a", fail)
        pool.submit("b", lambda: done.append("b"))
        eventually(lambda: done == ["b"])
    assert [(line["event"], line["host"]) for line in said] == [("kills_failed", "a")]
    eventually(lambda: pool.submit("a", lambda: done.append("a")))
