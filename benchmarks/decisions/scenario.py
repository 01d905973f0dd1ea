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
class Licence:
    """A product that work needs a licence of: a limit of ``most`` frames (or ``machines``) that run at once.

    Its licence server has ``seats`` (None: there is no server), of which artists may take what is free. It is
    ``reported``: who holds seats every few seconds; or ``set_to_free``: only how many are free is known, and the
    maximum is set by that. A frame that gets no seat ends with ``exit_status``, and its layer waits ``delay_minutes``.
    The limit opens when its report is ``life_seconds`` old. ``spare``: seats that the maximum leaves to artists.
    """

    most: int
    machines: bool = False
    seats: int | None = None
    reported: bool = False
    set_to_free: bool = False
    exit_status: int | None = None
    delay_minutes: int = 1
    life_seconds: int = 60

    @property
    def spare(self) -> int:
        return 0 if self.seats is None else self.seats - self.most


@dataclass(frozen=True, slots=True)
class Work:
    """Equal jobs of one show, submitted at second ``at``.

    Each job has one layer for each entry of ``cores`` (cores of a frame), of ``frames`` frames that run for
    ``seconds`` (least, most). ``ordered``: each layer's frames wait for those at their place in the layer before.
    ``licences`` are limits of the scenario, ``job_cap`` cores. The first ``heavy`` frames of each layer run out of
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
    licences: tuple[str, ...] = ()
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
    """One question. ``queue`` are settings of the section queue; ``licences`` are limits by name.

    ``history``: whether layers keep the run times of their frames (layer_usage). ``ordered``: whether work that says
    so is submitted with its dependencies. ``capped``: whether the caps are written as declared, or far above.
    ``frame_memory``: release.frame_memory, of who ends the frames here. ``sharded``: whether a run fails in which the
    hosts are divided among fewer shards than there are workers. ``imports``: a module that workers import, to be
    without something that no setting turns off. ``more_controls``: beside ``control``, which is the first.
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
    licences: Mapping[str, Licence] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    beats: int = 1
    history: bool = True
    ordered: bool = True
    capped: bool = True
    frame_memory: bool = True
    sharded: bool = False
    imports: str | None = None
    more_controls: tuple[Control, ...] = ()

    @property
    def controls(self) -> tuple[Control, ...]:
        return (*([] if self.control is None else [self.control]), *self.more_controls)

    @property
    def cores(self) -> int:
        return sum(hosts.count * hosts.cores for hosts in self.hosts)
