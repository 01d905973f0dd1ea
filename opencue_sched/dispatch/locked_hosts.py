"""How long a host is left alone whose row another transaction had: it would be found locked again at once.

Mostly a completion or a report has it, for a few milliseconds; then every moment its cores are left idle is lost. Now
and then somebody keeps it for long, and looking again and again costs a pass each time. Nobody can tell which it is, so
the rest grows with the looks in vain.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

FIRST_REST_SECONDS = 0.05
LONGEST_REST_SECONDS = 1.0
_FORGOTTEN_SECONDS = 2 * LONGEST_REST_SECONDS


class LockedHosts:
    """Of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rests: dict[str, tuple[float, float]] = {}

    def found(self, host_ids: Collection[str]) -> dict[str, float]:
        """These hosts were found locked just now: the seconds for which each is to rest.

        Twice as long as the last time, unless the host has been left in peace for a while since.
        """
        now = self._clock()
        with self._lock:
            self._rests = {host: rest for host, rest in self._rests.items() if rest[0] + _FORGOTTEN_SECONDS > now}
            for host in host_ids:
                _, last = self._rests.get(host, (now, FIRST_REST_SECONDS / 2))
                self._rests[host] = (now, min(2 * last, LONGEST_REST_SECONDS))
            return {host: self._rests[host][1] for host in host_ids}
