"""The order of shows, of the jobs of a show, and of hosts (docs/policies.md).

Shares between shows: at each step of a plan the show that uses least of its size goes on. Filling so, core by core, is
weighted max-min fairness by subscription size; what a share is follows from what is used, so nobody's demand has to be
known. Each pass reads the use from the ledger, so planners of several shards order shows by the same figures, and those
that are late by what the others book meanwhile put it right at their next step.

The jobs of a show go by rank, and in drawn epochs by a key u^(1/priority), the largest first (Efraimidis and Spirakis),
where u is a hash of the job's id and of the epoch's seed. A hash is the same for every pass of the epoch, so a job that
was drawn keeps its turn long enough to get something done, and two passes never disagree. The query computes it
(store.pending): it is the order before the limit on jobs, not a shuffle of the first few.

``convex`` is a potential of what is used on a host, the sum over cores, memory and GPUs of weight x e^(used / total); a
frame costs what it adds to that. The exponential makes the last part of a resource dearer than the first, so hosts come
to be used to the same degree in each, and what is left of one is left beside what is left of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from opencue_sched.domain.caps import Caps
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.units import CENTICORES_PER_CORE


class Use(NamedTuple):
    """How a show stands, the least first: shows without a size come last (``sizeless``), among them by cores alone."""

    sizeless: bool
    of_size: float
    """Cores in use for each core of the size; of a show without a size, the cores."""


class Shares:
    """What shows use of their subscriptions, by show and allocation, while a plan fills; ``sizes`` are cores."""

    def __init__(self, subscriptions: Mapping[tuple[str, str], Caps], sizes: Mapping[tuple[str, str], float]) -> None:
        self._sizes = sizes
        self._used: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._allocs: defaultdict[str, list[str]] = defaultdict(list)
        for (show_id, alloc_id), caps in subscriptions.items():
            self._used[show_id, alloc_id] = caps.cores.booked
            self._allocs[show_id].append(alloc_id)

    def use(self, show_id: str, alloc_id: str | None = None) -> Use:
        """What the show uses of an allocation; None: of all it has a subscription to."""
        pairs = [(show_id, it) for it in (self._allocs[show_id] if alloc_id is None else [alloc_id])]
        used = sum(self._used[pair] for pair in pairs)
        size = sum(max(0.0, self._sizes.get(pair, 0.0)) for pair in pairs)
        return Use(False, used / size) if size > 0 else Use(True, used)

    def take(self, show_id: str, alloc_id: str, cores: int) -> None:
        """Count cores that the plan gave to the show."""
        self._used[show_id, alloc_id] += cores


EPOCH_SECONDS = 2.0
"""Long enough for several passes over a full farm, short enough that a job with one core's worth of luck a minute does
not wait for many."""


def seed_of_draw(show_id: str, shard: str, now: float, part: float) -> str:
    """The seed of the epoch at ``now`` (epoch seconds of the database); '' for an epoch that goes by rank.

    ``part`` of the epochs of each show and shard, spread evenly, is drawn; different shows begin at different epochs.
    """
    epoch = math.floor(now / EPOCH_SECONDS)
    place = f"{show_id}|{shard}"
    offset = int.from_bytes(blake2b(place.encode(), digest_size=4).digest()) / 2**32
    drawn = math.floor((epoch + 1) * part + offset) > math.floor(epoch * part + offset)
    return f"{place}|{epoch}|" if drawn else ""


GPU_WEIGHT = 4.0
"""Cores and memory weigh 1: GPUs are few, and what else a host has is of no use to GPU work without them."""


def convex(host: Host, taken: Reservation) -> float:
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
