"""Has a cluster that rests for a moment gone on with at the end of it, and not at the next sweep, two seconds later.

The worker that ended the pass remembers the rest. If it dies, or Redis does not answer at the end, a sweep or another
worker's message watch finds the posting ready; the board gives the ticket of the message to one of those who ask.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from opencue_sched.coordination.postings import AFTER_THE_END_SECONDS, ClusterPostings, Offered
from opencue_sched.coordination.rounds import Rounds

SHORT_SECONDS = 2.0
"""What rests longer is left to the sweeps and the message watches."""
_RETRY_SECONDS = 0.1


class ShortRests(Rounds):
    """One thread, which runs as soon as something rests. ``send`` puts a message for a posting on a dispatch queue."""

    def __init__(
        self,
        postings: ClusterPostings,
        *,
        send: Callable[[Offered], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("short-rests", self.look, failed="short_rest_left_to_a_sweep", retry_seconds=_RETRY_SECONDS)
        self._postings = postings
        self._send = send
        self._clock = clock
        self._ends: list[tuple[float, str]] = []
        self._lock = threading.Lock()
        self._begun = False

    def ends_in(self, uuid: str, seconds: float) -> None:
        """The posting rests from now on for so many seconds."""
        if seconds > SHORT_SECONDS:
            return
        with self._lock:
            heapq.heappush(self._ends, (self._clock() + seconds + AFTER_THE_END_SECONDS, uuid))
            begin, self._begun = not self._begun, True
        if begin:
            self.start()
        self.want()

    def look(self) -> float | None:
        """Send a message for every posting whose rest is over. Seconds until the next one is; None: none rests. Raises
        RedisError, and leaves the one in hand to the sweeps."""
        while uuid := self._next():
            if offered := self._postings.offer_again(uuid):
                self._send(offered)
        with self._lock:
            return max(0.0, self._ends[0][0] - self._clock()) if self._ends else None

    def _next(self) -> str | None:
        with self._lock:
            return heapq.heappop(self._ends)[1] if self._ends and self._ends[0][0] <= self._clock() else None
