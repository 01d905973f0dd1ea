"""A backlog into which a test reads layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.placement.backlog import Backlog, BacklogWork
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_cluster, make_host, make_job, make_layer, make_need

CLUSTER = make_cluster()


def waiting_job(job_id: str = "j1", **changes: Any) -> Job:
    return make_job(job_id, facility_id="fac", **changes)


def waiting_layer(layer_id: str = "l1", *, waiting: int = 5, **changes: Any) -> Layer:
    return make_layer(layer_id, frames=0, waiting_frames=waiting, **changes)


def frames_of(layer_id: str, *numbers: int) -> tuple[Frame, ...]:
    return tuple(Frame(f"{layer_id}-f{number}", f"{number:04d}-{layer_id}", number, 0) for number in numbers)


def proc(layer: Layer, frame: Frame, job: Job | None = None) -> PlannedProc:
    vertices = Vertices("show", "alloc", "folder", "j1", layer.id, "dept")
    return PlannedProc(f"p-{frame.id}", job or waiting_job(), layer, frame, make_host(), make_need(), vertices)


@dataclass
class Known:
    """A backlog into which a test reads layers."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.clock)

    def read(self, *layers: Layer, job: Job | None = None, version: str = "v1", gone: tuple[str, ...] = ()) -> None:
        rows = [(job or waiting_job(), layer, version) for layer in layers]
        self.backlog.apply(rows, read_at=self.backlog.instant(), gone=gone)

    def read_portion(
        self, layer_id: str, *numbers: int, waiting: int | None = None, back_in: float | None = None
    ) -> None:
        frames = frames_of(layer_id, *numbers)
        count = len(frames) if waiting is None else waiting
        self.backlog.apply_portion(layer_id, count, frames, back_in, read_at=self.backlog.instant())

    def work(self, *clusters: Cluster, now: float = 0.0, own: frozenset[int] = ALL_BUCKETS) -> BacklogWork:
        return self.backlog.work(clusters or (CLUSTER,), own=own, now=now)

    def layers(self, **changes: Any) -> list[str]:
        return [waiting.layer.id for waiting in self.work(**changes)]

    def under(self, limit_id: str) -> list[str]:
        return [waiting.layer.id for waiting in self.work().under_limit(limit_id)]

    def frames(self, layer: Layer) -> list[str] | None:
        portion = self.work().portion(layer)
        return None if portion is None else [frame.id for frame in portion]
