"""What a pass plans from, and what it plans: a snapshot, and procs that are to be booked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opencue_sched.domain.caps import Caps, Headroom, Vertices
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.jobs import Frame, Job, Layer


@dataclass(frozen=True, slots=True)
class Work:
    """The jobs of one cluster, in the order in which they should be served."""

    cluster: Cluster
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the planner may know about the work of one pass (hosts come from the host pool).

    ``subscriptions`` maps (show id, alloc id) (an allocation that is absent may not be booked), and ``sizes`` the same
    to the subscription's size in cores; ``caps`` (of folders and jobs) and ``limits`` map ids (absent: unlimited).
    ``now`` is when it was read, in epoch seconds of the database.
    """

    work: tuple[Work, ...]
    subscriptions: Mapping[tuple[str, str], Caps]
    caps: Mapping[str, Caps]
    limits: Mapping[str, Headroom] = field(default_factory=dict)
    sizes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedProc:
    """One frame on one host. ``proc_id`` is generated here, before anything is booked."""

    proc_id: str
    job: Job
    layer: Layer
    frame: Frame
    host: Host
    reservation: Reservation
    vertices: Vertices
