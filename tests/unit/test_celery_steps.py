"""A worker that is told to stop before it consumes anything: while it waits for its counters, say."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.utils.dispatch import Signal
from celery.worker import state
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched import celery as wiring
from opencue_sched.celery import ProcessStep, sleep_unless_stopped
from opencue_sched.coordination.presence import WorkerState
from opencue_sched.worker.workload import Workload
from tests.kit.tasks import in_process


def test_a_wait_takes_its_time_when_nobody_says_stop() -> None:
    began = time.monotonic()
    sleep_unless_stopped(0.05)
    assert time.monotonic() - began >= 0.05


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
    worker = SimpleNamespace(app=None, hostname="w1@localhost", concurrency=1, pool_cls="threads", steps=[])
    step = object.__new__(ProcessStep)
    with in_process(mine), pytest.raises(WorkerShutdown):
        step.start(worker)
    assert given_back == [True]


def test_a_first_beat_without_redis_ends_no_worker() -> None:
    """It is made before the event loop runs: an error would end the worker here."""

    def heartbeat() -> None:
        raise RedisConnectionError("away")

    mine = SimpleNamespace(membership=SimpleNamespace(workload=Workload(), heartbeat=heartbeat))
    again: list[float] = []
    timer = SimpleNamespace(call_repeatedly=lambda seconds, _: again.append(seconds))
    with in_process(mine):
        wiring.PresenceStep(None).start(SimpleNamespace(app=None, timer=timer))
    assert again == [wiring.REFRESH_SECONDS]


def test_the_first_signal_to_stop_is_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload()
    mine = SimpleNamespace(membership=SimpleNamespace(workload=workload), start=lambda *_: None)
    monkeypatch.setattr(wiring, "install_level_signals", lambda: None)
    monkeypatch.setattr(wiring, "worker_shutting_down", Signal())
    with in_process(mine):
        object.__new__(ProcessStep).start(SimpleNamespace(app=None, hostname="w1@localhost", concurrency=1))
    wiring.worker_shutting_down.send(None)
    workload.become(WorkerState.WORKING)
    assert workload.state is WorkerState.DRAINING
