"""What a recompute costs: its time, how long it stalls Redis, and memory; idle and while bookings go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import redis
from sqlalchemy import Engine, text

from benchmarks.figures import Spread
from benchmarks.redis_load import Load, Stall, booking_load, stopwatch
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import RecomputeReport, recompute
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import JobSpec, LayerSpec

BOOKINGS_PER_SECOND = 1000
LONGEST_SCRIPT_MS = 10.0
FRAMES_A_JOB = 100
_JOBS_AT_ONCE = 50
_CORES_OF_THE_HOST = 1_000_000
_SLOWER_THAN_US = 200


@dataclass(frozen=True)
class RecomputeCost:
    """``rounds`` passes over so many procs. ``skipped`` cycles did not finish, or could not take stock.

    ``longest_script_ms`` and ``longest_command_ms`` are Redis's own (SLOWLOG), over all rounds; ``ping_*`` are what
    another client waited. ``bookings_per_second`` went on meanwhile: checked, settled and released.
    """

    phase: str
    procs: int
    rounds: int
    seconds: Spread
    skipped: int
    longest_script_ms: float
    longest_command_ms: float
    ping_longest_ms: Spread
    ping_p99_ms: Spread
    bookings_per_second: Spread | str
    redis_mb: float

    @property
    def passed(self) -> bool:
        return self.skipped == 0 and self.longest_script_ms <= LONGEST_SCRIPT_MS


def recompute_costs(engine: Engine, client: redis.Redis, url: str, procs: int, *, rounds: int) -> list[RecomputeCost]:
    """Fill the store with ``procs`` procs, then recompute idle and under load, in both kinds of store."""
    seed_farm(engine, procs)
    ledger = make_ledger(engine, client, owner="benchmark")
    client.flushdb()

    def fill(*, dual: bool = False) -> None:
        ensure_bootstrapped(engine, ledger, wait_age=0, fleet_start=True, dual=dual)

    def refill() -> bool:
        client.flushdb()
        ledger.forget_epoch()
        fill()
        return True

    def one_pass() -> bool:
        return finished(recompute(engine, ledger))

    rows = [measured(client, url, f"{procs} bootstrap", procs, refill, rounds=rounds)]
    rows.append(measured(client, url, f"{procs} idle", procs, one_pass, rounds=rounds))
    rows.append(measured(client, url, f"{procs} busy", procs, one_pass, rounds=rounds, load=True))
    fill(dual=True)
    rows.append(measured(client, url, f"{procs} busy, cuebot-redis", procs, one_pass, rounds=rounds, load=True))
    return rows


def finished(report: RecomputeReport) -> bool:
    """The pass came to its end: stock was taken, and in a dual store the counters were swapped or dissolved."""
    return report.stock_complete


def measured(
    client: redis.Redis, url: str, phase: str, procs: int, work: Callable[[], bool], *, rounds: int, load: bool = False
) -> RecomputeCost:
    """``work`` some times over, watched from outside."""
    work()
    seconds, pings, rates = [], [], []
    skipped, script, command = 0, 0.0, 0.0
    for _ in range(rounds):
        with _watched(client, url, load=load) as (stall, booked):
            began = perf_counter()
            skipped += not work()
            seconds.append(perf_counter() - began)
        longest = _slowest(client)
        script, command = max(script, longest[0]), max(command, longest[1])
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
        script,
        command,
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
        client.config_set("slowlog-max-len", 5000)
        client.slowlog_reset()
        yield stall, booked


def _slowest(client: redis.Redis) -> tuple[float, float]:
    """The longest script and the longest command since the log was reset; milliseconds."""
    entries: Any = client.slowlog_get(5000)
    scripts = [entry["duration"] for entry in entries if _text(entry["command"]).upper().startswith("EVAL")]
    own = [entry["duration"] for entry in entries if not _text(entry["command"]).upper().startswith(("FLUSH", "MEM"))]
    return max(scripts, default=0) / 1000, max(own, default=0) / 1000


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
