"""Each tick of a schedule fires once, whoever leads."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule
from kombu.exceptions import OperationalError

from opencue_sched.beat import LeaderScheduler

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

    def __init__(self, gate: Gate, *, every: float) -> None:
        self.app, self._gate = Celery("beats", set_as_current=False), gate
        self._entry = ScheduleEntry(OFTEN, "task", schedule=schedule(every, app=self.app), app=self.app, options={})
        self.sent: list[int] = []

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.sent.append(entry.options["headers"]["tick"])

    def at(self, now: float) -> float:
        return self._serve(self._gate, OFTEN, self._entry, now, self._gate.fired)


def test_of_the_ticks_that_nobody_fired_the_latest_is_fired_and_none_twice() -> None:
    gate = Gate()
    first, second = Beat(gate, every=100.0), Beat(gate, every=100.0)
    for beat, now in ((first, 550.0), (first, 560.0), (second, 570.0), (second, 950.0), (second, 999.0)):
        assert beat.at(now) == 100.0 - now % 100.0
    assert (first.sent, second.sent) == ([5], [9])


def test_no_tick_is_claimed_before_there_is_a_connection_for_its_message() -> None:
    class NoBroker(Beat):
        @property
        def producer(self) -> None:
            raise OperationalError("no connection")

    gate = Gate()
    with pytest.raises(OperationalError):
        NoBroker(gate, every=100.0).at(550.0)
    assert gate.fired == {}


def test_a_task_whose_interval_was_changed_fires_on() -> None:
    """Both ways: of a longer interval the numbers are lower."""
    gate = Gate()
    for started, interval in ((1_000_000.0, 1.0), (1_000_060.0, 2.0), (1_000_120.0, 1.0)):
        beat = Beat(gate, every=interval)
        for second in (0, 1, 2, 3):
            beat.at(started + second)
        assert len(beat.sent) == 4 / interval, f"every {interval} s"
