"""Layers that could not be placed step aside, so that neither their cluster nor the jobs behind them have to wait.

A pass looks at a bounded number of jobs. Two things keep those that cannot be placed from filling it for ever:

- **Rest.** A layer that found no host is left out of the passes that follow, until something changes that could make a
  difference to it: a host that, with as much idle as it has now, offers its tags, its OS and its need; an allocation of
  which the show's burst left too little when the layer was looked at, and leaves enough now; or the layer itself.
  Several hosts are judged together, so a layer may be roused for nothing, but never left to rest for want of a look.
- **The walk.** While passes place nothing and the jobs they look at are as many as a pass may, whatever they looked at
  in vain is left out of the next one, roused or not. So every job has its turn before any has its second. The walk ends
  when something was booked or the last job was looked at; then the highest priority comes first again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from opencue_sched.domain.farm import Host
from opencue_sched.domain.reservation import Need
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import LayerVerdict
from opencue_sched.placement.planner import Blocked
from opencue_sched.placement.searches import Search

_REMEMBERED_CHANGES = 64
_Place = tuple[str, str, bool]
"""A tag, an OS ('': any) and whether the frames thread."""


@dataclass(frozen=True, slots=True)
class HostNews:
    """Hosts that were read again, because they changed or may have; ``everything``: any host may have."""

    hosts: tuple[Host, ...] = ()
    everything: bool = False

    def __bool__(self) -> bool:
        return self.everything or bool(self.hosts)


@dataclass(frozen=True, slots=True)
class Resting:
    """A layer to be left out while its row has this ``version``; the ``verdict`` it had when it was looked at."""

    verdict: LayerVerdict
    version: str


@dataclass(frozen=True, slots=True)
class _Rest:
    until: float
    layer: Resting
    open_allocs: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Room:
    """The most of each that any host of some news has idle, by place; any amount of it, with ``everything``."""

    everything: bool
    by_place: Mapping[_Place, Need]

    @classmethod
    def of(cls, news: HostNews) -> _Room:
        most: dict[_Place, Need] = {}
        for host in news.hosts:
            idle = Need(host.idle_cores, host.idle_memory_kb, host.idle_gpus, host.idle_gpu_memory_kb)
            for place in _places(host):
                most[place] = _larger(most[place], idle) if place in most else idle
        return cls(news.everything, most)

    def may_do(self, search: Search | None) -> bool:
        if search is None:
            return False
        if self.everything:
            return True
        places = ((tag, search.os_name or "", search.threadable) for tag in search.tags)
        return any(self.by_place[place].covers(search.need) for place in places if place in self.by_place)


class LayerRest:
    """Per process; a layer rests in one cluster. ``seconds`` is how long at most: longer than its cluster sleeps."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._resting: dict[str, dict[Search | None, dict[str, _Rest]]] = {}
        self._walked: dict[str, tuple[float, dict[str, Resting]]] = {}
        self._lost: dict[str, tuple[float, frozenset[str]]] = {}
        self._changes: deque[tuple[int, _Room]] = deque(maxlen=_REMEMBERED_CHANGES)
        self._lock = threading.Lock()
        self._roused = 0

    @property
    def roused(self) -> int:
        """How often hosts changed: to be read before the hosts that layers are looked up among."""
        return self._roused

    def rest(self, cluster: str, blocked: Iterable[Blocked], *, roused: int) -> None:
        """These layers found no host in this cluster just now.

        ``roused`` was read before they were looked up. Those to which a host that changed since could make a difference
        do not rest: another pass has taken note of that change already, and none would rouse them again.
        """
        until = self._clock() + self._seconds
        with self._lock:
            forgotten = self._roused - roused > len(self._changes)
            rooms = [room for number, room in self._changes if number > roused]
            resting = self._resting.setdefault(cluster, defaultdict(dict))
            for one in blocked:
                if not forgotten and not any(room.may_do(one.search) for room in rooms):
                    rest = _Rest(until, Resting(one.verdict, one.version), one.open_allocs)
                    resting[one.search][one.verdict.layer_id] = rest

    def resting(self, cluster: str, room: Mapping[str, float]) -> dict[str, Resting]:
        """The layers of a cluster to be left out now, by id. ``room``: allocation id -> the cores that the show's
        subscription has left under its burst."""
        now = self._clock()
        with self._lock:
            walked_until, walked = self._walked.get(cluster, (0.0, {}))
            found = dict(walked) if walked_until > now else {}
            by_search = self._resting.get(cluster, {})
            for search, layers in list(by_search.items()):
                open_now = _open_allocs(search, room)
                for layer_id, rest in list(layers.items()):
                    if rest.until > now and open_now <= rest.open_allocs:
                        found[layer_id] = rest.layer
                    else:
                        del layers[layer_id]
                if not layers:
                    del by_search[search]
            if not by_search:
                self._resting.pop(cluster, None)
            return found

    def walk_on(self, cluster: str, looked_at: Iterable[Resting]) -> None:
        """A pass over the cluster booked nothing and there are more jobs: leave these layers out of the next one.

        Another process may end the walk: what this one has not gone on with in the time of a rest is forgotten.
        """
        now = self._clock()
        with self._lock:
            walked_until, walked = self._walked.get(cluster, (0.0, {}))
            looked = {layer.verdict.layer_id: layer for layer in looked_at}
            self._walked[cluster] = (now + self._seconds, {**(walked if walked_until > now else {}), **looked})

    def lost_before(self, cluster: str, layers: Collection[str]) -> frozenset[str]:
        """Which of these layers, all of whose frames a pass over the cluster just lost to others, had lost them all in
        the pass before it as well."""
        now = self._clock()
        with self._lock:
            until, before = self._lost.pop(cluster, (0.0, frozenset()))
            if layers:
                self._lost[cluster] = (now + self._seconds, frozenset(layers))
        return before.intersection(layers) if until > now else frozenset()

    def walk_ends(self, cluster: str) -> None:
        """The next pass begins with the highest priority again."""
        with self._lock:
            self._walked.pop(cluster, None)

    def hosts_changed(self, news: HostNews) -> None:
        """Rouse every layer to which these hosts could make a difference."""
        if not news:
            return
        room = _Room.of(news)
        with self._lock:
            self._roused += 1
            self._changes.append((self._roused, room))
            for by_search in self._resting.values():
                for search in [search for search in by_search if room.may_do(search)]:
                    del by_search[search]


def _open_allocs(search: Search | None, room: Mapping[str, float]) -> frozenset[str]:
    """The allocations with room for a frame; none for a layer that no host can help."""
    if search is None:
        return frozenset()
    return frozenset(alloc_id for alloc_id, cores in room.items() if cores >= search.need.cores)


def _places(host: Host) -> Iterable[_Place]:
    threads = (True,) if host.thread_mode is ThreadMode.ALL else (True, False)
    return ((tag, os_name, thread) for tag in host.tags for os_name in ("", *host.os_names) for thread in threads)


def _larger(one: Need, other: Need) -> Need:
    return Need(
        max(one.cores, other.cores),
        max(one.memory_kb, other.memory_kb),
        max(one.gpus, other.gpus),
        max(one.gpu_memory_kb, other.gpu_memory_kb),
    )
