"""What a recompute costs: its time, how long it stalls Redis, and memory; idle and while bookings go on.

Likewise whatever else works through the whole ledger: filling it, a flip of a show, releasing everything at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import Any

import redis
from sqlalchemy import Engine, text

from benchmarks.figures import Spread
from benchmarks.redis_load import Load, Stall, booking_load, stopwatch
from benchmarks.script_clock import TimedCall, calls_noted, scripts_timed
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger, reseed_limits
from opencue_sched.accounting.keys import unpack_entry
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.clients.lua_scripts import chunks
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting

BOOKINGS_PER_SECOND = 1000
LONGEST_SCRIPT_MS = 10.0
FRAMES_A_JOB = 100
_JOBS_AT_ONCE = 50
_CORES_OF_THE_HOST = 1_000_000
_ORPHANS_PER_PROC = 0.1
_RELEASED_AT_ONCE = 5000
_SCRIPTS_NAMED = 3
_PROCESSOR, _WALL = attrgetter("processor_ms"), attrgetter("wall_ms")


@dataclass(frozen=True)
class RecomputeCost:
    """``rounds`` passes over so many procs. ``skipped`` cycles did not finish, or could not check the counters.

    Of each round: the call of a script that kept Redis's processor longest (``longest_script_ms``; ``dearest_scripts``
    are those of all rounds), and the longest booking beside it, which does the same forty microseconds of work each
    time: what it took is what the machine adds to the processor's clock. ``slowest_by_clock_ms`` is the longest call by
    the wall's clock, for ``of_that_waited_ms`` of which something else had the processor. ``ping_*`` are what another
    client waited.
    ``bookings_per_second`` went on meanwhile: checked, settled and released.
    """

    phase: str
    procs: int
    rounds: int
    seconds: Spread
    skipped: int
    longest_script_ms: Spread
    dearest_scripts: str
    longest_booking_ms: Spread | str
    slowest_by_clock_ms: Spread
    of_that_waited_ms: Spread
    ping_longest_ms: Spread
    ping_p99_ms: Spread
    bookings_per_second: Spread | str
    redis_mb: float

    @property
    def passed(self) -> bool:
        """No cycle is skipped in any round, and no call takes too long of Redis's time in most of them.

        The rounds do the same work, and what a machine adds to one call in a million it does not add in each.
        """
        return self.skipped == 0 and self.longest_script_ms.median <= LONGEST_SCRIPT_MS


def recompute_costs(engine: Engine, client: redis.Redis, url: str, procs: int, *, rounds: int) -> list[RecomputeCost]:
    """Fill the store with ``procs`` procs, then work through it idle and under load, in both kinds of store."""
    seed_farm(engine, procs)
    ledger = make_ledger(engine, client, owner="benchmark", accounting=Accounting())
    client.flushdb()

    def empty() -> None:
        client.flushdb()
        with suppress(NotReady):
            ledger.learn_epoch()

    def fill(*, dual: bool = False) -> bool:
        ensure_bootstrapped(engine, ledger, wait_age=0, fleet_start=True, dual=dual)
        return True

    def refill() -> None:
        empty()
        fill()

    def one_pass() -> bool:
        recompute(engine, ledger)
        return True

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

    rows = [row("bootstrap", fill, prepare=empty), row("idle", one_pass), row("busy", one_pass, load=True)]
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
    skipped, calls = 0, []
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        with _watched(client, url, load=load) as (stall, booked):
            began = perf_counter()
            skipped += not work()
            seconds.append(perf_counter() - began)
        calls.append(calls_noted(client))
        pings.append(stall)
        rates.append(booked.per_second)
        assert not booked.refused
    memory: Any = client.info("memory")
    bookings = [_longest(call for call in of_a_round if call.name == "book") for of_a_round in calls]
    scripts = [_longest(call for call in of_a_round if call.name != "book") for of_a_round in calls]
    slowest = [max(of_a_round, key=_WALL) for of_a_round in calls]
    return RecomputeCost(
        phase,
        procs,
        rounds,
        Spread.of(seconds),
        skipped,
        Spread.of(scripts, digits=1),
        _dearest(chain.from_iterable(calls)),
        Spread.of(bookings, digits=1) if load else "",
        Spread.of([call.wall_ms for call in slowest], digits=1),
        Spread.of([call.waited_ms for call in slowest], digits=1),
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
            record = next(Ledger(client, owner="benchmark").records())
            vertices = unpack_entry(record.proc_id, record.entry).vertices
            booked = stack.enter_context(booking_load(url, vertices, per_second=BOOKINGS_PER_SECOND))
        stall = stack.enter_context(stopwatch(url))
        stack.enter_context(scripts_timed())
        yield stall, booked


def _longest(calls: Iterable[TimedCall]) -> float:
    return max((call.processor_ms for call in calls), default=0.0)


def _dearest(calls: Iterable[TimedCall]) -> str:
    """The scripts whose longest calls were the longest, with these; milliseconds of the processor."""
    longest = {call.name: call.processor_ms for call in sorted(calls, key=_PROCESSOR)}
    first = sorted(longest, key=longest.__getitem__, reverse=True)[:_SCRIPTS_NAMED]
    return ", ".join(f"{name} {longest[name]:.1f}" for name in first)


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
