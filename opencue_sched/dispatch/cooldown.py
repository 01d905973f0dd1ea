"""What failed is left alone for a while: longer each time it fails again, and not at all once it has worked.

One rule for all: the first cooldown, doubled by each failure in a row up to a bound. Clusters keep theirs on the board,
where every process sees them (coordination.postings); what only one process has to know is in Cooldowns.
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
_REMEMBERED = 10_000

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
    """What this process leaves alone, and why. Thread-safe.

    Something that has not failed again for as long as its last cooldown took begins anew. The latest 10,000 are kept.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._cooldowns: OrderedDict[What, _Cooldown] = OrderedDict()

    def failed(self, what: What, why: str) -> None:
        """Leave it alone from now on. What failed while it was left alone anyway had been begun before: once more says
        nothing."""
        now = self._clock()
        with self._lock:
            before = self._cooldowns.get(what)
            if before is not None and now < before.until:
                return
            failures = 1 if before is None or before.forgotten <= now else before.failures + 1
            seconds = cooldown_seconds(failures, first=self._first, longest=self._longest)
            self._cooldowns[what] = _Cooldown(now + seconds, now + 2 * seconds, failures, why)
            self._cooldowns.move_to_end(what)
            while len(self._cooldowns) > _REMEMBERED:
                self._cooldowns.popitem(last=False)

    def worked(self, what: What) -> None:
        """It need not be left alone any more."""
        with self._lock:
            self._cooldowns.pop(what, None)

    def active(self) -> dict[What, str]:
        """What is to be left alone now, and why."""
        now = self._clock()
        with self._lock:
            for what in [what for what, it in self._cooldowns.items() if it.forgotten <= now]:
                del self._cooldowns[what]
            return {what: it.why for what, it in self._cooldowns.items() if it.until > now}
