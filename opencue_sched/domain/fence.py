"""What a periodic task acts under."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of the leader that sent a periodic task, and the Redis key under which the newest one is recorded."""

    key: str
    number: int


@dataclass(frozen=True, slots=True)
class LeaderNote:
    """Who leads, as it notes itself at each renewal: numbers of its Redis (see LeaderGate) and its process, and when,
    in microseconds by the clock of the fence store. ``age_seconds`` of that, below 0 when the clock was put back since.
    """

    store: int
    process: int
    seen: int
    age_seconds: float
