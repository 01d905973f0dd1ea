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
"""Cooldown of a cluster after the first failed pass; it doubles up to LONGEST_SECONDS."""
LONGEST_SECONDS = 300.0
"""The longest cooldown of a cluster."""
EMPTY_SLEEP_SECONDS = 30.0
"""How long the posting of a cluster without pending jobs sleeps. New work wakes it at once: this is for news that was
lost."""
FIRST_LOCKED_SECONDS = 0.05
"""Cooldown of a host whose row another transaction had locked at two looks in a row; it doubles up to
LONGEST_LOCKED_SECONDS. Mostly a completion or a report has the row for a few milliseconds, so the next pass plans it
again, and idle cores are lost in a longer cooldown; but looking again and again at one that stays locked costs a pass
each."""
LONGEST_LOCKED_SECONDS = 1.0
"""The longest cooldown of a host whose row is locked."""

What = TypeVar("What", bound=Hashable)


def cooldown_seconds(failures: int, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> float:
    """The seconds of cooldown after this number of failures in a row, of which the last has just happened."""
    return float(min(longest, first * 2 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True)
class _Cooldown:
    """A row of failures. Times are those of the clock of its Cooldowns."""

    until: float
    """The end of the cooldown."""
    forgotten: float
    """The moment at which the row is over, unless there is another failure."""
    failures: int
    """How many failures the row has."""
    why: str
    """What the last failure was, for people."""


class Cooldowns(Generic[What]):
    """What cools down in this process, until when, and why. Thread-safe.

    A row of failures is over when something ``worked``, or did not fail for twice ``longest``. The first ``free``
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
        """The rows of failures, the one that failed longest ago first. Under ``_lock``."""

    def failed(self, what: What, why: str = "") -> float:
        """Begin a cooldown of ``what``, or a longer one, and return its length in seconds."""
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
        """End the cooldown of ``what``; its next one is the shortest again."""
        with self._lock:
            self._cooldowns.pop(what, None)

    def active(self) -> dict[What, str]:
        """What cools down now, and why."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            return {what: cooldown.why for what, cooldown in self._cooldowns.items() if cooldown.until > now}

    def _forget(self, now: float) -> None:
        """Drop the rows that are over, from the front: the oldest failure comes first. Under ``_lock``."""
        while self._cooldowns and next(iter(self._cooldowns.values())).forgotten <= now:
            self._cooldowns.popitem(last=False)
