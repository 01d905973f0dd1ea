"""A clock that stands still until a test turns it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Called for the time, in seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
