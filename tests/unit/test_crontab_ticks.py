"""Schedules without an interval fire once as well, whoever leads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule
from kombu.exceptions import OperationalError

from opencue_sched.beat import LeaderScheduler

HOURLY = "hourly"
OFTEN = "often"


class Gate:
    """One Redis for all beats: what was fired, and when last."""

    fence = 1

    def __init__(self) -> None:
        self.fired: dict[str, int] = {}

    def may_fire(self, name: str, tick: int) -> bool:
        if self.fired.get(name) == tick:
            return False
        self.fired[name] = tick
        return True


class Beat(LeaderScheduler):
    producer = None

    def __init__(self, app: Celery, gate: Gate, started: datetime) -> None:
        self.app, self._gate = app, gate
        entry = ScheduleEntry(HOURLY, "task", started, schedule=crontab(minute=0, app=app), app=app, options={})
        self.data = {HOURLY: entry}
        self.sent: list[int] = []

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.sent.append(entry.options["headers"]["tick"])

    def at(self, hour: int, minute: int) -> None:
        now = datetime(2026, 1, 1, hour, minute, 1, tzinfo=UTC).timestamp()
        self._serve(self._gate, HOURLY, self.data[HOURLY], now, self._gate.fired)


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
    class NoBroker(Beat):
        @property
        def producer(self) -> None:
            raise OperationalError("no connection")

    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    with pytest.raises(OperationalError):
        NoBroker(app, gate, started).at(11, 0)
    assert gate.fired == {}


def test_of_the_ticks_that_nobody_fired_the_latest_is_fired_and_none_twice(app: Celery) -> None:
    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    first, second = Beat(app, gate, started), Beat(app, gate, started)
    entry = ScheduleEntry(OFTEN, "task", started, schedule=schedule(100.0, app=app), app=app, options={})
    for beat, now in ((first, 550.0), (first, 560.0), (second, 570.0), (second, 950.0), (second, 999.0)):
        beat._serve(gate, OFTEN, entry, now, gate.fired)
    assert (first.sent, second.sent) == ([5], [9])


def test_a_task_whose_interval_was_changed_fires_on(app: Celery) -> None:
    """Both ways: of a longer interval the numbers are lower."""
    started, gate = datetime(2026, 1, 1, 10, 58, tzinfo=UTC), Gate()
    for interval in (1.0, 2.0, 1.0):
        beat = Beat(app, gate, started)
        entry = ScheduleEntry(OFTEN, "task", started, schedule=schedule(interval, app=app), app=app, options={})
        for second in (0, 1, 2, 3):
            beat._serve(gate, OFTEN, entry, started.timestamp() + second, gate.fired)
        assert len(beat.sent) == 4 / interval, f"every {interval} s"
        started += timedelta(minutes=1)
