"""A worker that is told to stop before it consumes anything: while it waits for its counters, say."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.signals import worker_shutting_down
from celery.worker import state
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched import celery as wiring
from opencue_sched.celery import ProcessStep, sleep_unless_stopped
from opencue_sched.coordination.presence import WorkerState
from opencue_sched.worker.workload import Workload
from tests.kit.frozen_clock import Clock


def test_a_wait_takes_its_time_when_nobody_says_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(wiring, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance))
    began = clock()
    sleep_unless_stopped(5.0)
    assert clock() - began == pytest.approx(5.0)


@pytest.mark.parametrize(("order", "raised"), [("should_stop", WorkerShutdown), ("should_terminate", WorkerTerminate)])
def test_a_wait_ends_at_the_order_to_stop(
    monkeypatch: pytest.MonkeyPatch, order: str, raised: type[SystemExit]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: monkeypatch.setattr(state, order, 0))
    with pytest.raises(raised):
        sleep_unless_stopped(3600)


def test_what_a_worker_holds_that_stops_at_its_start_is_given_back() -> None:
    given_back: list[bool] = []

    def start(_node: str, _capacity: int, sleep: object) -> None:
        assert sleep is sleep_unless_stopped
        raise WorkerShutdown(0)

    mine = SimpleNamespace(start=start, stop=lambda: given_back.append(True))
    app = SimpleNamespace(process=mine)
    worker = SimpleNamespace(app=app, hostname="w1@localhost", concurrency=1, pool_cls="threads", steps=[])
    step = object.__new__(ProcessStep)
    with pytest.raises(WorkerShutdown):
        step.start(worker)
    assert given_back == [True]


def test_a_first_beat_without_redis_ends_no_worker() -> None:
    """It is made before the event loop runs: an error would end the worker here."""

    def heartbeat() -> None:
        raise RedisConnectionError("away")

    mine = SimpleNamespace(membership=SimpleNamespace(workload=Workload(), heartbeat=heartbeat))
    again: list[float] = []
    timer = SimpleNamespace(call_repeatedly=lambda seconds, _: again.append(seconds))
    wiring.PresenceStep(None).start(SimpleNamespace(app=SimpleNamespace(process=mine), timer=timer))
    assert again == [wiring.REFRESH_SECONDS]


@pytest.fixture
def as_before() -> Iterator[None]:
    """What a worker that starts connects to signals is taken off again."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    handlers = [signal.getsignal(number) for number in numbers]
    receivers = list(worker_shutting_down.receivers)
    yield
    worker_shutting_down.receivers[:] = receivers
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_before")
def test_the_first_signal_to_stop_is_for_good() -> None:
    workload = Workload()
    mine = SimpleNamespace(membership=SimpleNamespace(workload=workload), start=lambda *_: None)
    app = SimpleNamespace(process=mine)
    object.__new__(ProcessStep).start(SimpleNamespace(app=app, hostname="w1@localhost", concurrency=1))
    worker_shutting_down.send(None)
    workload.become(WorkerState.WORKING)
    assert workload.state is WorkerState.DRAINING
