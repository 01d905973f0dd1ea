"""A beat on real stores, while the clock of Redis is wrong and after it was put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule
from structlog.testing import capture_logs

from opencue_sched.beat import LeaderScheduler
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker import fleet_metrics
from tests.kit.environment import stores_of
from tests.kit.frozen_clock import Clock

KEYS = LeaderKeys("cue", "beat")
HOUR = 3600.0
TASKS = {"often": 0.001, "now-and-then": 30.0}


class Beat(LeaderScheduler):
    """Its messages are kept."""

    producer = None
    redis_error = 0.0

    def __init__(self, client: Any, engine: Any) -> None:
        super().__init__(app=Celery("beats", set_as_current=False), lazy=True)
        self.sent: list[tuple[str, int]] = []
        self.clock = Clock()
        self.gate = LeaderGate(
            client,
            KEYS,
            ttl_seconds=15,
            retry_seconds=0,
            fences=PersistentFences(engine),
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


@pytest.fixture
def beat(redis_client, engine, settings) -> Iterator[Beat]:
    made = Beat(redis_client, engine)
    with stores_of(settings), closing(made.app):
        assert made.fires() == ["now-and-then", "often"]
        yield made


def test_ticks_go_on_while_the_clock_of_redis_is_ahead(beat: Beat) -> None:
    beat.redis_error = HOUR
    assert "often" in beat.fires()
    assert "often" in beat.fires()


def test_the_wait_for_ticks_of_the_future_is_logged_and_shown(beat: Beat) -> None:
    """The clock that named them was put right since."""
    beat.redis_error = HOUR
    assert "often" in beat.fires()
    beat.redis_error = 0.0
    with capture_logs() as logs:
        assert beat.fires() == []
        assert beat.fires() == []
    reported = {line["task"]: line for line in logs if line["event"] == "tick_of_the_future_recorded"}
    assert reported.keys() == {"often@0.001", "now-and-then@30"}
    assert len(logs) == 2, "once a minute"
    assert all(line["log_level"] == "error" for line in logs)
    assert reported["often@0.001"]["seconds_to_wait"] == pytest.approx(HOUR, abs=6)
    assert fleet_metrics.BEAT.get_sample_value("scheduler_ticks_ahead_seconds") == pytest.approx(HOUR, abs=35)
