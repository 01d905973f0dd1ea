"""The two farms of the stress benchmark: one to drain, one whose caps are far below its work.

Sizes follow OpenCue's own stress suite. ``scale`` multiplies hosts, jobs and subscriptions. The same seed and scale
make the same farm every time, so a database can hold each once. Shows, facilities, allocations, hosts and jobs have
names that begin with ``stress_d_`` (to drain) or ``stress_s_`` (to saturate).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, HostIds, HostSpec, JobIds, JobSpec, LayerSpec, ShowIds

SEED = 0x0C0FFEE
"""The seed of the farms that the benchmark's figures are of."""
DRAIN_PREFIX = "stress_d_"
SATURATION_PREFIX = "stress_s_"

_SHOWS = "(SELECT pk_show FROM show WHERE starts_with(str_name, 'stress_d_') OR starts_with(str_name, 'stress_s_'))"
_ALLOCS = "(SELECT pk_alloc FROM alloc WHERE starts_with(str_name, 'stress_d_') OR starts_with(str_name, 'stress_s_'))"
# In the order that the foreign keys ask for. Triggers of the schema delete what belongs to a job, folder or host.
_SWEEP = tuple(
    text(f"DELETE FROM {rows}")  # noqa: S608 - no values from outside
    for rows in (
        f"proc WHERE pk_show IN {_SHOWS}",
        f"job WHERE pk_show IN {_SHOWS}",
        f"job_history WHERE pk_show IN {_SHOWS}",
        f"host WHERE pk_alloc IN {_ALLOCS}",
        f"subscription WHERE pk_show IN {_SHOWS}",
        f"point WHERE pk_show IN {_SHOWS}",
        f"folder WHERE pk_show IN {_SHOWS}",
        f"show_stats WHERE pk_show IN {_SHOWS}",
        f"show WHERE pk_show IN {_SHOWS}",
        f"alloc WHERE pk_alloc IN {_ALLOCS}",
        "facility WHERE starts_with(str_name, 'stress_d_') OR starts_with(str_name, 'stress_s_')",
    )
)


@dataclass(frozen=True, slots=True)
class StressShape:
    """What one stress farm is made of: its numbers, and what is drawn at random for each host and layer."""

    prefix: str
    """How all names of the farm begin."""
    hosts: int
    host_cores: Sequence[int]
    """A host has one of these numbers of cores."""
    host_memory_gb: tuple[int, int]
    """The least and the most that a host has."""
    allocs: int
    subscription_cores: float
    """Size and burst of the show's subscription to each allocation."""
    manual_tags: int
    """How many tags there are besides those of the allocations."""
    jobs: int
    layers: int
    """Layers of each job."""
    frames: int
    """Frames of each layer."""
    layer_cores: Sequence[int]
    """A frame of a layer needs one of these numbers of cores."""
    layer_memory_gb: tuple[int, int]
    """The least and the most that a frame of a layer needs."""
    job_max_cores: float
    """The cap of each job."""

    def scaled(self, scale: float) -> StressShape:
        """The same farm with ``scale`` times the hosts, jobs and subscriptions; caps of single jobs stay."""
        return replace(
            self,
            hosts=max(self.allocs, round(self.hosts * scale)),
            jobs=max(1, round(self.jobs * scale)),
            subscription_cores=max(1, round(self.subscription_cores * scale)),
        )


DRAIN = StressShape(
    prefix=DRAIN_PREFIX,
    hosts=1200,
    host_cores=range(16, 129, 8),
    host_memory_gb=(32, 256),
    allocs=3,
    subscription_cores=90_000,
    manual_tags=8,
    jobs=300,
    layers=4,
    frames=5,
    layer_cores=(1, 2, 4, 8),
    layer_memory_gb=(2, 8),
    job_max_cores=100_000,
)
SATURATION = StressShape(
    prefix=SATURATION_PREFIX,
    hosts=400,
    host_cores=(8, 16, 32),
    host_memory_gb=(32, 64),
    allocs=3,
    subscription_cores=150,
    manual_tags=4,
    jobs=150,
    layers=2,
    frames=10,
    layer_cores=(2, 4),
    layer_memory_gb=(2, 4),
    job_max_cores=20,
)


@dataclass(frozen=True, slots=True)
class StressFarm:
    """A stress farm in the database."""

    show: ShowIds
    hosts: tuple[HostIds, ...]
    jobs: tuple[JobIds, ...]
    burst_cores: float
    """The bursts of all subscriptions of the farm together."""

    @property
    def frames(self) -> int:
        """How many frames wait."""
        return sum(len(job.frames) for job in self.jobs)


def drain_farm(connection: Connection, scale: float = 1.0, seed: int = SEED) -> StressFarm:
    """Make a farm with room for all its frames: 1,200 hosts and 6,000 frames at scale 1."""
    return stress_farm(connection, DRAIN.scaled(scale), seed)


def saturation_farm(connection: Connection, scale: float = 1.0, seed: int = SEED) -> StressFarm:
    """Make a farm with far more work than its bursts (3 x 150 cores at scale 1) and job caps (20 cores) let run."""
    return stress_farm(connection, SATURATION.scaled(scale), seed)


def remove_stress_farms(connection: Connection) -> None:
    """Delete every stress farm and what was booked on it, so that it can be made again in the same database."""
    for statement in _SWEEP:
        connection.execute(statement)


def stress_farm(connection: Connection, shape: StressShape, seed: int = SEED) -> StressFarm:
    """Write one stress farm. The caller owns the transaction."""
    chance = random.Random(f"{seed}:{shape.prefix}")
    prefix = f"{shape.prefix}{chance.getrandbits(24):06x}"
    farm = Farm(connection, seed=chance.getrandbits(64))
    facility = farm.facility(f"{prefix}_fac")
    show = farm.show(f"{prefix}_show")
    tags = [f"{prefix}_a{number}" for number in range(shape.allocs)]
    allocs = tuple(farm.alloc(tag, facility=f"{prefix}_fac", name=tag) for tag in tags)
    for alloc in allocs:
        farm.subscription(show, alloc, size=shape.subscription_cores)
    manual_tags = tuple(f"{prefix}_m{number}" for number in range(shape.manual_tags))
    hosts = farm.hosts(_hosts(shape, prefix, allocs, manual_tags, chance))
    layer_tags = (*manual_tags, *(alloc.tag for alloc in allocs))
    jobs = farm.jobs(_jobs(shape, prefix, show, facility, layer_tags, chance))
    burst = shape.subscription_cores * shape.allocs
    return StressFarm(show, tuple(hosts), tuple(jobs), burst)


def _hosts(
    shape: StressShape, prefix: str, allocs: Sequence[AllocIds], tags: Sequence[str], chance: random.Random
) -> list[HostSpec]:
    """Hosts, one allocation after the other. Each of the first hosts has one manual tag, until every tag is given; all
    others have none, one or two at random."""
    return [
        HostSpec(
            name=f"{prefix}_h{number:04d}",
            alloc=allocs[number % len(allocs)],
            cores=chance.choice(shape.host_cores),
            memory_gb=chance.randint(*shape.host_memory_gb),
            tags=[tags[number]] if number < len(tags) else chance.sample(tags, chance.randint(0, 2)),
            hostname_tag=False,
        )
        for number in range(shape.hosts)
    ]


def _jobs(
    shape: StressShape, prefix: str, show: ShowIds, facility: str, tags: Sequence[str], chance: random.Random
) -> list[JobSpec]:
    """The jobs of a show: priorities from 1 to 200 by their names, and tags out of ``tags`` by ``chance``."""
    names = [f"{prefix}_j{number:04d}" for number in range(shape.jobs)]
    return [
        JobSpec(
            name=name,
            show=show,
            facility_id=facility,
            priority=zlib.crc32(name.encode()) % 200 + 1,
            max_cores=shape.job_max_cores,
            max_gpus=0,
            layers=[_layer(shape, tags, chance) for _ in range(shape.layers)],
        )
        for name in names
    ]


def _layer(shape: StressShape, tags: Sequence[str], chance: random.Random) -> LayerSpec:
    """A layer of the shape's size. ``chance`` draws its cores and memory from those of the shape, and one to three of
    ``tags``, any of which will do."""
    return LayerSpec(
        frames=shape.frames,
        cores=chance.choice(shape.layer_cores),
        memory_gb=chance.randint(*shape.layer_memory_gb),
        tags=" | ".join(chance.sample(tags, chance.randint(1, 3))),
        type="PRE",
    )
