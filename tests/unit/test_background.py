"""The threads beside the work: nothing but their owner ends them, and an error is told once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg2
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy.exc import ProgrammingError
from structlog.testing import capture_logs

from opencue_sched.background import PeriodicThread
from tests.kit.polling import MOST_SECONDS, eventually

Make = Callable[..., PeriodicThread]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PeriodicThread] = []

    def start(make_round: Callable[[], float | None], **how: float) -> PeriodicThread:
        rounds = PeriodicThread("test", make_round, failed="it_failed", **{"retry_seconds": 0.001, **how})
        made.append(rounds)
        rounds.start()
        return rounds

    yield start
    assert all(rounds.stop() for rounds in made)


def test_a_round_is_made_at_once_then_when_wanted_or_when_the_last_one_said(make: Make):
    answers, made = iter([None, 0.0, 0.0, None, 3600.0]), []
    rounds = make(lambda: made.append(len(made)) or next(answers, None))
    eventually(lambda: len(made) == 1, what="the first round, after which it waits to be wanted")
    rounds.wake()
    eventually(lambda: len(made) == 4, what="a round when wanted, and two that the ones before asked for")
    for count in (5, 6):
        rounds.wake()
        eventually(lambda count=count: len(made) == count, what="a round when wanted, whatever the last one said")


def test_an_error_costs_its_round_and_is_told_once_until_another_comes_or_a_round_goes_well(make: Make):
    away, bug = RedisConnectionError("away"), KeyError("nobody thought of this")
    happens = iter([away, away, away, bug, bug, None, bug])
    ended = threading.Event()

    def make_round() -> float | None:
        error = next(happens, ended)
        if isinstance(error, Exception):
            raise error
        if error is ended:
            ended.set()
        return None if error is ended else 0.0

    with capture_logs() as said:
        make(make_round, longest_retry_seconds=0.004)
        assert ended.wait(MOST_SECONDS)
    assert [(line["event"], line["thread"], line["log_level"], line["error"]) for line in said] == [
        ("it_failed", "test", "warning", "ConnectionError: away"),
        ("it_failed", "test", "error", "KeyError: 'nobody thought of this'"),
        ("it_failed", "test", "error", "KeyError: 'nobody thought of this'"),
    ]


def test_an_error_of_postgresql_is_told_without_the_statement(make: Make):
    # given a round whose statement PostgreSQL refuses
    refused = psycopg2.ProgrammingError('relation "frame" does not exist\nLINE 1: SELECT secret FROM frame')
    with capture_logs() as said:

        def make_round() -> float | None:
            raise ProgrammingError("SELECT secret FROM frame", {"password": "sesame"}, refused)

        # when the round is made
        make(make_round)
        eventually(lambda: bool(said), what="the error is logged")
    # then one line says what PostgreSQL said
    assert said[0]["error"] == 'ProgrammingError: relation "frame" does not exist'


def test_stopping_cuts_every_wait_short_and_names_what_goes_on(make: Make):
    def fail() -> None:
        raise RedisConnectionError("away")

    asleep, go_on, working = threading.Event(), threading.Event(), threading.Event()
    sleepy = make(lambda: asleep.set() or (sleepy.pause(3600) and None))
    waiting, failing = make(lambda: 3600.0), make(fail, retry_seconds=3600)
    busy = make(lambda: working.set() or (go_on.wait() and None))
    assert asleep.wait(MOST_SECONDS)
    assert working.wait(MOST_SECONDS)
    assert [it.stop(10) for it in (sleepy, waiting, failing)] == [True] * 3
    with capture_logs() as said:
        assert not busy.stop(0.01)
    assert [(line["event"], line["thread"]) for line in said] == [("thread_left_behind", "test")]
    go_on.set()


def test_a_round_may_stop_its_own_thread_and_one_never_begun_is_stopped_at_once(make: Make):
    stopped: list[bool] = []
    rounds = make(lambda: stopped.append(rounds.stop()) or 0.0)
    eventually(lambda: stopped == [True])
    assert PeriodicThread("idle", lambda: None, failed="it_failed", retry_seconds=1).stop()
