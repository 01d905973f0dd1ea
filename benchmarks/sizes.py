"""What a farm's size costs: hosts that do nothing, a start, a new job, memory; and a frame as the farm grows.

*Idle*: farms of three sizes, of whose hosts no more than one is in use. Workers start on the farm, with a job waiting,
so that each knows all of its hosts; then nothing happens, with one worker and with as many as are asked for; then jobs
of one frame come, one at a time. *Growth*: the same number of frames is booked on small and large farms, with few and
many frames waiting. All sizes go with the number of hosts of the largest farm.

Rows are those that PostgreSQL read in the whole database (pg_stat_database: returned by scans and index entries); those
of a new job the ones that workers read (`row_meter`), less what they read in the same time when nothing happens.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from sqlalchemy import Row, TextClause, text

from benchmarks import idle, row_meter
from benchmarks.bookings import Spent
from benchmarks.farm_load import FarmLoad, hosts_of
from benchmarks.proc_times import read, resident_mb
from benchmarks.steady import ENVIRONMENT, hand_over, prepare, write_farm
from benchmarks.workbench import Workbench, workbench
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.placement.host_cache import REREAD_SECONDS, REREADS_PER_SECOND

MOST_HOSTS = 100_000
IDLE_PARTS = (0.1, 0.3, 1.0)
GROWTH_PARTS = ((0.012, 0.06), (0.012, 2.0), (0.1, 0.06), (0.1, 2.0))
"""Hosts and waiting frames of each farm that is compared, as parts of the largest one's hosts: of 100,000, 1,200 and
10,000 hosts, 6,000 and 200,000 frames."""
MOST_GROWTH = 1.2
"""Times as much as on the smallest of the farms, the first, that a frame may cost on the largest, the last."""
MOST_ROWS_OF_A_NEW_JOB = 1_000
MOST_ROWS_OF_A_REREAD = 8
"""Rows that PostgreSQL reads for each host that is read again while nothing happens."""

_T = TypeVar("_T")
_JOBS = 12
"""New jobs of which the time is taken, and as many again of which the rows are."""
_PAUSE_SECONDS = 0.7
_FLUSH_SECONDS = 1.2
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.02
_WARM_UP_PART, _MEASURED_PART = 0.2, 0.6
"""Of the frames that wait on the smallest farm, those booked before the reading begins, and during it."""
REREADS = "hosts.fetch_buckets"
"""The reader of `row_meter` that reads hosts again in the background."""
_AT_LEISURE = (REREADS, "lost_runs.", "reservations.", "accounting_tables.")
"""How the readers are called that periodic tasks have, jobs or not."""

_BOOKED_AT = text(
    "SELECT extract(epoch FROM coalesce(pg_xact_commit_timestamp(xmin), ts_dispatched)) FROM proc"
    " WHERE pk_frame = :frame"
)
_NOW = text("SELECT extract(epoch FROM clock_timestamp())")
_WRITTEN = text(
    "SELECT count(*) AS frames, CAST(pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0') AS float8) AS bytes FROM proc"
)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """A farm of so many hosts. ``first_frame_seconds`` are from the moment that the first worker takes messages;
    processor time in percent of a core; ``kb_a_host`` is what a worker holds for each host more than the smallest farm
    has."""

    phase: str
    workers: int
    first_frame_seconds: float
    memory_mb: int
    kb_a_host: float | None
    worker_percent: float
    postgresql_percent: float
    redis_percent: float
    rows_per_second: float
    reread_rows_per_second: float
    idle_read: str
    statements_per_second: float
    new_job_ms: float
    new_job_longest_ms: float
    new_job_rows: float
    new_job_read: str
    others_percent: int
    passed: bool


@dataclass(frozen=True, slots=True)
class GrowthResult:
    """What a frame cost in microseconds of processor time, rows and bytes of WAL, on a farm of so many hosts with so
    many frames waiting."""

    phase: str
    workers: int
    booked: int
    worker_us: float
    postgresql_us: float
    redis_us: float
    rows: float
    wal_bytes: float
    statements: float
    plan_ms: float
    lost_percent: float
    others_percent: int
    passed: bool


# Farms that do nothing


def run_idle_farms(counts: Sequence[int], *, most_hosts: int, seconds: float, console: Console) -> list[SizeResult]:
    """Farms of three sizes, each with so many workers in turn."""
    results: list[SizeResult] = []
    for part in IDLE_PARTS:
        with workbench(idle.ENVIRONMENT) as bench:
            shutil.copy(row_meter.__file__, bench.fleet.directory)
            site = _idle_site(bench, max(2, int(part * most_hosts)))
            for count in counts:
                result = _measure(site, count, seconds)
                small = next((it for it in results if it.workers == count), None)
                if small is not None:
                    more_hosts = site.hosts - int(IDLE_PARTS[0] * most_hosts)
                    kilobytes = 1024 * (result.memory_mb - small.memory_mb) / more_hosts
                    result = replace(result, kb_a_host=round(kilobytes, 2))
                results.append(result)
                console.print(
                    f"  {result.phase}, {count} workers: first frame after {result.first_frame_seconds} s, idle "
                    f"{result.postgresql_percent} % of a core of PostgreSQL and {result.rows_per_second} rows/s, a new "
                    f"job {result.new_job_ms} ms and {result.new_job_rows} rows, {result.kb_a_host} KB a host"
                )
    return results


@dataclass(frozen=True)
class _IdleSite:
    bench: Workbench
    load: FarmLoad
    hosts: int

    def new_job(self) -> tuple[str, float]:
        """A job of one frame; its frame, and when it was committed by the database's clock."""
        (show,) = self.load.shows.values()
        with self.bench.engine.begin() as connection:
            layers = [LayerSpec(frames=1, tags=self.load.tag)]
            job = Farm(connection).jobs([JobSpec(layers, show=show, os=None, name=f"job-{uuid.uuid4().hex[:12]}")])[0]
        return job.frames[0], float(self.ask(_NOW) or 0)

    def booked_at(self, frame: str) -> float:
        """When the frame was booked, waiting for that."""
        return _wait(lambda: self.ask(_BOOKED_AT, frame=frame))

    def ask(self, question: TextClause, **parameters: str) -> float | None:
        with self.bench.engine.connect() as connection:
            answer = connection.execute(question, parameters).scalar()
        return None if answer is None else float(answer)


def _idle_site(bench: Workbench, hosts: int) -> _IdleSite:
    load = FarmLoad()
    with bench.engine.begin() as connection:
        load.add_hosts(connection, hosts_of(hosts))
        load.add_show(connection, "show", size=load.cores)
    prepare(bench, load)
    hand_over(bench, load)
    return _IdleSite(bench, load, hosts)


def _measure(site: _IdleSite, workers: int, seconds: float) -> SizeResult:
    """Start the first worker on the farm, see its first frame, start the others, watch nothing happen, and send new
    jobs."""
    bench = site.bench
    frame, _ = site.new_job()
    bench.fleet.beat()
    metered = ("--include", Path(row_meter.__file__).stem)
    bench.workers(1, *metered)
    ready = float(site.ask(_NOW) or 0)
    first = site.booked_at(frame) - ready
    bench.workers(workers, *metered)
    _until_at_rest(bench)
    processes, began = bench.processes(), time.monotonic()
    before, cpu_before = bench.counters(), read(processes)
    time.sleep(seconds)
    lasted, cpu = time.monotonic() - began, read(processes).since(cpu_before)
    spent = Spent.between(before, bench.counters())
    memory = max(resident_mb(pid) for pid in processes["worker"])
    waits = list(_waits_of_new_jobs(site))
    read_rows, idle_rows = _rows_of_new_jobs(site)
    for name in list(bench.fleet.processes):
        bench.fleet.stop(name)
    bench.metrics_ports.clear()
    of_a_job = sum(read_rows.values())
    rereads = min(site.hosts / REREAD_SECONDS, REREADS_PER_SECOND)
    reread_rows = idle_rows.get(REREADS, 0.0)
    return SizeResult(
        phase=f"{site.hosts:,} hosts",
        workers=workers,
        first_frame_seconds=round(first, 2),
        memory_mb=memory,
        kb_a_host=None,
        **{f"{name}_percent": round(100 * cpu.groups[name] / lasted, 1) for name in ("worker", "postgresql", "redis")},
        rows_per_second=round(spent["pg_tup_returned"] / lasted, 1),
        reread_rows_per_second=round(reread_rows, 1),
        idle_read=_most(idle_rows),
        statements_per_second=round(spent["scheduler_sql_statements_total"] / lasted, 1),
        new_job_ms=round(1000 * median(waits), 1),
        new_job_longest_ms=round(1000 * max(waits), 1),
        new_job_rows=round(of_a_job),
        new_job_read=_most(read_rows),
        others_percent=cpu.others_percent(lasted),
        passed=of_a_job <= MOST_ROWS_OF_A_NEW_JOB and reread_rows <= MOST_ROWS_OF_A_REREAD * rereads,
    )


def _most(rows: Mapping[str, float]) -> str:
    """The readers of most rows."""
    return ", ".join(f"{name} {count:.0f}" for name, count in sorted(rows.items(), key=lambda it: -it[1])[:6])


def _until_at_rest(bench: Workbench) -> None:
    """Until all hosts are known, and the rest of what a start brings is over: the workers do not compute any more."""
    deadline, processes = time.monotonic() + _WAIT_SECONDS, bench.processes()
    while time.monotonic() < deadline:
        before = read({"worker": processes["worker"]})
        time.sleep(_FLUSH_SECONDS)
        if read({"worker": processes["worker"]}).since(before).groups["worker"] < 0.3 * _FLUSH_SECONDS:
            return


def _waits_of_new_jobs(site: _IdleSite, jobs: int = _JOBS) -> Sequence[float]:
    """Seconds from the commit of each new job to that of its booking."""
    waits = []
    for _ in range(jobs):
        time.sleep(_PAUSE_SECONDS)
        frame, committed = site.new_job()
        waits.append(site.booked_at(frame) - committed)
    return waits


def _rows_of_new_jobs(site: _IdleSite) -> tuple[dict[str, float], dict[str, float]]:
    """Rows that the workers read for a new job, and in a second in which nothing happens, by reader."""
    switch = site.bench.fleet.directory / row_meter.SWITCH
    switch.touch()
    began = time.monotonic()
    with_jobs = _metered(site, lambda: _waits_of_new_jobs(site))
    lasted = time.monotonic() - began
    alone = _metered(site, lambda: time.sleep(lasted))
    switch.unlink()
    rows = {name: (count - alone.get(name, 0.0)) / _JOBS for name, count in with_jobs.items()}
    for_jobs = {name: count for name, count in rows.items() if not name.startswith(_AT_LEISURE)}
    return for_jobs, {name: count / lasted for name, count in alone.items()}


def _metered(site: _IdleSite, happens: Callable[[], object]) -> dict[str, float]:
    prefix, before = f"{row_meter.SERIES}_total:", site.bench.counters()
    happens()
    spent = Spent.between(before, site.bench.counters())
    return {key.removeprefix(prefix): count for key, count in spent.counters.items() if key.startswith(prefix)}


def _wait(check: Callable[[], _T | None]) -> _T:
    deadline = time.monotonic() + _WAIT_SECONDS
    while (found := check()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_WAIT_SECONDS:.0f} s in vain; is the fleet at work?")
        time.sleep(_POLL_SECONDS)
    return found


# Farms that grow


def run_growth(counts: Sequence[int], *, most_hosts: int, console: Console) -> list[GrowthResult]:
    """The same number of frames on each farm; with each number of workers."""
    results = []
    least = int(min(frames for _, frames in GROWTH_PARTS) * most_hosts)
    for count in counts:
        found = []
        for hosts, frames in GROWTH_PARTS:
            result = _growth(int(hosts * most_hosts), int(frames * most_hosts), count, least)
            console.print(f"  {result.phase}, {count} workers: {result.rows} rows and {result.wal_bytes} B a frame")
            found.append(result)
        costs = ("worker_us", "postgresql_us", "redis_us", "rows", "wal_bytes")
        ratios = {name: getattr(found[-1], name) / max(getattr(found[0], name), 1e-9) for name in costs}
        console.print(f"  largest to smallest: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")
        kept = max(ratios["rows"], ratios["wal_bytes"]) <= MOST_GROWTH
        results += [replace(result, passed=result.passed and kept) for result in found]
    return results


def _growth(hosts: int, frames: int, workers: int, least: int) -> GrowthResult:
    with workbench(ENVIRONMENT) as bench:
        load = write_farm(bench, frames, hosts_of(hosts))
        bench.workers(workers)
        bench.fleet.beat()
        processes, began, wanted = bench.processes(), time.monotonic(), _MEASURED_PART * least
        start, at_first, cpu_before = bench.counters(), _written(bench), read(processes)
        hand_over(bench, load)
        _wait(lambda: Spent.between(start, bench.counters()).booked >= _WARM_UP_PART * least or None)
        before = bench.counters()
        if Spent.between(start, before).booked + wanted <= least:
            # What a process reads when it starts is no cost of a frame.
            began, cpu_before = time.monotonic(), read(processes)
        else:
            # On the smallest farm too few frames are left to be measured without those of the start.
            before = start
        written = at_first

        def are_booked() -> bool | None:
            # The counters go up when frames are launched, which is after their commit: what was written is compared
            # with the frames that were committed by then, as soon as there are more of them.
            nonlocal written
            now = _written(bench)
            written = now if now.frames > written.frames else written
            return Spent.between(before, bench.counters()).booked >= wanted or None

        _wait(are_booked)
        after = bench.counters()
        lasted, cpu = time.monotonic() - began, read(processes).since(cpu_before)
        spent = Spent.between(before, after)
        micros = {name: spent.per_frame(1e6 * seconds) for name, seconds in cpu.groups.items()}
        return GrowthResult(
            phase=f"{hosts:,} hosts, {frames:,} frames",
            workers=workers,
            booked=spent.booked,
            worker_us=micros["worker"],
            postgresql_us=micros["postgresql"],
            redis_us=micros["redis"],
            rows=spent.per_frame(spent["pg_tup_returned"]),
            wal_bytes=round((written.bytes - at_first.bytes) / (written.frames - at_first.frames), 1),
            statements=spent.per_frame(spent["scheduler_sql_statements_total"], 3),
            plan_ms=round(spent.mean_ms("plan"), 1),
            lost_percent=round(spent.lost_percent, 2),
            others_percent=cpu.others_percent(lasted),
            passed=spent.booked > 0,
        )


def _written(bench: Workbench) -> Row[Any]:
    """The ``frames`` that are committed, and all ``bytes`` of WAL so far."""
    with bench.engine.connect() as connection:
        return connection.execute(_WRITTEN).one()
