"""The hosts of one process, shared by the passes in its threads (distributed scheduler reference, "Host Cache")."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from opencue_sched.domain.farm import Host, Reservation
from opencue_sched.domain.frames import Need
from opencue_sched.settings import HostBookingStrategy, HostCacheSettings

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


def closeness(need: Need, cores: int, memory: int) -> tuple[bool, int, int]:
    """How close a host comes to a need it does not meet: with the cores, by its memory; without them, by its cores."""
    return (True, memory, cores) if cores >= need.cores else (False, cores, memory)


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

    def roomiest(self, need: Need) -> Host | None:
        """The host that comes closest to ``need``, to tell an operator what is missing.

        Of the hosts with enough idle cores, one with the most idle memory; if none has, one with the most idle cores.
        """
        level_from = _gpu_level(need.gpus, need.gpu_memory_kb)
        levels = list(self._levels.irange(minimum=level_from)) or list(self._levels)
        best: tuple[bool, int, int] | None = None
        found: Host | None = None
        for level in levels:
            by_cores = self._levels[level]
            for cores in by_cores.irange(reverse=True):
                bucket, hosts = by_cores[cores].peekitem(-1)
                close = closeness(need, cores, bucket)
                if best is None or close > best:
                    best, found = close, hosts.peekitem(0)[1]
                if cores < need.cores:
                    break
        return found

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


Accept = Callable[[Host], bool]
"""Whether a planner would take a host. Must be pure: it may be asked about hosts that are then not chosen."""
FetchHosts = Callable[[str, Sequence[str]], Sequence[Host]]
"""``fetch(facility_id, tags)``: the hosts of the facility with any of the tags that can be booked, in one query."""

HOLD_SECONDS = 12.0
GROUP_REFRESH_SECONDS = 10.0
"""Between full reads of a group. Changes in between arrive by the change log; this finds those whose news was lost."""
_FIRST_LISTED = 4
"""Hosts listed under the lock at first; each further listing is four times as long."""
_SCORED_CANDIDATES = 500
"""Hosts a policy's score chooses among: it is called for each, so this bounds what one search costs."""


_HostClass = tuple[object, ...]


def _class_of(host: Host) -> _HostClass:
    """What the host is when nothing runs on it."""
    return (
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

    ``kinds`` has a host of each kind as it is when nothing runs on it, and how many there are; ``roomiest`` is None
    when none is of an allocation that was asked for. ``refused`` has what PostgreSQL or RQD said of each further host,
    which is left alone for a moment.
    """

    kinds: Sequence[tuple[Host, int]]
    roomiest: Host | None
    refused: tuple[str, ...] = ()


class _Group:
    """The hosts of a facility that carry a tag, by class, and in an index for each allocation: one whose burst is used
    up costs a pass nothing, however many hosts it has. ``fetching`` is held by the thread that reads the group."""

    def __init__(self, new_index: Callable[[], HostIndex]) -> None:
        self.by_alloc: defaultdict[str, HostIndex] = defaultdict(new_index)
        self.classes: defaultdict[_HostClass, set[str]] = defaultdict(set)
        self.asked_at = 0.0
        self.fetched_at: float | None = None
        self.fetching = threading.Lock()

    def add(self, host: Host) -> None:
        self.by_alloc[host.alloc_id].add(host)
        self.classes[_class_of(host)].add(host.id)

    def remove(self, host: Host) -> None:
        self.by_alloc[host.alloc_id].remove(host.id)
        host_class = _class_of(host)
        self.classes[host_class].discard(host.id)
        if not self.classes[host_class]:
            del self.classes[host_class]


class _Hold(NamedTuple):
    """``covered_from``: reads that begin then or later contain what was taken, or show that it came to nothing."""

    taken: Reservation
    covered_from: float


@dataclass(slots=True)
class _Entry:
    """A host as it was last ``read``; None when it was not there. Reads that began before ``read_at`` do not count."""

    read_at: float
    read: Host | None = None
    holds: dict[str, _Hold] = field(default_factory=dict)


class _Refused(NamedTuple):
    """A host that is not to be read before ``until``, as it was last known."""

    until: float
    host: Host | None
    why: str


class HostCache:
    """PostgreSQL's hosts in groups by facility and tag, as they can be booked now. Thread-safe.

    Three things change a host: a read of PostgreSQL, a plan that takes from it, and the outcome of that plan. They
    arrive in any order, so a host is shown as *what the last read said, less the holds that read cannot have seen*:

    - Reads are ordered by when they *began*, on this process's clock; an older read never overwrites a newer one.
    - A hold starts when a plan takes from a host. Once its booking is committed, reads that begin later contain it and
      end it; if it was lost, its idle is back at once. A hold that is never settled ends with the first read that
      begins ``hold_seconds`` after it: longer than ``accounting.commit_deadline``, or the host would be promised again
      while its plan may still be committed. So a read that was under way during a commit does not bring back idle that
      the commit took, and the next read shows freed cores, not the host's next report (design trap I-3).

    Every doubt under-books: the host shows less idle than it has until the next read.

    ``fetch`` reads groups that are absent or older than ``GROUP_REFRESH_SECONDS``; hosts named by the change log come
    through ``apply`` in between. ``clock`` is in seconds and never runs backwards. One lock guards everything; it is
    not held during a fetch, nor while a planner's predicate runs.
    """

    def __init__(
        self,
        settings: HostCacheSettings,
        fetch: FetchHosts,
        *,
        instance: str = "",
        hold_seconds: float = HOLD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._instance = instance
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._groups: dict[tuple[str, str], _Group] = {}
        self._entries: dict[str, _Entry] = {}
        self._shown: dict[str, Host] = {}
        self._refused: dict[str, _Refused] = {}
        self._unsettled: dict[str, set[str]] = {}
        self._latest = self._expired_at = -math.inf
        self._lock = threading.RLock()
        self._fetch_permits = threading.BoundedSemaphore(settings.concurrent_groups)

    def __len__(self) -> int:
        """How many hosts can be booked, full ones included."""
        return len(self._shown)

    # Reading hosts

    def instant(self) -> float:
        """The time, later than at any call before: reads, commits and refusals are strictly ordered by it.

        Whoever reads hosts for ``apply`` asks before the query begins. The query must see whatever was committed
        before: do not use an older REPEATABLE READ snapshot.
        """
        with self._lock:
            self._latest = max(self._clock(), math.nextafter(self._latest, math.inf))
            return self._latest

    def refresh(self, facility_id: str, tags: Collection[str]) -> Sequence[Host]:
        """Read the groups of these tags that are absent or expired, in one query; the hosts that were read.

        At most ``concurrent_groups`` such queries run at once, and no group is read by two threads: an absent one that
        another thread reads is waited for, an expired one is used as it is. Errors of ``fetch`` go to the caller and
        leave the groups as they were.
        """
        with ExitStack() as locks:
            due: dict[str, _Group] = {}
            # In one order for all threads, or two would wait for each other's groups.
            for tag in sorted(set(tags)):
                group = self._group(facility_id, tag)
                if self._is_due(group) and group.fetching.acquire(blocking=group.fetched_at is None):
                    locks.callback(group.fetching.release)
                    if self._is_due(group):
                        due[tag] = group
            if not due:
                return ()
            with self._fetch_permits:
                read_at = self.instant()
                hosts = self._fetch(facility_id, list(due))
            with self._lock:
                absent = any(group.fetched_at is None for group in due.values())
                for host in hosts:
                    self._take_over(host, read_at, show=absent)
                known = {host_id for group in due.values() for ids in group.classes.values() for host_id in ids}
                for host_id in known - {host.id for host in hosts}:
                    self._forget(host_id, read_at)
                for group in due.values():
                    group.fetched_at = read_at
            return hosts

    def apply(self, hosts: Iterable[Host], gone_ids: Collection[str], *, read_at: float) -> None:
        """Take over hosts that were read again, and forget those that were asked for and cannot be booked any more.

        ``read_at`` is the ``instant`` at which the read began: whatever is newer here stays.
        """
        with self._lock:
            for host in hosts:
                self._take_over(host, read_at)
            for host_id in gone_ids:
                self._forget(host_id, read_at)

    def expire(self) -> None:
        """Make the next refresh of every group fetch it: for a change log that could not say what changed."""
        self._expired_at = self.instant()

    def invalidate(self, host_id: str, *, cooldown_seconds: float = 0.0, why: str = "") -> None:
        """Do not show the host until a read that begins ``cooldown_seconds`` from now or later.

        For a host that PostgreSQL or RQD refused, ``why`` being what they said; of several reasons the first says most.
        The cooldown is for what a read cannot show: that its RQD is gone, say.
        """
        with self._lock:
            until = self.instant() + cooldown_seconds
            before = self._refused.get(host_id) or _Refused(until, self._shown.get(host_id), why)
            self._forget(host_id, until)
            self._refused[host_id] = _Refused(max(until, before.until), before.host, before.why or why)

    def invalidated_ids(self) -> frozenset[str]:
        """Invalidated hosts whose cooldown is over: read them with the next hosts from the change log."""
        with self._lock:
            now = self.instant()
            return frozenset(host_id for host_id, refused in self._refused.items() if refused.until <= now)

    def back_in(self) -> float | None:
        """Seconds until an invalidated host may be read again, 0 for one that may be by now; None for no such host."""
        with self._lock:
            at = min((refused.until for refused in self._refused.values()), default=None)
            return None if at is None else max(0.0, at - self._clock())

    def evict_idle_groups(self) -> None:
        """Drop the groups nobody asked for during ``group_idle_timeout``, and their hosts."""
        with self._lock:
            now = self._clock()
            timeout = self._settings.group_idle_timeout
            self._groups = {key: group for key, group in self._groups.items() if now - group.asked_at <= timeout}
            # What is remembered of hosts in no group keeps off older reads, until none can arrive any more.
            oldest = now - self._settings.host_staleness_threshold
            for host_id, entry in list(self._entries.items()):
                if entry.read is not None and any(self._groups_of(entry.read)):
                    continue
                self._shown.pop(host_id, None)
                if entry.read_at < oldest and all(hold.covered_from < oldest for hold in entry.holds.values()):
                    del self._entries[host_id]
                    self._unsettled.pop(host_id, None)
                    self._refused.pop(host_id, None)

    # Placing frames on them

    def find(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: HostBookingStrategy,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        score: Callable[[Host], float] | None = None,
    ) -> Host | None:
        """The first host with one of ``tags`` and ``need`` idle that ``accept`` agrees to, or None.

        ``allocs`` leaves out the hosts of other allocations without looking at them. ``score`` replaces the strategy's
        order by the lowest score among the first 500 accepted hosts.
        """
        accepted = filter(accept, self._candidates(facility_id, tags, need, strategy, allocs))
        if score is None:
            return next(accepted, None)
        return min(islice(accepted, _SCORED_CANDIDATES), key=score, default=None)

    def take(self, host: Host, taken: Mapping[str, Reservation]) -> bool:
        """Hold what a plan takes from a host, by proc id, until ``settle``; everybody sees the host without it.

        False, and nothing is held, if the host is not as it was found any more (the reference's optimistic test).
        """
        with self._lock:
            if self._shown.get(host.id) is not host:
                return False
            covered_from = self._clock() + self._hold_seconds
            holds = {proc_id: _Hold(reservation, covered_from) for proc_id, reservation in taken.items()}
            self._entries[host.id].holds |= holds
            self._unsettled.setdefault(host.id, set()).update(taken)
            self._show(_less(host, holds))
            return True

    def settle(self, host_id: str, proc_id: str, *, committed: bool) -> None:
        """End a hold. One that was committed stays taken until a read shows it, one that was not is idle again."""
        with self._lock:
            entry = self._entries.get(host_id)
            hold = None if entry is None else entry.holds.get(proc_id)
            if entry is None or hold is None:
                return
            if committed:
                entry.holds[proc_id] = hold._replace(covered_from=min(hold.covered_from, self.instant()))
                self._outcome_known(host_id, [proc_id])
                return
            self._end_holds(host_id, entry, [proc_id])
            if entry.read is not None:
                self._show(_less(entry.read, entry.holds))

    def being_booked(self) -> Collection[str]:
        """Ids of the hosts from which plans that are not settled yet took something, the caller's own among them. A
        live view."""
        return self._unsettled.keys()

    def census(
        self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None = None
    ) -> Census:
        """What there is for a need that found no host. Costs as much as there are kinds of hosts: ask once per failed
        need and pass."""
        with self._lock:
            groups = [self._groups[facility_id, tag] for tag in tags if (facility_id, tag) in self._groups]
            by_class: defaultdict[_HostClass, set[str]] = defaultdict(set)
            if len(groups) == 1:
                by_class = groups[0].classes
            else:
                for host_class, ids in (kind for group in groups for kind in group.classes.items()):
                    by_class[host_class] |= ids
            kinds = [(self._shown[next(iter(ids))].idle(), len(ids)) for ids in by_class.values()]
            closest = [index.roomiest(need) for index in self._indexes(facility_id, tags, allocs)]
            roomiest = max(
                (host for host in closest if host is not None),
                key=lambda host: (*closeness(need, host.idle_cores, host.idle_memory_kb), host.id),
                default=None,
            )
            refused = tuple(
                why
                for _, host, why in self._refused.values()
                if host is not None and host.facility_id == facility_id and not host.tags.isdisjoint(tags)
            )
            return Census(kinds, roomiest, refused)

    # Inside; under the lock

    def _group(self, facility_id: str, tag: str) -> _Group:
        with self._lock:
            group = self._groups.get((facility_id, tag))
            if group is None:
                group = self._groups[facility_id, tag] = _Group(self._new_index)
            group.asked_at = self._clock()
            return group

    def _new_index(self) -> HostIndex:
        return HostIndex(memory_key_divisor_kb=self._settings.memory_key_divisor // 1024, instance=self._instance)

    def _is_due(self, group: _Group) -> bool:
        """Whether the group is absent or expired."""
        if group.fetched_at is None or group.fetched_at < self._expired_at:
            return True
        return self._clock() - group.fetched_at >= GROUP_REFRESH_SECONDS

    def _groups_of(self, host: Host) -> Iterator[_Group]:
        return (group for tag in host.tags if (group := self._groups.get((host.facility_id, tag))) is not None)

    def _take_over(self, host: Host, read_at: float, *, show: bool = False) -> None:
        """A read that began at ``read_at`` found the host; ``show``: also where it is as before."""
        entry = self._entries.get(host.id)
        if entry is None:
            if not any(self._groups_of(host)):
                return
            entry = self._entries[host.id] = _Entry(read_at)
        elif read_at < entry.read_at:
            return
        covered = [proc_id for proc_id, hold in entry.holds.items() if hold.covered_from <= read_at]
        self._end_holds(host.id, entry, covered)
        entry.read_at = read_at
        self._refused.pop(host.id, None)
        if covered or entry.read != host or host.id not in self._shown:
            entry.read = host
            self._show(_less(host, entry.holds))
        elif show:
            self._show(self._shown[host.id])

    def _forget(self, host_id: str, read_at: float) -> None:
        """A read that began at ``read_at`` did not find the host. Remembered, so that an older read cannot undo it."""
        entry = self._entries.setdefault(host_id, _Entry(read_at))
        if read_at < entry.read_at:
            return
        entry.read_at = read_at
        entry.read = None
        self._refused.pop(host_id, None)
        self._hide(host_id)

    def _end_holds(self, host_id: str, entry: _Entry, proc_ids: Collection[str]) -> None:
        for proc_id in proc_ids:
            del entry.holds[proc_id]
        self._outcome_known(host_id, proc_ids)

    def _outcome_known(self, host_id: str, proc_ids: Collection[str]) -> None:
        unsettled = self._unsettled.get(host_id)
        if unsettled is not None:
            unsettled.difference_update(proc_ids)
            if not unsettled:
                del self._unsettled[host_id]

    def _show(self, host: Host) -> None:
        """Let the host be found as it is now."""
        before = self._shown.get(host.id)
        if before is not None and (before.tags != host.tags or _class_of(before) != _class_of(host)):
            self._hide(host.id)
        self._shown[host.id] = host
        for group in self._groups_of(host):
            group.add(host)

    def _hide(self, host_id: str) -> None:
        before = self._shown.pop(host_id, None)
        if before is not None:
            for group in self._groups_of(before):
                group.remove(before)

    def _candidates(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: HostBookingStrategy,
        allocs: Collection[str] | None,
    ) -> Iterator[Host]:
        """Each host once, in the order of the strategy, listed in growing portions: mostly the first few are enough."""
        start, size = 0, _FIRST_LISTED
        while True:
            with self._lock:
                streams = [index.ranked(need, strategy) for index in self._indexes(facility_id, tags, allocs)]
                ranked = streams[0] if len(streams) == 1 else merge(*streams, key=itemgetter(0))
                listed = list(islice(_each_once(ranked), start, start + size))
            yield from listed
            if len(listed) < size:
                return
            start, size = start + size, size * 4

    def _indexes(self, facility_id: str, tags: Sequence[str], allocs: Collection[str] | None) -> list[HostIndex]:
        return [
            index
            for tag in tags
            if (group := self._groups.get((facility_id, tag))) is not None
            for alloc_id, index in group.by_alloc.items()
            if allocs is None or alloc_id in allocs
        ]


def _each_once(ranked: Iterable[tuple[Rank, Host]]) -> Iterator[Host]:
    """A host with two of the tags has the same rank in both groups, so its repeats follow each other."""
    last = ""
    for _, host in ranked:
        if host.id != last:
            last = host.id
            yield host


def _less(host: Host, holds: Mapping[str, _Hold]) -> Host:
    """The host without what is held of it."""
    taken = [hold.taken for hold in holds.values()]
    cores, memory_kb = sum(it.cores for it in taken), sum(it.memory_kb for it in taken)
    return host.less(Reservation(cores, memory_kb, sum(it.gpus for it in taken), sum(it.gpu_memory_kb for it in taken)))
