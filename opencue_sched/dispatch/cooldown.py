"""What is left alone for a while, because another look at once would find the same: one rule for all of it.

A failure starts a cooldown, each further failure in a row one twice as long up to a bound, and success ends the row.
Clusters keep theirs on the board, where every process sees them (coordination.postings). This module has what only one
process has to know: `Cooldowns` of hosts, of layers, and of layers on hosts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 300.0
"""Of a cluster whose passes fail."""
EMPTY_SLEEP_SECONDS = 30.0
"""Of a cluster without pending jobs. New work wakes it at once: this is for news that was lost."""
FIRST_LOCKED_SECONDS = 0.05
LONGEST_LOCKED_SECONDS = 1.0
"""Of a host whose row another transaction has locked, and had when it was looked at before. Mostly a completion or a
report has it for a few milliseconds, so the next pass plans it again, and idle cores are lost in a longer cooldown; but
looking again and again at one that stays locked costs a pass each."""

What = TypeVar("What", bound=Hashable)


def cooldown_seconds(failures: int, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> float:
    """The cooldown after so many failures in a row, of which the last has just happened."""
    return float(min(longest, first * 2 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True)
class _Cooldown:
    until: float
    forgotten: float
    failures: int
    why: str


class Cooldowns(Generic[What]):
    """What this process leaves alone, until when, and why. Thread-safe.

    A row of failures is over when something ``worked``, or did not fail for twice ``longest``. ``free``: so many
    failures of a row are followed by no cooldown.
    """

    def __init__(
        self, first: float, longest: float, clock: Callable[[], float] = time.monotonic, *, free: int = 0
    ) -> None:
        self._first = first
        self._longest = longest
        self._free = free
        self._clock = clock
        self._lock = threading.Lock()
        self._cooldowns: OrderedDict[What, _Cooldown] = OrderedDict()

    def failed(self, what: What, why: str = "") -> float:
        """Leave it alone from now on, for the seconds returned."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            before = self._cooldowns.pop(what, None)
            failures = 1 if before is None else before.failures + 1
            counted = failures - self._free
            seconds = cooldown_seconds(counted, first=self._first, longest=self._longest) if counted > 0 else 0.0
            self._cooldowns[what] = _Cooldown(now + seconds, now + 2 * self._longest, failures, why)
            return seconds

    def worked(self, what: What) -> None:
        """End its cooldown; the next one is the shortest again."""
        with self._lock:
            self._cooldowns.pop(what, None)

    def active(self) -> dict[What, str]:
        """What is to be left alone now, and why."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            return {what: it.why for what, it in self._cooldowns.items() if it.until > now}

    def _forget(self, now: float) -> None:
        """The oldest failure comes first."""
        while self._cooldowns and next(iter(self._cooldowns.values())).forgotten <= now:
            self._cooldowns.popitem(last=False)
