"""Background threads: none dies unheard, and none outlives what it uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from redis.exceptions import RedisError
from structlog.testing import capture_logs

from opencue_sched.worker.runtime import Background

MOST_SECONDS = 10.0


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.mark.parametrize(("error", "level"), [(RedisError("gone"), "warning"), (AttributeError("unexpected"), "error")])
def test_work_that_fails_says_so_and_can_be_started_again(error: Exception, level: str):
    background = Background()
    ran = threading.Semaphore(0)

    def fail() -> None:
        ran.release()
        raise error

    with capture_logs() as said:
        assert background.start("bootstrap", fail)
        assert ran.acquire(timeout=MOST_SECONDS)
        deadline = time.monotonic() + MOST_SECONDS
        while not background.start("bootstrap", fail):
            assert time.monotonic() < deadline
        background.close()
    assert {(line["event"], line["work"], line["log_level"]) for line in said} == {
        ("background_work_failed", "bootstrap", level)
    }
    assert len(said) == 2


def test_work_of_one_name_runs_once_at_a_time(background: Background):
    go_on = threading.Event()
    assert background.start("reload", go_on.wait)
    assert not background.start("reload", go_on.wait)
    assert background.start("another", go_on.wait)
    go_on.set()


def test_closing_wakes_what_sleeps_and_begins_nothing_more():
    background = Background()
    asleep = threading.Event()

    def doze() -> None:
        asleep.set()
        background.sleep(3600)

    with capture_logs() as said:
        background.start("bootstrap", doze)
        assert asleep.wait(MOST_SECONDS)
        background.close(MOST_SECONDS)
    assert [line["event"] for line in said] == ["background_work_given_up"]
    assert not background.start("bootstrap", doze)


def test_work_that_does_not_end_is_named():
    background = Background()
    go_on = threading.Event()
    background.start("stuck", go_on.wait)
    with capture_logs() as said:
        background.close(timeout=0.01)
    assert [(line["event"], line["work"]) for line in said] == [("background_work_abandoned", "stuck")]
    go_on.set()
    background.close()
