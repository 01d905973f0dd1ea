"""The order in which a worker asks its queues, for kombu's ``queue_order_strategy``.

As declared - instance, group, type - so that targeted messages are taken first; but a queue that has been passed over
for ``queue_age`` seconds is asked first once. So the message at the end of any queue waits no longer than that for each
message before it, however busy the more specific queues are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opencue_sched.settings import get_settings


class AgedOrder:
    """kombu's queue cycle: ``update`` sets the queues, ``consume`` lists them, ``rotate`` says which gave one."""

    def __init__(
        self,
        it: Iterable[str] | None = None,
        *,
        age_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.items: list[str] = []
        self._age = get_settings().coordination.queue_age if age_seconds is None else age_seconds
        self._clock = clock
        self._asked: dict[str, float] = {}
        self.update(it or ())

    def update(self, it: Iterable[str]) -> None:
        """These are the queues now, in their order."""
        self.items = list(it)
        now = self._clock()
        self._asked = {name: self._asked.get(name, now) for name in self.items}

    def consume(self, n: int) -> list[str]:
        """The first ``n`` queues, in the order to ask them."""
        order = self.items[:n]
        if not order:
            return order
        now = self._clock()
        longest = min(order, key=self._asked.__getitem__)
        if now - self._asked[longest] >= self._age:
            order = [longest, *(name for name in order if name != longest)]
        self._asked[order[0]] = now
        return order

    def rotate(self, last_used: str) -> str:
        """``last_used`` gave a message."""
        if last_used in self._asked:
            self._asked[last_used] = self._clock()
        return last_used
