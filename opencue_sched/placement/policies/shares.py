"""Shares between shows: at each step of a plan the show that uses least of its size goes on.

Filling so, core by core, is weighted max-min fairness by subscription size: a show with little to do leaves the rest to
the others, and no core stays idle for the sake of a share, because whoever comes last may still have what nobody before
could use. What a share is follows from what is used; nobody's demand has to be known. Burst stays a cap of its own.

Each pass reads the use from the ledger, so planners of several shards order shows by the same figures, and those that
are late by what the others book meanwhile put it right at their next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
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
