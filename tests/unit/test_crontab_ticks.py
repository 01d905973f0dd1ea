"""Schedules without an interval fire once as well, whoever leads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule
from kombu.exceptions import OperationalError

from opencue_sched.beat import LeaderScheduler
from tests.kit.environment import variables

HOURLY = "hourly"
OFTEN = "often"


class Gate:
    """One Redis for all beats, its clock, and what was fired when last. Each beat leads that looks."""

    fence = 1
    trouble = None

    def __init__(self) -> None:
        self.fired: dict[str, int] = {}
        self.now = 0.0

    @property
    def last_ticks(self) -> dict[str, int]:
        return self.fired

    def renew(self) -> int:
        return self.fence

    def redis_time(self) -> float:
        return self.now

    def may_fire(self, name: str, tick: int) -> bool:
        if self.fired.get(name) == tick:
            return False
        self.fired[name] = tick
        return True


class Beat(LeaderScheduler):
    producer = None

    def __init__(self, app: Celery, gate: Gate, started: datetime, of: Any = None) -> None:
        """``of``: the schedule of its one entry; by default each full hour."""
        super().__init__(app=app, lazy=True)
        self.gate, self.presence = gate, SimpleNamespace(refresh=lambda **_: None)
        name, of = (HOURLY, crontab(minute=0, app=app)) if of is None else (OFTEN, of)
        self.data = {name: ScheduleEntry(name, "task", started, schedule=of, app=app, options={})}
        self.sent: list[int] = []

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.sent.append(entry.options["headers"]["tick"])

    def at(self, hour: int, minute: int) -> None:
        self.at_second(datetime(2026, 1, 1, hour, minute, 1, tzinfo=UTC).timestamp())

    def at_second(self, now: float) -> None:
        self.gate.now = now
        self.tick()


@pytest.fixture
def app() -> Celery:
    app = Celery("beats", set_as_current=False)
    app.conf.update(timezone="UTC", enable_utc=True)
    return app


def test_a_beat_that_takes_over_fires_no_crontab_tick_a_second_time(app: Celery) -> None:
    # given two beats since 10:58, of which the first leads and fires at 11:00
    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    first, second = Beat(app, gate, started), Beat(app, gate, started)
    first.at(11, 0)
    assert first.sent == [int(datetime(2026, 1, 1, 11, tzinfo=UTC).timestamp()) // 60]

    # when the second leads from 11:07, then it fires at 12:00, and not before
    second.at(11, 7)
    assert second.sent == []
    second.at(12, 0)
    assert second.sent == [int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()) // 60]


def test_a_tick_that_nobody_fired_is_fired_by_whoever_leads_next(app: Celery) -> None:
    started = datetime(2026, 1, 1, 10, 58, tzinfo=UTC)
    late = Beat(app, Gate(), started)
    late.at(11, 7)
    assert len(late.sent) == 1


def test_a_beat_on_a_host_whose_clock_is_ahead_waits_for_no_tick_until_then(app: Celery) -> None:
    """What was never fired is due from the beat's start on, and only its host knows when that was."""
    tomorrow = Beat(app, Gate(), datetime(2026, 1, 2, 10, 58, tzinfo=UTC))
    tomorrow.at(10, 58)
    tomorrow.at(11, 0)
    assert tomorrow.sent == [int(datetime(2026, 1, 1, 11, tzinfo=UTC).timestamp()) // 60]


def test_no_tick_is_claimed_before_there_is_a_connection_for_its_message(app: Celery) -> None:
    asked = []

    class NoBroker(Beat):
        @property
        def producer(self) -> None:
            asked.append(self)
            raise OperationalError("no connection")

    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    with variables(DATABASE_URL="postgresql://db.example/opencue", REDIS_URL="redis://redis.example"):
        NoBroker(app, gate, started).at(11, 0)
    assert asked
    assert gate.fired == {}


def test_of_the_ticks_that_nobody_fired_the_latest_is_fired_and_none_twice(app: Celery) -> None:
    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    often = schedule(100.0, app=app)
    first, second = Beat(app, gate, started, often), Beat(app, gate, started, often)
    for beat, now in ((first, 550.0), (first, 560.0), (second, 570.0), (second, 950.0), (second, 999.0)):
        beat.at_second(now)
    assert (first.sent, second.sent) == ([5], [9])


def test_a_task_whose_interval_was_changed_fires_on(app: Celery) -> None:
    """Both ways: of a longer interval the numbers are lower."""
    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    for interval in (1.0, 2.0, 1.0):
        beat = Beat(app, gate, started, schedule(interval, app=app))
        for second in (0, 1, 2, 3):
            beat.at_second(started.timestamp() + second)
        assert len(beat.sent) == 4 / interval, f"every {interval} s"
        started += timedelta(minutes=1)
