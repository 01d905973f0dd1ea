"""What /livez and /readyz answer, beside the metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from wsgiref.util import setup_testing_defaults

import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

from opencue_sched.celery import PresenceStep
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.worker import metrics, probes
from opencue_sched.worker.probes import PULSE, STALLED_SECONDS, Pulse, with_probes
from opencue_sched.worker.workload import Workload
from tests.kit.frozen_clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(probes, "boot_clock", clock)
    return clock


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    return Pulse()


@pytest.fixture
def ask(pulse: Pulse) -> Callable[[str], tuple[int, str]]:
    registry = CollectorRegistry()
    Gauge("of_the_test", "A metric.", registry=registry).set(7)
    application = with_probes(make_wsgi_app(registry), pulse)

    def ask(path: str) -> tuple[int, str]:
        environ: dict[str, object] = {"PATH_INFO": path}
        setup_testing_defaults(environ)
        statuses: list[str] = []
        body = b"".join(application(environ, lambda status, _headers: statuses.append(status)))  # type: ignore[arg-type]
        return int(statuses[0].split()[0]), body.decode()

    return ask


def test_a_process_that_starts_is_alive_and_not_ready(ask: Callable[[str], tuple[int, str]]) -> None:
    assert ask("/livez") == (200, "ok\n")
    assert ask("/readyz")[0] == 503


def test_one_whose_loop_comes_round_is_both(ask: Callable[[str], tuple[int, str]], pulse: Pulse, clock: Clock) -> None:
    for _ in range(3):
        pulse.beat()
        assert ask("/livez") == ask("/readyz") == (200, "ok\n")
        clock.now += STALLED_SECONDS


def test_one_whose_loop_is_stuck_is_neither(ask: Callable[[str], tuple[int, str]], pulse: Pulse, clock: Clock) -> None:
    pulse.beat()
    clock.now += STALLED_SECONDS + 1
    status, why = ask("/livez")
    assert (status, why) == ask("/readyz")
    assert status == 503
    assert "121 s" in why


def test_one_that_waits_for_its_broker_is_alive(
    ask: Callable[[str], tuple[int, str]], pulse: Pulse, clock: Clock
) -> None:
    pulse.beat()
    pulse.rest()
    clock.now += 3600
    assert ask("/livez")[0] == 200
    assert ask("/readyz")[0] == 503


def test_the_metrics_are_where_they_were(ask: Callable[[str], tuple[int, str]]) -> None:
    status, text = ask("/metrics")
    assert status == 200
    assert "of_the_test 7.0" in text


@pytest.fixture
def served() -> Iterator[str]:
    PULSE.rest()  # what other tests of this process had run does not run any more
    started = metrics.serve_metrics("127.0.0.1", free_port(), CollectorRegistry())
    assert started is not None
    yield f"http://127.0.0.1:{started[1]}"
    started[0].shutdown()
    started[0].server_close()


def test_the_port_of_the_metrics_answers_probes(served: str) -> None:
    with urllib.request.urlopen(f"{served}/livez", timeout=10) as answer:  # noqa: S310 - ours
        assert (answer.status, answer.read()) == (200, b"ok\n")


def test_the_pulse_of_a_worker_is_its_consumers_timer(clock: Clock) -> None:
    # given a consumer with the step that refreshes the presence
    membership = SimpleNamespace(workload=Workload(), heartbeat=lambda: None)
    timers: list[Callable[[], None]] = []
    timer = SimpleNamespace(call_repeatedly=lambda _, call: timers.append(call) or SimpleNamespace(cancel=lambda: None))
    parent = SimpleNamespace(app=SimpleNamespace(process=SimpleNamespace(membership=membership)), timer=timer)
    step = PresenceStep(parent)

    # when the consumer starts, its timer stands still, goes on, and the connection to the broker is lost
    step.start(parent)
    assert PULSE.problem(ready=True) == ""
    clock.now += STALLED_SECONDS + 1
    assert PULSE.problem(ready=False) != ""
    timers[0]()
    assert PULSE.problem(ready=True) == ""
    step.stop(parent)

    # then the worker is alive until it is connected again, however long that takes
    clock.now += 3600
    assert PULSE.problem(ready=False) == ""
