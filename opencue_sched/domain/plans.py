"""What a pass plans from, and what it plans: waiting layers of shows, a snapshot, and procs that are to be booked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from opencue_sched.domain.caps import Caps, Headroom, Seats, Vertices
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_needs import smallest_need
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Frame, Job, Layer


class Place(NamedTuple):
    """The hosts on which a layer may run at all, whatever amounts it needs. Only layers of one place are compared by
    their needs."""

    tags: frozenset[str]
    os_name: str | None
    threadable: bool


@dataclass(slots=True)
class Waiting:
    """A layer with waiting frames, and what a plan asks of it again and again."""

    job: Job
    layer: Layer
    frames: int
    """How many frames of the layer wait, as far as is known."""
    need: Resources
    """The least that any frame of the layer takes."""
    place: Place

    @property
    def unplanned(self) -> int:
        """How many of the frames no plan of this process is booking: rather too many where that is not known."""
        return self.frames

    @classmethod
    def of(cls, job: Job, layer: Layer) -> Waiting:
        """A layer that waits, as a plan is made from it."""
        place = Place(layer.tags, job.os_name, layer.threadable)
        return cls(job, layer, max(layer.waiting_frames, len(layer.frames)), smallest_need(layer), place)


class Draw(Protocol):
    """Says which job's turn it is in the drawn part of a show (placement/policies/order.py)."""

    def is_due(self, part: float) -> bool:
        """Whether the next core is to be drawn, so that ``part`` of all are (0.1: every tenth)."""

    def times(self, priorities: Mapping[str, int]) -> list[tuple[float, str]]:
        """The virtual time and the id of each job in ``priorities``, which has the jobs' priorities by their ids."""

    def served(self, job_id: str, cores: int, priority: int) -> float:
        """Note that a job starts ``cores`` because it was drawn; returns its virtual time from now on."""

    def count(self, cores: int, *, drawn: bool) -> None:
        """Count cores that the show starts."""


class Work(Protocol):
    """The waiting layers of one show in one facility, over all its clusters that a pass has claimed."""

    @property
    def clusters(self) -> Sequence[Cluster]:
        """The clusters, all of one show, facility and shard."""

    @property
    def draw(self) -> Draw | None:
        """The draw of the show's drawn part; None where all jobs go by rank."""

    def __iter__(self) -> Iterator[Waiting]:
        """The waiting layers in the order in which they should be served."""

    def in_order(self, may_start: Callable[[str], bool]) -> Iterator[Waiting]:
        """The layers in that order, without those of jobs for which ``may_start`` returns False. It is called with the
        id of a job when the job's first layer comes."""

    def of_job(self, job_id: str) -> Iterable[Waiting]:
        """The waiting layers of one job, in their order."""

    def under_limit(self, limit_id: str) -> Iterable[Waiting]:
        """The layers under a limit, in any order."""

    def least_of_job(self, job_id: str) -> Iterable[tuple[frozenset[str], Resources]]:
        """The least that any layer of a job needs, in each amount, for each set of tags that its layers have."""

    def priorities(self) -> Mapping[str, int]:
        """The priorities of the jobs with waiting layers, by their ids."""

    def tags(self) -> Iterable[frozenset[str]]:
        """The sets of tags that the waiting layers have."""

    def least_need(self, tags: Iterable[str]) -> Resources:
        """The least that any layer with one of these tags needs, in each amount; a core where no such layer is left."""

    def portion(self, layer: Layer) -> Sequence[Frame] | None:
        """The layer's first waiting frames, without those that are being booked; None where they were not read yet."""

    def has_portion(self, layer: Layer) -> bool:
        """Whether ``portion`` would return frames, and not None."""

    def to_judge(self) -> Iterable[Waiting]:
        """Layers that no plan has looked at for long: this one says of each why it waits."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the planner may know about the work of one pass (hosts come from the host pool). Nobody changes its
    mappings after it was read."""

    work: tuple[Work, ...]
    subscriptions: Mapping[tuple[str, str], Caps]
    """Burst and use by show id and allocation id; an allocation that is absent may not be booked."""
    caps: Mapping[str, Caps]
    """Caps and use by the id of a folder or job; a folder or job that is absent has no caps."""
    limits: Mapping[str, Headroom] = field(default_factory=dict)
    """What is left of each limit, by its id; a limit that is absent is unlimited."""
    sizes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The size of a subscription in cores, by show id and allocation id."""
    now: float = 0.0
    """The moment at which the snapshot was read, in epoch seconds of the database's clock."""
    seats: Mapping[str, Seats] = field(default_factory=dict)
    """The machines of each limit that counts machines, by its id."""


@dataclass(frozen=True, slots=True)
class PlannedProc:
    """One frame on one host."""

    proc_id: str
    """Made by the plan, before anything is booked."""
    job: Job
    layer: Layer
    frame: Frame
    host: Host
    resources: Resources
    vertices: Vertices
