"""The steady state: a farm of five shows is filled, then frames end and freed cores are booked again.

The fill is timed from the moment the shows are handed over to the commit of the booking that makes 99 % of the cores
busy. In the steady state frames end at a fixed rate, each in turn by chance (their run times are exponential, so the
rate is the same from the first second on), by `FrameEnds`.

Rows are those PostgreSQL read in the whole database (pg_stat_database: ``returned`` by scans and index entries,
``fetched`` by indexes), less what the benchmark read itself: its looks at new procs are counted, and what a transaction
of ends reads is measured when the workers have stopped, with frames still ending at the same rate.

Which function of the store has rows read is counted in a phase of its own (`row_meter`). Processor time is apart for
workers, for their sessions' PostgreSQL backends, for those of the benchmark's own sessions (which end frames and look),
for Redis, and for the rest.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from sqlalchemy import text

from benchmarks import row_meter
from benchmarks.bookings import Spent, rows_by_table
from benchmarks.farm_clock import FarmClock, weighted_percentile
from benchmarks.farm_load import FRAMES_OF_A_LAYER, HOSTS_1553, FarmLoad, cut, hosts_of, workload
from benchmarks.frame_ends import FrameEnds, RunningProc
from benchmarks.proc_times import Reading, resident_mb
from benchmarks.statement_times import StatementTimes, configuration, leave_out
from benchmarks.stress import ACTIVATE
from benchmarks.workbench import OUR_SESSIONS, REDIS, THE_REST, THEIR_SESSIONS, WORKERS, Workbench, code_of, workbench
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.insight.audit import run_audit

MOST_LOST_PERCENT = 3.0
MOST_ROWS_PER_FRAME = 100
SHOWS: Mapping[str, float] = {"north": 0.3, "east": 0.25, "south": 0.2, "west": 0.15, "centre": 0.1}
"""Sizes as parts of the farm; each show may burst to all of it."""
DEFAULT_RATE = 200.0
"""Frames that end in a second. One machine of two cores bears it with PostgreSQL, Redis and four workers on it."""

# Ages only, so that the first worker may book a few seconds after its start; the rest is as shipped.
ENVIRONMENT = {"OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true", "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "5s"}

_FULL = 0.99
_POLL_SECONDS = 0.25
_STALL_SECONDS = 60.0
_FLUSH_SECONDS = 1.2
_WARM_UP_SECONDS = 5.0
_CALIBRATION_SECONDS = 6.0
_METERED_SECONDS = 8.0
_READERS_SHOWN = 10
_BACKLOG_READERS = ("backlog.", "pending.fetch_pending_jobs", "pending.fetch_waiting_")
"""Which readers of `row_meter` look for waiting work, by how their names begin; not the scan of a sweep."""
# A deep backlog, so that no show runs out of work.
_SPARE_FRAMES = 15_000
CORES_OF_A_FRAME = 3.7
_JOBS_OF_A_SHOW = 50
_LAYERS_KNOWN = "scheduler_backlog_layers"
_RESYNC_AGE = "scheduler_backlog_resync_age_seconds"

_IDLE = text("SELECT sum(int_cores_idle) / 100.0 FROM host")
_PROCS = text("SELECT count(*) FROM proc")
_BOOKED_AT = text(
    "SELECT extract(epoch FROM coalesce(pg_xact_commit_timestamp(xmin), ts_dispatched)), int_cores_reserved FROM proc"
    " ORDER BY 1"
)
_REPORTED = text("UPDATE host_stat SET ts_ping = current_timestamp, str_state = 'UP'")
_NOW = text("SELECT extract(epoch FROM clock_timestamp())")


@dataclass(frozen=True, slots=True)
class SteadyResult:
    """One phase with so many workers. Seconds; ``utilisation`` in percent of the cores. Rows and statements are for
    each frame booked, rows less the benchmark's own; ``own_rows`` are those its transactions of ends read, for each
    frame ended; ``rows_by_purpose`` those of the workers, ``rows_of_waiting_work`` those of what reads waiting jobs,
    layers and frames (both of the steady phase only). ``statement_us``: how long PostgreSQL planned and executed the
    statements of workers and beat, for each frame, where it counts that. Processor time is in microseconds for each
    frame booked.
    ``memory_mb`` is the greatest of the workers, ``layers_known`` the least and ``resync_age`` the greatest of their
    metrics, "-" where they have none.
    """

    phase: str
    workers: int
    seconds: float
    booked: int
    booked_per_second: float
    ended_per_second: float
    lost_percent: float
    lost_by_reason: str
    rows_returned: float
    rows_fetched: float
    own_rows: str
    statements: float
    statements_a_pass: float
    refill_p50: float
    refill_p99: float
    utilisation: float
    workers_us: float
    their_postgresql_us: float
    ends_postgresql_us: float
    redis_us: float
    rest_us: float
    memory_mb: int
    layers_known: str
    resync_age: str
    passes: int
    frames_a_pass: float
    empty_passes: int
    stage_ms: str
    most_read: str
    rows_of_waiting_work: float | None
    rows_by_purpose: str
    statement_us: str
    deadlocks: int
    cpu: str
    audit_failed: bool
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class _Own:
    """Rows the benchmark reads itself."""

    polls: int = 0
    ended: int = 0
    batches: int = 0
    returned_of_a_batch: float = 0.0
    fetched_of_a_batch: float = 0.0

    def per_end(self) -> str:
        """The rows of the batches, for each frame that they ended."""
        ratio = self.batches / max(1, self.ended)
        return f"{ratio * self.returned_of_a_batch:.0f} returned, {ratio * self.fetched_of_a_batch:.0f} fetched"


@dataclass(frozen=True, slots=True)
class Size:
    """How large the farm and its backlog are. ``frames`` wait in all shows together, in about so many ``layers``; None:
    what fills the farm and lasts, in layers of `FRAMES_OF_A_LAYER`."""

    hosts: int = 1_553
    frames: int | None = None
    layers: int | None = None


@dataclass
class _Site:
    bench: Workbench
    load: FarmLoad
    hosts: int
    workers: int
    code: str
    console: Console
    own: _Own = field(default_factory=_Own)


@dataclass(frozen=True)
class _Moment:
    """All that is read at the beginning and the end of a measured phase."""

    counters: Counter[str]
    tables: dict[str, int]
    cpu: Reading
    memory_mb: int
    layers_known: str
    resync_age: str
    statements: StatementTimes
    at: float


def run_steady(
    counts: Sequence[int],
    *,
    rate: float,
    seconds: float,
    console: Console,
    size: Size = Size(),
    base: str | None = None,
    rounds: int = 1,
) -> list[SteadyResult]:
    """Fill the farm, then let frames end at ``rate`` a second for ``seconds``, with each number of workers.

    ``base``: a commit whose workers and beat do the same by turns with those of this code.
    """
    results = []
    with code_of(base) if base else nullcontext() as code_of_base:
        codes: list[tuple[str, Path | None]] = [("", None), *([(f", {base}", code_of_base)] if base else [])]
        for number in range(1, rounds + 1):
            for count in counts:
                for name, code in codes:
                    console.print(
                        f"round {number} of {rounds}, {count} worker{'s' if count > 1 else ''}{name}: "
                        f"fill, then {rate:g} ends a second for {seconds:g} s"
                    )
                    results += _run(count, rate, seconds, console, size, name, code)
    if base:
        for count in counts:
            console.print(f"{count} worker{'s' if count > 1 else ''}: {_compared(results, count, base)}")
    return results


def _compared(results: Sequence[SteadyResult], workers: int, base: str) -> str:
    """The processor time of workers and their backends for each frame, to that of the base; medians of the rounds."""
    spent = {
        phase: median(
            result.workers_us + result.their_postgresql_us
            for result in results
            if (result.phase, result.workers) == (phase, workers)
        )
        for phase in ("steady", f"steady, {base}")
    }
    of_this, of_base = spent.values()
    return (
        f"workers and their PostgreSQL take {of_this:.0f} us of processor time a frame, {of_this / of_base:.2f} times "
        f"as much as at {base}"
    )


def write_farm(
    bench: Workbench,
    frames: int,
    hosts: Mapping[int, int] = HOSTS_1553,
    *,
    frames_of_a_layer: float = FRAMES_OF_A_LAYER,
) -> FarmLoad:
    """The farm with its shows, not handed over yet; ``frames`` wait in all, as many in each show."""
    load = FarmLoad()
    cores = sum(size * count for size, count in hosts.items())
    with bench.engine.begin() as connection:
        load.add_hosts(connection, hosts)
        for number, (name, part) in enumerate(SHOWS.items()):
            show = load.add_show(connection, name, size=part * cores, burst=cores)
            layers = workload(frames // len(SHOWS), random.Random(number), frames_of_a_layer=frames_of_a_layer)
            load.add_jobs(connection, show, cut(layers, _JOBS_OF_A_SHOW))
    prepare(bench, load)
    return load


def prepare(bench: Workbench, load: FarmLoad) -> None:
    """Let PostgreSQL know the farm as it is in use, then keep its shows back until `hand_over`."""
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    with bench.engine.begin() as connection:
        for show in load.shows.values():
            connection.execute(ACTIVATE, {"show": show.id, "on": False})
    # A session that ends says at once what it has read, which is not to be counted later.
    bench.engine.dispose()


def hand_over(bench: Workbench, load: FarmLoad) -> float:
    """Hand all shows over in one transaction; when that was, by the database's clock.

    No RQD reports: where the farm took minutes to write, its hosts were silent for as long.
    """
    with bench.engine.begin() as connection:
        connection.execute(_REPORTED)
        for show in load.shows.values():
            connection.execute(ACTIVATE, {"show": show.id, "on": True})
    with bench.engine.connect() as connection:
        return float(connection.execute(_NOW).scalar_one())


def _run(
    workers: int, rate: float, seconds: float, console: Console, size: Size, code_name: str, code: Path | None
) -> list[SteadyResult]:
    hosts = hosts_of(size.hosts)
    cores = sum(cores * count for cores, count in hosts.items())
    lasting = _WARM_UP_SECONDS + seconds + _METERED_SECONDS + _CALIBRATION_SECONDS
    frames = size.frames or int(cores / CORES_OF_A_FRAME + rate * lasting) + _SPARE_FRAMES
    frames_of_a_layer = frames / size.layers if size.layers else FRAMES_OF_A_LAYER
    with workbench(ENVIRONMENT, code=code, configuration=configuration()) as bench:
        leave_out(bench.engine)
        load = write_farm(bench, frames, hosts, frames_of_a_layer=frames_of_a_layer)
        site = _Site(bench, load, size.hosts, workers, code_name, console)
        console.print(f"  {load.frames} frames in {len(load.minutes)} layers wait for {load.cores} cores")
        module = Path(row_meter.__file__)
        shutil.copy(module, bench.fleet.directory)
        bench.workers(workers, "--include", module.stem)
        bench.fleet.beat()
        filled = _told(site, _fill(site))
        steady = _told(site, _steady(site, rate, seconds))
    return [filled, steady]


def _told(site: _Site, result: SteadyResult) -> SteadyResult:
    """Print the result at once, so that a run that is ended early was not for nothing."""
    site.console.print(
        f"  {result.phase}: {result.booked} booked, {result.lost_percent} % lost ({result.lost_by_reason}), "
        f"{result.rows_returned} rows a frame and {result.statements_a_pass} statements a pass, "
        f"refill {result.refill_p50} and {result.refill_p99} s, {result.utilisation} % of the cores in use, "
        f"their PostgreSQL {result.their_postgresql_us} us a frame ({result.statement_us}), "
        f"their rows {result.rows_by_purpose}"
    )
    return result


def _fill(site: _Site) -> SteadyResult:
    StatementTimes.forget(site.bench.engine)
    before = _moment(site)
    began = hand_over(site.bench, site.load)
    _wait_until_full(site)
    time.sleep(_FLUSH_SECONDS)
    after = _moment(site)
    with site.bench.engine.connect() as connection:
        bookings = [(float(at), int(cores)) for at, cores in connection.execute(_BOOKED_AT)]
    full = _FULL * site.load.cores * 100
    reached = sum(cores for _, cores in bookings) >= full
    at = weighted_percentile(bookings, 99) if bookings else after.at
    return _result(site, "fill", before, after, seconds=at - began, reached=reached)


def _wait_until_full(site: _Site) -> None:
    least, changed = float(site.load.cores), time.monotonic()
    while time.monotonic() - changed < _STALL_SECONDS:
        with site.bench.engine.connect() as connection:
            idle = float(connection.execute(_IDLE).scalar_one())
        site.own.polls += 1
        if idle <= (1 - _FULL) * site.load.cores:
            return
        if idle < least:
            least, changed = idle, time.monotonic()
        time.sleep(_POLL_SECONDS)
    site.console.print(f"  the fill stalled with {least:,.0f} cores idle")


def _steady(site: _Site, rate: float, seconds: float) -> SteadyResult:
    bench, clock, chance = site.bench, FarmClock(), random.Random(1)
    with bench.engine.connect() as connection:
        running = int(connection.execute(_PROCS).scalar_one())
    mean, began = max(1, running) / rate, time.time()
    ends = FrameEnds(
        bench.engine,
        lambda proc: _residual(proc, began) + chance.expovariate(1 / mean),
        ledger=Ledger(bench.client, owner="frame-ends"),
        changes=HostChanges(bench.client, bench.settings.coordination.namespace),
        on_booked=clock.booked,
        on_ended=clock.ended,
    )
    with ends:
        time.sleep(_WARM_UP_SECONDS)
        StatementTimes.forget(bench.engine)
        before, ended, batches, seen = _moment(site), ends.ended, ends.batches, ends.rows
        time.sleep(seconds)
        after = _moment(site)
        ended, batches, seen = ends.ended - ended, ends.batches - batches, ends.rows - seen
        late = ends.overdue
        of_waiting_work, by_reader = _metered(site)
        for name in [name for name in bench.fleet.processes if name.startswith("worker")]:
            bench.fleet.stop(name)
        bench.metrics_ports.clear()
        site.own = _calibrated(site, ends)
    site.own.ended, site.own.batches = ended, batches
    site.console.print(
        f"  {ended / seconds:.0f} frames ended a second, the last {late:.2f} s late; {dict(ends.outcomes)}"
    )
    result = _result(site, "steady", before, after, seconds=after.at - before.at, clock=clock, looked=seen)
    audit = run_audit(bench.engine, bench.client, bench.settings)
    return replace(
        result,
        rows_of_waiting_work=of_waiting_work,
        rows_by_purpose=by_reader,
        audit_failed=audit.failed,
        passed=result.passed and not audit.failed,
    )


def _metered(site: _Site) -> tuple[float, str]:
    """Rows that waiting work is read from, for each frame booked, and those of each reader, the most first."""
    switch = site.bench.fleet.directory / row_meter.SWITCH
    switch.touch()
    before = site.bench.counters()
    time.sleep(_METERED_SECONDS)
    spent = Spent.between(before, site.bench.counters())
    switch.unlink()
    prefix = f"{row_meter.SERIES}_total:"
    rows = {key.removeprefix(prefix): count for key, count in spent.counters.items() if key.startswith(prefix)}
    readers = sorted(rows.items(), key=lambda reader: -reader[1])[:_READERS_SHOWN]
    waiting = sum(count for name, count in rows.items() if name.startswith(_BACKLOG_READERS))
    told = ", ".join(f"{name} {spent.per_frame(count)}" for name, count in readers)
    return spent.per_frame(waiting), f"{spent.per_frame(sum(rows.values()))} in all: {told}"


def _residual(proc: RunningProc, began: float) -> float:
    """Frames that ran before the ends began count from that moment."""
    return max(0.0, began - proc.booked_at)


def _calibrated(site: _Site, ends: FrameEnds) -> _Own:
    """What a transaction of ends reads. No worker runs any more, frames end at the same rate."""
    time.sleep(_FLUSH_SECONDS)
    before, batches, looked = site.bench.counters(), ends.batches, ends.rows
    time.sleep(_CALIBRATION_SECONDS)
    spent = Spent.between(before, site.bench.counters())
    batches, looked = max(1, ends.batches - batches), ends.rows - looked
    return _Own(
        returned_of_a_batch=(spent["pg_tup_returned"] - looked) / batches,
        fetched_of_a_batch=(spent["pg_tup_fetched"] - looked) / batches,
    )


def _moment(site: _Site) -> _Moment:
    cpu = site.bench.cpu()
    with site.bench.engine.connect() as connection:
        tables = rows_by_table(connection)
    layers, ages = (site.bench.samples(name) for name in (_LAYERS_KNOWN, _RESYNC_AGE))
    return _Moment(
        site.bench.counters(),
        tables,
        cpu,
        memory_mb=max(resident_mb(pid) for pid in site.bench.processes()["worker"]),
        layers_known=f"{min(layers):.0f}" if layers else "-",
        resync_age=f"{max(ages):.1f}" if ages else "-",
        statements=StatementTimes.read(site.bench.engine),
        at=time.time(),
    )


def _result(
    site: _Site,
    phase: str,
    before: _Moment,
    after: _Moment,
    *,
    seconds: float,
    clock: FarmClock | None = None,
    looked: int = 0,
    reached: bool = True,
) -> SteadyResult:
    spent, own = Spent.between(before.counters, after.counters), site.own
    polled = own.polls * site.hosts
    returned = spent["pg_tup_returned"] - looked - polled - own.batches * own.returned_of_a_batch
    fetched = spent["pg_tup_fetched"] - looked - own.batches * own.fetched_of_a_batch
    p50, p99 = clock.refill_seconds(before.at, after.at, 50, 99) if clock else (0.0, 0.0)
    with site.bench.engine.connect() as connection:
        idle = float(connection.execute(_IDLE).scalar_one())
    cores = clock.mean_cores(before.at, after.at) if clock else site.load.cores - idle
    read_rows = {name: rows - before.tables.get(name, 0) for name, rows in after.tables.items()}
    most = sorted(read_rows.items(), key=lambda part: -part[1])[:6]
    cpu = after.cpu.since(before.cpu)
    window = after.at - before.at
    micros = cpu.micros(spent.booked)
    shares = ", ".join(f"{name} {100 * used / window:.0f} %" for name, used in cpu.groups.items())
    return SteadyResult(
        phase=f"{phase}{site.code}",
        workers=site.workers,
        seconds=round(seconds, 2),
        booked=spent.booked,
        booked_per_second=round(spent.booked / max(seconds, 0.001), 1),
        ended_per_second=round(own.ended / seconds, 1),
        lost_percent=round(spent.lost_percent, 2),
        lost_by_reason=spent.lost_by_reason,
        rows_returned=spent.per_frame(returned),
        rows_fetched=spent.per_frame(fetched),
        own_rows=own.per_end(),
        statements=spent.per_frame(spent["scheduler_sql_statements_total"], 3),
        statements_a_pass=round(spent["scheduler_sql_statements_total"] / max(1, spent.passes), 1),
        refill_p50=round(p50, 3),
        refill_p99=round(p99, 3),
        utilisation=round(100 * cores / site.load.cores, 2),
        workers_us=micros[WORKERS],
        their_postgresql_us=micros[THEIR_SESSIONS],
        ends_postgresql_us=micros[OUR_SESSIONS],
        redis_us=micros[REDIS],
        rest_us=micros[THE_REST],
        memory_mb=after.memory_mb,
        layers_known=after.layers_known,
        resync_age=after.resync_age,
        passes=spent.passes,
        frames_a_pass=round(spent.booked / max(1, spent.passes), 1),
        empty_passes=spent.empty_passes,
        stage_ms=spent.stage_ms(),
        most_read=", ".join(f"{name} {spent.per_frame(rows)}" for name, rows in most),
        rows_of_waiting_work=None,
        rows_by_purpose="-",
        statement_us=after.statements.of_each(spent.booked),
        deadlocks=int(spent["pg_deadlocks"]),
        cpu=f"{shares}, others {cpu.others_percent(window)} % of the machine",
        audit_failed=False,
        passed=reached and spent.booked > 0 and spent.lost_percent <= MOST_LOST_PERCENT,
    )
