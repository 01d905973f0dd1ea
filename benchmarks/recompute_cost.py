"""What a recompute costs: its time, how long it stalls Redis, and memory; idle and while bookings go on.

Likewise whatever else works through the whole ledger: filling it, a flip of a show, releasing everything at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import redis
from sqlalchemy import Engine, text

from benchmarks.figures import Spread
from benchmarks.redis_load import Load, Stall, booking_load, stopwatch
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger, reseed_limits
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import RecomputeReport, recompute
from opencue_sched.accounting.scripts import chunks
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import JobSpec, LayerSpec
from opencue_sched.lua_scripts import load_script, lua_directory

BOOKINGS_PER_SECOND = 1000
LONGEST_SCRIPT_MS = 10.0
FRAMES_A_JOB = 100
_JOBS_AT_ONCE = 50
_CORES_OF_THE_HOST = 1_000_000
_SLOWER_THAN_US, _SLOW_CALLS = 300, 30_000
_ORPHANS_PER_PROC = 0.1
_RELEASED_AT_ONCE = 5000


@dataclass(frozen=True)
class RecomputeCost:
    """``rounds`` passes over so many procs. ``skipped`` cycles did not finish, or could not take stock.

    ``longest_script_ms`` of each round is Redis's own (SLOWLOG), ``slowest_script`` its name. On a busy machine one
    that was put off the processor counts as long too. ``longest_booking_ms`` is the yardstick for that: a booking does
    some forty microseconds of work. ``each_script_ms``: the longest call of each, in the round in which that was least.
    ``ping_*`` are what another client waited. ``bookings_per_second`` went on meanwhile: checked, settled and released.
    """

    phase: str
    procs: int
    rounds: int
    seconds: Spread
    skipped: int
    longest_script_ms: Spread
    slowest_script: str
    each_script_ms: str
    longest_booking_ms: Spread | str
    ping_longest_ms: Spread
    ping_p99_ms: Spread
    bookings_per_second: Spread | str
    redis_mb: float

    @property
    def passed(self) -> bool:
        """A script that is too long is so in every round."""
        return self.skipped == 0 and self.longest_script_ms.least <= LONGEST_SCRIPT_MS


def recompute_costs(engine: Engine, client: redis.Redis, url: str, procs: int, *, rounds: int) -> list[RecomputeCost]:
    """Fill the store with ``procs`` procs, then work through it idle and under load, in both kinds of store."""
    seed_farm(engine, procs)
    ledger = make_ledger(engine, client, owner="benchmark")
    client.flushdb()

    def fill(*, dual: bool = False) -> None:
        ensure_bootstrapped(engine, ledger, wait_age=0, fleet_start=True, dual=dual)

    def refill() -> bool:
        client.flushdb(asynchronous=True)
        ledger.forget_epoch()
        fill()
        return True

    def one_pass() -> bool:
        return finished(recompute(engine, ledger))

    def flips() -> bool:
        """All shows go, with jobs that are long finished, and come back: every entry is removed and added."""
        _leave_orphans(client, round(procs * _ORPHANS_PER_PROC))
        _set_managed(engine, False)
        gone = one_pass()
        assert client.hlen(keys.LEDGER) < procs
        _set_managed(engine, True)
        reseed_limits(engine, ledger, _shows(engine))
        back = one_pass()
        assert client.hlen(keys.LEDGER) >= procs
        return gone and back

    def releases() -> bool:
        ids = [record.proc_id for record in ledger.records()]
        return sum(ledger.release(part) for part in chunks(ids, _RELEASED_AT_ONCE)) >= procs

    def row(phase: str, work: Callable[[], bool], **how: Any) -> RecomputeCost:
        return measured(client, url, f"{procs} {phase}", procs, work, rounds=rounds, **how)

    rows = [row("bootstrap", refill), row("idle", one_pass), row("busy", one_pass, load=True)]
    rows += [row("busy, flipped", flips, load=True), row("busy, released", releases, load=True, prepare=refill)]
    refill()
    fill(dual=True)
    rows.append(row("busy, cuebot-redis", one_pass, load=True))
    rows.append(row("busy, cuebot-redis, flipped", flips, load=True))
    return rows


def _leave_orphans(client: redis.Redis, count: int) -> None:
    """Keys of jobs nobody knows any more."""
    with client.pipeline(transaction=False) as pipe:
        for _ in range(count):
            pipe.hset(keys.job(str(uuid.uuid4())), mapping={"int_max_cores": -1, "int_cores": 0, "int_gpus": 0})
        pipe.execute()


def _set_managed(engine: Engine, managed: bool) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE show SET b_scheduler_managed = :managed"), {"managed": managed})


def _shows(engine: Engine) -> list[str]:
    with engine.begin() as connection:
        return list(connection.execute(text("SELECT pk_show FROM show")).scalars())


def finished(report: RecomputeReport) -> bool:
    """The pass came to its end: stock was taken, and in a dual store the counters were swapped or dissolved."""
    return report.stock_complete


def measured(
    client: redis.Redis,
    url: str,
    phase: str,
    procs: int,
    work: Callable[[], bool],
    *,
    rounds: int,
    load: bool = False,
    prepare: Callable[[], object] | None = None,
) -> RecomputeCost:
    """``work`` some times over, watched from outside; before each time ``prepare``, or before all once the work."""
    if prepare is None:
        work()
    seconds, pings, rates = [], [], []
    skipped, scripts, bookings = 0, [], []
    each: dict[str, list[float]] = {}
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        with _watched(client, url, load=load) as (stall, booked):
            began = perf_counter()
            skipped += not work()
            seconds.append(perf_counter() - began)
        slowest = _slowest(client)
        for name, ms in slowest.items():
            each.setdefault(name, []).append(ms)
        bookings.append(slowest.pop("book", 0.0))
        scripts.append(max(((ms, name) for name, ms in slowest.items()), default=(0.0, "none")))
        pings.append(stall)
        rates.append(booked.per_second)
        assert not booked.refused
    memory: Any = client.info("memory")
    return RecomputeCost(
        phase,
        procs,
        rounds,
        Spread.of(seconds),
        skipped,
        Spread.of([ms for ms, _ in scripts], digits=1),
        max(scripts)[1],
        ", ".join(f"{name} {min(longest):.1f}" for name, longest in sorted(each.items())),
        Spread.of(bookings, digits=1) if load else "",
        Spread.of([it.longest_ms for it in pings], digits=1),
        Spread.of([it.p99_ms for it in pings]),
        Spread.of(rates, digits=0) if load else "",
        round(memory["used_memory"] / 1e6, 1),
    )


@contextmanager
def _watched(client: redis.Redis, url: str, *, load: bool) -> Iterator[tuple[Stall, Load]]:
    with ExitStack() as stack:
        booked = Load()
        if load:
            vertices = next(Ledger(client, owner="benchmark").records()).booking.vertices
            booked = stack.enter_context(booking_load(url, vertices, per_second=BOOKINGS_PER_SECOND))
        stall = stack.enter_context(stopwatch(url))
        client.config_set("slowlog-log-slower-than", _SLOWER_THAN_US)
        client.config_set("slowlog-max-len", _SLOW_CALLS)
        client.slowlog_reset()
        yield stall, booked


def _slowest(client: redis.Redis) -> dict[str, float]:
    """The longest call of each script since the log was reset, by its name; milliseconds."""
    names = {load_script(path.stem).sha: path.stem for path in lua_directory().glob("*.lua")}
    longest: dict[str, float] = {}
    entries: Any = client.slowlog_get(_SLOW_CALLS)
    for entry in entries:
        words = _text(entry["command"]).split(" ", 2)
        if words[0].upper() == "EVALSHA":
            name = names.get(words[1], words[1])
            longest[name] = max(longest.get(name, 0.0), entry["duration"] / 1000)
    return longest


def _text(command: Any) -> str:
    return command.decode(errors="replace") if isinstance(command, bytes) else str(command)


def seed_farm(engine: Engine, procs: int) -> None:
    """A show whose jobs run ``procs`` frames on one enormous host."""
    with engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.default_show()
        connection.execute(text("UPDATE subscription SET int_size = 2000000000, int_burst = 2000000000"))
        host = farm.host(cores=_CORES_OF_THE_HOST, memory_gb=1_000_000)
    for first in range(0, procs, FRAMES_A_JOB * _JOBS_AT_ONCE):
        jobs_left = -(-(procs - first) // FRAMES_A_JOB)
        with engine.begin() as connection:
            farm.connection = connection
            specs = [JobSpec([LayerSpec(frames=FRAMES_A_JOB)], show=show) for _ in range(min(_JOBS_AT_ONCE, jobs_left))]
            for job in farm.jobs(specs):
                farm.run(job.frames, host)
