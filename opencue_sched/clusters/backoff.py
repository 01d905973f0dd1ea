"""Which clusters are left alone for a while, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Protocol

from opencue_sched.settings import Queue


class SleepReason(StrEnum):
    """Why a pass ended without a reason to come back at once."""

    EMPTY = "empty"
    SATURATED = "saturated"
    QUERY_ERROR = "query_error"


def sleep_seconds(reason: SleepReason, queue: Queue) -> float:
    """How long a cluster sleeps. A failed query waits as long as an empty cluster (facts G)."""
    if reason is SleepReason.SATURATED:
        return queue.cluster_saturated_sleep
    return queue.cluster_empty_sleep


class BackOff(Protocol):
    """Sleeping clusters by key. All methods take several keys, so that a shared implementation needs one round trip."""

    def sleep(self, key: str, seconds: float) -> None:
        """Leave the cluster alone for ``seconds`` from now; replaces what was left of an earlier sleep."""

    def wake(self, keys: Iterable[str]) -> None:
        """End the sleep of these clusters."""

    def remaining(self, keys: Iterable[str]) -> dict[str, float]:
        """Seconds left of each of these that sleeps; those awake are absent."""

    def retain(self, keys: Iterable[str]) -> None:
        """Forget every cluster that is not among these."""


class MemoryBackOff:
    """Back-off of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def sleep(self, key: str, seconds: float) -> None:
        self._until[key] = self._clock() + seconds

    def wake(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._until.pop(key, None)

    def remaining(self, keys: Iterable[str]) -> dict[str, float]:
        now = self._clock()
        left: dict[str, float] = {}
        for key in keys:
            until = self._until.get(key)
            if until is None:
                continue
            if until > now:
                left[key] = until - now
            else:
                self._until.pop(key, None)
        return left

    def retain(self, keys: Iterable[str]) -> None:
        kept = set(keys)
        for key in [key for key in self._until if key not in kept]:
            self._until.pop(key, None)
