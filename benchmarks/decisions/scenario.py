"""What a scenario declares: a farm, its shows, work over time, what happens to it, and how its record is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.decisions.record import Record

if TYPE_CHECKING:
    from benchmarks.decisions.stage import Stage

GENERAL = "general"
MEMORY_GB_A_CORE = 4
"""Of every host."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """``count`` equal hosts that carry ``tag``. A host that has a ``name`` carries that as well."""

    kind: str
    count: int
    cores: int
    gpus: int = 0
    tag: str = GENERAL
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Show:
    """A show with a subscription of ``size`` cores, and the caps of its burst and its root folder (None: none)."""

    name: str
    size: int
    burst: int | None = None
    folder_cap: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Equal jobs of one show, submitted at second ``at``.

    Each job has one layer for each entry of ``cores`` (cores of a frame), of ``frames`` frames that run for
    ``seconds`` (least, most). ``ordered``: each layer's frames wait for those at their place in the layer before.
    ``licence`` is a limit of the scenario, ``job_cap`` cores. The first ``heavy`` frames of each layer run out of
    memory unless they have a tenth more than they ask for. ``paused``: until an event resumes its show.
    """

    name: str
    show: str
    frames: int
    cores: tuple[int, ...] = (1,)
    jobs: int = 1
    seconds: tuple[float, float] = (2.0, 3.0)
    priority: int = 100
    at: float = 0.0
    gpus: int = 0
    memory_gb_a_core: float = 2.0
    tag: str = GENERAL
    job_cap: int | None = None
    licence: str | None = None
    ordered: bool = False
    heavy: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to the farm at second ``at``."""

    at: float
    name: str
    happens: Callable[[Stage], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """One figure of a run, and between which values it must be."""

    name: str
    value: float
    least: float = -math.inf
    most: float = math.inf

    @property
    def kept(self) -> bool:
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        bounds = (f">= {self.least:g}" if math.isfinite(self.least) else "") + (
            " " if math.isfinite(self.least) and math.isfinite(self.most) else ""
        )
        bounds += f"<= {self.most:g}" if math.isfinite(self.most) else ""
        return f"{'' if self.kept else '!! '}{self.name} {self.value:.3g}" + (f" ({bounds})" if bounds else "")


@dataclass(frozen=True, slots=True)
class Control:
    """The same run with the policy off, in which the figure ``fails`` must not be kept (others may fail too).

    ``queue`` are settings of the section queue (skipped when there is no such setting), ``changes`` other fields of
    the scenario that are replaced.
    """

    says: str
    fails: str
    queue: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


Judge = Callable[[Record], Sequence[Bound]]


@dataclass(frozen=True)
class Scenario:
    """One question. ``queue`` are settings of the section queue; ``licences`` are limits in frames.

    ``history``: whether layers keep the run times of their frames (layer_usage). ``ordered``: whether work that says
    so is submitted with its dependencies. ``capped``: whether the caps are written as declared, or far above.
    ``frame_memory``: release.frame_memory, of who ends the frames here. ``sharded``: whether a run fails in which the
    hosts are divided among fewer shards than there are workers.
    """

    name: str
    says: str
    hosts: tuple[Hosts, ...]
    shows: tuple[Show, ...]
    work: tuple[Work, ...]
    seconds: float
    judge: Judge
    control: Control | None = None
    queue: Mapping[str, str] = field(default_factory=dict)
    licences: Mapping[str, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    beats: int = 1
    history: bool = True
    ordered: bool = True
    capped: bool = True
    frame_memory: bool = True
    sharded: bool = False

    @property
    def cores(self) -> int:
        return sum(hosts.count * hosts.cores for hosts in self.hosts)
