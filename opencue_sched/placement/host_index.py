"""Hosts ordered by what is idle on them, for the searches of a plan (docs/references.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedDict

from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.settings import HostBookingStrategy

Rank = tuple[int, int, int, str]
"""A host's place in the order of a strategy: GPU level, cores, memory bucket, id. The smaller rank is served first, so
cores and memory bucket are negative where the strategy prefers the hosts with more idle."""


def _gpu_level(gpus: int, gpu_memory_kb: int) -> int:
    """The GPU level of idle resources, or of a need: 0 without any GPU or GPU memory, else 1 and the number of GPUs.
    GPU memory alone makes a GPU host, too."""
    return 0 if gpus <= 0 and gpu_memory_kb <= 0 else 1 + max(0, gpus)


class HostIndex:
    """Hosts ordered for booking, in a tree by what is idle on them: GPU level, then cores, then memory bucket, then id.
    Not thread-safe: the host cache uses it under its lock. Finding, adding and removing a host are O(log n).

    Cores and memory are the dimensions of the reference (docs/references.md, "The distributed scheduler"); the GPU
    level is the third that the reference says a GPU farm needs.

    Work without GPUs walks the levels from below, so it meets hosts without GPUs first and then those with the fewest
    GPUs idle; work with GPUs starts at the level it needs and never sees the others. Within one memory bucket the exact
    idle memory is checked, because a bucket also holds hosts with less than is asked for. (A memory bucket is no bucket
    of domain/shards.py, which knows no amounts.)
    """

    def __init__(self, *, memory_key_divisor_kb: int) -> None:
        self._memory_bucket_kb = max(1, memory_key_divisor_kb)
        """The width of a memory bucket."""
        self._levels: SortedDict[int, SortedDict[int, SortedDict[int, SortedDict[str, Host]]]] = SortedDict()
        """The tree: GPU level, idle cores, memory bucket, host id. It has no empty branches."""
        self._places: dict[str, tuple[int, int, int]] = {}
        """The GPU level, idle cores and memory bucket under which each host is in the tree, by host id."""

    def __contains__(self, host_id: str) -> bool:
        return host_id in self._places

    def add(self, host: Host) -> None:
        """Put a host where its idle resources say, in place of what was here of it."""
        level = _gpu_level(host.idle_gpus, host.idle_gpu_memory_kb)
        place = (level, host.idle_cores, max(0, host.idle_memory_kb) // self._memory_bucket_kb)
        if self._places.get(host.id, place) != place:
            self.remove(host.id)
        self._places[host.id] = place
        tree: SortedDict[Any, Any] = self._levels
        for key in place:
            branch = tree.get(key)
            if branch is None:
                branch = tree[key] = SortedDict()
            tree = branch
        tree[host.id] = host

    def remove(self, host_id: str) -> None:
        """Take a host out, and the branches that get empty. A host that is not here may be named, too."""
        place = self._places.pop(host_id, None)
        if place is None:
            return
        trees: list[SortedDict[Any, Any]] = [self._levels]
        for key in place:
            trees.append(trees[-1][key])
        for tree, branch in zip(reversed(trees), (host_id, *reversed(place)), strict=True):
            del tree[branch]
            if tree:
                return

    def ranked(self, need: Resources, strategy: HostBookingStrategy) -> Iterator[tuple[Rank, Host]]:
        """The hosts with at least ``need`` idle in the strategy's order, with their ranks, by which several indexes are
        merged into one order. Lazy: the index must not be changed until the caller has what it wants."""
        # Best fit: the host with the fewest idle of those that do comes first.
        best_cores, best_memory = strategy.core_saturation, strategy.memory_saturation
        least_level = _gpu_level(need.gpus, need.gpu_memory_kb)
        least_bucket = max(0, need.memory_kb) // self._memory_bucket_kb
        # There are few levels and buckets: to walk over those that are too low takes less time than irange().
        for level in self._levels:
            if level < least_level:
                continue
            by_cores = self._levels[level]
            for cores in by_cores.irange(minimum=need.cores, reverse=not best_cores):
                by_memory = by_cores[cores]
                for bucket in by_memory if best_memory else reversed(by_memory):
                    if bucket < least_bucket:
                        continue
                    hosts = by_memory[bucket]
                    for host_id in hosts:
                        host = hosts[host_id]
                        if (
                            host.idle_memory_kb >= need.memory_kb
                            and host.idle_gpus >= need.gpus
                            and host.idle_gpu_memory_kb >= need.gpu_memory_kb
                        ):
                            rank_cores = cores if best_cores else -cores
                            yield (level, rank_cores, bucket if best_memory else -bucket, host_id), host

    def idle_cores(self) -> Iterator[tuple[str, int]]:
        """The ids of the hosts with a core idle, and how many they have."""
        for by_cores in self._levels.values():
            for cores in by_cores.irange(minimum=1):
                for hosts in by_cores[cores].values():
                    for host_id in hosts:
                        yield host_id, cores

    def rank(self, host_id: str, strategy: HostBookingStrategy) -> Rank | None:
        """The rank of a host in the strategy's order; None for a host that is not here."""
        place = self._places.get(host_id)
        if place is None:
            return None
        level, cores, bucket = place
        bucket = bucket if strategy.memory_saturation else -bucket
        return level, cores if strategy.core_saturation else -cores, bucket, host_id
