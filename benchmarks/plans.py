"""What a plan costs by itself: 1,000 frames on 10,000 hosts, with 20,000 waiting layers, each of a memory of its own.

No stores and no processes: the planner, the backlog and the host cache of a worker in memory. What is measured is the
processor time from the backlog's work to the verdicts, without that of PostgreSQL's answers, which are made up
beforehand. *Empty*: all hosts are idle. *Full*: of each tenth host one frame has ended, so that nearly each frame of
the plan needs a search of its own, for which there is no goal.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.farm_load import HOSTS_10000, MEMORY_GB_PER_CORE, PARTS, JobLoad, Work, cut, workload
from benchmarks.figures import Spread
from opencue_sched.domain.caps import Caps, Headroom
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.hosts import Host
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import Snapshot, Waiting
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.domain.states import ThreadMode
from opencue_sched.placement.backlog import Backlog
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.planner import Planner
from opencue_sched.placement.policy import policy_for
from opencue_sched.settings import HostCacheSettings, Queue

SHOWS, JOBS_OF_A_SHOW, LAYERS, FRAMES_OF_A_LAYER = 5, 50, 20_000, 50
MOST_PLAN_MS = 100.0
_FACILITY, _ALLOC, _TAGS = "facility", "alloc", frozenset({"general"})
_KB_A_GB = 1024 * 1024
_PORTION = 200


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plans of one farm. ``plan_ms`` is processor time; ``reads`` how often the plan asked for portions."""

    phase: str
    rounds: int
    hosts: int
    layers: int
    frames: int
    reads: int
    plan_ms: Spread
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def run_plans(*, rounds: int, console: Console) -> list[PlanResult]:
    """So many plans of each farm."""
    jobs = list(_jobs(random.Random(1)))
    return [
        _measure("empty", _hosts(), jobs, rounds, console, most_ms=MOST_PLAN_MS),
        _measure("full", list(_freed(_hosts(), random.Random(2))), jobs, rounds, console),
    ]


def _measure(
    phase: str, hosts: Sequence[Host], jobs: Sequence[Job], rounds: int, console: Console, *, most_ms: float = math.inf
) -> PlanResult:
    plans = [_plan(hosts, jobs) for _ in range(rounds)]
    spent = Spread.of([1000 * seconds for seconds, _, _ in plans], digits=1)
    _, planned, reads = plans[-1]
    console.print(f"  {phase}: {planned} frames planned in {spent} ms of the processor")
    layers = sum(len(job.layers) for job in jobs)
    return PlanResult(phase, rounds, len(hosts), layers, planned, reads, spent, spent.median <= most_ms)


def _plan(hosts: Sequence[Host], jobs: Sequence[Job]) -> tuple[float, int, int]:
    """One plan of a process that has just read all: processor time, frames planned, and reads of portions."""
    backlog = Backlog()
    backlog.apply(((job, layer, "") for job in jobs for layer in job.layers), read_at=backlog.instant())
    pool = HostCache(HostCacheSettings(), _Fetched(hosts).fetch, instance="benchmark")
    pool.refresh(_FACILITY, sorted(_TAGS))
    clusters = [_cluster(show) for show in range(SHOWS)]
    cores = sum(host.total_cores for host in hosts)
    unlimited = Caps(Headroom(None, 0), Headroom(None, 0))
    number = itertools.count()
    for cluster in clusters:
        backlog.work([cluster], own=ALL_BUCKETS, now=0.0)  # the order is made once
    _search_for_garbage_as_workers_do()
    seconds, reads = 0.0, 0
    began = time.process_time()
    works = tuple(backlog.work([cluster], own=ALL_BUCKETS, now=0.0) for cluster in clusters)
    planner = Planner(
        Snapshot(
            works,
            {(cluster.show_id, _ALLOC): unlimited for cluster in clusters},
            {vertex: unlimited for job in jobs for vertex in (job.id, job.folder_id)},
            sizes={(cluster.show_id, _ALLOC): cores / SHOWS for cluster in clusters},
        ),
        pool,
        policy_for(Queue()),
        lambda: f"proc-{next(number)}",
        idle_cores=pool.idle_cores(clusters),
    )
    while wanted := planner.run():
        seconds += time.process_time() - began
        answers = [(waiting.layer.id, waiting.frames, _frames(waiting)) for waiting in wanted]
        reads += 1
        began = time.process_time()
        for layer_id, frames_waiting, frames in answers:
            backlog.apply_portion(layer_id, frames_waiting, frames, None, read_at=backlog.instant())
    planner.judge()
    seconds += time.process_time() - began
    return seconds, len(planner.procs()), reads


def _search_for_garbage_as_workers_do() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@dataclass(frozen=True)
class _Fetched:
    """What PostgreSQL answers when the hosts are read."""

    hosts: Sequence[Host]

    def fetch(self, _facility_id: str, _tags: Sequence[str] | None, _buckets: Collection[int]) -> Sequence[Host]:
        return self.hosts


def _cluster(show: int) -> Cluster:
    return Cluster(_FACILITY, f"show{show}", ClusterKind.ALLOC, tuple(_TAGS), _ALLOC)


def _hosts(counts: Mapping[int, int] = HOSTS_10000) -> list[Host]:
    numbers = itertools.count()
    return [_host(f"host{next(numbers):05d}", cores) for cores, hosts in counts.items() for _ in range(hosts)]


def _host(name: str, cores: int) -> Host:
    memory_kb = cores * MEMORY_GB_PER_CORE * _KB_A_GB
    return Host(
        name,
        name,
        _FACILITY,
        _ALLOC,
        _TAGS,
        ("linux",),
        ThreadMode.AUTO,
        total_centicores=100 * cores,
        idle_centicores=100 * cores,
        total_memory_kb=memory_kb,
        idle_memory_kb=memory_kb,
    )


def _freed(hosts: Sequence[Host], chance: random.Random) -> Iterator[Host]:
    """The hosts without anything idle but, on each tenth, what one frame had."""
    for number, host in enumerate(hosts):
        cores = 0 if number % 10 else min(chance.choices(list(PARTS), list(PARTS.values()))[0], host.total_cores)
        memory_kb = cores * MEMORY_GB_PER_CORE * _KB_A_GB
        yield replace(host, idle_centicores=100 * cores, idle_memory_kb=memory_kb)


def _jobs(chance: random.Random) -> Iterator[Job]:
    per_show = LAYERS // SHOWS * FRAMES_OF_A_LAYER
    for show in range(SHOWS):
        layers = workload(per_show, chance, frames_of_a_layer=FRAMES_OF_A_LAYER)
        for number, load in enumerate(cut(layers, JOBS_OF_A_SHOW)):
            yield _job(f"show{show}", f"show{show}-job{number:03d}", load)


def _job(show: str, name: str, load: JobLoad) -> Job:
    layers = tuple(_layer(f"{name}-layer{number:04d}", number, work) for number, work in enumerate(load.layers))
    return Job(name, name, show, show, f"{show}-folder", "dept", "linux", layers, _FACILITY, load.priority)


def _layer(name: str, order: int, work: Work) -> Layer:
    return Layer(
        name,
        name,
        cores_min_centicores=int(100 * work.cores),
        cores_max_centicores=0,
        memory_min_kb=int(work.memory_gb * _KB_A_GB),
        gpus_min=0,
        gpu_memory_min_kb=0,
        tags=_TAGS,
        services=("maya",),
        threadable=True,
        waiting_frames=work.frames,
        frames=(),
        dispatch_order=order,
    )


def _frames(waiting: Waiting) -> list[Frame]:
    return [
        Frame(f"{waiting.layer.id}-{number:04d}", f"{number:04d}", number, 0)
        for number in range(min(_PORTION, waiting.frames))
    ]
