"""How it was done before, small enough to read: plain counters, as the accounting reference and OpenCue's Rust
scheduler have them (facts I). Written down here to be seen failing.

``RedisCounters`` is the reference: numbers in shared Redis, a booking script, a rollback by negated deltas, a reseed
guarded by acct:seq, releases published as decrements. ``ProcessCounters`` is what came after it: numbers of one
process, with bookings in flight kept apart and two buckets of settled ones by the parity of the recompute's epoch.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import cap_rows_of_shows
from opencue_sched.settings import Settings
from opencue_sched.store.accounting_tables import refresh_tables
from tests.integration.accounting.interleaved import (
    BOOK,
    BOOKED,
    CAPS_READ,
    SNAPSHOT,
    UNDOING,
    Side,
)
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis, boundary

CORES_PER_FRAME = 1
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
    cores: int = CORES_PER_FRAME


class Counters(ABC):
    """Numbers, and nothing of whose they are. ``caps``: from a vertex to its cap; ``sums``: from a vertex to cores."""

    @abstractmethod
    def book(self, taken: Taken) -> bool: ...

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

    def confirm(self, taken: Taken) -> None:
        """It is committed."""


class RedisCounters(Counters):
    """The accounting reference."""

    def __init__(self, client: SteppedRedis) -> None:
        self.client = client

    def book(self, taken: Taken) -> bool:
        return bool(self._run(BOOK_SCRIPT, [*taken.vertices, keys.SEQ], ["check", taken.cores]))

    def rollback(self, taken: Taken) -> None:
        self._run(BOOK_SCRIPT, [*taken.vertices, keys.SEQ], ["force", -taken.cores])

    def release(self, taken: Taken) -> None:
        self.rollback(taken)

    def counted(self, key: str) -> int:
        return int(self.client.hget(key, "int_cores") or 0)

    def cap(self, key: str) -> float:
        return float(self.client.hget(key, _cap_field(key)) or 0)

    def load_caps(self, read: Callable[[], Mapping[str, float]], *, guarded: bool) -> None:
        seq = self.client.get(keys.SEQ) or "0"
        self._write(seq if guarded else "", {key: (_cap_field(key), cap) for key, cap in read().items()})

    def recompute(self, read: Callable[[], Mapping[str, int]], *, zero_baseline: bool, guarded: bool) -> None:
        for _ in range(1 + RETRIES):
            seq = self.client.get(keys.SEQ) or "0"
            stored = [key for key in self.client.scan_iter(match="acct:*:*")] if zero_baseline else []
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


class Naive(Side):
    """A scheduler and a Cuebot on such counters. ``zero_baseline``, ``guarded``, ``guards_caps``: which of the
    repairs that were added later it has."""

    ours = False
    make: ClassVar[Callable[[SteppedRedis], Counters]]

    def __init__(self, engine: Engine, client: SteppedRedis, clock: Clock, settings: Settings) -> None:
        super().__init__(engine, client, clock, settings)
        self.counters = type(self).make(client)
        self.claimed: set[str] = set()
        self.ended: dict[str, Taken] = {}

    # Booking

    def worker(self) -> Actor:
        return self.actor(f"worker{len(self.actors)}", lambda: self._works(self.counters))

    def _works(self, counters: Counters) -> None:
        wanted = self._plan()
        try:
            boundary(BOOK)
            accepted = [taken for taken in wanted if counters.book(taken)]
            boundary(BOOKED)
            if accepted:
                self._commit(counters, accepted)
        finally:
            self.claimed -= {taken.frame_id for taken in wanted}

    def _commit(self, counters: Counters, accepted: Sequence[Taken]) -> None:
        try:
            with self.engine.begin() as connection:
                for taken in accepted:
                    self._insert(connection, taken)
        except DBAPIError:
            self._give_back(counters, accepted)
            return
        if not self.launches_fail:
            for taken in accepted:
                counters.confirm(taken)
            return
        self._give_back(counters, accepted)
        with self.engine.begin() as connection:
            connection.execute(_DELETE, {"procs": [taken.proc_id for taken in accepted]})
            boundary(UNDOING)

    def _plan(self) -> list[Taken]:
        with self.engine.begin() as connection:
            rows = connection.execute(_WAITING).all()
            alloc = connection.execute(_ALLOC, {"host": self.host.id}).scalar_one()
        rows = [row for row in rows if row.pk_frame not in self.claimed]
        self.claimed |= {row.pk_frame for row in rows}
        return [
            Taken(str(uuid.uuid4()), row.pk_frame, self._vertices(alloc, row.pk_folder, row.pk_job)) for row in rows
        ]

    def _vertices(self, alloc: str, folder: str, job: str) -> tuple[str, str, str]:
        return keys.subscription(self.show.id, alloc), keys.folder(folder), keys.job(job)

    def _insert(self, connection: Connection, taken: Taken) -> None:
        row = {"proc": taken.proc_id, "frame": taken.frame_id, "host": self.host.id, "centicores": taken.cores * 100}
        connection.execute(_INSERT, row)
        connection.execute(_START, row)

    @staticmethod
    def _give_back(counters: Counters, accepted: Iterable[Taken]) -> None:
        for taken in accepted:
            counters.rollback(taken)

    # Releasing: by the vertices of now, in whole cores

    def end(self, proc_id: str) -> None:
        with self.engine.begin() as connection:
            row = connection.execute(_PLACE, {"proc": proc_id}).one()
        cores = row.int_cores_reserved // 100
        self.ended[proc_id] = Taken(proc_id, "", self._vertices(row.pk_alloc, row.pk_folder, row.pk_job), cores)
        super().end(proc_id)

    def release(self, proc_id: str) -> None:
        self.counters.release(self.ended[proc_id])

    # Repairing

    def recompute(self) -> Actor:
        return self.actor("recompute", self._recomputes)

    def _recomputes(self) -> None:
        self.counters.recompute(self._sums, zero_baseline=self.zero_baseline, guarded=self.guarded)
        refresh_tables(self.engine, [self.show.id])

    def _sums(self) -> Mapping[str, int]:
        sums: Counter[str] = Counter()
        with self.engine.begin() as connection:
            for row in connection.execute(_SUMS):
                for key in self._vertices(row.pk_alloc, row.pk_folder, row.pk_job):
                    sums[key] += row.centicores
        boundary(SNAPSHOT)
        return {key: centicores // 100 for key, centicores in sums.items()}

    def load_caps(self) -> Actor:
        return self.actor("caps", self._loads_caps)

    def _loads_caps(self) -> None:
        self.counters.load_caps(self._caps, guarded=self.guards_caps)

    def _caps(self) -> Mapping[str, float]:
        caps = {}
        with self.engine.begin() as connection:
            for key, fields in cap_rows_of_shows(connection, [self.show.id]):
                cap = dict(zip(fields[::2], fields[1::2], strict=True)).get(_cap_field(key))
                if cap is not None:
                    caps[key] = float(cap)
        boundary(CAPS_READ)
        return caps

    def stir(self) -> None:
        job = self.jobs[-1]
        taken = Taken("", "", self._vertices(self.alloc.id, job.folder_id, job.id))
        if self.counters.book(taken):
            self.counters.rollback(taken)

    def hand_over(self, meanwhile: Callable[[], object]) -> None:
        self.set_managed(True)
        self._loads_caps()
        meanwhile()

    def hand_back(self, meanwhile: Callable[[], object]) -> None:
        self._recomputes()
        self.set_managed(False)
        meanwhile()

    def refill(self, meanwhile: Callable[[], object]) -> None:
        self._loads_caps()
        self._recomputes()
        meanwhile()

    def settle_down(self) -> None:
        for _ in range(3):
            self._recomputes()

    def counted(self) -> int:
        return self.counters.counted(self.key)

    def burst(self) -> float:
        return self.counters.cap(keys.subscription(self.show.id, self.alloc.id))


class OnRedis(Naive):
    """The accounting reference."""

    make = RedisCounters


class InProcess(Naive):
    """What came after it."""

    make = staticmethod(lambda _: ProcessCounters())


class InEachProcess(InProcess):
    """The same, with an instance of it for each worker."""

    def worker(self) -> Actor:
        mine = ProcessCounters()
        mine.load_caps(self._caps, guarded=False)
        mine.recompute(self._sums, zero_baseline=True, guarded=True)
        return self.actor(f"worker{len(self.actors)}", lambda: self._works(mine))


def _cap_field(key: str) -> str:
    return "burst" if key.startswith("acct:sub:") else "int_max_cores"


_WAITING = text(
    """
    SELECT pk_frame, pk_folder, frame.pk_job
      FROM frame JOIN job USING (pk_job) JOIN show USING (pk_show)
     WHERE frame.str_state = 'WAITING' AND b_scheduler_managed ORDER BY int_number
    """
)
_ALLOC = text("SELECT pk_alloc FROM host WHERE pk_host = :host")
_INSERT = text(
    """
    INSERT INTO proc (pk_proc, pk_host, pk_job, pk_show, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved)
    SELECT CAST(:proc AS varchar), :host, frame.pk_job, pk_show, pk_layer, pk_frame, :centicores, 1
      FROM frame JOIN job USING (pk_job) WHERE pk_frame = :frame
    """
)
_START = text("UPDATE frame SET str_state = 'RUNNING' WHERE pk_frame = :frame")
_DELETE = text("DELETE FROM proc WHERE pk_proc = ANY(:procs)")
_PLACE = text(
    """
    SELECT int_cores_reserved, pk_alloc, pk_folder, proc.pk_job
      FROM proc JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job WHERE pk_proc = :proc
    """
)
_SUMS = text(
    """
    SELECT host.pk_alloc, pk_folder, proc.pk_job, sum(int_cores_reserved) AS centicores
      FROM proc JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job JOIN show ON show.pk_show = job.pk_show
     WHERE b_scheduler_managed AND job.str_state <> 'FINISHED'
     GROUP BY host.pk_alloc, pk_folder, proc.pk_job
    """
)
