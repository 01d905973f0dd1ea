"""Which host: the strategy's order against the convex score, on one trace, in memory.

The planner and the host cache are the real ones; time, the farm and its work are simulated, so a day of a farm takes
minutes and two runs differ in nothing but the policy. A tenth of the hosts of `HOSTS_1553` gets work of `workload` in
a steady stream, a little more or less than it can do.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.farm_load import HOSTS_1553, MEMORY_GB_PER_CORE, MINUTES, PARTS, Work, workload
from opencue_sched.domain.caps import Caps, Headroom
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.hosts import Host
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc, Snapshot
from opencue_sched.domain.plans import Work as ClusterWork
from opencue_sched.domain.states import ThreadMode
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.planner import Policy, plan_pass, policy_for
from opencue_sched.settings import HostCacheSettings, Queue

PASS_SECONDS = 15.0
JOBS_OF_A_PASS = 60
FRAMES_OF_A_LAYER = 20
WARM_UP_HOURS = 1.5
WIDE_CORES = 16
"""A frame of so many cores fits on the smallest host only when nothing else is on it."""
_KB_PER_GB = 1024 * 1024
_CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")


@dataclass(slots=True)
class Figures:
    """One run. ``stranded_percent``: cores idle on average while frames waited, of all. ``wide_minutes``: the mean wait
    of frames of 16 cores and more, those that still wait among them."""

    policy: str
    load: float
    seed: int
    frames_per_hour: float = 0.0
    used_percent: float = 0.0
    stranded_percent: float = 0.0
    narrow_minutes: float = 0.0
    wide_minutes: float = 0.0
    plan_ms: float = 0.0


@dataclass(slots=True)
class _Site:
    """A farm whose clock this moves."""

    cache: HostCache
    hosts: dict[str, Host]
    seconds: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, tuple[float, list[Frame], Layer]] = field(default_factory=dict)
    running: list[tuple[float, str, PlannedProc]] = field(default_factory=list)

    def arrive(self, now: float, number: int, work: Work) -> None:
        layer = _layer(f"l{number}", work)
        self.seconds[layer.id] = work.minutes * 60
        self.waiting[layer.id] = (now, list(layer.frames), layer)

    def end(self, now: float) -> list[PlannedProc]:
        """End what is over; those procs."""
        ended = []
        while self.running and self.running[0][0] <= now:
            _, _, proc = heapq.heappop(self.running)
            self._change(proc, -1)
            ended.append(proc)
        self._read({proc.host.id for proc in ended})
        return ended

    def start(self, now: float, procs: Sequence[PlannedProc], chance: random.Random) -> None:
        for proc in procs:
            self.cache.settle(proc.host.id, proc.proc_id, committed=True)
            self._change(proc, 1)
            seconds = self.seconds[proc.layer.id] * chance.uniform(0.8, 1.2)
            heapq.heappush(self.running, (now + seconds, proc.proc_id, proc))
            self.waiting[proc.layer.id][1].remove(proc.frame)
            if not self.waiting[proc.layer.id][1]:
                del self.waiting[proc.layer.id]
        self._read({proc.host.id for proc in procs})

    def snapshot(self) -> Snapshot:
        jobs = []
        for _, frames, layer in itertools.islice(self.waiting.values(), JOBS_OF_A_PASS):
            looked_at = tuple(frames[:FRAMES_OF_A_LAYER])
            jobs.append(_job(replace(layer, frames=looked_at, waiting_frames=len(frames))))
        caps = Caps(Headroom(None, 0), Headroom(None, 0))
        return Snapshot((ClusterWork(_CLUSTER, tuple(jobs)),), {("show", "alloc"): caps}, {})

    def idle_cores(self) -> int:
        return sum(host.idle_cores for host in self.hosts.values())

    def _change(self, proc: PlannedProc, sign: int) -> None:
        host, taken = self.hosts[proc.host.id], proc.reservation
        counts = {**host.running, proc.layer.id: host.running.get(proc.layer.id, 0) + sign}
        self.hosts[host.id] = replace(
            host,
            idle_centicores=host.idle_centicores - sign * taken.cores * 100,
            idle_memory_kb=host.idle_memory_kb - sign * taken.memory_kb,
            running={layer: count for layer, count in counts.items() if count},
        )

    def _read(self, host_ids: set[str]) -> None:
        self.cache.apply([self.hosts[host_id] for host_id in host_ids], [], read_at=self.cache.instant())


def policies() -> dict[str, Policy]:
    """What is compared."""
    alone = Queue(locality=False, layer_host_share=False)
    convex = alone.model_copy(update={"host_score": "convex"})
    return {"strategy": policy_for(alone), "convex, first 16": policy_for(convex)}


def run(name: str, load: float, *, hours: float, seed: int) -> Figures:
    """One policy on the trace of this seed and load (of the farm's cores)."""
    policy = policies()[name]
    farm = _hosts(0.1)
    cores = sum(host.total_cores for host in farm.values())
    clock = itertools.count(1.0)
    site = _Site(HostCache(HostCacheSettings(), lambda *_: list(farm.values()), clock=lambda: next(clock) * 1e-6), farm)
    site.cache.refresh("fac", ["general"])
    chance, ids = random.Random(seed), itertools.count()
    arrivals = _arrivals(cores * load, hours, random.Random(seed))
    result, plans = Figures(name, load, seed), []
    used, stranded, done = [], [], 0
    waits: dict[bool, list[float]] = {True: [], False: []}
    passes = int(hours * 3600 / PASS_SECONDS)
    for number in range(passes):
        now = number * PASS_SECONDS
        measured = now >= WARM_UP_HOURS * 3600
        while arrivals and arrivals[-1][0] <= now:
            site.arrive(now, next(ids), arrivals.pop()[1])
        ended = site.end(now)
        done += len(ended) if measured else 0
        began = time.perf_counter()
        (plan,) = plan_pass(
            site.snapshot(), site.cache, policy, granted_layers=site.waiting, new_id=lambda: f"p{next(ids)}"
        )
        plans.append(time.perf_counter() - began)
        for proc in plan.procs if measured else ():
            waits[proc.reservation.cores >= WIDE_CORES].append(now - site.waiting[proc.layer.id][0])
        site.start(now, plan.procs, chance)
        if measured:
            used.append(1 - site.idle_cores() / cores)
            stranded.append(site.idle_cores() / cores if site.waiting else 0.0)
    for since, frames, layer in site.waiting.values():
        waits[layer.cores_min_centicores >= WIDE_CORES * 100] += [passes * PASS_SECONDS - since] * len(frames)
    result.frames_per_hour = round(done / (hours - WARM_UP_HOURS))
    result.used_percent, result.stranded_percent = round(100 * fmean(used), 2), round(100 * fmean(stranded), 2)
    result.narrow_minutes, result.wide_minutes = (round(fmean(waits[it] or [0]) / 60, 2) for it in (False, True))
    result.plan_ms = round(1000 * fmean(plans), 2)
    return result


def _arrivals(cores: float, hours: float, chance: random.Random) -> list[tuple[float, Work]]:
    """Layers at random times that keep so many cores busy on average, the last first."""
    whole = sum(PARTS.values())
    mean_cores = sum(width * part for width, part in PARTS.items()) / whole
    low, high = MINUTES
    mean_minutes = fmean(low * (high / low) ** (step / 1000) for step in range(1001))
    frames = int(cores * hours * 60 / (mean_cores * mean_minutes))
    layers = [it for it in workload(frames, chance, frames_of_a_layer=10) if it.frames]
    return sorted(((chance.uniform(0, hours * 3600), it) for it in layers), key=lambda it: it[0], reverse=True)


def _hosts(part: float) -> dict[str, Host]:
    sizes = [cores for cores, count in HOSTS_1553.items() for _ in range(round(count * part))]
    return {f"h{number}": _host(f"h{number}", cores) for number, cores in enumerate(sizes)}


def _host(host_id: str, cores: int) -> Host:
    memory_kb = cores * MEMORY_GB_PER_CORE * _KB_PER_GB
    return Host(
        id=host_id,
        name=host_id,
        facility_id="fac",
        alloc_id="alloc",
        tags=frozenset({"general"}),
        os_names=("linux",),
        thread_mode=ThreadMode.AUTO,
        total_centicores=cores * 100,
        idle_centicores=cores * 100,
        total_memory_kb=memory_kb,
        idle_memory_kb=memory_kb,
    )


def _layer(layer_id: str, work: Work) -> Layer:
    return Layer(
        id=layer_id,
        name=layer_id,
        command="render",
        frame_range=f"1-{work.frames}",
        chunk_size=1,
        cores_min_centicores=int(work.cores * 100),
        cores_max_centicores=int(work.cores * 100),
        memory_min_kb=int(work.memory_gb * _KB_PER_GB),
        gpus_min=0,
        gpu_memory_min_kb=0,
        tags=frozenset({"general"}),
        services=(),
        threadable=True,
        waiting_frames=work.frames,
        frames=tuple(Frame(f"{layer_id}-{number}", str(number), number, 0) for number in range(work.frames)),
    )


def _job(layer: Layer) -> Job:
    return Job(
        id=f"j{layer.id}",
        name=layer.id,
        show_id="show",
        show_name="show",
        folder_id="folder",
        dept_id="dept",
        shot="",
        user="",
        uid=None,
        log_dir="",
        os_name=None,
        loki_url=None,
        layers=(layer,),
    )
