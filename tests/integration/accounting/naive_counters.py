"""How it was done before, small enough to read: plain numbers, as the accounting reference and OpenCue's Rust scheduler
have them. Written down here to be seen failing.

``RedisCounters`` is the reference: numbers in shared Redis, a booking script, a rollback by negated deltas, a reseed
guarded by acct:seq, releases published as decrements. ``ProcessCounters`` is what came after it: numbers of one
process, with bookings in flight kept apart and two buckets of settled ones by the parity of the recompute's epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opencue_sched.accounting import keys
from tests.integration.accounting.stepping import SteppedRedis

RETRIES = 3
BOOK_SCRIPT = """
if ARGV[1] == 'check' then
  local sub = redis.call('HMGET', KEYS[1], 'int_cores', 'burst')
  if (sub[1] or 0) + ARGV[2] > tonumber(sub[2] or 0) then return 0 end
  for i = 2, 3 do
    local read = redis.call('HMGET', KEYS[i], 'int_cores', 'int_max_cores')
    local cap = tonumber(read[2] or 0)
    if cap > 0 and (read[1] or 0) + ARGV[2] > cap then return 0 end
  end
end
for i = 1, 3 do redis.call('HINCRBY', KEYS[i], 'int_cores', ARGV[2]) end
redis.call('INCR', KEYS[4])
return 1
"""
RESEED_SCRIPT = """
if ARGV[1] ~= '' and (redis.call('GET', KEYS[1]) or '0') ~= ARGV[1] then return 0 end
for i = 2, #KEYS do redis.call('HSET', KEYS[i], unpack(cjson.decode(ARGV[i]))) end
return 1
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """One booking: cores, and the subscription, folder and job they are counted at."""

    proc_id: str
    frame_id: str
    vertices: tuple[str, str, str]
    cores: int = 1


class Counters(ABC):
    """Numbers, and nothing of whose they are. ``caps``: from a vertex to its cap; ``sums``: from a vertex to cores."""

    @abstractmethod
    def book(self, taken: Taken) -> bool: ...

    @abstractmethod
    def confirm(self, taken: Taken) -> None: ...

    @abstractmethod
    def rollback(self, taken: Taken) -> None: ...

    @abstractmethod
    def release(self, taken: Taken) -> None: ...

    @abstractmethod
    def counted(self, key: str) -> int: ...

    @abstractmethod
    def cap(self, key: str) -> float: ...

    @abstractmethod
    def load_caps(self, read: Callable[[], Mapping[str, float]], *, guarded: bool) -> None: ...

    @abstractmethod
    def recompute(self, read: Callable[[], Mapping[str, int]], *, zero_baseline: bool, guarded: bool) -> None: ...


class RedisCounters(Counters):
    """The accounting reference."""

    def __init__(self, client: SteppedRedis) -> None:
        self.client = client

    def book(self, taken: Taken) -> bool:
        return bool(self._run(BOOK_SCRIPT, [*taken.vertices, keys.SEQ], ["check", taken.cores]))

    def confirm(self, taken: Taken) -> None:
        """What is committed is counted already."""

    def rollback(self, taken: Taken) -> None:
        self._run(BOOK_SCRIPT, [*taken.vertices, keys.SEQ], ["force", -taken.cores])

    def release(self, taken: Taken) -> None:
        self.rollback(taken)

    def counted(self, key: str) -> int:
        return int(self.client.hget(key, "int_cores") or 0)

    def cap(self, key: str) -> float:
        return float(self.client.hget(key, cap_field(key)) or 0)

    def load_caps(self, read: Callable[[], Mapping[str, float]], *, guarded: bool) -> None:
        seq = self.client.get(keys.SEQ) or "0"
        self._write(seq if guarded else "", {key: (cap_field(key), cap) for key, cap in read().items()})

    def recompute(self, read: Callable[[], Mapping[str, int]], *, zero_baseline: bool, guarded: bool) -> None:
        for _ in range(1 + RETRIES):
            seq = self.client.get(keys.SEQ) or "0"
            stored = list(self.client.scan_iter(match="acct:*:*")) if zero_baseline else []
            values = dict.fromkeys(stored, 0) | dict(read())
            if self._write(seq if guarded else "", {key: ("int_cores", cores) for key, cores in values.items()}):
                return

    def _write(self, seq: str, fields: Mapping[str, tuple[str, float]]) -> bool:
        pairs = [f'["{name}", {value:g}]' for name, value in fields.values()]
        return bool(self._run(RESEED_SCRIPT, [keys.SEQ, *fields], [seq, *pairs]))

    def _run(self, script: str, names: Sequence[str], args: Sequence[Any]) -> Any:
        with self.client.pipeline(transaction=False) as pipe:
            pipe.evalsha(self.client.script_load(script), len(names), *names, *args)
            return pipe.execute()[0]


class ProcessCounters(Counters):
    """What came after: one process, one lock (a test steps one actor at a time, so it needs none)."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.in_flight: Counter[str] = Counter()
        self.settled: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self.caps: dict[str, float] = {}
        self.epoch = 0

    def book(self, taken: Taken) -> bool:
        subscription, *others = taken.vertices
        full = self.live[subscription] + taken.cores > self.cap(subscription)
        if full or any(self.live[key] + taken.cores > self.cap(key) > 0 for key in others):
            return False
        self._add(self.live, taken, 1)
        self._add(self.in_flight, taken, 1)
        return True

    def confirm(self, taken: Taken) -> None:
        self._add(self.in_flight, taken, -1)
        self._add(self.settled[self.epoch % 2], taken, 1)

    def rollback(self, taken: Taken) -> None:
        self._add(self.live, taken, -1)
        self._add(self.in_flight, taken, -1)

    def release(self, taken: Taken) -> None:
        self._add(self.live, taken, -1)

    def counted(self, key: str) -> int:
        return self.live[key]

    def cap(self, key: str) -> float:
        return self.caps.get(key, 0)

    def load_caps(self, read: Callable[[], Mapping[str, float]], *, guarded: bool) -> None:
        self.caps.update(read())

    def recompute(self, read: Callable[[], Mapping[str, int]], *, zero_baseline: bool, guarded: bool) -> None:
        before = self.epoch
        self.epoch += 1
        sums = Counter(read())
        kept = self.settled[1 - before % 2]
        for key in {*self.live, *sums}:
            self.live[key] = sums[key] + self.in_flight[key] + kept[key]
        self.settled[before % 2].clear()

    @staticmethod
    def _add(counter: Counter[str], taken: Taken, sign: int) -> None:
        for key in taken.vertices:
            counter[key] += sign * taken.cores


def cap_field(key: str) -> str:
    """The field of a vertex that can refuse."""
    return "burst" if key.startswith("acct:sub:") else "int_max_cores"
