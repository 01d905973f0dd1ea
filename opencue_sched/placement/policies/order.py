"""The order of shows, of the jobs of a show, and of hosts (docs/policies.md).

Shares between shows: at each step of a plan the show that uses least of its size goes on. Filling so, core by core, is
weighted max-min fairness by subscription size; what a share is follows from what is used, so nobody's demand has to be
known. Each pass reads the use from the ledger, so planners of several shards order shows by the same figures, and those
that are late by what the others book meanwhile put it right at their next step.

The jobs of a show go by rank: priority, then the shard's hash of the job, age, id. Of the cores that a show starts, a
part (``queue.priority_draw``) goes instead to the job with the least virtual time among those that have a host
(`VirtualTimes`). So jobs of low priority have their turn while others take all that comes free, each in the measure of
its priority.

``convex`` is a potential of what is used on a host, the sum over cores, memory and GPUs of weight x e^(used / total); a
frame costs what it adds to that. The exponential makes the last part of a resource dearer than the first, so hosts come
to be used to the same degree in each, and what is left of one is left beside what is left of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import NamedTuple

from opencue_sched.domain.caps import Caps
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.units import CENTICORES_PER_CORE


class Use(NamedTuple):
    """How much a show uses; the show that uses least comes first."""

    sizeless: bool
    """Whether the show has no size: such shows come last, among themselves by cores alone."""
    of_size: float
    """Cores in use for each core of the size; of a show without a size, the cores."""


class Shares:
    """What shows use of their subscriptions, by show and allocation, while one plan fills; ``sizes`` are cores."""

    def __init__(self, subscriptions: Mapping[tuple[str, str], Caps], sizes: Mapping[tuple[str, str], float]) -> None:
        self._used: defaultdict[tuple[str, str | None], float] = defaultdict(float)
        """Cores in use, by show id and allocation id; with None: of all allocations that the show has a subscription
        to."""
        self._size: defaultdict[tuple[str, str | None], float] = defaultdict(float)
        """Cores of the size, likewise."""
        for (show_id, alloc_id), caps in subscriptions.items():
            for place in ((show_id, alloc_id), (show_id, None)):
                self._used[place] += caps.cores.booked
                self._size[place] += max(0.0, sizes.get((show_id, alloc_id), 0.0))

    def use(self, show_id: str, alloc_id: str | None = None) -> Use:
        """What the show uses of an allocation; None: of all it has a subscription to."""
        # Asked at each step of a plan, and for each layer that waits behind shows which use less.
        used, size = self._used[show_id, alloc_id], self._size[show_id, alloc_id]
        return Use(False, used / size) if size > 0 else Use(True, used)

    def take(self, show_id: str, alloc_id: str, cores: int) -> None:
        """Count cores that the plan gave to the show."""
        self._used[show_id, alloc_id] += cores
        self._used[show_id, None] += cores


class VirtualTimes:
    """The draw of one show: which job's turn it is, for the passes of one process over one shard. Start-time fair
    queueing: the job with the least virtual time is served, and then its time grows by cores / priority.

    Not thread-safe. Virtual times are not stored: a process that starts anew costs each job one turn.
    """

    def __init__(self, place: float = 0.0) -> None:
        self.place = place
        """The position of the shard among all, from 0 to below 1. It may change: what is known of jobs stays."""
        self._times: dict[str, float] = {}
        self._now = 0.0
        """The virtual time of the show: the largest at which a job was served."""
        self._cores = self._drawn_cores = 0

    def is_due(self, part: float) -> bool:
        """Whether the next core is to be drawn, so that ``part`` of all that the show starts here are."""
        return part > 0 and self._drawn_cores + 1 <= part * (self._cores + 1)

    def times(self, priorities: Mapping[str, int]) -> list[tuple[float, str]]:
        """The virtual time and the id of each job in ``priorities``, which has the jobs' priorities by their ids. A job
        that comes, or comes back, begins up to one turn after the show's time: none saves credit."""
        times = []
        for job_id, priority in priorities.items():
            at = self._times.get(job_id)
            if at is None:
                at = self._times[job_id] = self._first_time(job_id, priority)
            times.append((at, job_id))
        return times

    def left(self, job_id: str) -> None:
        """Forget a job of which no frame waits any more."""
        self._times.pop(job_id, None)

    def keep(self, job_ids: Collection[str]) -> None:
        """Forget the jobs that are not among these, where more are known than these are."""
        if len(self._times) > len(job_ids):
            for job_id in [known for known in list(self._times) if known not in job_ids]:
                self.left(job_id)

    def served(self, job_id: str, cores: int, priority: int) -> float:
        """Note that a job starts ``cores`` because it was drawn; returns its virtual time from now on."""
        at = self._times.get(job_id, self._now)
        self._now = max(self._now, at)
        self._times[job_id] = after = at + cores / max(priority, 1)
        return after

    def count(self, cores: int, *, drawn: bool) -> None:
        """Count cores that the show starts here (negative: that came to nothing)."""
        self._cores += cores
        if drawn:
            self._drawn_cores += cores
        if self._cores > _CORES_REMEMBERED:
            self._cores //= 2
            self._drawn_cores //= 2

    def _first_time(self, job_id: str, priority: int) -> float:
        """The virtual time of a job that has none yet: somewhere in the first turn of its priority, by its id and this
        shard's place."""
        # Each shard begins at another part of the turn, and these are evenly spread: of N planners one has the job's
        # first turn within an Nth of it, as one planner that served all hosts would.
        digest = blake2b(job_id.encode(), digest_size=4).digest()
        part = (int.from_bytes(digest) / 2**32 + self.place) % 1.0
        return self._now + part / max(priority, 1)


_CORES_REMEMBERED = 10_000
"""Over how many started cores of a show the drawn part is kept: what a process did long ago is not made up for. Beyond
that both counts are halved. With fewer, a few large frames throw the drawn part off."""


GPU_WEIGHT = 4.0
"""Cores and memory weigh 1: GPUs are few, and what else a host has is of no use to GPU work without them."""


def convex(host: Host, taken: Resources) -> float:
    """The score: what taking this, which the host has idle, adds to the host's potential. Never negative."""
    cost = 0.0
    for weight, total, idle, amount in (
        (1.0, host.total_centicores, host.idle_centicores, taken.cores * CENTICORES_PER_CORE),
        (1.0, host.total_memory_kb, host.idle_memory_kb, taken.memory_kb),
        (GPU_WEIGHT, host.total_gpus, host.idle_gpus, taken.gpus),
    ):
        if total > 0 and amount > 0:
            used = total - idle
            cost += weight * (math.exp((used + amount) / total) - math.exp(used / total))
    return cost
