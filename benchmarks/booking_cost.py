"""What the ledger costs a booking: the ledgered script against scripts that only count, in the same run."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import redis

from benchmarks.figures import Spread
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import server_run_id
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger, book_call
from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.domain.caps import Vertices

BATCH = 200
_SLICE = 1000
BOUND = 1.5
"""A ledgered booking may cost this much of the reference's, in Redis's own time."""

# The five vertices and the sequence number, nothing else. "lean" is the fastest way to write it; the other reads field
# by field and adds numbers, as the reference's own script did.
_COUNT = """
for i = 1, 5 do
  redis.call('HINCRBY', KEYS[i], 'int_cores', {cores})
  redis.call('HINCRBY', KEYS[i], 'int_gpus', {gpus})
end
redis.call('INCR', KEYS[6])
return {{1}}
"""
_LEAN = """
local cores, gpus = tonumber(ARGV[1]), tonumber(ARGV[2])
local sub = redis.call('HMGET', KEYS[1], 'burst', 'int_cores')
if cores > 0 and (sub[2] or 0) + cores > tonumber(sub[1] or 0) then return {0, 'subscription', sub[2], sub[1]} end
for i = 2, 3 do
  local now = redis.call('HMGET', KEYS[i], 'int_max_cores', 'int_cores', 'int_max_gpus', 'int_gpus')
  local cap, gpu_cap = tonumber(now[1] or -1), tonumber(now[3] or -1)
  if cores > 0 and cap > 0 and (now[2] or 0) + cores > cap then return {0, 'cores', now[2], now[1]} end
  if gpus > 0 and gpu_cap > 0 and (now[4] or 0) + gpus > gpu_cap then return {0, 'gpus', now[4], now[3]} end
end
"""
_FIELD_BY_FIELD = """
local cores, gpus = tonumber(ARGV[1]), tonumber(ARGV[2])
local function read(key, field) return tonumber(redis.call('HGET', key, field) or 0) end
local function over(key, used, cap, amount)
  local now, limit = read(key, used), read(key, cap)
  return limit > 0 and now + amount > limit
end
if cores > 0 then
  local now, burst = read(KEYS[1], 'int_cores'), read(KEYS[1], 'burst')
  if now + cores > burst then return {0, 'subscription', now, burst} end
  if over(KEYS[2], 'int_cores', 'int_max_cores', cores) then return {0, 'folder'} end
  if over(KEYS[3], 'int_cores', 'int_max_cores', cores) then return {0, 'job'} end
end
if gpus > 0 then
  if over(KEYS[2], 'int_gpus', 'int_max_gpus', gpus) then return {0, 'folder_gpus'} end
  if over(KEYS[3], 'int_gpus', 'int_max_gpus', gpus) then return {0, 'job_gpus'} end
end
"""
PLAIN = {
    "reference": _FIELD_BY_FIELD + _COUNT.format(cores="cores", gpus="gpus"),
    "lean": _LEAN + _COUNT.format(cores="ARGV[1]", gpus="ARGV[2]"),
}


@dataclass(frozen=True)
class BookingCost:
    """``server_us``: Redis's own time an EVALSHA; ``per_second``: of one client, in pipelines of BATCH, answers
    included. The ratios are those of the ledgered script to this one in the same round, by either time."""

    phase: str
    server_us: Spread
    per_second: Spread
    ratio_by_server_time: Spread | str
    ratio_by_clock: Spread | str
    bytes_per_proc: int | str


def booking_cost(client: redis.Redis, *, bookings: int = 20_000, rounds: int = 5) -> list[BookingCost]:
    """A ledgered booking against plain ones, taking turns."""
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PLAIN, "ledger")}
    size = 0
    for _ in range(rounds):
        client.flushdb()
        epoch = Epoch.new(server_run_id(client))
        client.set(keys.EPOCH, epoch.text)
        vertices = seeded(client, jobs=100)
        booked = [Booking(str(uuid.uuid4()), vertices[i % len(vertices)], 2) for i in range(bookings)]
        calls = {name: _plain(client, text, booked) for name, text in PLAIN.items()}
        calls["ledger"] = _ledgered(client, epoch, booked)
        for name, timed in _in_turns(client, calls).items():
            timings[name].append(timed)
        size = int(client.memory_usage(keys.LEDGER, samples=0) or 0) // bookings
    return [_cost(name, rows, timings["ledger"], size) for name, rows in timings.items()]


def _cost(name: str, rows: list[tuple[float, float]], own: list[tuple[float, float]], size: int) -> BookingCost:
    ledger = name == "ledger"
    by_server = [mine[0] / theirs[0] for mine, theirs in zip(own, rows, strict=True)]
    by_clock = [theirs[1] / mine[1] for mine, theirs in zip(own, rows, strict=True)]
    return BookingCost(
        name,
        Spread.of([us for us, _ in rows], digits=1),
        Spread.of([rate for _, rate in rows], digits=0),
        "" if ledger else Spread.of(by_server),
        "" if ledger else Spread.of(by_clock),
        size if ledger else "",
    )


def seeded(client: redis.Redis, *, jobs: int) -> list[Vertices]:
    """The vertices of a show with this many jobs, their caps generous."""
    show, alloc, folder, dept = (str(uuid.uuid4()) for _ in range(4))
    client.hset(keys.subscription(show, alloc), mapping={"size": 10**7, "burst": 10**7, "caps_at": 1})
    client.hset(keys.folder(folder), mapping={"int_max_cores": -1, "int_max_gpus": -1, "show_id": show})
    made = [Vertices(show, alloc, folder, str(uuid.uuid4()), str(uuid.uuid4()), dept) for _ in range(jobs)]
    for vertices in made:
        client.hset(
            keys.job(vertices.job_id), mapping={"int_max_cores": 10**6, "int_max_gpus": 10**6, "int_priority": 1}
        )
    return made


def _plain(client: redis.Redis, text: str, booked: Sequence[Booking]) -> list[tuple[Any, ...]]:
    script = str(client.script_load(text))
    return [("EVALSHA", script, 6, *keys.counted(b.vertices), keys.SEQ, 2, 0) for b in booked]


def _ledgered(client: redis.Redis, epoch: Epoch, booked: Sequence[Booking]) -> list[tuple[Any, ...]]:
    script = str(client.script_load(load_script("book").text))
    made = [book_call(epoch.text, "check", b, "worker-1") for b in booked]
    return [("EVALSHA", script, len(call.keys), *call.keys, *call.args) for call in made]


def _in_turns(client: redis.Redis, calls: Mapping[str, Sequence[tuple[Any, ...]]]) -> dict[str, tuple[float, float]]:
    """Redis's microseconds a call, and calls a second. A slice of each in turns: what disturbs one disturbs all."""
    micros, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    total = len(calls["ledger"])
    for number, start in enumerate(range(0, total, _SLICE)):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            spent, elapsed = _timed(client, calls[name][start : start + _SLICE])
            micros[name] += spent
            seconds[name] += elapsed
    return {name: (micros[name] / total, total / seconds[name]) for name in calls}


def _timed(client: redis.Redis, calls: Sequence[tuple[Any, ...]]) -> tuple[float, float]:
    """Redis's microseconds for these calls, and the seconds a client waited for them in pipelines."""
    client.config_resetstat()
    elapsed = 0.0
    for start in range(0, len(calls), BATCH):
        pipe = client.pipeline(transaction=False)
        for call in calls[start : start + BATCH]:
            pipe.execute_command(*call)  # type: ignore[no-untyped-call]
        began = perf_counter()
        answers = pipe.execute()
        elapsed += perf_counter() - began
        assert all(answer[0] == 1 for answer in answers)
    stats: Any = client.info("commandstats")
    return float(stats["cmdstat_evalsha"]["usec"]), elapsed


@dataclass(frozen=True)
class BookingRate:
    """Whole bookings through ``Ledger``, in plans of BATCH: checked, settled and released, by so many processes."""

    phase: str
    booked_per_second: Spread
    redis_busy_percent: Spread


def booking_rates(client: redis.Redis, url: str, *, seconds: float = 3.0, rounds: int = 3) -> list[BookingRate]:
    """How many bookings one Redis takes from one and from several processes."""
    results = []
    with ProcessPoolExecutor(max(_CLIENTS), mp_context=get_context("spawn")) as pool:
        for clients in _CLIENTS:
            rates, busy = [], []
            for _ in range(rounds):
                client.flushdb()
                client.set(keys.EPOCH, Epoch.new(server_run_id(client)).text)
                vertices = seeded(client, jobs=100)
                list(pool.map(_warm_up, [url] * clients))
                before: Any = client.info("cpu")
                done = list(pool.map(_book_for, [url] * clients, [vertices] * clients, [seconds] * clients))
                after: Any = client.info("cpu")
                spent = sum(after[f"used_cpu_{it}"] - before[f"used_cpu_{it}"] for it in ("user", "sys"))
                rates.append(sum(done) / seconds)
                busy.append(100 * spent / seconds)
            phase = f"{clients} process" + ("es" if clients > 1 else "")
            results.append(BookingRate(phase, Spread.of(rates, digits=0), Spread.of(busy, digits=0)))
    return results


_CLIENTS = (1, 2)


def _warm_up(url: str) -> None:
    redis.Redis.from_url(url).ping()


def _book_for(url: str, vertices: Sequence[Vertices], seconds: float) -> int:
    client = redis.Redis.from_url(url, decode_responses=True)
    ledger = Ledger(client, owner="benchmark")
    done, until = 0, perf_counter() + seconds
    while perf_counter() < until:
        plan = [Booking(str(uuid.uuid4()), vertices[i % len(vertices)], 2) for i in range(BATCH)]
        done += len(ledger.book(plan).accepted)
        ledger.settle(plan)
        ledger.release([booking.proc_id for booking in plan])
    client.close()
    return done
