"""What a periodic task acts under."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of the leader that sent a periodic task, and the Redis key under which the newest one is recorded."""

    key: str
    number: int
