"""Hosts ordered by what is idle on them, for the searches of a plan (distributed scheduler reference, "Host Cache")."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from opencue_sched.domain.farm import Host
from opencue_sched.domain.frames import Need
from opencue_sched.settings import HostBookingStrategy

Rank = tuple[int, int, int, str]
"""A host's place in the order of a strategy (GPU level, cores, bucket, tie); smaller first, no two hosts share one."""


class _Position(NamedTuple):
    gpu_level: int
    cores: int
    bucket: int
    tie: str


def _gpu_level(gpus: int, gpu_memory_kb: int) -> int:
    """0 without any GPU resource, else 1 + whole GPUs: GPU memory alone makes a GPU host, too."""
    return 0 if gpus <= 0 and gpu_memory_kb <= 0 else 1 + max(0, gpus)


def _branch(tree: SortedDict[int, SortedDict[Any, Any]], key: int) -> SortedDict[Any, Any]:
    """The sub-tree at ``key``, made if it is not there."""
    branch = tree.get(key)
    if branch is None:
        branch = tree[key] = SortedDict()
    return branch


class HostIndex:
    """Hosts ordered for booking, in a tree by what is idle on them: GPU level, then cores, then memory bucket. Not
    thread-safe; finding, adding and removing a host are O(log n).

    Cores and memory are the dimensions of the distributed scheduler reference; the GPU level is the third that it says
    a GPU farm needs.

    Work without GPUs walks the levels from below, so it meets hosts without GPUs first and then those with the fewest
    idle; work with GPUs starts at the level it needs and never sees the others. Within one memory bucket the exact
    idle memory is checked, because a bucket also holds hosts with less than is asked for. Hosts that are equal to the
    strategy come in an order fixed by ``instance``, so that two instances looking at the same hosts reach for
    different ones.
    """

    def __init__(self, *, memory_key_divisor_kb: int, instance: str = "") -> None:
        self._divisor = max(1, memory_key_divisor_kb)
        self._instance = blake2b(instance.encode()).digest()
        self._levels: SortedDict[int, SortedDict[int, SortedDict[int, SortedDict[str, Host]]]] = SortedDict()
        self._positions: dict[str, _Position] = {}

    def add(self, host: Host) -> None:
        """Put a host where its idle resources say, out of where it was before."""
        known = self._positions.get(host.id)
        position = _Position(
            _gpu_level(host.idle_gpus, host.idle_gpu_memory_kb),
            host.idle_cores,
            max(0, host.idle_memory_kb) // self._divisor,
            known.tie if known is not None else self._tie(host.id),
        )
        if known is not None and known != position:
            self._take_out(known)
        self._positions[host.id] = position
        by_cores = _branch(self._levels, position.gpu_level)
        by_memory = _branch(by_cores, position.cores)
        _branch(by_memory, position.bucket)[position.tie] = host

    def remove(self, host_id: str) -> None:
        """Take a host out; nothing happens if it is not here."""
        position = self._positions.pop(host_id, None)
        if position is not None:
            self._take_out(position)

    def ranked(self, need: Need, strategy: HostBookingStrategy) -> Iterator[tuple[Rank, Host]]:
        """The hosts with at least ``need`` idle in the strategy's order, with their ranks, by which several indexes are
        merged into one order. Lazy: do not change the index meanwhile."""
        best_cores, best_memory = strategy.core_saturation, strategy.memory_saturation
        least_bucket = max(0, need.memory_kb) // self._divisor
        for level in self._levels.irange(minimum=_gpu_level(need.gpus, need.gpu_memory_kb)):
            by_cores = self._levels[level]
            for cores in by_cores.irange(minimum=need.cores, reverse=not best_cores):
                by_memory = by_cores[cores]
                for bucket in by_memory.irange(minimum=least_bucket, reverse=not best_memory):
                    for tie, host in by_memory[bucket].items():
                        if (
                            host.idle_memory_kb >= need.memory_kb
                            and host.idle_gpus >= need.gpus
                            and host.idle_gpu_memory_kb >= need.gpu_memory_kb
                        ):
                            rank_cores = cores if best_cores else -cores
                            yield (level, rank_cores, bucket if best_memory else -bucket, tie), host

    def rank(self, host_id: str, strategy: HostBookingStrategy) -> Rank | None:
        """The host's place in the strategy's order; None if it is not here."""
        at = self._positions.get(host_id)
        if at is None:
            return None
        cores = at.cores if strategy.core_saturation else -at.cores
        return at.gpu_level, cores, at.bucket if strategy.memory_saturation else -at.bucket, at.tie

    def _tie(self, host_id: str) -> str:
        """Where the host stands among equals. Ends with the id: a position must be of one host only."""
        return blake2b(host_id.encode(), digest_size=6, key=self._instance).hexdigest() + host_id

    def _take_out(self, position: _Position) -> None:
        by_cores = self._levels[position.gpu_level]
        by_memory = by_cores[position.cores]
        bucket = by_memory[position.bucket]
        del bucket[position.tie]
        if bucket:
            return
        del by_memory[position.bucket]
        if by_memory:
            return
        del by_cores[position.cores]
        if not by_cores:
            del self._levels[position.gpu_level]
