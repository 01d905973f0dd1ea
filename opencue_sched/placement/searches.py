"""Searches of one plan that found no host, so that layers that look alike do not search again.

Within a plan hosts only get fuller and allocations only close, so a search that failed keeps failing.
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
        self._nothing_idle: defaultdict[tuple[str, ...], list[tuple[Need, frozenset[str]]]] = defaultdict(list)
        self._refused: dict[Search, frozenset[str]] = {}

    def covers(self, search: Search, allocs: frozenset[str]) -> bool:
        """Whether the search, in these allocations, is known to find nothing."""
        refused = self._refused.get(search)
        if refused is not None and allocs <= refused:
            return True
        return any(
            _at_least(search.need, need) and allocs <= known for need, known in self._nothing_idle.get(search.tags, ())
        )

    def nothing_idle(self, search: Search, allocs: frozenset[str]) -> None:
        """No host had the need idle."""
        self._nothing_idle[search.tags].append((search.need, allocs))

    def all_refused(self, search: Search, allocs: frozenset[str]) -> None:
        """Every host that had the need idle was refused for reasons that are in the search."""
        self._refused[search] = allocs


def _at_least(need: Need, other: Need) -> bool:
    return (
        need.cores >= other.cores
        and need.memory_kb >= other.memory_kb
        and need.gpus >= other.gpus
        and need.gpu_memory_kb >= other.gpu_memory_kb
    )
