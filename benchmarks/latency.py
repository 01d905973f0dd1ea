"""The latency benchmark: from COMMIT to RUNNING, with beat and settings at defaults and RQDs that speak real gRPC.

How long does a new job wait on an idle farm, and how long is a core idle after a frame's end while frames wait? The
latter is asked with ends far apart, each of which finds the farm at rest, and with ends close together. And how long
does a new job wait on idle hosts beside 1,000,000 frames of its show which need more memory than any host has? A frame
is RUNNING when the transaction that says so is committed (commit timestamps of PostgreSQL), and started when the
LaunchFrame call has reached its RQD.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import TypeVar

from rich.console import Console
from sqlalchemy import text

from benchmarks.farm_load import FarmLoad, JobLoad, Work
from benchmarks.proc_times import read
from benchmarks.workbench import Workbench, workbench
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec, ShowIds
from opencue_sched.embedded.rqds.simulated_host import Behaviour, FrameRun
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.embedded.servers.processes import free_port

HOSTS = 8
CORES_OF_EACH = 4
BACKLOG_FRAMES = 60
GOAL_MEDIAN_MS, GOAL_P99_MS = 150.0, 600.0
WAITING_JOBS, LAYERS_OF_EACH, FRAMES_OF_EACH = 250, 80, 50
"""1,000,000 frames in 20,000 layers."""

# Ages only, so that the first worker may book a few seconds after its start; the rest is as shipped.
ENVIRONMENT = {
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "2s",
}

_Result = TypeVar("_Result")

_WAIT_SECONDS = 30.0
_JOBS_WRITTEN = 10
"""By one transaction: no statement takes long enough to be cancelled."""
_POLL_SECONDS = 0.005
_SETTLED_SECONDS = 3.0
_PAUSE_SECONDS = (0.4, 2.2)
_BURST_PAUSE_SECONDS = (0.02, 0.4)

_TRANSACTION = text("SELECT CAST(pg_current_xact_id() AS text)")
_COMMITTED_AT = text("SELECT extract(epoch FROM pg_xact_commit_timestamp(CAST(:id AS xid)))")
_RUNNING_SINCE = text("SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin)) FROM proc WHERE pk_frame = :frame")
_UP = text("SELECT count(*) FROM host JOIN host_stat USING (pk_host) WHERE str_state = 'UP'")
_BUSY = text("SELECT count(*) FROM proc")

# Histograms of the workers: where a pass spends its time.
_STAGES = {
    "scan": "scheduler_active_scan_duration_seconds_sum",
    "gather": "scheduler_job_query_duration_seconds_sum",
    "plan": "scheduler_plan_duration_seconds_sum",
    "book": "scheduler_book_duration_seconds_sum",
    "commit": "scheduler_commit_duration_seconds_sum",
    "launch": "scheduler_launch_duration_seconds_sum",
}


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """One question's answer. Milliseconds; ``stage_ms`` are means per round, summed over workers and passes."""

    phase: str
    workers: int
    rounds: int
    median_ms: float
    p95_ms: float
    p99_ms: float
    longest_ms: float
    started_median_ms: float
    started_p99_ms: float
    stage_ms: str
    passes_per_round: float
    cpu_of_others_percent: float
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class _Site:
    bench: Workbench
    farm: SimulatedFarm
    show: ShowIds
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def new_job(self, frames: int) -> tuple[tuple[str, ...], float]:
        """Write a job of frames that do not end by themselves; their ids, and when its transaction was committed."""
        with self.bench.engine.connect() as connection:
            layers = [LayerSpec(frames=frames, command="simulate hang")]
            job = Farm(connection).jobs(
                [JobSpec(name=f"job-{uuid.uuid4().hex[:12]}", layers=layers, show=self.show, os=None)]
            )[0]
            transaction = connection.execute(_TRANSACTION).scalar()
            connection.commit()
            at = connection.execute(_COMMITTED_AT, {"id": transaction}).scalar()
        assert at is not None, "the server keeps no commit timestamps"
        return job.frames, float(at)

    def running_since(self, run: FrameRun) -> float:
        """When the frame's RUNNING was committed, not later than its start (a report may have touched the proc)."""
        started = _wall_clock(run.started)
        with self.bench.engine.connect() as connection:
            at = connection.execute(_RUNNING_SINCE, {"frame": run.frame_id}).scalar()
        return started if at is None else min(float(at), started)

    def busy(self) -> int:
        with self.bench.engine.connect() as connection:
            return int(connection.execute(_BUSY).scalar() or 0)

    def pause(self, between: tuple[float, float]) -> None:
        time.sleep(self.chance.uniform(*between))


def run_latency(*, workers: int, rounds: int, console: Console) -> list[LatencyResult]:
    """All questions for one number of workers, on a fleet of its own."""
    with _site(workers) as site:
        _warm_up(site)
        results = [_measure(site, "new job, idle farm", workers, _new_jobs(site, rounds), console)]
        _fill(site)
        freed = _freed_cores(site, rounds, _PAUSE_SECONDS)
        results.append(_measure(site, "freed core, one at a time", workers, freed, console))
        freed = _freed_cores(site, rounds, _BURST_PAUSE_SECONDS)
        results.append(_measure(site, "freed core, busy farm", workers, freed, console))
    with _site(workers) as site:
        _write_backlog(site)
        _warm_up(site)
        phase = "new job, 1,000,000 frames wait"
        results.append(_measure(site, phase, workers, _new_jobs(site, rounds), console))
    return results


def _measure(
    site: _Site, phase: str, workers: int, waits: Iterator[tuple[float, float]], console: Console
) -> LatencyResult:
    processes, began = site.bench.processes(), time.monotonic()
    before, cpu_before = site.bench.counters(), read(processes)
    pairs = list(waits)
    cpu, seconds = read(processes).since(cpu_before), time.monotonic() - began
    spent = Counter(site.bench.counters())
    spent.subtract(before)
    running, started = ([1000 * seconds for seconds in column] for column in zip(*pairs, strict=True))
    points = quantiles(running, n=100, method="inclusive")
    stages = {name: 1000 * spent[key] / len(pairs) for name, key in _STAGES.items()}
    result = LatencyResult(
        phase=phase,
        workers=workers,
        rounds=len(pairs),
        median_ms=round(median(running), 1),
        p95_ms=round(points[94], 1),
        p99_ms=round(points[98], 1),
        longest_ms=round(max(running), 1),
        started_median_ms=round(median(started), 1),
        started_p99_ms=round(quantiles(started, n=100, method="inclusive")[98], 1),
        stage_ms=" ".join(f"{name} {value:.1f}" for name, value in stages.items()),
        passes_per_round=round(spent["scheduler_pass_terminated_reason_total"] / len(pairs), 2),
        cpu_of_others_percent=cpu.others_percent(seconds),
        passed=median(running) <= GOAL_MEDIAN_MS and points[98] <= GOAL_P99_MS,
    )
    console.print(f"{phase}, {workers} worker(s): median {result.median_ms} ms, p99 {result.p99_ms} ms")
    return result


def _new_jobs(site: _Site, rounds: int) -> Iterator[tuple[float, float]]:
    """(to RUNNING, to its start at RQD) for one new job after the other, in seconds."""
    for _ in range(rounds):
        (frame,), committed = site.new_job(1)
        run = _wait(partial(site.farm.runs, frame))[0]
        yield site.running_since(run) - committed, _wall_clock(run.started) - committed
        site.farm.finish(run.host_name, frame)
        _wait(lambda: site.busy() == 0)
        site.pause(_PAUSE_SECONDS)


def _freed_cores(site: _Site, rounds: int, pauses: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """The same from a frame's end to the next start on its host, with more frames waiting than cores.

    The frames of the shorter pauses end before the one before has its successor: the time of each is its own.
    """
    ended: list[tuple[str, str]] = []
    seen = len(site.farm.runs())
    for number in range(rounds):
        if number % (BACKLOG_FRAMES // 2) == 0:
            site.new_job(BACKLOG_FRAMES)
        host, frame = site.chance.choice(sorted((host, frame) for frame, host in site.farm.running().items()))
        site.farm.finish(host, frame)
        ended.append((host, frame))
        site.pause(pauses)
    _wait(lambda: len(site.farm.runs()) >= seen + rounds)
    every = site.farm.runs()
    ends = {run.frame_id: run.ended for run in every if run.ended is not None}
    followers = every[seen:]
    for host, frame in ended:
        at = ends[frame]
        run = next(run for run in followers if run.host_name == host and run.started >= at)
        followers.remove(run)
        yield site.running_since(run) - _wall_clock(at), run.started - at


def _warm_up(site: _Site) -> None:
    """Open every connection and cache once."""
    frames, _ = site.new_job(HOSTS * CORES_OF_EACH)
    _wait(lambda: set(frames) <= site.farm.running().keys())
    for frame, host in site.farm.running().items():
        site.farm.finish(host, frame)
    _wait(lambda: site.busy() == 0)
    time.sleep(_SETTLED_SECONDS)


def _write_backlog(site: _Site) -> None:
    """Work of the show that is before any other in its order and fits no host, each layer with a memory of its own."""
    load = FarmLoad()
    memories = itertools.count(500)
    jobs = [
        JobLoad([Work(FRAMES_OF_EACH, 1, next(memories), 10) for _ in range(LAYERS_OF_EACH)], priority=200)
        for _ in range(WAITING_JOBS)
    ]
    for first in range(0, WAITING_JOBS, _JOBS_WRITTEN):
        with site.bench.engine.begin() as connection:
            load.add_jobs(connection, site.show, jobs[first : first + _JOBS_WRITTEN])
    with site.bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))


def _fill(site: _Site) -> None:
    site.new_job(HOSTS * CORES_OF_EACH)
    _wait(lambda: len(site.farm.running()) == HOSTS * CORES_OF_EACH)
    time.sleep(_SETTLED_SECONDS)


@contextlib.contextmanager
def _site(workers: int) -> Iterator[_Site]:
    port = free_port()
    farm = SimulatedFarm(
        host_specs(HOSTS, cores=CORES_OF_EACH, tags=("general",)),
        report_address=f"127.0.0.1:{port}",
        behaviour=Behaviour(),
        report_seconds=(10.0, 30.0),
    )
    with farm:
        environment: Mapping[str, str] = {
            **ENVIRONMENT,
            "OPENCUE_SCHED_RELEASE__PORT": str(port),
            "OPENCUE_SCHED_RQD__ADDRESSES": json.dumps(farm.addresses),
        }
        with workbench(environment) as bench:
            with bench.engine.begin() as connection:
                show = Farm(connection).default_show()
            bench.fleet.report_service()
            _wait(lambda: _hosts_up(bench, farm))
            bench.workers(workers)
            bench.fleet.beat()
            yield _Site(bench, farm, show)


def _hosts_up(bench: Workbench, farm: SimulatedFarm) -> bool:
    for spec in farm.specs:
        farm.report_now(spec.name)
    with bench.engine.connect() as connection:
        return int(connection.execute(_UP).scalar() or 0) == HOSTS


def _wall_clock(monotonic: float) -> float:
    """A moment of time.monotonic() by the clock that PostgreSQL on this machine stamps commits with."""
    return monotonic + time.time() - time.monotonic()


def _wait(check: Callable[[], _Result]) -> _Result:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (result := check()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_WAIT_SECONDS:.0f} s in vain; is the fleet at work?")
        time.sleep(_POLL_SECONDS)
    return result
