"""Hosts, layers and jobs for the placement tests: everything has a default but what a test is about."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opencue_sched.domain.caps import Caps, Headroom
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.frame_needs import Rules
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import Draw, Snapshot, Waiting
from opencue_sched.domain.states import ThreadMode
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.plan_state import Plan
from opencue_sched.placement.planner import plan_pass
from opencue_sched.placement.policy import Policy
from opencue_sched.settings import Queue

GIB = 1024 * 1024
"""KB in a GiB."""
NO_MEMORY_RULE = Rules(memory_stranded_threshold_kb=-1)
"""Frames never take all idle cores because of memory."""


@dataclass(frozen=True)
class GivenWork:
    """Work whose jobs, layers and frames a test gives, in their order."""

    clusters: tuple[Cluster, ...]
    given: tuple[Job, ...]
    draw: Draw | None = None

    def __iter__(self) -> Iterator[Waiting]:
        return (Waiting.of(job, layer) for job in self.given for layer in job.layers)

    def in_order(self, may_start: Callable[[str], bool]) -> Iterator[Waiting]:
        return (waiting for waiting in self if may_start(waiting.job.id))

    def of_job(self, job_id: str) -> list[Waiting]:
        return [waiting for waiting in self if waiting.job.id == job_id]

    def under_limit(self, limit_id: str) -> Iterator[Waiting]:
        return (waiting for waiting in self if limit_id in waiting.layer.limit_ids)

    def least_of_job(self, job_id: str) -> list[tuple[frozenset[str], Resources]]:
        return [(waiting.layer.tags, waiting.need) for waiting in self.of_job(job_id)]

    def priorities(self) -> dict[str, int]:
        return {job.id: job.priority for job in self.given}

    def tags(self) -> set[frozenset[str]]:
        return {waiting.layer.tags for waiting in self}

    def least_need(self, tags: Iterable[str]) -> Resources:
        needs = [waiting.need for waiting in self if not waiting.layer.tags.isdisjoint(tags)]
        return Resources(*(min(getattr(need, name) for need in needs) for name in _AMOUNTS))

    def portion(self, layer: Layer) -> Sequence[Frame] | None:
        return layer.frames

    def has_portion(self, layer: Layer) -> bool:
        return True

    def to_judge(self) -> Iterator[Waiting]:
        return iter(self)


_AMOUNTS = ("cores", "memory_kb", "gpus", "gpu_memory_kb")


def make_host(host_id: str = "h1", *, cores: int = 8, memory_gib: float = 32, **changes: Any) -> Host:
    """An idle host of ``cores``; idle amounts follow the totals unless given."""
    memory_kb = int(memory_gib * GIB)
    values: dict[str, Any] = {
        "id": host_id,
        "name": f"host-{host_id}",
        "facility_id": "fac",
        "alloc_id": "alloc",
        "tags": frozenset({"general"}),
        "os_names": ("linux",),
        "thread_mode": ThreadMode.AUTO,
        "total_centicores": cores * 100,
        "idle_centicores": cores * 100,
        "total_memory_kb": memory_kb,
        "idle_memory_kb": memory_kb,
        "total_gpus": changes.get("idle_gpus", 0),
        "total_gpu_memory_kb": changes.get("idle_gpu_memory_kb", 0),
    }
    return Host(**(values | changes))


def make_layer(
    layer_id: str = "l1", *, frames: int = 1, cores: float = 1, memory_gib: float = 1, **changes: Any
) -> Layer:
    values: dict[str, Any] = {
        "id": layer_id,
        "name": layer_id,
        "cores_min_centicores": int(cores * 100),
        "cores_max_centicores": 0,
        "memory_min_kb": int(memory_gib * GIB),
        "gpus_min": 0,
        "gpu_memory_min_kb": 0,
        "tags": frozenset({"general"}),
        "services": ("default",),
        "threadable": True,
        "waiting_frames": frames,
        "frames": tuple(Frame(f"{layer_id}-f{n}", f"{n:04d}-{layer_id}", n, 0) for n in range(1, frames + 1)),
    }
    return Layer(**(values | changes))


def make_job(job_id: str = "j1", layers: Sequence[Layer] = (), **changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": job_id,
        "name": job_id,
        "show_id": "show",
        "show_name": "show",
        "folder_id": "folder",
        "dept_id": "dept",
        "os_name": "linux",
        "layers": tuple(layers),
    }
    return Job(**(values | changes))


def make_caps(cores: float | None = None, gpus: float | None = None, *, booked: int = 0) -> Caps:
    return Caps(Headroom(cores, booked), Headroom(gpus, 0))


def make_snapshot(*jobs: Job, subscriptions: Mapping[str, Caps] | None = None, **changes: Any) -> Snapshot:
    """Work of one cluster, of the show ``show``; ``subscriptions`` are its own, by allocation."""
    own = {"alloc": make_caps(10_000)} if subscriptions is None else subscriptions
    values: dict[str, Any] = {
        "work": (GivenWork((make_cluster(),), jobs),),
        "subscriptions": {("show", alloc_id): caps for alloc_id, caps in own.items()},
        "caps": {**changes.pop("folders", {}), **changes.pop("job_caps", {})},
    }
    return Snapshot(**(values | changes))


def make_cluster(*tags: str) -> Cluster:
    return Cluster("fac", "show", ClusterKind.MANUAL, tuple(sorted(tags or ("general",))))


def make_need(cores: int = 1, memory_gib: float = 0, gpus: int = 0, gpu_memory_gib: float = 0) -> Resources:
    return Resources(cores, int(memory_gib * GIB), gpus, int(gpu_memory_gib * GIB))


def counting_ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"p{next(numbers)}"


def make_policy(rules: Rules = NO_MEMORY_RULE, *, max_frames: int = 1000, **changes: Any) -> Policy:
    """One that bounds no layer and knows no locality, unless ``changes`` of the settings say so; others are its own."""
    own = {name: changes.pop(name) for name in ("admissions", "soft_admissions", "score") if name in changes}
    queue = Queue.model_validate({"dispatch_frames_per_layer_limit": 1000, "locality": False, **changes})
    return Policy(queue, rules, max_frames=max_frames, **own)


def plan(snapshot: Snapshot, pool: HostCache, *, cluster: Cluster | None = None, **changes: Any) -> Plan:
    """``plan_pass`` with frames that take exactly their minimum."""
    values: dict[str, Any] = {"policy": make_policy(), "new_id": counting_ids()}
    values |= changes
    if cluster is not None:
        (work,) = snapshot.work
        assert isinstance(work, GivenWork)
        snapshot = replace(snapshot, work=(replace(work, clusters=(cluster,)),))
    (planned,) = plan_pass(snapshot, pool, values.pop("policy"), **values)
    return planned


def take(cores: int, memory_gib: float = 0) -> Resources:
    return Resources(cores, int(memory_gib * GIB))
