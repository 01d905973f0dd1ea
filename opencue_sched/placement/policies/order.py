"""The order of shows and of the jobs of a show.

Shares between shows: at each step of a plan the show that uses least of its size goes on. Filling so, core by core, is
weighted max-min fairness by subscription size: a show with little to do leaves the rest to the others, and no core
stays idle for the sake of a share. What a share is follows from what is used; nobody's demand has to be known. Burst
stays a cap of its own. Each pass reads the use from the ledger, so planners of several shards order shows by the same
figures, and those that are late by what the others book meanwhile put it right at their next step.

The order of a show's jobs: by rank, with a part by draw, so that nothing starves. Time is cut into epochs of
EPOCH_SECONDS. Of these the part ``queue.priority_draw`` goes by draw and the others by rank: priority first, then age,
as OpenCue's own dispatcher does. In a drawn epoch each job has a key u^(1/priority), the largest first (Efraimidis and
Spirakis), where u is a hash of the job's id and of the epoch's seed: a job of priority 200 comes first twice as often
as one of 100. A hash is the same for every pass of the epoch, so a job that was drawn keeps its turn long enough to get
something done, and two passes never disagree. The query computes it (store.pending): it is the order before the limit
on jobs, not a shuffle of the first few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import NamedTuple

from opencue_sched.domain.farm import Caps

Subscription = tuple[str, str]
"""Show id and allocation id."""


class Use(NamedTuple):
    """How a show stands, the least first: shows without a size come last (``sizeless``), among them by cores alone."""

    sizeless: bool
    of_size: float
    """Cores in use for each core of the size; of a show without a size, the cores."""


class Shares:
    """What shows use of their subscriptions while a plan fills.

    ``subscriptions`` and ``sizes`` (cores) are by (show, allocation). Without ``on`` all shows stand alike.
    """

    def __init__(
        self, subscriptions: Mapping[Subscription, Caps], sizes: Mapping[Subscription, float], *, on: bool = True
    ) -> None:
        self._on = on
        self._sizes = sizes
        self._used: defaultdict[Subscription, float] = defaultdict(float)
        self._allocs: defaultdict[str, list[str]] = defaultdict(list)
        for (show_id, alloc_id), caps in subscriptions.items():
            self._used[show_id, alloc_id] = caps.cores.booked
            self._allocs[show_id].append(alloc_id)

    def use(self, show_id: str, alloc_ids: Collection[str] | None = None) -> Use:
        """What the show uses of these allocations; None: of all it has a subscription to."""
        if not self._on:
            return Use(False, 0.0)
        pairs = [(show_id, alloc_id) for alloc_id in (self._allocs[show_id] if alloc_ids is None else alloc_ids)]
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
