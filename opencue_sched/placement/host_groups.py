"""Hosts by facility and tag: the host groups of the distributed scheduler reference ("Host Cache").

A group is split by allocation, so that an allocation whose burst is used up costs a pass nothing, however many hosts
it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, cast

import redis
import structlog

from opencue_sched.domain.farm import Host, ThreadMode
from opencue_sched.domain.reservation import Need
from opencue_sched.placement.index import HostIndex, Rank, closeness
from opencue_sched.placement.policy import Strategy

GroupKey = tuple[str, str]
"""Facility id and host tag."""


class HostClass(NamedTuple):
    """What a host is when nothing runs on it. Whole cores; memory in KB."""

    alloc_id: str
    os_names: tuple[str, ...]
    thread_mode: ThreadMode
    centicores: int
    memory_kb: int
    gpus: int
    gpu_memory_kb: int

    @classmethod
    def of(cls, host: Host) -> HostClass:
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
class Census:
    """Why no host was found: what the hosts with these tags are, and which comes closest right now.

    ``host_classes`` maps each kind of host to how many there are, whether or not they can be booked at the moment;
    ``roomiest`` is None when none of them can. ``refused`` has what PostgreSQL or RQD said of each further host, which
    is left alone for a moment.
    """

    host_classes: Mapping[HostClass, int]
    roomiest: Host | None
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class _Group:
    by_alloc: dict[str, HostIndex] = field(default_factory=dict)
    host_classes: dict[HostClass, set[str]] = field(default_factory=dict)


class HostGroups:
    """The open groups and the hosts in them. A host is known (counted in censuses) and, unless hidden, bookable.

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
        for ids in group.host_classes.values():
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
        return [] if group is None else [host_id for ids in group.host_classes.values() for host_id in ids]

    def put(self, host: Host) -> None:
        """Make the host known and bookable as it is now, in the open groups of its tags and in no other."""
        known = self._known.get(host.id)
        if known is not None and known.tags is not host.tags and known.tags != host.tags:
            self.drop(host.id)
            known = None
        if known is not None and (known.alloc_id != host.alloc_id or HostClass.of(known) != HostClass.of(host)):
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
        host_class = HostClass.of(host)
        for tag in host.tags:
            group = self._groups.get((host.facility_id, tag))
            if group is None or host_class not in group.host_classes:
                continue
            group.host_classes[host_class].discard(host_id)
            if not group.host_classes[host_class]:
                del group.host_classes[host_class]

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

    def census(self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None) -> Census:
        """What there is for ``need``. Costs as much as there are kinds of hosts: ask once per failed need and pass."""
        groups = [self._groups[facility_id, tag] for tag in tags if (facility_id, tag) in self._groups]
        if len(groups) == 1:
            host_classes = {host_class: len(ids) for host_class, ids in groups[0].host_classes.items()}
        else:
            every: dict[HostClass, set[str]] = {}
            for group in groups:
                for host_class, ids in group.host_classes.items():
                    every[host_class] = every.get(host_class, set()) | ids
            host_classes = {host_class: len(ids) for host_class, ids in every.items()}
        closest = [index.roomiest(need) for index in self._indexes(facility_id, tags, allocs)]
        roomiest = max(
            (host for host in closest if host is not None),
            key=lambda host: (*closeness(need, host.idle_cores, host.idle_memory_kb), host.id),
            default=None,
        )
        return Census(host_classes, roomiest)

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
        group.host_classes.setdefault(HostClass.of(host), set()).add(host.id)
        if host.id not in self._hidden:
            self._index(group, host.alloc_id).add(host)


def _each_once(ranked: Iterator[tuple[Rank, Host]]) -> Iterator[Host]:
    """A host with two of the tags has the same rank in both groups, so its repeats follow each other."""
    last = ""
    for _, host in ranked:
        if host.id != last:
            last = host.id
            yield host


Accept = Callable[[Host], bool]
"""Whether a planner would take a host. Must be pure: it may be asked about hosts that are then not handed out."""

log = structlog.get_logger(__name__)

_FIELD = "hosts"
_START = "0-0"
_IDS_PER_ENTRY = 250
_MAX_ENTRIES_KEPT = 10_000
_MAX_ENTRIES_READ = 1_000

_Entry = tuple[str, dict[str, str]]


class HostChanges:
    """Reads and writes ``{namespace}:hosts:changed``, a Redis stream with the ids of hosts whose rows changed.

    Who commits a booking or a release appends the hosts it touched; every worker reads what is new at its next gather
    and reads just those hosts again. So every cache sees freed cores at once, without waiting for a host report or for
    a group to expire. The log is a hint, never a truth: when it cannot answer, the caller reads every host. Holds no
    state: readers keep their own cursor.
    """

    def __init__(self, client: redis.Redis, namespace: str, *, keep_entries: int = _MAX_ENTRIES_KEPT) -> None:
        self._client = client
        # Not in coordination/names.py, which placement may not import.
        self._key = f"{namespace}:hosts:changed"
        self._keep_entries = keep_entries

    def publish(self, host_ids: Collection[str]) -> None:
        """Append the ids, in one round trip; 250 to an entry. Call it after the commit that changed the hosts."""
        ids = iter(dict.fromkeys(host_ids))
        pipeline = self._client.pipeline(transaction=False)
        while batch := list(islice(ids, _IDS_PER_ENTRY)):
            pipeline.xadd(self._key, {_FIELD: json.dumps(batch)}, maxlen=self._keep_entries, approximate=True)
        if len(pipeline):
            pipeline.execute()

    def since(self, cursor: str | None) -> tuple[str, frozenset[str] | None]:
        """What was appended after ``cursor``: the new cursor, and the ids, or None for "read every host again".

        None when there is no cursor yet, when the entry it names is gone (trimmed, or a flushed or failed-over Redis),
        when more than 1,000 entries are new, or when an entry is not ours. Read the hosts *after* this call: then
        nothing can fall between. One round trip.
        """
        pipeline = self._client.pipeline(transaction=True)
        at = cursor or _START
        pipeline.xrange(self._key, at, at)
        pipeline.xrange(self._key, f"({at}", "+", count=_MAX_ENTRIES_READ + 1)
        pipeline.xrevrange(self._key, count=1)
        answers = cast("list[list[_Entry]]", pipeline.execute())
        named, new, last = answers
        if not last:
            return _START, frozenset() if cursor == _START else None
        now = last[0][0]
        if cursor is None or not named or len(new) > _MAX_ENTRIES_READ:
            return now, None
        ids = _ids(new)
        if ids is None:
            log.warning("host_change_log_unreadable", key=self._key)
        return now, ids


def _ids(entries: list[_Entry]) -> frozenset[str] | None:
    """All ids of the entries; None if one of them was not written by ``publish``."""
    ids: set[str] = set()
    for _, fields in entries:
        try:
            batch: Any = json.loads(fields[_FIELD])
        except (KeyError, ValueError):
            return None
        if not isinstance(batch, list) or not all(isinstance(host_id, str) for host_id in batch):
            return None
        ids.update(batch)
    return frozenset(ids)
