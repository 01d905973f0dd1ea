"""The other program of a dual store: it takes what it ends off the counters, without saying which proc that was.

Such a decrement that comes once its entry was swapped away, or twice, makes counters too low until the next swap: the
reference's own bound. So the test keeps account of what each counter may lack, and no counter may lack any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import Booking, amounts
from opencue_sched.clients.lua_scripts import load_script
from tests.integration.accounting.stepped_store import Amounts, Seen, check_counters, look, sums
from tests.integration.accounting.stepping import SteppedRedis
from tests.kit.cuebot_publish import PUBLISH

_DROPPED_EARLIER = """
for _, key in ipairs(KEYS) do
  if redis.call('HEXISTS', key, 'dropped_at') == 1 then redis.call('HINCRBY', key, 'dropped_at', -ARGV[1]) end
end
"""


class Cuebot:
    """``lacking``: how much each counter may be below what runs. ``busy``: something moves before every swap.

    A decrement is expected where its entry is, or was when the ledger was looked at last and nothing has settled what
    it left behind since: no swap, no filling, no grace that may be over (``_moment`` counts these).
    """

    def __init__(self, client: SteppedRedis, vertices: list[str], *, busy: bool) -> None:
        self.lacking: dict[str, Amounts] = defaultdict(lambda: (0, 0))
        self.due: dict[str, Booking] = {}
        self._client = redis.Redis(connection_pool=client.connection_pool)
        self._vertices = [key for key in vertices if not key.startswith(keys.LIMIT_PREFIX)]
        self.busy = busy
        self._expected: dict[str, tuple[int, str]] = {}
        self._published: dict[str, str] = {}
        self._epoch = ""
        self._moment = 0
        client.watched = {load_script("reseed_cas").sha: (self._before_a_swap, self._swapped)}

    def publish(self, proc_id: str) -> None:
        """The decrement of a proc that has ended arrives, once or again."""
        booked = self.due[proc_id]
        seen = look(self._client, self._vertices)
        self.look_at(seen)
        moment, entry = self._expected.get(proc_id, (-1, ""))
        expected = seen.is_open and moment == self._moment and proc_id not in self._published
        self._lacks(booked.packed(), entry if expected else "")
        self._published.setdefault(proc_id, booked.packed())
        self._client.eval(PUBLISH, 6, *keys.counted(booked.vertices)[:5], keys.SEQ, -booked.cores, -booked.gpus)

    def look_at(self, seen: Seen) -> None:
        """What entries there are; one may be moved after its decrement has come, which then belongs to nothing."""
        if seen.epoch != self._epoch:
            self._epoch = seen.epoch
            self.settled()
        for proc_id, record in seen.records.items():
            self._expected[proc_id] = self._moment, record.entry
            published = self._published.get(proc_id)
            if published is not None and published != record.entry:
                self._lacks(published, record.entry)
                self._published[proc_id] = record.entry

    def settled(self) -> None:
        """What dropped entries have left on the counters is gone, or may be."""
        self._moment += 1

    def time_passes(self, seconds: int) -> None:
        self._client.eval(_DROPPED_EARLIER, len(self._vertices), *self._vertices, seconds)
        self.settled()

    def check(self, seen: Seen, running: Mapping[str, Amounts]) -> None:
        """No counter is below what runs, but for what came too late."""
        for key in self._vertices:
            for counted, needed, lacking in zip(
                seen.counters[key], running.get(key, (0, 0)), self.lacking[key], strict=True
            ):
                assert counted >= needed - lacking, f"{key} counts {counted} of {needed}, and {lacking} came too late"

    def _lacks(self, published: str, entry: str) -> None:
        """A decrement arrives (``published``) where ``entry`` does not count."""
        there = set(amounts(entry)) if entry else set()
        for key, cores, gpus in set(amounts(published)) - there:
            had = self.lacking[key]
            self.lacking[key] = had[0] + cores, had[1] + gpus

    def _before_a_swap(self) -> None:
        if self.busy:
            self._client.incr(keys.SEQ)

    def _swapped(self, answers: list[Any]) -> None:
        """At this moment every counter is the sum of its entries."""
        if any(int(answer[0]) != 1 for answer in answers):
            return
        seen = look(self._client, self._vertices)
        check_counters(
            seen.counters, sums(record.entry for record in seen.records.values()), "after a swap its entries"
        )
        self.lacking.clear()
        self.settled()
