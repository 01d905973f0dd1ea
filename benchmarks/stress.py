"""The stress benchmark: drain a big farm, then saturate a small one, through real Celery workers in dry run.

Throughput is counted by commit time (PostgreSQL's commit timestamps where the server keeps them, otherwise samples of
the proc count every 50 ms), never by ts_booked: a batch shares one ts_booked. On a Cuebot's database a show that is
handed over is left alone for half a minute: all clocks start when that is over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Self, cast

import redis
from rich.console import Console
from sqlalchemy import Engine, text

from benchmarks.proc_times import Reading
from benchmarks.workbench import REDIS, THEIR_SESSIONS, WORKERS, Workbench, code_of, workbench
from opencue_sched.accounting import keys
from opencue_sched.accounting.imported_shows import ImportNote
from opencue_sched.embedded.farms.stress_farms import StressFarm, drain_farm, remove_stress_farms, saturation_farm
from opencue_sched.insight.audit import run_audit
from opencue_sched.store.schema import check_schema, read_origin

STALL_SECONDS = 10.0
_FIRST_BOOKING_SECONDS = 120.0
"""How long the first booking may take: the workers are still starting then, on a busy machine for a minute."""
POLL_SECONDS = 0.05

ENVIRONMENT = {
    "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    "OPENCUE_SCHED_QUEUE__DISPATCH_FRAMES_PER_LAYER_LIMIT": "50",
    "OPENCUE_SCHED_QUEUE__MAX_JOBS_PER_CLUSTER_PASS": "50",
    "OPENCUE_SCHED_QUEUE__MEMORY_STRANDED_THRESHOLD": "100MB",
    "OPENCUE_SCHED_QUEUE__CLUSTER_SATURATED_SLEEP": "500ms",
    "OPENCUE_SCHED_QUEUE__JOB_BACK_OFF_DURATION": "2s",
    "OPENCUE_SCHED_QUEUE__ACTIVE_SCAN_INTERVAL": "1s",
    "OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL": "1s",
    "OPENCUE_SCHED_QUEUE__MANUAL_TAGS_CHUNK_SIZE": "2",
    "OPENCUE_SCHED_HOST_CACHE__HOST_STALENESS_THRESHOLD": "1h",
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "5s",
}

_NEARLY_ALL = 0.99
"""The part of a drain's frames with which it counts as done."""

_PROCS = text("SELECT count(*) FROM proc WHERE pk_show = :show")
_HAS_COMMIT_TIMES = text("SELECT current_setting('track_commit_timestamp', true) = 'on'")
_NOW = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS float8)")
_COMMIT_TIMES = text(
    "SELECT CAST(extract(epoch FROM pg_xact_commit_timestamp(xmin)) AS float8) FROM proc WHERE pk_show = :show"
)
_COMMIT_SPAN = text(
    "SELECT extract(epoch FROM max(at) - min(at)) AS span, count(DISTINCT at) AS commits "
    "FROM (SELECT pg_xact_commit_timestamp(xmin) AS at FROM proc WHERE pk_show = :show) times"
)
ACTIVATE = text("UPDATE show SET b_scheduler_managed = :on WHERE pk_show = :show")
_PAUSE = text("UPDATE job SET b_paused = true WHERE pk_show = :show")
# Frames still waiting though their job, some subscription they reach, and a host there all have room for them.
PLACEABLE = text(
    """
    WITH used AS (
        SELECT h.pk_alloc, sum(p.int_cores_reserved) AS cores FROM proc p JOIN host h USING (pk_host)
        WHERE p.pk_show = :show GROUP BY h.pk_alloc
    ), jobs AS (
        SELECT j.pk_job, r.int_max_cores - coalesce((SELECT sum(int_cores_reserved) FROM proc p
               WHERE p.pk_job = j.pk_job), 0) AS room
        FROM job j JOIN job_resource r USING (pk_job) WHERE j.pk_show = :show
    )
    SELECT count(*) FROM layer l
    JOIN layer_stat s USING (pk_layer)
    JOIN jobs j ON j.pk_job = l.pk_job AND j.room >= l.int_cores_min
    WHERE s.int_waiting_count > 0 AND EXISTS (
        SELECT 1 FROM host h
        JOIN subscription sub ON sub.pk_alloc = h.pk_alloc AND sub.pk_show = :show
        LEFT JOIN used u ON u.pk_alloc = h.pk_alloc
        WHERE h.int_cores_idle >= l.int_cores_min AND h.int_mem_idle >= l.int_mem_min
          AND sub.int_burst - coalesce(u.cores, 0) >= l.int_cores_min
          AND string_to_array(h.str_tags, ' ') && string_to_array(replace(l.str_tags, ' ', ''), '|')
    )
    """
)


@dataclass(frozen=True, slots=True)
class FrameCost:
    """Processor time in microseconds for each frame booked, from the moment from which the show may be booked to the
    first look that finds 99 % of the phase's frames booked; None where a phase ends with fewer.
    ``frames_per_processor_second`` are those of workers, their PostgreSQL backends and Redis together."""

    workers_us: float | None = None
    their_postgresql_us: float | None = None
    redis_us: float | None = None
    frames_per_processor_second: float | None = None

    @classmethod
    def of(cls, spent: Reading, frames: int) -> Self:
        micros = spent.micros(frames)
        parts = micros[WORKERS], micros[THEIR_SESSIONS], micros[REDIS]
        return cls(*parts, round(1e6 / max(sum(parts), 0.1), 1))


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase's figures. Rates are per second of the span between the first and the last commit; ``seconds_to_99``
    is from the hand-over to the commit with which 99 % of what was booked at last were.

    Processor time is that of `FrameCost`."""

    phase: str
    workers: int
    frames: int
    booked: int
    seconds: float
    seconds_to_99: float
    frames_per_second: float
    commits: int
    timing: str
    hosts_attempted: int
    wasted_attempts: int
    lost_bookings: int
    lost_by_reason: str
    claim_conflicts: int
    passes: int
    lua_calls_per_frame: float
    redis_commands_per_frame: float
    sql_statements_per_frame: float
    rows_written_per_frame: float
    workers_us: float | None
    their_postgresql_us: float | None
    redis_us: float | None
    frames_per_processor_second: float | None
    deadlocks: int
    cores_booked: int
    burst_cores: int
    layers_placeable_but_waiting: int
    audit_failed: bool
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_by_turns(
    *, workers: int, scale: float, database_url: str | None, base: str | None, console: Console
) -> list[PhaseResult]:
    """The benchmark, and once more with the workers and beat of the commit ``base``, if there is one."""
    results = []
    with code_of(base) if base else nullcontext() as code_of_base:
        for name, code in [("", None), *([(f", {base}", code_of_base)] if base else [])]:
            with workbench(ENVIRONMENT, database_url=database_url, code=code) as bench:
                if base:
                    console.print(f"with the code of {base}" if code else "with this code")
                    with bench.engine.begin() as connection:
                        remove_stress_farms(connection)
                found = run_stress(bench, workers=workers, scale=scale, console=console)
                results += [replace(result, phase=f"{result.phase}{name}") for result in found]
    return results


def run_stress(bench: Workbench, *, workers: int, scale: float, console: Console) -> list[PhaseResult]:
    """Seed both farms, start the fleet, and let it work on one after the other."""
    with bench.engine.begin() as connection:
        drain = drain_farm(connection, scale)
        saturation = saturation_farm(connection, scale)
        for farm in (drain, saturation):
            connection.execute(ACTIVATE, {"show": farm.show.id, "on": False})
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    console.print(
        f"farms: {drain.frames} frames on {len(drain.hosts)} hosts, "
        f"{saturation.frames} frames on {len(saturation.hosts)} hosts"
    )
    with bench.engine.connect() as connection:
        set_based = check_schema(connection).set_based_frames
    console.print(f"counters and history of started frames: {'once a plan' if set_based else 'by the frame triggers'}")
    bench.workers(workers)
    bench.fleet.beat()
    results = []
    for name, farm, target in (("drain", drain, drained), ("saturation", saturation, _saturated)):
        results.append(run_phase(bench, name, farm, workers, target, console))
        with bench.engine.begin() as connection:
            connection.execute(_PAUSE, {"show": farm.show.id})
    return results


def drained(result: PhaseResult) -> bool:
    """The goal of a drain phase: nearly every frame is booked."""
    return result.booked >= _NEARLY_ALL * result.frames


def _saturated(result: PhaseResult) -> bool:
    return result.layers_placeable_but_waiting == 0 and result.cores_booked <= result.burst_cores


def run_phase(
    bench: Workbench,
    name: str,
    farm: StressFarm,
    workers: int,
    target: Callable[[PhaseResult], bool],
    console: Console,
) -> PhaseResult:
    """Hand the farm's show over, wait until nothing more is booked, and say what that took."""
    before = bench.counters()
    with bench.engine.begin() as connection:
        connection.execute(ACTIVATE, {"show": farm.show.id, "on": True})
    began = ours_from(bench.engine, bench.client, farm.show.id)
    while (seconds := began - database_clock(bench.engine)) > 0:
        console.print(f"  the show is left alone for {seconds:.1f} s")
        time.sleep(seconds)
    samples, cost = _watch(bench, farm, console)
    span, timing = _sampled_span(samples), "samples every 50 ms"
    seconds_to_99 = seconds_to(99, samples)
    after = bench.counters()
    spent: Counter[str] = Counter({key: after[key] - before[key] for key in after})
    exact = commit_span(bench.engine, farm.show.id)
    commits = 0
    if exact is not None:
        (span, commits), timing = exact, "commit timestamps"
        with bench.engine.connect() as connection:
            times = sorted(connection.execute(_COMMIT_TIMES, {"show": farm.show.id}).scalars())
        seconds_to_99 = seconds_to(99, [(at - began, number) for number, at in enumerate(times, start=1)])
    with bench.engine.connect() as connection:
        booked = int(connection.execute(_PROCS, {"show": farm.show.id}).scalar() or 0)
        placeable = int(connection.execute(PLACEABLE, {"show": farm.show.id}).scalar() or 0)
        cores = connection.execute(
            text("SELECT coalesce(sum(int_cores_reserved), 0) / 100 FROM proc WHERE pk_show = :show"),
            {"show": farm.show.id},
        ).scalar()
    audit = run_audit(bench.engine, bench.client, bench.settings)
    console.print("\n".join(audit.lines()))
    per_frame = max(1, booked)
    result = PhaseResult(
        phase=name,
        workers=workers,
        frames=farm.frames,
        booked=booked,
        seconds=round(span, 3),
        seconds_to_99=round(seconds_to_99, 3),
        frames_per_second=round(booked / span, 1) if span > 0 else 0.0,
        commits=commits,
        timing=timing,
        hosts_attempted=int(spent["scheduler_hosts_attempted_total"]),
        wasted_attempts=int(spent["scheduler_wasted_attempts_total"]),
        lost_bookings=int(spent["scheduler_bookings_lost_total"]),
        lost_by_reason=", ".join(
            f"{key.partition(':')[2]} {int(count)}"
            for key, count in sorted(spent.items())
            if key.startswith("scheduler_bookings_lost_total:") and count
        ),
        claim_conflicts=int(spent["scheduler_messages_dropped_total:held"]),
        passes=int(spent["scheduler_pass_terminated_reason_total"]),
        lua_calls_per_frame=round(spent["redis_lua_calls"] / per_frame, 2),
        redis_commands_per_frame=round(spent["redis_commands"] / per_frame, 2),
        sql_statements_per_frame=round(spent["scheduler_sql_statements_total"] / per_frame, 3),
        rows_written_per_frame=round(
            (spent["pg_tup_inserted"] + spent["pg_tup_updated"] + spent["pg_tup_deleted"]) / per_frame, 2
        ),
        workers_us=cost.workers_us,
        their_postgresql_us=cost.their_postgresql_us,
        redis_us=cost.redis_us,
        frames_per_processor_second=cost.frames_per_processor_second,
        deadlocks=int(spent["pg_deadlocks"]),
        cores_booked=int(cores or 0),
        burst_cores=int(farm.burst_cores),
        layers_placeable_but_waiting=placeable,
        audit_failed=audit.failed,
        passed=False,
    )
    return PhaseResult(**{**result.as_dict(), "passed": target(result) and not audit.failed})  # type: ignore[arg-type]


def database_clock(engine: Engine) -> float:
    """Epoch seconds by the database's clock."""
    with engine.connect() as connection:
        return float(connection.execute(_NOW).scalar_one())


def ours_from(engine: Engine, client: redis.Redis, show_id: str) -> float:
    """From when on a show that has just been handed over may be booked, in epoch seconds by the database's clock.

    Now, unless there may be Cuebots: they may take the show for their own a while longer, and the worker that finds it
    first notes until when.
    """
    with engine.connect() as connection:
        left_alone = read_origin(connection) == "cuebot"
    deadline = time.monotonic() + STALL_SECONDS
    while left_alone and time.monotonic() < deadline:
        note = ImportNote.parse(cast("str | None", client.hget(keys.IMPORTED, show_id)))
        if note is not None:
            seconds, micros = client.time()
            return database_clock(engine) + max(0.0, note.due - (seconds + micros / 1e6))
        time.sleep(POLL_SECONDS)
    return database_clock(engine)


def seconds_to(percent: float, counts: Sequence[tuple[float, int]]) -> float:
    """When a count that grows first reached so many percent of what it is at last; 0 of nothing. ``counts`` are
    (seconds, count) by time."""
    wanted = percent / 100 * counts[-1][1] if counts else 0
    return next((at for at, count in counts if count >= wanted), 0.0) if wanted else 0.0


def _watch(bench: Workbench, farm: StressFarm, console: Console) -> tuple[list[tuple[float, int]], FrameCost]:
    """Follow the proc count until it stalls or everything is booked: seconds since the start, and the count then; and
    what a frame costs."""
    samples: list[tuple[float, int]] = []
    cost = FrameCost()
    cpu_before = bench.cpu()
    started, shown = time.monotonic(), -1.0
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while True:
            booked = int(connection.execute(_PROCS, {"show": farm.show.id}).scalar() or 0)
            now = time.monotonic() - started
            if not samples or booked != samples[-1][1]:
                samples.append((now, booked))
                if cost.workers_us is None and booked >= _NEARLY_ALL * farm.frames:
                    cost = FrameCost.of(bench.cpu().since(cpu_before), booked)
            if now - shown >= 1.0:
                console.print(f"  {booked} of {farm.frames} booked")
                shown = now
            patience = STALL_SECONDS if booked else _FIRST_BOOKING_SECONDS
            if booked >= farm.frames or now - samples[-1][0] > patience:
                return samples, cost
            time.sleep(POLL_SECONDS)


def _sampled_span(samples: Sequence[tuple[float, int]]) -> float:
    """Seconds from the start to the last sample that found more booked."""
    growing = [at for at, count in samples if count > 0]
    return growing[-1] if growing else 0.0


def commit_span(engine: Engine, show_id: str) -> tuple[float, int] | None:
    """Seconds between the first and the last commit, and the number of commits; None when the server keeps no times."""
    with engine.connect() as connection:
        if not connection.execute(_HAS_COMMIT_TIMES).scalar():
            return None
        row = connection.execute(_COMMIT_SPAN, {"show": show_id}).one()
    return (float(row.span), int(row.commits)) if row.span else None
