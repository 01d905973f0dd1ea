"""The hosts of one process, shared by the passes in its threads (docs/references.md)."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of
from opencue_sched.placement.host_index import HostIndex
from opencue_sched.placement.policies.admissions import most_of_a_layer
from opencue_sched.settings import HostBookingStrategy, HostCacheSettings

Accept = Callable[[Host], bool]
"""Whether a planner would take a host. Must be pure: it is asked under the lock, and of hosts that are not chosen."""
FetchHosts = Callable[[str, Sequence[str] | None, Collection[int]], Sequence[Host]]
"""``fetch(facility_id, tags, buckets)``: the hosts of the facility that can be booked, of these buckets
(domain/shards.py), in one query. With tags the hosts that have any of them, at most FIRST_READ_HOSTS, whichever these
are; with None all hosts."""

TAKEN_SECONDS = 12.0
"""What a plan took and nobody settled counts as taken until the first read that begins this long after it, where the
caller says no other time: two seconds longer than the default of ``accounting.commit_deadline``."""
REREAD_SECONDS = 10.0
"""Time between two reads of a host, in a small farm. Changes in between arrive by the change log. The reads find
changes that the log lost, and those that it never has: hosts that are new, are up again, or have ceased to report."""
WHOLE_ROUND_SECONDS = 60.0
"""Time between two rounds in which a process reads all hosts here again, not only those that are its own to read."""
REREADS_PER_SECOND = 1_000
"""How many hosts a fleet reads again in the background each second at most. It costs a twentieth of a core of
PostgreSQL, whatever the size of farm and fleet; in a larger farm a round takes longer than REREAD_SECONDS."""
HOSTS_PER_REREAD = 500
"""About how many hosts one query reads again. A pass waits that long for the cache's lock, and for Python's own."""
_FIRST_BUCKETS = 16
"""How many buckets the first portion has, and one that follows a portion without hosts. How many hosts they turn out to
have says how many buckets to read together."""
_MOST_GROWTH = 4
"""How many times as many buckets as the portion before a portion has at most; after one that could not be read it has
that part of them. A few buckets with few hosts say little of the others, and one read of all hosts of a farm is what
portions are to avoid."""
RUNNING_BELIEVED_SECONDS = 60.0
"""How long a read of the frames that run on a host is believed, together with what this process booked there since.
Reading them means reading all procs of the host, and cores of a large host come free many times in a minute. Frames
that ended meanwhile still count. This matters little to locality, which asks for layers that ran there as well; for
the share of a layer see PART_OF_SHARE."""
PART_OF_SHARE = 2
"""A read of a host where some layer has more than its share divided by this is not believed: some of its frames may
have ended, and with a few that a plan adds the layer would seem to have all its share. Its turn there would go to
another show, for good, so what runs there is read each time."""
FIRST_READ_HOSTS = 5_000
"""How many hosts a pass waits for when it reads a group first: half a second. In a larger farm the others follow in the
background, so that the first plan of a process comes as soon on any farm."""
FOREIGN_IDLE_SECONDS = 60.0
"""How long no pass has asked for a group of another instance's shard when the group is dropped."""
SCORED_CANDIDATES = 16
"""Among how many hosts a score chooses: the score is computed for each, so this bounds what one search costs."""
_KNOWN_LISTED = 16
"""How many of the hosts that run or ran a layer one search tests for having the layer's need idle. With more, a search
for a layer that runs on many hosts costs more, of which few have so much idle; those that have not go to the end, so
that the next search tests others."""
RECENT_LAYERS = 8
"""How many layers that ran on a host, and run there no more, are remembered, for locality. With more, each
change of a host costs more, and a search is led to hosts that the layer left longer ago."""

_HostClass = tuple[object, ...]
_class_of = attrgetter(
    "alloc_id", "os_names", "thread_mode", "total_centicores", "total_memory_kb", "total_gpus", "total_gpu_memory_kb"
)
"""The class of a host: what it is when nothing runs on it."""


class HostGroups(NamedTuple):
    """The hosts of a facility's shard that have one of some tags."""

    facility_id: str
    tags: Sequence[str]
    shard: str = ""


class HostOrder(NamedTuple):
    """The order in which hosts are preferred for a layer."""

    strategy: HostBookingStrategy = HostBookingStrategy()
    known_to: str | None = None
    """The id of a layer: hosts that run or ran it come before all others, whatever the strategy's order."""
    score: Callable[[Host], float] | None = None
    """Among the others the host with the lowest score is preferred, out of the first SCORED_CANDIDATES that are
    accepted in the strategy's order; of equal ones the first."""


class Census(NamedTuple):
    """What hosts there are with some tags."""

    kinds: Sequence[tuple[Host, int]]
    """One host of each class, as it is when nothing runs on it, and how many of the class there are."""
    refused: tuple[str, ...] = ()
    """Why each host that is left out for a moment was refused, in the words of PostgreSQL or RQD."""


class _Group:
    """The hosts of a shard and facility that carry a tag. Under the cache's lock."""

    def __init__(self, new_index: Callable[[], HostIndex]) -> None:
        self.by_alloc: defaultdict[str, HostIndex] = defaultdict(new_index)
        """An index for each allocation: one whose burst is used up costs a pass nothing, however many hosts it has."""
        self.classes: defaultdict[_HostClass, set[str]] = defaultdict(set)
        """The ids of the hosts of each class."""
        self.by_bucket: defaultdict[int, set[str]] = defaultdict(set)
        """The ids of the hosts in each bucket."""
        self.read = False
        """Whether the hosts were read; until then the group is empty. Changed under ``_Part.reading``."""
        self.asked_at = 0.0
        """The time at which a pass needed the group last."""

    def __contains__(self, host: Host) -> bool:
        index = self.by_alloc.get(host.alloc_id)
        return index is not None and host.id in index

    def add(self, host: Host) -> None:
        """Let the host be found as it is now. One that is here already is of the same class."""
        index = self.by_alloc[host.alloc_id]
        if host.id not in index:
            self.classes[_class_of(host)].add(host.id)
            self.by_bucket[bucket_of(host.id)].add(host.id)
        index.add(host)

    def remove(self, host: Host) -> None:
        """Take a host out."""
        self.by_alloc[host.alloc_id].remove(host.id)
        host_class = _class_of(host)
        self.classes[host_class].discard(host.id)
        if not self.classes[host_class]:
            del self.classes[host_class]
        self.by_bucket[bucket_of(host.id)].discard(host.id)


@dataclass(slots=True)
class _Part:
    """The groups of a facility's shard, by tag. All are read again in rounds, some buckets at a time."""

    facility_id: str
    buckets: frozenset[int]
    due_at: float
    """The instant at which the next portion is read."""
    whole_at: float
    """The instant from which the next round takes all buckets, not only those that are the process's own to read."""
    left: list[int] = field(default_factory=list)
    """The buckets that the round under way has not read yet."""
    round: int = 0
    """The number of that round."""
    in_round: int = 0
    """How many buckets that round has in all."""
    at_once: bool = False
    """Whether that round makes no pauses."""
    at_a_time: int = _FIRST_BUCKETS
    """How many buckets the next portion has."""
    sized: bool = False
    """Whether portions have found their size; until then they come without pauses."""
    groups: dict[str, _Group] = field(default_factory=dict)
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that reads what is absent."""

    def begin(self, own: frozenset[int], now: float) -> None:
        """Begin a round of those buckets that are the process's own to read; of all when it is time to."""
        whole = now >= self.whole_at
        self.left, self.at_once = sorted(self.buckets if whole else self.buckets & own), False
        self.round, self.in_round = self.round + 1, len(self.left)
        if whole:
            self.whole_at = now + WHOLE_ROUND_SECONDS

    def begin_at_once(self, now: float) -> None:
        """Begin a round of all buckets that makes no pauses."""
        self.left, self.at_once, self.in_round = sorted(self.buckets), True, len(self.buckets)
        self.round += 1
        self.due_at, self.whole_at = now, now + WHOLE_ROUND_SECONDS

    def read(self, buckets: frozenset[int], hosts: int, of_round: int) -> float:
        """Note that these buckets, with their number of ``hosts``, were read for that round. Returns the seconds to the
        next portion. A round that began meanwhile reads them once more."""
        if of_round == self.round:
            self.left = [bucket for bucket in self.left if bucket not in buckets]
        of_bucket, most = hosts / len(buckets), len(ALL_BUCKETS)
        wanted = max(1, min(most, int(HOSTS_PER_REREAD / of_bucket))) if hosts else _FIRST_BUCKETS
        in_haste = self.at_once or not self.sized
        self.sized = self.sized or (hosts > 0 and wanted <= _MOST_GROWTH * self.at_a_time)
        self.at_a_time = min(_MOST_GROWTH * self.at_a_time, wanted)
        if in_haste and self.left:
            return 0.0
        round_seconds = max(REREAD_SECONDS, most * of_bucket / REREADS_PER_SECOND)
        return round_seconds if in_haste else round_seconds * len(buckets) / self.in_round

    def failed(self) -> None:
        """Make portions smaller after one could not be read: it may have been too large to be read in time."""
        self.at_a_time = max(1, self.at_a_time // _MOST_GROWTH)


class Reread(NamedTuple):
    """What one call of `HostCache.reread` did."""

    changed: Sequence[Host]
    """The hosts that were not as they were known."""
    pause: float
    """The seconds after which to call again."""
    appeared: Sequence[Host] = ()
    """Hosts that were not known to be bookable: one for each set of groups."""


class _Taken(NamedTuple):
    """What a plan took from a host for one proc, and no read can show yet."""

    resources: Resources
    covered_from: float
    """Reads that begin then or later contain what was taken, or show that it came to nothing."""
    layer_id: str
    """The layer of the frame for which it was taken."""


@dataclass(slots=True)
class _Entry:
    """What is known of a host. Under the cache's lock."""

    read_at: float
    """The time at which the last read of the host began: reads that began before do not count."""
    read: Host | None = None
    """The host as that read found it; None when it was not there."""
    taken: dict[str, _Taken] = field(default_factory=dict)
    """What plans have taken that ``read`` does not show, by proc id."""
    ran: tuple[str, ...] = ()
    """The layers that ran at the last read, then those that had run before. A process plans a host for as long as the
    host is its own, so its own memory is enough."""
    running_read_at: float = -math.inf
    """The time at which the read began that last said what runs there."""


class _Refused(NamedTuple):
    """A host that PostgreSQL or RQD refused."""

    until: float
    """The moment from which on a read that begins may show the host again."""
    host: Host | None
    """The host as this process last knew it; None if it was not."""
    why: str
    """What PostgreSQL or RQD said, for people."""


class HostCache:
    """PostgreSQL's hosts in groups by facility, shard and tag, as they can be booked now. Thread-safe.

    Three things change a host: a read of PostgreSQL, a plan that takes from it, and the outcome of that plan. They
    arrive in any order, so a host is shown as *what the last read said, less what was taken that it cannot show*:

    - Reads are ordered by when they *began*, on this process's clock; an older read never overwrites a newer one.
    - What a plan takes from a host is taken off at once. When its booking is committed, reads that begin later show it;
      when the booking was lost, it is idle again at once. What is never settled counts as taken until the first read
      that begins ``taken_seconds`` later: longer than ``accounting.commit_deadline``, or the host would be given out
      again while its plan may still be committed. So a read that was under way during a commit does not bring back idle
      that the commit took; and cores that a read finds free are shown at once, not at the host's next report.

    Every doubt under-books: the host shows less idle than it has until the next read.

    ``fetch`` reads groups: what is absent when it is asked for, the rest in portions, in the background (``reread``);
    hosts named by the change log come through ``apply`` in between. ``clock`` is in seconds and never runs backwards.
    One lock guards everything; it is not held during a fetch. A search holds it while the planner's predicate runs:
    Python would run one of two searches at a time anyway.
    """

    def __init__(
        self,
        settings: HostCacheSettings,
        fetch: FetchHosts,
        *,
        instance: str = "",
        taken_seconds: float = TAKEN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._instance = instance
        self._taken_seconds = taken_seconds
        self._clock = clock
        self._lock = threading.RLock()
        """Guards changes of all fields down to ``_latest``."""
        self._parts: dict[tuple[str, str], _Part] = {}
        """The parts of which passes need hosts, by facility and shard."""
        self._entries: dict[str, _Entry] = {}
        """What is known of hosts, by id: also of some that cannot be booked."""
        self._shown: dict[str, Host] = {}
        """The hosts that can be booked, by id, as plans find them."""
        self._known_at: dict[str, dict[str, None]] = {}
        """Ids of shown hosts with a core idle, by the id of a layer that they run or ran; in the order to look at."""
        self._gpu_hosts: set[str] = set()
        """Ids of shown hosts that have GPUs."""
        self._refused: dict[str, _Refused] = {}
        """Hosts that are not shown because they were refused, by id."""
        self._draining: dict[str, Host] = {}
        """Shown hosts that are reserved for a layer, by id."""
        self._latest = -math.inf
        """The last ``instant``."""
        self._fetch_permits = threading.BoundedSemaphore(settings.concurrent_groups)

    def __len__(self) -> int:
        """How many hosts can be booked, full ones included."""
        return len(self._shown)

    def has_gpus(self) -> bool:
        """Whether a host that can be booked has GPUs."""
        return bool(self._gpu_hosts)

    # Reading hosts

    def instant(self) -> float:
        """The time, later than at any call before: reads, commits and refusals are strictly ordered by it.

        A caller that reads hosts for ``apply`` asks for this before its query begins. The query must see whatever was
        committed before: do not use an older REPEATABLE READ snapshot.
        """
        with self._lock:
            self._latest = max(self._clock(), math.nextafter(self._latest, math.inf))
            return self._latest

    def refresh(
        self, facility_id: str, tags: Collection[str], shard: str = "", buckets: frozenset[int] = ALL_BUCKETS
    ) -> Sequence[Host]:
        """Read those groups of these tags that were not read yet, in one query; returns the hosts that were read.

        ``shard`` is the shard of the groups, ``buckets`` what it has. At most ``concurrent_groups`` such queries run at
        once. No group is read by two threads: one waits for what the other reads. Errors of ``fetch`` go to the caller
        and leave the groups as they were.
        """
        part, groups = self._open(facility_id, shard, tags, buckets)
        if all(group.read for group in groups.values()):
            return ()  # without waiting for a thread that reads other groups
        with part.reading:
            due = {tag: group for tag, group in groups.items() if not group.read}
            if not due:
                return ()
            with self._fetch_permits:
                read_at = self.instant()
                hosts = self._fetch(facility_id, list(due), buckets)
            with self._lock:
                if len(hosts) < FIRST_READ_HOSTS:
                    self.apply(hosts, _known(due.values(), buckets) - {host.id for host in hosts}, read_at=read_at)
                else:
                    part.at_a_time, part.sized = 1, False
                    self.apply(hosts, (), read_at=read_at)
                    part.begin_at_once(self._clock())
                for group in due.values():
                    group.read = True
            return hosts

    def reread(self, own: frozenset[int] = ALL_BUCKETS) -> Reread:
        """Read the next portion of hosts again, if it is time to. For a thread in the background. Errors of ``fetch``
        go to the caller.

        ``own``: the buckets that are read in each round; all other hosts here are read once in WHOLE_ROUND_SECONDS.
        """
        with self._lock:
            now = self._clock()
            part = min(self._parts.values(), key=attrgetter("due_at"), default=None)
            if part is None or part.due_at > now:
                return Reread((), REREAD_SECONDS if part is None else min(REREAD_SECONDS, part.due_at - now))
            if not part.left:
                part.begin(own, now)
            if not part.left:
                part.due_at = now + REREAD_SECONDS
                return Reread((), 0.0)
            portion = frozenset(part.left[: part.at_a_time])
            groups, of_round = list(part.groups.values()), part.round
        with self._fetch_permits:
            read_at = self.instant()
            try:
                hosts = self._fetch(part.facility_id, None, portion)
            except Exception:
                with self._lock:
                    part.failed()
                raise
        with self._lock:
            absent = [host for host in hosts if host.id not in self._shown]
            gone = _known(groups, portion) - {host.id for host in hosts}
            changed = self.apply(hosts, gone, read_at=read_at)
            appeared = {tuple(map(id, self._groups_of(host))): host for host in absent if host.id in self._shown}
            pause = part.read(portion, len(hosts), of_round)
            # A thread that is late makes up for one portion at once, and for no more.
            part.due_at = max(part.due_at, self._clock() - pause) + pause
            return Reread(changed, 0.0, tuple(appeared.values()))

    def running_known(self, host_ids: Iterable[str]) -> frozenset[str]:
        """The hosts of ``host_ids`` of which it is known what runs there: it was read less than
        RUNNING_BELIEVED_SECONDS ago, and no layer has more than half its share there (PART_OF_SHARE)."""
        with self._lock:
            oldest = self._clock() - RUNNING_BELIEVED_SECONDS
            shown = ((host_id, self._shown.get(host_id)) for host_id in host_ids)
            return frozenset(
                host_id
                for host_id, host in shown
                if host and self._entries[host_id].running_read_at > oldest and _has_few_of_each(host)
            )

    def apply(
        self,
        hosts: Iterable[Host],
        gone_ids: Collection[str],
        *,
        read_at: float,
        but_running: Collection[str] = (),
    ) -> list[Host]:
        """Take over ``hosts`` that were read, and forget those that the read did not find (``gone_ids``): they cannot
        be booked any more. Returns the hosts that changed.

        ``read_at`` is the ``instant`` at which the read began: whatever is newer here stays. ``but_running``: ids of
        hosts of which the read left out the frames that run there.
        """
        with self._lock:
            changed = [
                host for host in hosts if self._take_over(host, read_at, running_read=host.id not in but_running)
            ]
            for host_id in gone_ids:
                self._forget(host_id, read_at)
            return changed

    def expire(self) -> None:
        """Have every host read again, as soon as that can be: for a change log that could not say what changed."""
        with self._lock:
            for part in self._parts.values():
                part.begin_at_once(self._clock())

    def forget_reads(self) -> None:
        """Have every host read again by the pass that needs it next, after changes that were not heard of."""
        with self._lock:
            parts = list(self._parts.values())
        for part in parts:
            with part.reading:  # what is being read now may have been read before the change
                for group in part.groups.values():
                    group.read = False

    def invalidate(self, host_id: str, *, cooldown_seconds: float = 0.0, why: str = "") -> None:
        """Do not show the host until a read that begins ``cooldown_seconds`` from now or later.

        For a host that PostgreSQL or RQD refused; ``why``: what they said, of which the first reason is kept. The
        cooldown is for what a read cannot show, such as an RQD that is gone.
        """
        with self._lock:
            until = self.instant() + cooldown_seconds
            before = self._refused.get(host_id) or _Refused(until, self._shown.get(host_id), why)
            self._forget(host_id, until)
            self._refused[host_id] = _Refused(max(until, before.until), before.host, before.why or why)

    def invalidated_ids(self) -> frozenset[str]:
        """Ids of invalidated hosts whose cooldown is over. The caller reads them with the next hosts from the change
        log."""
        with self._lock:
            now = self.instant()
            return frozenset(host_id for host_id, refused in self._refused.items() if refused.until <= now)

    def back_in(self) -> float | None:
        """Seconds until an invalidated host may be read again, 0 for one that may be by now; None for no such host."""
        with self._lock:
            at = min((refused.until for refused in self._refused.values()), default=None)
            return None if at is None else max(0.0, at - self._clock())

    def keep_shards(self, shards: Collection[str]) -> None:
        """Drop the groups of all other shards: the hosts are divided in another way now."""
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key[1] in shards}

    def reaches(self, host_ids: Iterable[str]) -> set[str]:
        """The hosts among these that are in a shard cached here; the others need not be read."""
        with self._lock:
            known = frozenset[int]().union(*(part.buckets for part in self._parts.values()))
        return {host_id for host_id in host_ids if bucket_of(host_id) in known}

    def evict_idle_groups(self) -> None:
        """Drop the groups nobody asked for during ``group_idle_timeout``, those of another instance's shard after
        FOREIGN_IDLE_SECONDS, and their hosts."""
        with self._lock:
            now = self._clock()
            own = self._settings.group_idle_timeout
            for (_, shard), part in self._parts.items():
                timeout = own if shard in ("", self._instance) else FOREIGN_IDLE_SECONDS
                part.groups = {tag: group for tag, group in part.groups.items() if now - group.asked_at <= timeout}
            self._parts = {key: part for key, part in self._parts.items() if part.groups}
            # An entry outlives its groups, to reject reads that began before; by then these have ended (after 30 s).
            oldest = now - self._settings.host_staleness_threshold
            for host_id, entry in list(self._entries.items()):
                if entry.read is not None and any(self._groups_of(entry.read)):
                    continue
                self._hide(host_id)
                if entry.read_at < oldest and all(taken.covered_from < oldest for taken in entry.taken.values()):
                    del self._entries[host_id]
                    self._refused.pop(host_id, None)

    # Placing frames on them

    def find(
        self,
        groups: HostGroups,
        need: Resources,
        order: HostOrder,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        only: Collection[str] | None = None,
    ) -> Host | None:
        """The first host of the groups, in this order, that has ``need`` idle and that ``accept`` agrees to, or None.

        ``allocs``: hosts of other allocations are left out without a look at them. ``only``: ids, all other hosts are
        left out, and no layer is known to these.
        """
        strategy, known_to, score = order
        with self._lock:
            indexes = self._indexes(groups, allocs)
            if only is None and known_to is not None:
                for host in filter(accept, self._known(known_to, indexes, need, strategy)):
                    return host
            if only is not None:
                accepted = filter(accept, self._among(only, indexes, need, strategy))
            elif len(indexes) == 1:
                ranked = indexes[0].ranked(need, strategy)
                accepted = filter(accept, (host for _, host in ranked))
            else:
                # A host with two of the tags has the same rank in both groups, so its repeats follow each other.
                ranked = merge(*(index.ranked(need, strategy) for index in indexes), key=itemgetter(0))
                accepted = filter(accept, (next(same)[1] for _, same in groupby(ranked, key=itemgetter(0))))
            if score is None:
                return next(accepted, None)
            return min(islice(accepted, SCORED_CANDIDATES), key=score, default=None)

    def has_idle(self, groups: HostGroups, need: Resources, *, allocs: Collection[str] | None = None) -> bool:
        """Whether a host of the groups has ``need`` idle. ``allocs``: hosts of other allocations do not count."""
        with self._lock:
            # Index by index: where any host will do, no order of all is made.
            ranked = (index.ranked(need, HostOrder().strategy) for index in self._indexes(groups, allocs))
            return next(chain.from_iterable(ranked), None) is not None

    def idle_cores(self, clusters: Iterable[Cluster], *, most: float = math.inf) -> int:
        """Whole cores idle on the hosts of these clusters' tags, each host once; no more are counted when there are
        ``most``."""
        with self._lock:
            counted: set[str] = set()
            total = 0
            asked = (HostGroups(cluster.facility_id, cluster.tags, cluster.shard) for cluster in clusters)
            groups = dict.fromkeys(chain.from_iterable(map(self._groups_with, asked)))  # each once
            for index in chain.from_iterable(group.by_alloc.values() for group in groups):
                for host_id, cores in index.idle_cores():
                    if total >= most:
                        return total
                    total += 0 if host_id in counted else cores
                    counted.add(host_id)
            return total

    def take(self, host: Host, taken: Mapping[str, Resources], *, layer_id: str = "") -> bool:
        """Take resources from a host for the procs of a plan, by proc id. Until ``settle`` every pass sees the host
        without these resources, and with frames of the layer on it.

        Returns False, and takes nothing, if the host has changed since it was found (the reference's optimistic test).
        """
        with self._lock:
            if self._shown.get(host.id) is not host:
                return False
            covered_from = self._clock() + self._taken_seconds
            by_proc = {proc_id: _Taken(resources, covered_from, layer_id) for proc_id, resources in taken.items()}
            self._entries[host.id].taken |= by_proc
            self._show(_less(host, by_proc))
            return True

    def settle(self, host_id: str, proc_id: str, *, committed: bool) -> None:
        """Note the outcome of a proc for which resources were taken. Once committed they stay taken until a read shows
        it; otherwise they are idle again."""
        with self._lock:
            entry = self._entries.get(host_id)
            taken = None if entry is None else entry.taken.get(proc_id)
            if entry is None or taken is None:
                return
            if committed:
                entry.taken[proc_id] = taken._replace(covered_from=min(taken.covered_from, self.instant()))
            else:
                del entry.taken[proc_id]
                if entry.read is not None:
                    self._show(_less(entry.read, entry.taken))

    def being_booked(self, host_id: str) -> bool:
        """Whether a plan whose commit is not known to be over takes something from the host."""
        with self._lock:
            now = self.instant()
            return any(taken.covered_from > now for taken in self._entries[host_id].taken.values())

    def draining_for(self, layer_id: str) -> Sequence[Host]:
        """The hosts that are reserved for the layer, in whatever shard."""
        with self._lock:
            return [
                host for host in self._draining.values() if host.reservation and host.reservation.layer_id == layer_id
            ]

    def census(self, groups: HostGroups) -> Census:
        """What hosts there are in the groups, for a need that found none. Costs as much as there are classes of hosts:
        ask once for each failed need and pass."""
        with self._lock:
            found = self._groups_with(groups)
            by_class: defaultdict[_HostClass, list[set[str]]] = defaultdict(list)
            for host_class, ids in (kind for group in found for kind in group.classes.items()):
                by_class[host_class].append(ids)
            merged = (ids[0] if len(ids) == 1 else set[str]().union(*ids) for ids in by_class.values())
            kinds = [(self._shown[next(iter(ids))].idle(), len(ids)) for ids in merged]
            away = ((host, why) for _, host, why in self._refused.values() if host is not None)
            refused = tuple(why for host, why in away if not set(found).isdisjoint(self._groups_of(host)))
            return Census(kinds, refused)

    # Inside; under the lock

    def _open(
        self, facility_id: str, shard: str, tags: Iterable[str], buckets: frozenset[int]
    ) -> tuple[_Part, dict[str, _Group]]:
        """The part of a facility's shard, and its groups of these tags. What is absent is made, and the part is made
        anew if the shard has other buckets now."""
        with self._lock:
            now = self._clock()
            part = self._parts.get((facility_id, shard))
            if part is None or part.buckets != buckets:
                part = self._parts[facility_id, shard] = _Part(
                    facility_id, buckets, now + REREAD_SECONDS, now + WHOLE_ROUND_SECONDS
                )
            for tag in tags:
                if tag not in part.groups:
                    part.groups[tag] = _Group(
                        partial(HostIndex, memory_key_divisor_kb=self._settings.memory_key_divisor // 1024)
                    )
                part.groups[tag].asked_at = now
            return part, {tag: part.groups[tag] for tag in tags}

    def _groups_of(self, host: Host) -> Iterator[_Group]:
        """The groups in which a host is found: of each part of its facility that has its bucket, those of its tags."""
        bucket = bucket_of(host.id)
        for part in self._parts.values():
            if part.facility_id == host.facility_id and bucket in part.buckets:
                yield from (part.groups[tag] for tag in host.tags if tag in part.groups)

    def _indexes(self, groups: HostGroups, allocs: Collection[str] | None) -> list[HostIndex]:
        """The indexes of the groups, those of these allocations alone."""
        return [
            index
            for group in self._groups_with(groups)
            for alloc_id, index in group.by_alloc.items()
            if allocs is None or alloc_id in allocs
        ]

    def _groups_with(self, groups: HostGroups) -> list[_Group]:
        part = self._parts.get((groups.facility_id, groups.shard))
        return [] if part is None else [part.groups[tag] for tag in groups.tags if tag in part.groups]

    def _take_over(self, host: Host, read_at: float, *, running_read: bool) -> bool:
        """Take over a host as a read that began at ``read_at`` found it; returns whether it changed."""
        entry = self._entries.get(host.id)
        if entry is None:
            if not any(self._groups_of(host)):
                return False
            entry = self._entries[host.id] = _Entry(read_at)
        elif read_at < entry.read_at:
            return False
        covered = {proc_id: taken.layer_id for proc_id, taken in entry.taken.items() if taken.covered_from <= read_at}
        for proc_id in covered:
            del entry.taken[proc_id]
        if (running_read and host.idle_cores) or host.idle_centicores >= host.total_centicores:
            entry.running_read_at = read_at
        elif entry.read is not None:
            # A read says nothing of what runs on a full host, either.
            host = replace(host, running=_with(entry.read.running, covered.values()))
        # A frame that was placed and has ended since the last read ran here as well.
        ran = dict.fromkeys((*covered.values(), *entry.ran))
        gone = (layer_id for layer_id in ran if layer_id and layer_id not in host.running)
        recent = tuple(islice(gone, RECENT_LAYERS))
        entry.ran = (*host.running, *recent) if host.idle_cores else tuple(ran)
        host = replace(host, recent=recent) if recent else host
        entry.read_at = read_at
        self._refused.pop(host.id, None)
        shown = self._shown.get(host.id)
        if shown is None or covered or entry.read != host:
            entry.read = host
            self._show(_less(host, entry.taken))
            return True
        # A host that did not change stays the same object, from which plans may take, and joins groups that are new.
        for group in self._groups_of(shown):
            if shown not in group:
                group.add(shown)
        return False

    def _forget(self, host_id: str, read_at: float) -> None:
        """Forget a host that a read which began at ``read_at`` did not find. The time is remembered, so that an older
        read cannot bring the host back."""
        entry = self._entries.setdefault(host_id, _Entry(read_at))
        if read_at < entry.read_at:
            return
        entry.read_at = read_at
        entry.read = None
        self._refused.pop(host_id, None)
        self._hide(host_id)

    def _show(self, host: Host) -> None:
        """Let the host be found as it is now."""
        before = self._shown.get(host.id)
        if before is not None and (before.tags != host.tags or _class_of(before) != _class_of(host)):
            self._hide(host.id)
            before = None
        self._shown[host.id] = host
        if host.total_gpus > 0 or host.total_gpu_memory_kb > 0:
            self._gpu_hosts.add(host.id)
        self._note_layers(host.id, before, host)
        self._draining.pop(host.id, None)
        if host.reservation is not None:
            self._draining[host.id] = host
        for group in self._groups_of(host):
            group.add(host)

    def _hide(self, host_id: str) -> None:
        """Let the host be found no more, until it is shown again. Its entry stays as it is."""
        before = self._shown.pop(host_id, None)
        self._gpu_hosts.discard(host_id)
        self._draining.pop(host_id, None)
        if before is not None:
            self._note_layers(host_id, before, None)
            for group in self._groups_of(before):
                group.remove(before)

    def _note_layers(self, host_id: str, before: Host | None, now: Host | None) -> None:
        """Keep by layer the hosts that run or ran it and have a core idle."""
        known_before, known_now = _layers_known_to(before), _layers_known_to(now)
        for layer_id in known_before - known_now:
            del self._known_at[layer_id][host_id]
            if not self._known_at[layer_id]:
                del self._known_at[layer_id]
        for layer_id in known_now - known_before:
            self._known_at.setdefault(layer_id, {})[host_id] = None

    def _among(
        self, host_ids: Iterable[str], indexes: Sequence[HostIndex], need: Resources, strategy: HostBookingStrategy
    ) -> list[Host]:
        """The hosts that are in these indexes and have the needed cores idle, in the order of the strategy."""
        ranked = []
        for host_id in host_ids:
            rank = next(filter(None, (index.rank(host_id, strategy) for index in indexes)), None)
            host = self._shown.get(host_id)
            if rank is not None and host is not None and host.idle_cores >= need.cores:
                ranked.append((rank, host))  # the rest that a frame needs is asked for with its resources
        return [host for _, host in sorted(ranked, key=itemgetter(0))]

    def _known(
        self, layer_id: str, indexes: Sequence[HostIndex], need: Resources, strategy: HostBookingStrategy
    ) -> list[Host]:
        """Hosts of these indexes that run the layer and have the need idle, in the order of the strategy, and then
        those that ran it, the last first."""
        ranked = []
        hosts = self._known_at.get(layer_id, {})
        for host_id in list(islice(hosts, _KNOWN_LISTED)):
            host = self._shown[host_id]
            rank = next(filter(None, (index.rank(host_id, strategy) for index in indexes)), None)
            if rank is not None and host.idle_cores >= need.cores and host.idle_memory_kb >= need.memory_kb:
                ran = 0 if layer_id in host.running else 1 + host.recent.index(layer_id)
                ranked.append((ran, rank, host))
            else:
                hosts[host_id] = hosts.pop(host_id)  # the next search looks at others first
        return [host for _, _, host in sorted(ranked, key=itemgetter(0, 1))]


def _known(groups: Iterable[_Group], buckets: Iterable[int]) -> set[str]:
    """The ids of the hosts in these groups and buckets."""
    groups, buckets = list(groups), list(buckets)
    return set[str]().union(*(group.by_bucket.get(bucket, ()) for group in groups for bucket in buckets))


def _less(host: Host, by_proc: Mapping[str, _Taken]) -> Host:
    """The host without what was taken from it, and with the layers for which it was taken."""
    if not by_proc:
        return host
    cores = memory_kb = gpus = gpu_memory_kb = 0
    running = dict(host.running)
    for taken in by_proc.values():
        cores += taken.resources.cores
        memory_kb += taken.resources.memory_kb
        gpus += taken.resources.gpus
        gpu_memory_kb += taken.resources.gpu_memory_kb
        if taken.layer_id:
            running[taken.layer_id] = running.get(taken.layer_id, 0) + 1
    return host.without(Resources(cores, memory_kb, gpus, gpu_memory_kb), running)


def _with(running: Mapping[str, int], more: Iterable[str]) -> Mapping[str, int]:
    """Frames by layer, and one more of each of these layers ("": of none)."""
    added = Counter(filter(None, more))
    return {**running, **{layer_id: running.get(layer_id, 0) + frames for layer_id, frames in added.items()}}


def _has_few_of_each(host: Host) -> bool:
    """Whether each layer on the host is so far from its share that frames which ended do not matter."""
    return max(host.running.values(), default=0) * PART_OF_SHARE <= most_of_a_layer(host)


def _layers_known_to(host: Host | None) -> set[str]:
    """The layers that a host with a core idle runs or ran."""
    return set() if host is None or host.idle_cores < 1 else {*host.running, *host.recent}
