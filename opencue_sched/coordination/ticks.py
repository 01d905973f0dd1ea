"""Nominal ticks of periodic tasks, and what to do with those missed while nobody led.

A tick is the number of whole intervals since the epoch, by Redis TIME, so every beat gives the same name to the same
moment whatever its own clock says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

MINUTE = 60.0
CATCH_UP_WINDOW_TICKS = 100
MARK_SPARE_SECONDS = 600.0
"""By so much clocks may differ, and no tick is taken for one that was not fired."""


class CatchUp(StrEnum):
    """What a new leader does with the ticks it finds unfired."""

    SKIP = "skip"
    LATEST = "latest"
    ALL = "all"


def tick_series(task: str, interval_seconds: float) -> str:
    """The name under which the ticks of ``task`` are counted and remembered.

    With another interval the same number means another moment: after a change from 1 s to 2 s, the last tick of before
    would lie decades ahead, and the task would never fire again.
    """
    return f"{task}@{interval_seconds:.10g}"


def tick_began(series: str, tick: int) -> float:
    """When a tick of this series began, seconds since the epoch; those of schedules without interval are minutes."""
    _, _, interval = series.rpartition("@")
    try:
        return tick * float(interval)
    except ValueError:
        return tick * MINUTE


def last_began(ticks: Mapping[str, int], now_seconds: float) -> float | None:
    """When the latest of these ticks began, those that are still to come left out; None when there is none."""
    began = [tick_began(series, tick) for series, tick in ticks.items()]
    return max((moment for moment in began if moment <= now_seconds), default=None)


def nominal_tick(now_seconds: float, interval_seconds: float) -> int:
    """The tick that ``now`` belongs to."""
    return int(now_seconds // interval_seconds)


def due_ticks(last: int | None, now_seconds: float, interval_seconds: float, policy: CatchUp) -> list[int]:
    """The ticks to fire now, oldest first.

    ``last`` is the tick fired last by anybody. A task that never fired fires at once, and SKIP differs from LATEST
    only after a gap: LATEST fires the newest tick at once, SKIP waits for the next one to begin.
    """
    current = nominal_tick(now_seconds, interval_seconds)
    if last is None:
        return [current]
    if current <= last:
        return []
    if current == last + 1:
        return [current]
    if policy is CatchUp.SKIP:
        into_tick = now_seconds - current * interval_seconds
        return [current] if into_tick < min(interval_seconds, 1.0) else []
    if policy is CatchUp.LATEST:
        return [current]
    return list(range(max(last + 1, current - CATCH_UP_WINDOW_TICKS + 1), current + 1))


def mark_seconds(interval_seconds: float, policy: CatchUp) -> float:
    """How long a tick is remembered as fired: for longer than it may be found due."""
    window = CATCH_UP_WINDOW_TICKS if policy is CatchUp.ALL else 1
    return MARK_SPARE_SECONDS + window * interval_seconds


def seconds_to_next(now_seconds: float, interval_seconds: float) -> float:
    """Seconds until the next tick begins."""
    return (nominal_tick(now_seconds, interval_seconds) + 1) * interval_seconds - now_seconds
