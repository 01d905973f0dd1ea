"""Fills of an empty farm that ask whether the cut of the work matters: 20,000 frames on 1,553 hosts, once as one layer
and once as fifty layers of 400. How fast a farm fills must not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from sqlalchemy import text

from benchmarks.bookings import Spent
from benchmarks.farm_load import HOSTS_1553, FarmLoad, JobLoad, Work
from benchmarks.proc_times import resident_mb
from benchmarks.steady import ENVIRONMENT, MOST_LOST_PERCENT, hand_over, prepare
from benchmarks.workbench import Workbench, workbench

FRAMES = 20_000
LAYERS = 50
LEAST_RATIO = 0.8
"""Frames a second of one layer, at least, for each of fifty layers'."""

_POLL_SECONDS = 0.5
_FLUSH_SECONDS = 1.2
_BOOKED = text("SELECT count(*) FROM proc")
_LAST_BOOKED_AT = text(
    "SELECT extract(epoch FROM max(coalesce(pg_xact_commit_timestamp(xmin), ts_dispatched))) FROM proc"
)


@dataclass(frozen=True, slots=True)
class FillResult:
    """One fill. ``seconds`` from the hand-over to the last booking; rows (of the whole database) and statements are for
    each frame booked. ``plan_ms_99`` is an upper bound; ``memory_mb`` is the greatest of the workers."""

    phase: str
    workers: int
    frames: int
    booked: int
    seconds: float
    booked_per_second: float
    lost_percent: float
    lost_by_reason: str
    rows_returned: float
    rows_fetched: float
    statements: float
    passes: int
    frames_a_pass: float
    plan_ms: float
    plan_ms_99: float
    stage_ms: str
    memory_mb: int
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_rounds(counts: Sequence[int], *, seconds: float, console: Console) -> list[FillResult]:
    """The same frames as fifty layers and as one, each for at most so many seconds, with each number of workers."""
    results = []
    for count in counts:
        many, one = (_rounds(count, layers, seconds, console) for layers in (LAYERS, 1))
        ratio = one.booked_per_second / max(many.booked_per_second, 0.1)
        console.print(f"  one layer fills {ratio:.2f} times as fast as {LAYERS}")
        results += [many, replace(one, passed=one.passed and ratio >= LEAST_RATIO)]
    return results


def _rounds(workers: int, layers: int, seconds: float, console: Console) -> FillResult:
    load = FarmLoad()
    with workbench(ENVIRONMENT) as bench:
        with bench.engine.begin() as connection:
            load.add_hosts(connection, HOSTS_1553)
            show = load.add_show(connection, "show", size=load.cores)
            load.add_jobs(connection, show, [JobLoad([Work(FRAMES // layers, 2, 4, 10)]) for _ in range(layers)])
        prepare(bench, load)
        name = f"{layers} x {FRAMES // layers:,}"
        return _fill(bench, load, name, workers, FRAMES, seconds, console)


def _fill(
    bench: Workbench, load: FarmLoad, phase: str, workers: int, wanted: int, seconds: float, console: Console
) -> FillResult:
    """Hand the shows over and watch until so many frames are booked, or for so many seconds."""
    bench.workers(workers)
    bench.fleet.beat()
    before = bench.counters()
    began = hand_over(bench, load)
    deadline, booked = time.monotonic() + seconds, 0
    while booked < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        with bench.engine.connect() as connection:
            booked = int(connection.execute(_BOOKED).scalar_one())
    with bench.engine.connect() as connection:
        last = connection.execute(_LAST_BOOKED_AT).scalar()
    memory = max(resident_mb(pid) for pid in bench.processes()["worker"])
    time.sleep(_FLUSH_SECONDS)
    spent = Spent.between(before, bench.counters())
    took = (float(last) if last else began + seconds) - began
    console.print(f"  {phase}, {workers} workers: {booked} of {wanted} frames booked in {took:.1f} s")
    return FillResult(
        phase=phase,
        workers=workers,
        frames=load.frames,
        booked=booked,
        seconds=round(took, 2),
        booked_per_second=round(booked / took, 1),
        lost_percent=round(spent.lost_percent, 2),
        lost_by_reason=spent.lost_by_reason,
        rows_returned=spent.per_frame(spent["pg_tup_returned"]),
        rows_fetched=spent.per_frame(spent["pg_tup_fetched"]),
        statements=spent.per_frame(spent["scheduler_sql_statements_total"], 3),
        passes=spent.passes,
        frames_a_pass=round(spent.booked / max(1, spent.passes), 1),
        plan_ms=round(spent.mean_ms("plan"), 1),
        plan_ms_99=spent.at_most_ms("plan", 99),
        stage_ms=spent.stage_ms(),
        memory_mb=memory,
        passed=booked > 0 and spent.lost_percent <= MOST_LOST_PERCENT,
    )
