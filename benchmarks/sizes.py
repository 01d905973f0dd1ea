"""What a farm's size costs: hosts that do nothing, a start, a new job, memory; and a frame as the farm grows.

*Idle*: farms of three sizes, of whose hosts no more than one is in use. Workers start on the farm, with a job waiting,
so that each knows all of its hosts; then nothing happens, with one worker and with as many as are asked for; then jobs
of one frame come, one at a time. *Growth*: the same number of frames is booked on small and large farms, with few and
many frames waiting, from rest to rest: bursts let the shows have the cores of so many frames. All sizes go with the
number of hosts of the largest farm.

Rows of an idle farm are those that PostgreSQL read in the whole database (pg_stat_database: returned by scans and index
entries). Those of a new job and of a frame are the ones that workers read (`row_meter`), less what they read when
nothing is booked, and without what periodic tasks read.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from rich.console import Console
from sqlalchemy import TextClause, text

from benchmarks import idle, row_meter
from benchmarks.bookings import Spent
from benchmarks.farm_load import FarmLoad, hosts_of
from benchmarks.proc_times import Reading, read, resident_mb
from benchmarks.steady import CORES_OF_A_FRAME, ENVIRONMENT, SHOWS, hand_over, prepare, write_farm
from benchmarks.workbench import Workbench, workbench
from opencue_sched.accounting import keys
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.placement.host_cache import REREAD_SECONDS, REREADS_PER_SECOND
from opencue_sched.worker.fleet_metrics import CENSUS_SECONDS

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
_WARM_UP_PART, _MEASURED_PART, _METERED_PART = 0.2, 0.5, 0.2
"""Of the frames that wait on the smallest farm, those booked before the reading begins, during it, and afterwards while
the workers count their rows: that costs time of its own."""
_NO_RECOMPUTE = {"OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS": "3600"}
"""Added to the settings where frames are counted: a recompute reads all that runs, and would come within the seconds of
one farm and not of another."""
_READERS_SHOWN = 6
_LAUNCH_SECONDS = 0.4
"""The pause between two looks whether all bursts are used and all that was booked is launched."""
_CORES_LEFT = 16
"""Cores of a burst that no frame may fit into any more."""
REREADS = "hosts.fetch_buckets"
"""The reader of `row_meter` that reads hosts again in the background."""
_AT_LEISURE = (
    REREADS,
    "backlog.fetch_versions",
    "lost_runs.",
    "pending.fetch_requirements",
    "reservations.",
    "accounting_tables.",
)
"""How the readers are called that periodic tasks have, jobs or not."""

_BOOKED_AT = text(
    "SELECT extract(epoch FROM coalesce(pg_xact_commit_timestamp(xmin), ts_dispatched)) FROM proc"
    " WHERE pk_frame = :frame"
)
_NOW = text("SELECT extract(epoch FROM clock_timestamp())")
_WAL_BYTES = text("SELECT CAST(pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0') AS float8)")
_WAL = "wal_bytes"
_SET_BURSTS = text("UPDATE subscription SET int_burst = :centicores RETURNING pk_show, pk_alloc")


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
    """What a frame cost in microseconds of processor time and bytes of WAL, on a farm of so many hosts with so many
    frames waiting, less what the fleet costs at rest; that in rows a second and percent of a core. ``rows`` are those
    that workers read for a frame, ``rows_read`` the readers of most of them."""

    phase: str
    workers: int
    booked: int
    worker_us: float
    postgresql_us: float
    redis_us: float
    redis_commands: float
    rows: float
    rows_read: str
    wal_bytes: float
    statements: float
    plan_ms: float
    lost_percent: float
    rest_rows_per_second: int
    rest_percent: str
    others_percent: int
    passed: bool


# Farms that do nothing


def run_idle_farms(
    counts: Sequence[int],
    *,
    most_hosts: int,
    seconds: float,
    console: Console,
    parts: Sequence[float] = IDLE_PARTS,
    fleet_type: type[Fleet] = Fleet,
) -> list[SizeResult]:
    """Farms of these sizes, each with so many workers in turn."""
    results: list[SizeResult] = []
    for part in parts:
        with workbench(idle.ENVIRONMENT, fleet_type=fleet_type) as bench:
            shutil.copy(row_meter.__file__, bench.fleet.directory)
            site = _idle_site(bench, max(2, int(part * most_hosts)))
            for count in counts:
                result = _measure(site, count, seconds)
                small = next((it for it in results if it.workers == count), None)
                if small is not None:
                    more_hosts = site.hosts - int(parts[0] * most_hosts)
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


def _most(rows: Mapping[str, float], digits: int = 0) -> str:
    """The readers of most rows."""
    most = sorted(rows.items(), key=lambda reader: -reader[1])[:_READERS_SHOWN]
    return ", ".join(f"{name} {count:.{digits}f}" for name, count in most)


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
    with_jobs = _metered(site.bench, lambda: _waits_of_new_jobs(site))
    lasted = time.monotonic() - began
    alone = _metered(site.bench, lambda: time.sleep(lasted))
    switch.unlink()
    rows = {name: (count - alone.get(name, 0.0)) / _JOBS for name, count in with_jobs.items()}
    for_jobs = {name: count for name, count in rows.items() if not name.startswith(_AT_LEISURE)}
    return for_jobs, {name: count / lasted for name, count in alone.items()}


def _metered(bench: Workbench, happens: Callable[[], object]) -> dict[str, float]:
    """Rows that the workers read while something happens, by reader."""
    prefix, before = f"{row_meter.SERIES}_total:", bench.counters()
    happens()
    spent = Spent.between(before, bench.counters())
    return {key.removeprefix(prefix): count for key, count in spent.counters.items() if key.startswith(prefix)}


def _wait(check: Callable[[], _T | None]) -> _T:
    deadline = time.monotonic() + _WAIT_SECONDS
    while (found := check()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_WAIT_SECONDS:.0f} s in vain; is the fleet at work?")
        time.sleep(_POLL_SECONDS)
    return found


# Farms that grow


def run_growth(
    counts: Sequence[int],
    *,
    most_hosts: int,
    console: Console,
    rest_seconds: float = CENSUS_SECONDS,
    parts: Sequence[tuple[float, float]] = GROWTH_PARTS,
    fleet_type: type[Fleet] = Fleet,
) -> list[GrowthResult]:
    """The same number of frames on each farm; with each number of workers. What the fleet costs at rest is watched for
    ``rest_seconds`` before, and the frames for as long at least: by default in both the leading beat counts the hosts
    once."""
    results = []
    least = int(min(frames for _, frames in parts) * most_hosts)
    for count in counts:
        found = []
        for hosts, frames in parts:
            farm = int(hosts * most_hosts), int(frames * most_hosts)
            result = _growth(*farm, count, least, rest_seconds, fleet_type)
            console.print(f"  {result.phase}, {count} workers: {result.rows} rows and {result.wal_bytes} B a frame")
            found.append(result)
        smallest, largest = found[0], found[-1]
        costs = ("worker_us", "postgresql_us", "redis_us", "rows", "wal_bytes")
        ratios = {name: getattr(largest, name) / max(getattr(smallest, name), 1e-9) for name in costs}
        console.print(f"  largest to smallest: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")
        kept = max(ratios["rows"], ratios["wal_bytes"]) <= MOST_GROWTH
        results += [replace(result, passed=result.passed and kept) for result in found]
    return results


@dataclass(frozen=True, slots=True)
class _Moment:
    """All that is read at one moment of a run."""

    at: float
    counters: Counter[str]
    cpu: Reading

    @classmethod
    def now(cls, bench: Workbench) -> _Moment:
        counters = bench.counters()
        with bench.engine.connect() as connection:
            counters[_WAL] = connection.execute(_WAL_BYTES).scalar_one()
        return cls(time.monotonic(), counters, read(bench.processes()))

    def since(self, before: _Moment) -> tuple[float, Spent, Reading]:
        """The seconds between two moments, what was spent, and the processor time."""
        return self.at - before.at, Spent.between(before.counters, self.counters), self.cpu.since(before.cpu)


def _growth(
    hosts: int, frames: int, workers: int, least: int, rest_seconds: float, fleet_type: type[Fleet]
) -> GrowthResult:
    """What a frame costs from rest to rest. A process has a thousand frames and more between plan and launch: a reading
    while it is at work would count what some frames cost, and divide it by others."""
    with workbench({**ENVIRONMENT, **_NO_RECOMPUTE}, fleet_type=fleet_type) as bench:
        load = write_farm(bench, frames, hosts_of(hosts))
        shutil.copy(row_meter.__file__, bench.fleet.directory)
        bench.workers(workers, "--include", Path(row_meter.__file__).stem)
        bench.fleet.beat()
        # What a process reads when it starts is no cost of a frame.
        start = bench.counters()
        subscriptions = _set_bursts(bench, _WARM_UP_PART * least)
        hand_over(bench, load)
        _until_used(bench, subscriptions, start)
        _until_at_rest(bench)
        rest_began = _Moment.now(bench)
        time.sleep(rest_seconds)
        began = _Moment.now(bench)
        _until_used(bench, _set_bursts(bench, (_WARM_UP_PART + _MEASURED_PART) * least), start)
        time.sleep(max(0.0, began.at + rest_seconds - time.monotonic()))
        ended = _Moment.now(bench)
        lasted, spent, cpu = ended.since(began)
        rested, spent_at_rest, cpu_at_rest = began.since(rest_began)
        rows = _rows_of_frames(bench, (_WARM_UP_PART + _MEASURED_PART) * least, _METERED_PART * least, start)

        def of_a_frame(count: float, at_rest: float) -> float:
            return spent.per_frame(count - at_rest * lasted / rested)

        micros = {
            name: of_a_frame(1e6 * seconds, 1e6 * cpu_at_rest.groups[name]) for name, seconds in cpu.groups.items()
        }
        return GrowthResult(
            phase=f"{hosts:,} hosts, {frames:,} frames",
            workers=workers,
            booked=spent.booked,
            worker_us=micros["worker"],
            postgresql_us=micros["postgresql"],
            redis_us=micros["redis"],
            redis_commands=of_a_frame(spent["redis_commands"], spent_at_rest["redis_commands"]),
            rows=round(sum(rows.values()), 1),
            rows_read=_most(rows, digits=1),
            wal_bytes=of_a_frame(spent[_WAL], spent_at_rest[_WAL]),
            statements=spent.per_frame(spent["scheduler_sql_statements_total"], 3),
            plan_ms=round(spent.mean_ms("plan"), 1),
            lost_percent=round(spent.lost_percent, 2),
            rest_rows_per_second=round(spent_at_rest["pg_tup_returned"] / rested),
            rest_percent=", ".join(
                f"{name} {100 * cpu_at_rest.groups[name] / rested:.1f}" for name in ("worker", "postgresql", "redis")
            ),
            others_percent=cpu.others_percent(lasted),
            passed=spent.booked > 0,
        )


def _rows_of_frames(bench: Workbench, booked: float, more: float, start: Mapping[str, float]) -> dict[str, float]:
    """Rows that the workers read for a frame, by reader, where bursts for ``booked`` frames are raised for so many
    ``more``. Without what is read for the raise itself, which a raise too small for any frame tells."""
    switch = bench.fleet.directory / row_meter.SWITCH
    switch.touch()

    def raise_by_nothing() -> None:
        _set_bursts(bench, booked, more_centicores=1)
        _until_at_rest(bench)

    def raise_by_frames() -> None:
        _until_used(bench, _set_bursts(bench, booked + more), start)

    for_nothing = _metered(bench, raise_by_nothing)
    before = bench.counters()
    for_frames = _metered(bench, raise_by_frames)
    frames = max(1, Spent.between(before, bench.counters()).booked)
    switch.unlink()
    return {
        name: (count - for_nothing.get(name, 0.0)) / frames
        for name, count in for_frames.items()
        if not name.startswith(_AT_LEISURE)
    }


def _set_bursts(bench: Workbench, frames: float, *, more_centicores: int = 0) -> Mapping[str, int]:
    """Let all shows together have the cores of so many frames, each as many as the others. Returns the cores by the key
    of each show's subscription."""
    cores = int(frames * CORES_OF_A_FRAME / len(SHOWS))
    with bench.engine.begin() as connection:
        rows = connection.execute(_SET_BURSTS, {"centicores": CENTICORES_PER_CORE * cores + more_centicores})
        return {keys.subscription(row.pk_show, row.pk_alloc): cores for row in rows}


def _until_used(bench: Workbench, bursts: Mapping[str, int], start: Mapping[str, float]) -> None:
    """Wait until the shows use their bursts, and all that was booked since ``start`` is committed and launched.

    Asked of Redis and of the workers' own counters, where the answer costs as little on any farm.
    """

    def are_used_and_launched() -> bool | None:
        # Not often: each look costs the worker some milliseconds.
        time.sleep(_LAUNCH_SECONDS)
        # The launched first, then the use and the ledger at one moment: a booking whose commit is cancelled counts as
        # used until it is rolled back, and as launched never.
        launched = Spent.between(start, bench.counters()).booked
        with bench.client.pipeline() as together:
            for key in bursts:
                together.hget(key, "int_cores")
            together.hlen(keys.LEDGER)
            *used, in_ledger = together.execute()
        enough = all(int(cores or 0) >= burst - _CORES_LEFT for cores, burst in zip(used, bursts.values(), strict=True))
        return (enough and launched >= in_ledger) or None

    _wait(are_used_and_launched)
