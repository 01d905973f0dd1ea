"""Searches of one plan that found no host, so that layers that look alike do not search again.

Within a plan hosts only get fuller and allocations only close (sooner for more cores), so a search that failed keeps
failing, and so does a larger one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from opencue_sched.domain.farm import Job, Layer
from opencue_sched.domain.reservation import Need


@dataclass(frozen=True, slots=True)
class Search:
    """All that decides which hosts a layer can use, caps and admission apart."""

    tags: tuple[str, ...]
    os_name: str | None
    need: Need
    threadable: bool
    cores_min_centicores: int
    cores_max_centicores: int

    @classmethod
    def of(cls, job: Job, layer: Layer, need: Need, tags: tuple[str, ...]) -> Search:
        return cls(tags, job.os_name, need, layer.threadable, layer.cores_min_centicores, layer.cores_max_centicores)


class BarrenSearches:
    """What is known to find nothing.

    Two kinds: a need for which the tags have no host with that much idle, which also answers for every larger need;
    and an exact search all of whose hosts said no (another OS, not wholly idle, ...), which answers for itself only.
    """

    def __init__(self) -> None:
        self._nothing_idle: defaultdict[tuple[str, ...], list[Need]] = defaultdict(list)
        self._refused: set[Search] = set()

    def covers(self, search: Search) -> bool:
        """Whether the search is known to find nothing."""
        if search in self._refused:
            return True
        return any(search.need.covers(need) for need in self._nothing_idle.get(search.tags, ()))

    def nothing_idle(self, search: Search) -> None:
        """No host had the need idle."""
        self._nothing_idle[search.tags].append(search.need)

    def all_refused(self, search: Search) -> None:
        """Every host that had the need idle was refused for reasons that are in the search."""
        self._refused.add(search)
