"""What exact accounting costs: a ledgered booking against a plain one, and a recompute of many procs.

``python -m benchmarks accounting`` prints one table per question. Ratios are the point; absolute figures drift.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import redis
from pydantic import SecretStr
from sqlalchemy import Engine

from benchmarks.figures import show, write_json
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped, server_run_id
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.accounting.scripts import book_call
from opencue_sched.accounting.store_epoch import Epoch
from opencue_sched.domain.farm import Vertices
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import JobSpec, LayerSpec
from opencue_sched.embedded.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.lua_scripts import load_script
from opencue_sched.settings import Settings
from opencue_sched.store import schema
from opencue_sched.store.engine import make_engine

FRAMES_A_JOB = 100
JOBS_A_FARM_STEP = 50
CORES_A_HOST = 100_000

# The five vertices and the sequence number, nothing else. LEAN is the fastest way to write it; the other reads field by
# field and adds numbers, as the reference's own script did.
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
    "plain": _FIELD_BY_FIELD + _COUNT.format(cores="cores", gpus="gpus"),
    "lean plain": _LEAN + _COUNT.format(cores="ARGV[1]", gpus="ARGV[2]"),
}


@dataclass(frozen=True)
class BookingCost:
    """Server time is Redis's own usec per EVALSHA; rates are bookings a second in pipelines of ``batch``.

    The ratios are those of the ledgered script to this one.
    """

    script: str
    bookings: int
    batch: int
    server_us: float
    per_second: int
    server_ratio: float
    wall_ratio: float
    bytes_per_entry: int


def booking_cost(
    client: redis.Redis, *, bookings: int = 20_000, batch: int = 200, rounds: int = 5
) -> list[BookingCost]:
    """A ledgered booking against plain ones, alternating; the median round of each."""
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PLAIN, "ledger")}
    size = 0
    for _ in range(rounds):
        client.flushdb()
        epoch = Epoch.new(server_run_id(client))
        client.set(keys.EPOCH, epoch.text)
        vertices = _seeded(client, jobs=100)
        booked = [Booking(str(uuid.uuid4()), vertices[i % len(vertices)], 2) for i in range(bookings)]
        for name, text in PLAIN.items():
            script = str(client.script_load(text))
            calls = [("EVALSHA", script, 6, *keys.counted(b.vertices), keys.SEQ, 2, 0) for b in booked]
            timings[name].append(_timed(client, calls, batch))
        script = str(client.script_load(load_script("book").text))
        made = [book_call(epoch.text, "check", b, "worker-1") for b in booked]
        ours = [("EVALSHA", script, len(call.keys), *call.keys, *call.args) for call in made]
        timings["ledger"].append(_timed(client, ours, batch))
        size = int(client.memory_usage(keys.LEDGER, samples=0) or 0) // bookings
    best = {name: (min(us for us, _ in rows), max(rate for _, rate in rows)) for name, rows in timings.items()}
    own_us, own_rate = best["ledger"]
    return [
        BookingCost(
            name,
            bookings,
            batch,
            round(us, 1),
            round(rate),
            round(own_us / us, 2),
            round(rate / own_rate, 2),
            size if name == "ledger" else 0,
        )
        for name, (us, rate) in best.items()
    ]


def _seeded(client: redis.Redis, *, jobs: int) -> list[Vertices]:
    show, alloc, folder, dept = (str(uuid.uuid4()) for _ in range(4))
    client.hset(keys.subscription(show, alloc), mapping={"size": 10**7, "burst": 10**7, "caps_at": 1})
    client.hset(keys.folder(folder), mapping={"int_max_cores": -1, "int_max_gpus": -1, "show_id": show})
    made = [Vertices(show, alloc, folder, str(uuid.uuid4()), str(uuid.uuid4()), dept) for _ in range(jobs)]
    for vertices in made:
        caps = {"int_max_cores": 10**6, "int_max_gpus": 10**6, "int_priority": 1}
        client.hset(keys.job(vertices.job_id), mapping=caps)
    return made


def _timed(client: redis.Redis, calls: Sequence[tuple[Any, ...]], batch: int) -> tuple[float, float]:
    """Redis's microseconds a call, and calls a second."""
    client.config_resetstat()
    elapsed = 0.0
    for start in range(0, len(calls), batch):
        pipe = client.pipeline(transaction=False)
        for call in calls[start : start + batch]:
            pipe.execute_command(*call)
        began = time.perf_counter()
        answers = pipe.execute()
        elapsed += time.perf_counter() - began
        assert all(answer[0] == 1 for answer in answers)
    stats: Any = client.info("commandstats")
    return float(stats["cmdstat_evalsha"]["usec_per_call"]), len(calls) / elapsed


@dataclass(frozen=True)
class RecomputeCost:
    """One pass over a ledger that agrees with PostgreSQL, or that lacks every proc (``added``)."""

    procs: int
    load: str
    added: int
    seconds: float
    longest_script_ms: float
    stock_complete: bool
    healed: int
    bookings_meanwhile: int
    redis_mb: float


def recompute_cost(engine: Engine, client: redis.Redis, procs: int) -> list[RecomputeCost]:
    """Bootstrap ``procs`` procs, then recompute idle and while bookings come and go."""
    _farm(engine, procs)
    ledger = make_ledger(engine, client, owner="benchmark")
    filled = _watched(client, lambda: ensure_bootstrapped(engine, ledger, wait_age=0))
    rows = [_row(client, procs, "bootstrap", filled.value.procs, filled, None, 0)]
    idle = _watched(client, lambda: recompute(engine, ledger))
    rows.append(_row(client, procs, "idle", 0, idle, idle.value, 0))
    with _booking(ledger) as booked:
        before = booked()
        busy = _watched(client, lambda: recompute(engine, ledger))
        rows.append(_row(client, procs, "busy", 0, busy, busy.value, booked() - before))
    return rows


@dataclass(frozen=True)
class _Watched:
    value: Any
    seconds: float
    longest_ms: float


def _watched(client: redis.Redis, work: Callable[[], Any]) -> _Watched:
    client.config_set("slowlog-log-slower-than", 500)
    client.slowlog_reset()
    began = time.perf_counter()
    value = work()
    seconds = time.perf_counter() - began
    slow: Any = client.slowlog_get(128)
    longest = max((entry["duration"] for entry in slow if b"EVALSHA" in _command(entry)), default=0)
    return _Watched(value, seconds, longest / 1000)


def _command(entry: Any) -> bytes:
    command = entry["command"]
    return command if isinstance(command, bytes) else str(command).encode()


def _row(
    client: redis.Redis, procs: int, load: str, added: int, watched: _Watched, report: Any, meanwhile: int
) -> RecomputeCost:
    memory: Any = client.info("memory")
    return RecomputeCost(
        procs=procs,
        load=load,
        added=added,
        seconds=round(watched.seconds, 2),
        longest_script_ms=watched.longest_ms,
        stock_complete=report is None or report.stock_complete,
        healed=0 if report is None else report.healed,
        bookings_meanwhile=meanwhile,
        redis_mb=round(memory["used_memory"] / 1e6, 1),
    )


def _farm(engine: Engine, procs: int) -> None:
    """A show whose jobs run ``procs`` frames on one enormous host."""
    with engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.default_show()
        host = farm.host(cores=CORES_A_HOST * 10, memory_gb=1_000_000)
    for _ in range(0, procs, FRAMES_A_JOB * JOBS_A_FARM_STEP):
        with engine.begin() as connection:
            farm.connection = connection
            count = min(JOBS_A_FARM_STEP, max(1, procs // FRAMES_A_JOB))
            jobs = farm.jobs([JobSpec([LayerSpec(frames=FRAMES_A_JOB)], show=show) for _ in range(count)])
            for job in jobs:
                farm.run(job.frames, host)


@contextmanager
def _booking(ledger: Ledger, *, per_second: int = 1000, batch: int = 50) -> Iterator[Callable[[], int]]:
    """Bookings that come, settle and go at a steady rate; yields how many were made so far."""
    record = next(iter(ledger.records()))
    vertices = record.booking.vertices
    made, stop = [0], threading.Event()

    def work() -> None:
        while not stop.wait(batch / per_second):
            bookings = [Booking(str(uuid.uuid4()), vertices, 1) for _ in range(batch)]
            ledger.force(bookings)
            ledger.release([booking.proc_id for booking in bookings])
            made[0] += batch

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: made[0]
    finally:
        stop.set()
        thread.join()


@click.command()
@click.option("--procs", multiple=True, type=int, default=(10_000,), show_default=True, help="Sizes to recompute at.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of the booking comparison.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(procs: tuple[int, ...], rounds: int, json_path: Path | None) -> None:
    """The cost of a ledgered booking, and of a recompute.

    Example: python -m benchmarks accounting --procs 10000 --procs 100000
    """
    with EmbeddedRedis() as server:
        client = redis.Redis.from_url(server.url, decode_responses=True)
        booking = [asdict(row) for row in booking_cost(client, rounds=rounds)]
        show([{"phase": row["script"], **row} for row in booking], "a booking")
        rows: list[dict[str, Any]] = []
        for count in procs:
            client.flushdb()
            with EmbeddedPostgres() as postgres:
                schema.upgrade(postgres.url)
                engine = make_engine(Settings(database_url=SecretStr(postgres.url)))
                rows += [asdict(row) for row in recompute_cost(engine, client, count)]
                engine.dispose()
        client.close()
    show([{"phase": f"{row['procs']} {row['load']}", **row} for row in rows], "recompute")
    write_json(json_path, {"booking": booking, "recompute": rows})


if __name__ == "__main__":
    main()
