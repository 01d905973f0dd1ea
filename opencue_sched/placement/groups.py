"""Hosts by facility and tag: the host groups of the distributed scheduler reference ("Host Cache").

A group is split by allocation, so that an allocation whose burst is used up costs a pass nothing, however many hosts
it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter
from typing import NamedTuple

from opencue_sched.domain.farm import Host
from opencue_sched.domain.reservation import Need
from opencue_sched.domain.states import ThreadMode
from opencue_sched.placement.index import HostIndex, Rank, closeness
from opencue_sched.placement.strategy import Strategy

GroupKey = tuple[str, str]
"""Facility id and host tag."""


class Build(NamedTuple):
    """What a host is when nothing runs on it. Whole cores; memory in KB."""

    alloc_id: str
    os_names: tuple[str, ...]
    thread_mode: ThreadMode
    centicores: int
    memory_kb: int
    gpus: int
    gpu_memory_kb: int

    @classmethod
    def of(cls, host: Host) -> Build:
        return cls(
            host.alloc_id,
            host.os_names,
            host.thread_mode,
            host.total_centicores,
            host.total_memory_kb,
            host.total_gpus,
            host.total_gpu_memory_kb,
        )


@dataclass(frozen=True, slots=True)
class Survey:
    """Why no host was found: what the hosts with these tags are, and which comes closest right now.

    ``builds`` maps each kind of host to how many there are, whether or not they can be booked at the moment;
    ``roomiest`` is None when none of them can. ``refused`` has what PostgreSQL or RQD said of each further host, which
    is left alone for a moment.
    """

    builds: Mapping[Build, int]
    roomiest: Host | None
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class _Group:
    by_alloc: dict[str, HostIndex] = field(default_factory=dict)
    builds: dict[Build, set[str]] = field(default_factory=dict)


class HostGroups:
    """The open groups and the hosts in them. A host is known (counted in surveys) and, unless hidden, bookable.

    Not thread-safe: ``HostCache`` locks around it.
    """

    def __init__(self, *, memory_key_divisor_kb: int, instance: str = "") -> None:
        self._divisor = memory_key_divisor_kb
        self._instance = instance
        self._groups: dict[GroupKey, _Group] = {}
        self._known: dict[str, Host] = {}
        self._hidden: set[str] = set()

    def __len__(self) -> int:
        """How many hosts are known."""
        return len(self._known)

    def open(self, key: GroupKey) -> None:
        """Start keeping a group; hosts known from other groups join it at once."""
        if key in self._groups:
            return
        self._groups[key] = _Group()
        facility_id, tag = key
        for host in list(self._known.values()):
            if host.facility_id == facility_id and tag in host.tags:
                self._join(host, tag)

    def close(self, key: GroupKey) -> None:
        """Stop keeping a group; hosts that are in no other open group are forgotten."""
        group = self._groups.pop(key, None)
        if group is None:
            return
        for ids in group.builds.values():
            for host_id in ids:
                if not self.wants(self._known[host_id]):
                    del self._known[host_id]
                    self._hidden.discard(host_id)

    def wants(self, host: Host) -> bool:
        """Whether the host belongs to an open group."""
        return any((host.facility_id, tag) in self._groups for tag in host.tags)

    def get(self, host_id: str) -> Host | None:
        """The host as it was last put, bookable or hidden."""
        return self._known.get(host_id)

    def shows(self, host: Host) -> bool:
        """Whether the host is bookable exactly as it is."""
        return self._known.get(host.id) is host and host.id not in self._hidden

    def members(self, key: GroupKey) -> list[str]:
        """Ids of every known host of a group."""
        group = self._groups.get(key)
        return [] if group is None else [host_id for ids in group.builds.values() for host_id in ids]

    def put(self, host: Host) -> None:
        """Make the host known and bookable as it is now, in the open groups of its tags and in no other."""
        known = self._known.get(host.id)
        if known is not None and known.tags is not host.tags and known.tags != host.tags:
            self.drop(host.id)
            known = None
        if known is not None and (known.alloc_id != host.alloc_id or Build.of(known) != Build.of(host)):
            self.drop(host.id)
            known = None
        if not self.wants(host):
            return
        self._known[host.id] = host
        self._hidden.discard(host.id)
        for tag in host.tags:
            group = self._groups.get((host.facility_id, tag))
            if group is None:
                continue
            if known is None:
                self._join(host, tag)
            else:
                self._index(group, host.alloc_id).add(host)

    def hide(self, host_id: str) -> None:
        """Make the host unbookable, but still known."""
        host = self._known.get(host_id)
        if host is None or host_id in self._hidden:
            return
        self._hidden.add(host_id)
        for tag in host.tags:
            group = self._groups.get((host.facility_id, tag))
            if group is not None and host.alloc_id in group.by_alloc:
                group.by_alloc[host.alloc_id].remove(host_id)

    def drop(self, host_id: str) -> None:
        """Forget the host."""
        self.hide(host_id)
        self._hidden.discard(host_id)
        host = self._known.pop(host_id, None)
        if host is None:
            return
        build = Build.of(host)
        for tag in host.tags:
            group = self._groups.get((host.facility_id, tag))
            if group is None or build not in group.builds:
                continue
            group.builds[build].discard(host_id)
            if not group.builds[build]:
                del group.builds[build]

    def candidates(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        allocs: Collection[str] | None = None,
    ) -> Iterator[Host]:
        """Bookable hosts with any of the tags (and in one of ``allocs``), each once, in the order of the strategy."""
        streams = [index.ranked(need, strategy) for index in self._indexes(facility_id, tags, allocs)]
        if len(streams) == 1:
            return (host for _, host in streams[0])
        return _each_once(merge(*streams, key=itemgetter(0)))

    def survey(self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None) -> Survey:
        """What there is for ``need``. Costs as much as there are kinds of hosts: ask once per failed need and pass."""
        groups = [self._groups[facility_id, tag] for tag in tags if (facility_id, tag) in self._groups]
        if len(groups) == 1:
            builds = {build: len(ids) for build, ids in groups[0].builds.items()}
        else:
            every: dict[Build, set[str]] = {}
            for group in groups:
                for build, ids in group.builds.items():
                    every[build] = every.get(build, set()) | ids
            builds = {build: len(ids) for build, ids in every.items()}
        closest = [index.roomiest(need) for index in self._indexes(facility_id, tags, allocs)]
        roomiest = max(
            (host for host in closest if host is not None),
            key=lambda host: (*closeness(need, host.idle_cores, host.idle_memory_kb), host.id),
            default=None,
        )
        return Survey(builds, roomiest)

    def _indexes(self, facility_id: str, tags: Sequence[str], allocs: Collection[str] | None) -> list[HostIndex]:
        return [
            index
            for tag in tags
            if (group := self._groups.get((facility_id, tag))) is not None
            for alloc_id, index in group.by_alloc.items()
            if allocs is None or alloc_id in allocs
        ]

    def _index(self, group: _Group, alloc_id: str) -> HostIndex:
        index = group.by_alloc.get(alloc_id)
        if index is None:
            index = HostIndex(memory_key_divisor_kb=self._divisor, instance=self._instance)
            group.by_alloc[alloc_id] = index
        return index

    def _join(self, host: Host, tag: str) -> None:
        group = self._groups[host.facility_id, tag]
        group.builds.setdefault(Build.of(host), set()).add(host.id)
        if host.id not in self._hidden:
            self._index(group, host.alloc_id).add(host)


def _each_once(ranked: Iterator[tuple[Rank, Host]]) -> Iterator[Host]:
    """A host with two of the tags has the same rank in both groups, so its repeats follow each other."""
    last = ""
    for _, host in ranked:
        if host.id != last:
            last = host.id
            yield host
