"""A beat on real stores, of which one has a wrong clock: what is recorded as fired, and what goes on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule
from structlog.testing import capture_logs

from opencue_sched.beat import LeaderScheduler
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.names import LeaderKeys
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker import fleet_metrics

KEYS = LeaderKeys("cue", "beat")
HOUR = 3600.0
TASKS = {"often": 0.001, "now-and-then": 30.0}


class Clock:
    """Of this host: it says how long things take."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fences(PersistentFences):
    """PostgreSQL, whose clock may be wrong."""

    error = 0.0

    def time(self) -> float:
        told = super().time() + self.error
        self.on_the_way()
        return told

    def on_the_way(self) -> None:
        """What happens before the answer arrives."""


class Beat(LeaderScheduler):
    """Its messages are kept."""

    producer = None
    redis_error = 0.0

    def _show(self, gate: LeaderGate) -> None:
        """It has no presence."""

    def __init__(self, client: Any, engine: Any) -> None:
        self.app = Celery("beats", set_as_current=False)
        self.sent: list[tuple[str, int]] = []
        self.presence = None
        self._told: dict[tuple[str, object], float] = {}
        self.clock, self.fences = Clock(), Fences(engine)
        self.gate = LeaderGate(
            client,
            KEYS,
            ttl_seconds=15,
            renew_deadline_seconds=10,
            retry_seconds=0,
            fences=self.fences,
            clock=self.clock,
        )
        heard = self.gate.redis_time
        self.gate.redis_time = lambda: heard() + self.redis_error  # type: ignore[method-assign]
        started = datetime(2026, 1, 1, tzinfo=UTC)
        self.data = {
            name: ScheduleEntry(name, "task", started, schedule=schedule(every, app=self.app), app=self.app)
            for name, every in TASKS.items()
        }

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.sent.append((entry.options["headers"]["tick_of"], entry.options["headers"]["tick"]))

    def fires(self) -> list[str]:
        """The tasks fired by one look at the schedule, a renewal later."""
        self.clock.now += 5
        self.sent.clear()
        self.tick()
        return sorted(series.partition("@")[0] for series, _ in self.sent)

    def ahead(self) -> float:
        """By how much the furthest tick that is recorded as fired is still to come."""
        recorded = self.fences.last_ticks(KEYS.name)
        return max(tick * TASKS[series.partition("@")[0]] for series, tick in recorded.items()) - Fences.time(
            self.fences
        )


@pytest.fixture
def beat(redis_client, engine) -> Iterator[Beat]:
    made = Beat(redis_client, engine)
    assert made.fires() == ["now-and-then", "often"]
    yield made
    made.app.close()


def test_while_the_clock_of_redis_is_far_ahead_ticks_go_on_and_none_of_the_future_is_recorded(beat: Beat) -> None:
    beat.redis_error = HOUR
    with capture_logs() as logs:
        assert "often" in beat.fires()
        assert "often" in beat.fires()
    assert beat.ahead() < 5
    (said,) = [line for line in logs if line["event"] == "clocks_of_the_stores_differ"]
    assert said["log_level"] == "error"
    assert said["redis_ahead_seconds"] == pytest.approx(HOUR, abs=5)
    assert fleet_metrics.clocks_apart._value.get() == pytest.approx(HOUR, abs=5)
    beat.redis_error = 0.0
    assert "often" in beat.fires(), "and when it is put right nothing has to wait for it"
    assert fleet_metrics.clocks_apart._value.get() == pytest.approx(0, abs=5)


@pytest.mark.parametrize(("redis_error", "postgresql_error"), [(-HOUR, 0.0), (0.0, -HOUR), (0.0, HOUR)])
def test_no_other_wrong_clock_keeps_ticks_from_going_on(
    beat: Beat, redis_error: float, postgresql_error: float
) -> None:
    beat.redis_error, beat.fences.error = redis_error, postgresql_error
    assert "often" in beat.fires()
    assert "often" in beat.fires()
    beat.fences.error = 0.0
    assert beat.ahead() < 5


def test_an_answer_that_took_long_does_not_pass_for_a_wrong_clock(beat: Beat, monkeypatch: pytest.MonkeyPatch) -> None:
    def a_minute_passes() -> None:
        beat.clock.now += 60
        beat.redis_error += 60

    assert beat.gate is not None
    monkeypatch.setattr(beat.fences, "on_the_way", a_minute_passes)
    beat.gate._hear_second_clock(beat.fences)
    assert abs(beat.gate.clocks().apart) < 5


def test_a_leader_that_comes_later_finds_the_wrong_clock_as_well(beat: Beat, redis_client, engine) -> None:
    beat.gate.resign()
    for redis_error in (HOUR, -HOUR):
        successor = Beat(redis_client, engine)
        successor.redis_error = redis_error
        assert "often" in successor.fires()
        assert successor.ahead() < 5
        successor.gate.resign()
        successor.app.close()


def test_ticks_of_the_future_that_are_recorded_already_are_told_of(beat: Beat) -> None:
    """As both clocks ahead at once would leave them: nobody can tell."""
    beat.redis_error = beat.fences.error = HOUR
    assert "often" in beat.fires()
    beat.redis_error = beat.fences.error = 0.0
    with capture_logs() as logs:
        assert beat.fires() == []
        assert beat.fires() == []
    told = {line["task"]: line for line in logs if line["event"] == "tick_of_the_future_recorded"}
    assert told.keys() == {"often@0.001", "now-and-then@30"}
    assert len(logs) == 2, "once a minute"
    assert all(line["log_level"] == "error" for line in logs)
    assert told["often@0.001"]["seconds_to_wait"] == pytest.approx(HOUR, abs=6)
    assert fleet_metrics.ticks_ahead._value.get() == pytest.approx(HOUR, abs=35)
