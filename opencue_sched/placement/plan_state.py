"""How far a plan is: with each cluster, each show and each layer of it, and what it knows of their hosts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_needs import Search
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc, Waiting, Work
from opencue_sched.domain.verdicts import LayerVerdict, Shortage
from opencue_sched.placement.policies import Refusal


@dataclass(slots=True)
class Plan:
    """What one pass wants to book for one of its clusters."""

    procs: list[PlannedProc] = field(default_factory=list)
    verdicts: list[LayerVerdict] = field(default_factory=list)
    shortages: list[Shortage] = field(default_factory=list)
    """What layers of the show wait for that the pass did not look at. The plan of the first cluster of a show has the
    shortages of all its clusters."""
    attempts: Counter[str] = field(default_factory=Counter)
    """How many hosts each layer that got to try any was given, by layer id."""
    wasted_attempts: int = 0
    """How many of these others took from meanwhile."""
    cache_misses: int = 0
    """How many searches found no host."""
    full: bool = False
    """Whether a bound on the plan was reached, so that there is more to place right away."""
    at_cap: bool = False
    """Whether a cap of a folder, job or limit, or a burst, kept a layer waiting."""


@dataclass(slots=True)
class LayerState:
    """Frames of one layer that ask for the same memory: what they ask for, how far they are, why hosts said no."""

    show: ShowState
    listed: Waiting
    """The layer as the backlog has it, with all its frames."""
    cluster: Cluster
    plan: Plan
    job: Job
    layer: Layer
    search: Search
    waiting: int
    frames: deque[Frame]
    """The frames that were read and are not planned yet, in their order."""
    most: int
    """Frames that it may have in this round."""
    failed_on: set[str] = field(default_factory=set)
    """The names of the hosts that frames of it failed on lately."""
    open_allocs: frozenset[str] = frozenset()
    placed: int = 0
    all_read: bool = False
    """Whether a read found no more of the layer's frames than those that were there."""
    wasted: int = 0
    asked: bool = False
    refused: Refusal | None = None
    softly_refused: bool = False
    second: bool = False
    """Whether it had its part of the round, and goes on after all others of the show had theirs."""
    reason: Refusal | None = None
    """Why the round ended for it; None before that."""


@dataclass(slots=True)
class Reach:
    """What a plan has found out about the hosts of some tags of a show's clusters: hosts only get fuller for all, but
    which allocations are open is a show's own."""

    tags: tuple[str, ...]
    closed: bool = False
    """Whether no host has what the most modest layer needs."""
    nothing_idle: list[Resources] = field(default_factory=list)
    """Needs that no host has idle: every larger one finds none either."""


@dataclass(slots=True)
class ShowState:
    """One show in one facility, over all clusters that the pass has of it: who of it goes on next."""

    work: Work
    plans: Mapping[Cluster, Plan]
    tags: frozenset[str]
    reaches: dict[frozenset[str], Reach] = field(default_factory=dict)
    """What the plan found of the hosts of layers, by their tags: one where the clusters have the same of these."""
    states: dict[str, list[LayerState]] = field(default_factory=dict)
    """How far the plan is with each layer, by its id."""
    rest: Iterator[Waiting] | None = None
    """What was not looked at yet, in the order of rank."""
    by_rank: deque[LayerState] = field(default_factory=deque)
    later: deque[LayerState] = field(default_factory=deque)
    drawn: list[tuple[float, str]] | None = None
    """A heap of the jobs that may be drawn, by virtual time; None before the first draw of a round."""
    front: LayerState | None = None
    """Frames that go on now."""
    drawing: bool = False
    """Whether they were drawn."""
    booking_jobs: set[str] = field(default_factory=set)
    bounded: bool = False
    """Whether as many jobs have frames in the plan as may."""
    wanted: list[Waiting] = field(default_factory=list)
    """The show stops at the first of these: their frames were not read yet."""

    @property
    def place(self) -> tuple[str, str]:
        cluster = self.work.clusters[0]
        return cluster.facility_id, cluster.show_id
