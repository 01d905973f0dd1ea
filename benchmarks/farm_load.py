"""A farm like a real one, and work like a real farm's.

Hosts of 16, 32 and 128 cores with 4 GB a core (`HOSTS_1553`: 57,248 cores, `HOSTS_10000`: 360,000). Work by `workload`:
frames of 1 to 64 cores in fixed parts, memory that rises with the cores and is each layer's own, run times from 2 to 52
minutes. Several shows share one allocation by subscriptions. Everything is written set-based: 100,000 frames take some
seconds.

    load = FarmLoad(seed=1, time_scale=1 / 60)
    with engine.begin() as connection:
        load.add_hosts(connection, HOSTS_1553)
        show = load.add_show(connection, "north", size=20_000, burst=57_248)
        load.add_jobs(connection, show, cut(workload(30_000, random.Random(1)), jobs=50))
    with FrameEnds(engine, load.seconds_of, ledger=..., changes=...):
        ...
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, text

from benchmarks.frame_ends import RunningProc
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, HostSpec, JobIds, JobSpec, LayerSpec, ShowIds

HOSTS_1553: Mapping[int, int] = {128: 246, 32: 303, 16: 1_004}
"""Cores of a host to the number of such hosts: 57,248 cores."""
HOSTS_10000: Mapping[int, int] = {128: 1_507, 32: 1_951, 16: 6_542}
"""360,000 cores."""
_FARMS = {sum(counts.values()): counts for counts in (HOSTS_1553, HOSTS_10000)}
MEMORY_GB_PER_CORE = 4

PARTS: Mapping[int, float] = {1: 23, 2: 26, 4: 34, 8: 14.5, 16: 1.9, 32: 0.3, 64: 0.05}
"""Cores of a frame to the part of the frames that have so many, in percent of their sum (99.75)."""
MEMORY_GB_OF_A_CORE = (0.5, 3.6)
"""So that one core has 0.5 to 3.6 GB, and 64 cores up to 230 GB."""
MINUTES = (2.0, 52.0)
FRAMES_OF_A_LAYER = 40
_SPREAD = 0.2
_KB_A_GB = 1024 * 1024

_FRAMES = text(
    """
    INSERT INTO frame (pk_frame, pk_layer, pk_job, str_name, str_state, int_number, int_dispatch_order, int_layer_order)
    SELECT CAST(gen_random_uuid() AS varchar), layer.pk_layer, layer.pk_job,
           lpad(CAST(number AS text), greatest(4, length(CAST(number AS text))), '0') || '-' || layer.str_name,
           'WAITING', number, number - 1, layer.int_dispatch_order
      FROM json_each_text(CAST(:frames AS json)) AS wanted(layer, frames)
      JOIN layer ON layer.pk_layer = wanted.layer
     CROSS JOIN generate_series(1, CAST(wanted.frames AS int)) AS number
    """
)


@dataclass(frozen=True, slots=True)
class Work:
    """A layer's work. ``minutes`` is how long a frame runs on a real farm, within a fifth more or less.

    ``spec`` overrides fields of the layer's LayerSpec (tags, gpus, limits, threadable, ...).
    """

    frames: int
    cores: float
    memory_gb: float
    minutes: float
    spec: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobLoad:
    """A job of these layers. ``max_cores`` is the job's own cap."""

    layers: Sequence[Work]
    priority: int = 100
    name: str | None = None
    max_cores: float = 1_000_000


def hosts_of(count: int) -> Mapping[int, int]:
    """So many hosts: `HOSTS_1553`, `HOSTS_10000`, or any other number in the parts of the latter."""
    return _FARMS.get(count) or _parts(count, HOSTS_10000)


def workload(frames: int, chance: random.Random, *, frames_of_a_layer: float = FRAMES_OF_A_LAYER) -> list[Work]:
    """Layers with so many frames in all, each class of cores in its part (rounded to the next frame), in any order.

    No two layers have the same memory, to the kilobyte: on a real farm hardly any two do.
    """
    layers = []
    memories: set[int] = set()
    for cores, wanted in parts_of(frames).items():
        count = math.ceil(wanted / frames_of_a_layer)
        for number in range(count):
            memory_kb = int(cores * chance.uniform(*MEMORY_GB_OF_A_CORE) * _KB_A_GB)
            while memory_kb in memories:
                memory_kb += 1
            memories.add(memory_kb)
            minutes = MINUTES[0] * (MINUTES[1] / MINUTES[0]) ** chance.random()
            share = wanted * (number + 1) // count - wanted * number // count
            layers.append(Work(share, cores, memory_kb / _KB_A_GB, round(minutes, 1)))
    chance.shuffle(layers)
    return layers


def parts_of(frames: int) -> dict[int, int]:
    """How many of so many frames have each number of cores."""
    return _parts(frames, PARTS)


def _parts(number: int, weights: Mapping[int, float]) -> dict[int, int]:
    """The number in parts as the weights are; largest remainders first."""
    whole = sum(weights.values())
    exact = {cores: number * weight / whole for cores, weight in weights.items()}
    counts = {cores: int(share) for cores, share in exact.items()}
    left = number - sum(counts.values())
    for cores in sorted(exact, key=lambda cores: counts[cores] - exact[cores])[:left]:
        counts[cores] += 1
    return counts


def cut(layers: Sequence[Work], jobs: int, *, priorities: Sequence[int] = (100,)) -> list[JobLoad]:
    """The layers dealt round to so many jobs, whose priorities are taken in turn from ``priorities``."""
    dealt = [layers[number::jobs] for number in range(jobs)]
    return [JobLoad(part, priorities[number % len(priorities)]) for number, part in enumerate(dealt) if part]


@dataclass
class FarmLoad:
    """What was written, and how long its frames run. One facility, one allocation, whose tag is ``tag``.

    ``time_scale`` seconds of the benchmark pass for each second of a real farm (1/60: a minute takes a second).
    """

    seed: int = 1
    time_scale: float = 1.0
    tag: str = "general"
    shows: dict[str, ShowIds] = field(default_factory=dict)
    cores: int = 0
    frames: int = 0
    minutes: dict[str, float] = field(default_factory=dict)
    """Of each layer by its id."""
    _serial: int = 0

    def add_hosts(
        self, connection: Connection, counts: Mapping[int, int], *, memory_gb_per_core: float = MEMORY_GB_PER_CORE
    ) -> list[HostIds]:
        """Idle hosts, so many of each number of cores; they carry the allocation's tag only."""
        farm = Farm(connection)
        alloc = farm.alloc(self.tag)
        made = farm.hosts(
            HostSpec(
                name=f"{self.tag}-c{cores}-{number:05d}",
                alloc=alloc,
                cores=cores,
                memory_gb=cores * memory_gb_per_core,
                hostname_tag=False,
            )
            for cores, count in counts.items()
            for number in range(count)
        )
        self.cores += sum(cores * count for cores, count in counts.items())
        return made

    def add_show(self, connection: Connection, name: str, *, size: float, burst: float | None = None) -> ShowIds:
        """A managed show that subscribes to the allocation with ``size`` and ``burst`` cores (burst like size)."""
        farm = Farm(connection)
        show = self.shows[name] = farm.show(name)
        farm.subscription(show, farm.alloc(self.tag), size=size, burst=burst)
        return show

    def add_jobs(self, connection: Connection, show: ShowIds, jobs: Sequence[JobLoad]) -> list[JobIds]:
        """Write jobs whose frames wait. The ids of their frames are not among the answer."""
        farm = Farm(connection)
        specs = [self._spec(show, job) for job in jobs]
        made = farm.jobs(specs)
        layers = [
            (ids, work)
            for job, job_ids in zip(jobs, made, strict=True)
            for ids, work in zip(job_ids.layers, job.layers, strict=True)
        ]
        connection.execute(_FRAMES, {"frames": json.dumps({ids.id: work.frames for ids, work in layers})})
        farm.activate(made)
        self.minutes.update((ids.id, work.minutes) for ids, work in layers)
        self.frames += sum(work.frames for _, work in layers)
        return made

    def seconds_of(self, proc: RunningProc) -> float:
        """How long a proc's frame runs, in seconds of the benchmark; the same for a frame each time."""
        spread = 1 - _SPREAD + 2 * _SPREAD * zlib.crc32(proc.frame_id.encode()) / 2**32
        return 60 * self.minutes[proc.layer_id] * spread * self.time_scale

    def _spec(self, show: ShowIds, job: JobLoad) -> JobSpec:
        self._serial += 1
        return JobSpec(
            layers=[self._layer(work) for work in job.layers],
            show=show,
            name=job.name or f"{show.name}-job{self._serial:05d}",
            priority=job.priority,
            max_cores=job.max_cores,
            activate=False,
        )

    def _layer(self, work: Work) -> LayerSpec:
        # Without frames: they are written by one statement for all layers.
        size = {"cores": work.cores, "memory_gb": work.memory_gb, "tags": self.tag, "range": f"1-{work.frames}"}
        return replace(LayerSpec(frames=0, **size), **work.spec)  # type: ignore[arg-type]
