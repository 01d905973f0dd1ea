"""How far a plan is: with each cluster, each show and each layer of it, and what it knows of their hosts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify

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
    """The planned procs, in the order in which they were placed."""
    verdicts: list[LayerVerdict] = field(default_factory=list)
    """A verdict on each layer that the plan looked at."""
    shortages: list[Shortage] = field(default_factory=list)
    """What layers wait for that this pass did not look at. The first plan of a show has those of all its clusters."""
    attempts: Counter[str] = field(default_factory=Counter)
    """How many hosts each layer tried, by its id; layers that tried none are absent."""
    wasted_attempts: int = 0
    """How many of these hosts another plan had taken from meanwhile."""
    cache_misses: int = 0
    """How many searches found no host."""
    full: bool = False
    """Whether a bound on the plan was reached, so that there is more to place right away."""
    at_cap: bool = False
    """Whether a cap of a folder, job or limit, or a burst, kept a layer waiting."""


@dataclass(slots=True)
class LayerState:
    """How far a plan is with the frames of one layer that ask for the same memory."""

    show: ShowState
    listed: Waiting
    """The layer as the backlog has it, with all its frames."""
    cluster: Cluster
    plan: Plan
    """The plan of ``cluster``."""
    job: Job
    layer: Layer
    """The layer with the memory that these frames ask for."""
    search: Search
    """What the frames look for in a host."""
    waiting: int
    """How many of these frames wait."""
    frames: deque[Frame]
    """The frames that were read and are not planned yet, in their order."""
    most: int
    """How many frames the layer may have in this round."""
    failed_on: set[str] = field(default_factory=set)
    """The names of the hosts that frames of the layer failed on lately."""
    open_allocs: frozenset[str] = frozenset()
    """The allocations of which the show may take enough for one more frame."""
    placed: int = 0
    """Frames that the plan has placed."""
    all_read: bool = False
    """Whether a read found no more of the layer's frames than those that were there."""
    wasted: int = 0
    """Hosts that another plan had taken from meanwhile."""
    asked: bool = False
    """Whether the last search came to a host with the need idle, or a limit of the layer has no seat left. Otherwise no
    host has the need idle."""
    refused: Refusal | None = None
    """Why the last host that the search came to refused the frame, or which limit has no seat left; None where hosts
    lacked what the frame needs."""
    softly_refused: bool = False
    """Whether a host refused a frame by a soft admission, which the second round of a plan leaves out."""
    second: bool = False
    """Whether the layer's share of the round is used up: it goes on once all others of the show have had theirs."""
    reason: Refusal | None = None
    """Why the round is over for these frames; None while it is not."""

    def verdict(self, reason: Refusal) -> LayerVerdict:
        """The verdict on these frames, where ``reason`` is why the others wait."""
        waiting = self.waiting - self.placed
        return LayerVerdict(self.job.id, self.layer.id, reason.verdict, self.placed, waiting, reason.detail)


@dataclass(slots=True)
class Reach:
    """What a plan has found out about the hosts with some tags of a show's clusters. It stays true for the plan:
    hosts only get fuller. Each show has its own, because its open allocations are its own."""

    tags: tuple[str, ...]
    closed: bool = False
    """Whether no host has what the most modest layer needs."""
    nothing_idle: list[Resources] = field(default_factory=list)
    """Needs that no host has idle: every larger one finds none either."""


@dataclass(slots=True)
class ShowState:
    """How far a plan is with one show in one facility, over all its clusters that the pass has; and what comes next."""

    work: Work
    """What waits of the show."""
    plans: Mapping[Cluster, Plan]
    """The plans of the show's clusters, among others."""
    tags: frozenset[str]
    """The tags of all clusters of the show that the pass has."""
    reaches: dict[frozenset[str], Reach] = field(default_factory=dict)
    """What the plan found out about hosts, by the tags of layers. Sets of which the clusters have the same tags share
    one."""
    states: dict[str, list[LayerState]] = field(default_factory=dict)
    """How far the plan is with each layer, by its id."""
    rest: Iterator[Waiting] | None = None
    """The layers that the plan has not looked at yet, in the order of rank."""
    by_rank: deque[LayerState] = field(default_factory=deque)
    """Frames that go on next, in the order of rank."""
    later: deque[LayerState] = field(default_factory=deque)
    """Frames that go on once all others have had their share of the round."""
    drawn: list[tuple[float, str]] | None = None
    """A heap of the jobs that may be drawn, by virtual time; None before the first draw of a round."""
    front: LayerState | None = None
    """Frames that go on now."""
    drawing: bool = False
    """Whether the frames of ``front`` were drawn; otherwise they go on by rank."""
    booking_jobs: set[str] = field(default_factory=set)
    """The ids of the jobs that have frames in the plan."""
    bounded: bool = False
    """Whether as many jobs have frames in the plan as may."""
    wanted: list[Waiting] = field(default_factory=list)
    """Layers whose frames are to be read. The show stops at the first of them until they are."""

    @property
    def place(self) -> tuple[str, str]:
        """The ids of the facility and the show."""
        cluster = self.work.clusters[0]
        return cluster.facility_id, cluster.show_id

    def cluster_of(self, layer: Layer) -> Cluster:
        """The cluster for which a layer counts: the first of those that reach it."""
        clusters = self.work.clusters
        return next((cluster for cluster in clusters if not layer.tags.isdisjoint(cluster.tags)), clusters[0])

    def draw_among(self, states: Iterable[LayerState]) -> None:
        """Let the jobs of these layers be drawn, and no others."""
        draw = self.work.draw
        self.drawn = [] if draw is None else draw.times({state.job.id: state.job.priority for state in states})
        heapify(self.drawn)
