"""What is left alone for a while, because another look at once would find the same: one rule for all of it.

A failure starts a cooldown, each further failure in a row one twice as long up to a bound, and success ends the row.
Clusters keep theirs on the board, where every process sees them (coordination.postings). This module has what only one
process has to know: `Cooldowns` of hosts and of layers on hosts, and which layers a pass skips.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from opencue_sched.domain.frame_needs import Search, least_cores
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.states import ThreadMode
from opencue_sched.placement.planner import UnschedulableLayer
from opencue_sched.store.pending import SkippedLayers

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 300.0
"""Of a cluster whose passes fail."""
EMPTY_SLEEP_SECONDS = 30.0
"""Of a cluster without pending jobs. New work wakes it at once: this is for news that was lost."""
FIRST_LOCKED_SECONDS = 0.05
LONGEST_LOCKED_SECONDS = 1.0
"""Of a host whose row another transaction has locked, and had when it was looked at before. Mostly a completion or a
report has it for a few milliseconds, so the next pass plans it again, and idle cores are lost in a longer cooldown; but
looking again and again at one that stays locked costs a pass each."""
_REMEMBERED_CHANGES = 64

What = TypeVar("What", bound=Hashable)


def cooldown_seconds(failures: int, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> float:
    """The cooldown after so many failures in a row, of which the last has just happened."""
    return float(min(longest, first * 2 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True)
class _Cooldown:
    until: float
    forgotten: float
    failures: int
    why: str


class Cooldowns(Generic[What]):
    """What this process leaves alone, until when, and why. Thread-safe.

    A row of failures is over when something ``worked``, or did not fail for twice ``longest``. ``free``: so many
    failures of a row are followed by no cooldown.
    """

    def __init__(
        self, first: float, longest: float, clock: Callable[[], float] = time.monotonic, *, free: int = 0
    ) -> None:
        self._first = first
        self._longest = longest
        self._free = free
        self._clock = clock
        self._lock = threading.Lock()
        self._cooldowns: OrderedDict[What, _Cooldown] = OrderedDict()

    def failed(self, what: What, why: str = "") -> float:
        """Leave it alone from now on, for the seconds returned."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            before = self._cooldowns.pop(what, None)
            failures = 1 if before is None else before.failures + 1
            counted = failures - self._free
            seconds = cooldown_seconds(counted, first=self._first, longest=self._longest) if counted > 0 else 0.0
            self._cooldowns[what] = _Cooldown(now + seconds, now + 2 * self._longest, failures, why)
            return seconds

    def worked(self, what: What) -> None:
        """End its cooldown; the next one is the shortest again."""
        with self._lock:
            self._cooldowns.pop(what, None)

    def active(self) -> dict[What, str]:
        """What is to be left alone now, and why."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            return {what: it.why for what, it in self._cooldowns.items() if it.until > now}

    def _forget(self, now: float) -> None:
        """The oldest failure comes first."""
        while self._cooldowns and next(iter(self._cooldowns.values())).forgotten <= now:
            self._cooldowns.popitem(last=False)


# Layers that could not be placed are skipped by the passes that follow.
#
# A pass looks at a bounded number of jobs. Without skipping, those that cannot be placed would fill it for ever. That
# jobs of low priority have their turn while others take all that comes free is the draw's work
# (placement/policies/order.py).
#
# - A layer that found no host is skipped, and with it all others of its kind, which would find none either: on a full
#   farm one look answers for thousands of jobs. The cooldown ends early when a host changes that, with as much idle as
#   it has now, offers the tags, the OS and the need (all of its cores to frames that want all of them), or when an
#   allocation has enough left under the show's burst that had too little at the last look. A layer that is changed to
#   ask for something else is of another kind.
# - The scan. Layers held up by something that no host can change (a cap in the plan, a permit, the ledger) are skipped
#   by the next pass when nothing was booked and there are more jobs, so every job is looked at before any is looked at
#   twice. A layer that lost its frames to others is looked at once more before that.

_Place = tuple[str, str, bool]
"""A tag, an OS ('': any) and whether the frames thread."""
_Size = tuple[int, ThreadMode]
"""All cores of a host in centicores, and its thread mode: with what is idle, what decides on frames that ask for a part
of the host."""


@dataclass(frozen=True)
class HostNews:
    """Hosts that were read again, because they changed or may have; ``everything``: any host may have."""

    hosts: tuple[Host, ...] = ()
    everything: bool = False

    def may_do(self, search: Search) -> bool:
        """Whether one of them could make a difference to this search; any host, if any may have changed."""
        if self.everything:
            return True
        places = ((tag, search.os_name or "", search.threadable) for tag in search.tags)
        return any(
            idle.covers(search.need) and 0 < least_cores(search, host) <= idle.cores
            for place in places
            for idle, host in self._by_place.get(place, ())
        )

    @cached_property
    def _by_place(self) -> Mapping[_Place, Sequence[tuple[Reservation, Host]]]:
        """Without those that have no more of anything idle than another of their size. Made only when a kind is
        skipped: mostly none is."""
        by_place: defaultdict[_Place, defaultdict[_Size, dict[Reservation, Host]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for host in self.hosts:
            has = Reservation(host.idle_cores, host.idle_memory_kb, host.idle_gpus, host.idle_gpu_memory_kb)
            for place in _places(host):
                by_place[place][host.total_centicores, host.thread_mode][has] = host
        return {place: [it for hosts in sizes.values() for it in _largest(hosts)] for place, sizes in by_place.items()}


class _Kind(NamedTuple):
    """A kind without a host, and the allocations with headroom for it that were looked at."""

    search: Search
    open_allocs: frozenset[str]
    until: float


@dataclass(slots=True)
class _Cluster:
    """Of one cluster: kinds without a host; layers that no host can help, with the end of their cooldown and the
    version of their row; until when a scan is believed to go on, and the wake-ups at its beginning; which layers lost
    frames to others in the last pass."""

    kinds: dict[str, _Kind] = field(default_factory=dict)
    rows: dict[str, tuple[float, str]] = field(default_factory=dict)
    scan_until: float = 0.0
    scan_began: int = 0
    lost: frozenset[str] = frozenset()

    def forget(self, now: float) -> bool:
        """Forget what is over; whether nothing is left. During a scan no cooldown ends by time alone: however many jobs
        there are, the last one is looked at before the first is again."""
        scans = self.scan_until > now
        if not scans:
            self.kinds = {kind: it for kind, it in self.kinds.items() if it.until > now}
            self.rows = {layer: row for layer, row in self.rows.items() if row[0] > now}
        return not (self.kinds or self.rows or scans)


class LayerCooldowns:
    """Which layers the passes of this process skip, each in one cluster, for ``seconds`` at most: longer than the
    cluster sleeps. Thread-safe."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._clusters: defaultdict[str, _Cluster] = defaultdict(_Cluster)
        self._changes: deque[tuple[int, HostNews]] = deque(maxlen=_REMEMBERED_CHANGES)
        self._forget_at = 0.0
        self._lock = threading.Lock()
        self.host_changes = 0
        """How often hosts changed: to be read before the hosts that layers are looked up among."""

    def found_no_host(self, cluster: str, blocked: Iterable[UnschedulableLayer], *, host_changes: int) -> None:
        """Skip these layers, which found no host in this cluster just now.

        ``host_changes`` was read before they were looked up. Those to which a host that changed since could make a
        difference are not skipped: another pass has taken note of that change, and none would end their cooldown.
        """
        now = self._clock()
        by_kind: defaultdict[str, list[UnschedulableLayer]] = defaultdict(list)
        for one in blocked:
            by_kind[one.kind].append(one)
        with self._lock:
            self._forget(now)
            forgotten = self.host_changes - host_changes > len(self._changes)
            missed = [news for number, news in self._changes if number > host_changes]
            here = self._clusters[cluster]
            for kind, layers in by_kind.items():
                search = layers[0].search
                if forgotten or any(news.may_do(search) for news in missed):
                    continue
                open_allocs = frozenset.intersection(*(it.open_allocs for it in layers))
                here.kinds[kind] = _Kind(search, open_allocs, now + self._seconds)

    def skip_rows(self, cluster: str, versions: Mapping[str, str]) -> None:
        """Skip these layers (id -> version of its row), which no host can help: their rows have to change."""
        until = self._clock() + self._seconds
        with self._lock:
            self._clusters[cluster].rows |= {layer_id: (until, version) for layer_id, version in versions.items()}

    def skipped(self, cluster: str, headroom: Mapping[str, float]) -> SkippedLayers:
        """What a pass over the cluster skips now. ``headroom``: allocation id -> the cores that the show's subscription
        has left under its burst."""
        now = self._clock()
        with self._lock:
            here = self._clusters[cluster]
            here.forget(now)
            here.kinds = {
                kind: it
                for kind, it in here.kinds.items()
                if it.open_allocs.issuperset(
                    alloc for alloc, cores in headroom.items() if cores >= it.search.need.cores
                )
            }
            return SkippedLayers({layer_id: version for layer_id, (_, version) in here.rows.items()}, list(here.kinds))

    def hosts_changed(self, news: HostNews) -> None:
        """End the cooldowns of all to which these hosts could make a difference."""
        if not (news.everything or news.hosts):
            return
        with self._lock:
            self.host_changes += 1
            self._changes.append((self.host_changes, news))
            for here in self._clusters.values():
                here.kinds = {kind: it for kind, it in here.kinds.items() if not news.may_do(it.search)}

    def end_pass(
        self,
        cluster: str,
        *,
        wakes: int,
        more: bool,
        booked: bool,
        hostless: bool,
        got_nothing: Mapping[str, str],
        lost: frozenset[str],
    ) -> bool:
        """A pass over the cluster has ended. Whether the next one comes at once although nothing was ``booked``.

        ``wakes``: how often the cluster had been woken when the pass began. ``more``: there may be more to place than
        it looked at. Some layers were ``hostless``; those that ``got_nothing`` (id -> version of its row) had another
        reason. Frames of the ``lost`` ones were planned, and lost to others.
        """
        now = self._clock()
        with self._lock:
            here = self._clusters[cluster]
            # Frames that were lost may be had a moment later, so their layers come first once more. Those that lose all
            # of them again are skipped like the others, or a window full of them would keep all behind it waiting.
            lost_once, here.lost = lost - here.lost, lost
            rows = {layer_id: (now, version) for layer_id, version in got_nothing.items() if layer_id not in lost_once}
            go_on = not booked and more and (hostless or bool(rows))
            if go_on:
                # Layers without a host have a cooldown; the others are skipped as long as the scan lasts. Another
                # process may end it: one that this process does not go on with for ``seconds`` is forgotten.
                if here.scan_until <= now:
                    here.forget(now)
                    here.scan_began = wakes
                here.rows |= rows
                here.scan_until = now + self._seconds
            else:
                # The scan ends: the next pass begins with the highest priority again, and at once if the cluster was
                # woken since the scan began, maybe for jobs that the scan had passed.
                go_on = not booked and here.scan_until > now and here.scan_began != wakes
                here.scan_until = 0.0
            return go_on

    def _forget(self, now: float) -> None:
        """Once in ``seconds``, forget clusters of which nothing is left: they may be no more."""
        if now < self._forget_at:
            return
        self._forget_at = now + self._seconds
        for cluster in [key for key, here in self._clusters.items() if here.forget(now)]:
            del self._clusters[cluster]


def _places(host: Host) -> Iterable[_Place]:
    threads = (True,) if host.thread_mode is ThreadMode.ALL else (True, False)
    return ((tag, os_name, thread) for tag in host.tags for os_name in ("", *host.os_names) for thread in threads)


def _largest(hosts: Mapping[Reservation, Host]) -> list[tuple[Reservation, Host]]:
    """Those of hosts, by what they have idle, that no other covers."""
    kept: list[tuple[Reservation, Host]] = []
    for idle in sorted(hosts, key=lambda it: (it.cores, it.memory_kb, it.gpus, it.gpu_memory_kb), reverse=True):
        if not any(larger.covers(idle) for larger, _ in kept):
            kept.append((idle, hosts[idle]))
    return kept
