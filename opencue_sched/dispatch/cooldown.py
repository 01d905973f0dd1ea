"""Layers that could not be placed step aside, so that neither their cluster nor the jobs behind them have to wait.

A pass looks at a bounded number of jobs. Four things keep those that cannot be placed from filling it for ever. The
rest and the walk never let a host go to a job while one of a higher priority would have it; the pause and turn may:

- **Rest.** A layer that found no host is left out of the passes that follow, and with it all others of its kind, which
  would find none either: on a full farm one look answers for thousands of jobs. They rest until something changes that
  could make a difference to them: a host that, with as much idle as it has now, offers the tags, the OS and the need
  (all of its cores to frames that want all of them); or an allocation of which the show's burst left too little at
  that look, and leaves enough now. A layer that is made to ask for something else is of another kind.
- **The pause.** What was roused and looked at in vain again and again is left alone for a moment each time. News that
  come in a pause are remembered to its end.
- **The walk.** Layers held up by something that no host can change (a cap in the plan, a permit, lost bookings) are
  left out of the next pass when nothing was booked and there are more jobs. So every job has its turn before any has
  its second; the walk ends when something was booked or the last job was looked at.
- **The turn.** Where something comes free before every pass (cores, a licence, room in a folder) and the first job
  takes it every time, others that want the same would fill every pass for nothing. So of a few passes in a row that had
  no time for all jobs, one leaves out what the pass before looked at in vain: a moment in which those behind may use
  what those ahead cannot.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Generic, TypeVar

from opencue_sched.domain.cluster import LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, Snapshot, ThreadMode
from opencue_sched.domain.reservation import Need, least_cores, smallest_need
from opencue_sched.placement.planner import Search, UnschedulableLayer
from opencue_sched.store.pending import CapKind, Capped, LeftOut, Room

EMPTY_SLEEP_SECONDS = 30.0
"""A cluster without pending jobs is left alone this long. New work wakes it at once: this is for news that was lost."""
PAUSE_SECONDS = 0.05
PASSES_BEFORE_A_TURN = 4
_TURN_SECONDS = 1.0
_REMEMBERED_CHANGES = 64
_Place = tuple[str, str, bool]
"""A tag, an OS ('': any) and whether the frames thread."""
_Size = tuple[int, ThreadMode]
"""All cores of a host in centicores, and its thread mode: with what is idle, what decides on frames that ask for a part
of the host."""


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
class Aside:
    """What a pass over a cluster leaves out, and the last ``verdicts`` on those of it that were ever looked at."""

    left_out: LeftOut
    verdicts: Mapping[str, LayerVerdict]


@dataclass(slots=True)
class _Rest:
    """A kind that rests. Its ``layers`` are those that were looked at. ``called``: there were news in the pause."""

    search: Search
    open_allocs: frozenset[str]
    until: float
    pause_until: float
    layers: dict[str, LayerVerdict]
    called: bool = False


@dataclass(slots=True)
class _Vain:
    """Looks at a kind that found nothing, one not long after the other."""

    at: float
    looks: int = 0


@dataclass(slots=True)
class _Aside:
    """Of one cluster: kinds that rest, the looks in vain at kinds, rows that make no sense, what the walk has passed,
    who lost all frames to others in the last pass; how many passes in a row had no time for all jobs, the kinds and
    rows that the next pass leaves out for others' turn, and whether the last one did."""

    kinds: dict[str, _Rest] = field(default_factory=dict)
    vain: dict[str, _Vain] = field(default_factory=dict)
    rows: dict[str, tuple[float, Resting]] = field(default_factory=dict)
    walked: dict[str, Resting] = field(default_factory=dict)
    walked_until: float = 0.0
    walk_began: int = 0
    lost: frozenset[str] = frozenset()
    lost_until: float = 0.0
    full_passes: int = 0
    turn: dict[str, dict[str, LayerVerdict]] = field(default_factory=dict)
    turn_rows: dict[str, Resting] = field(default_factory=dict)
    turn_until: float = 0.0
    turned: bool = False

    def forget(self, now: float, seconds: float) -> bool:
        """Forget what is over; whether nothing is left. While a walk goes on, no rest ends by time alone: however many
        jobs there are, the last one has its turn before the first has another."""
        on_a_walk = self.walked_until > now
        self.kinds = {
            kind: rest for kind, rest in self.kinds.items() if rest.until > now or (on_a_walk and not rest.called)
        }
        self.vain = {kind: vain for kind, vain in self.vain.items() if vain.at + seconds > now}
        self.rows = {layer: row for layer, row in self.rows.items() if row[0] > now or on_a_walk}
        return not (self.kinds or self.vain or self.rows or self.walked_until > now or self.lost_until > now)


class _Room:
    """The hosts of some news, sorted by what they have idle only when something rests: mostly nothing does."""

    def __init__(self, news: HostNews) -> None:
        self._news = news

    def may_do(self, search: Search) -> bool:
        """Whether one of them could make a difference to this search; any host, if any may have changed."""
        if self._news.everything:
            return True
        places = ((tag, search.os_name or "", search.threadable) for tag in search.tags)
        return any(
            idle.covers(search.need) and 0 < least_cores(search, host) <= idle.cores
            for place in places
            for idle, host in self._by_place.get(place, ())
        )

    @cached_property
    def _by_place(self) -> Mapping[_Place, Sequence[tuple[Need, Host]]]:
        """Without those that have no more of anything idle than another of their size."""
        by_place: defaultdict[_Place, defaultdict[_Size, dict[Need, Host]]] = defaultdict(lambda: defaultdict(dict))
        for host in self._news.hosts:
            has = Need(host.idle_cores, host.idle_memory_kb, host.idle_gpus, host.idle_gpu_memory_kb)
            for place in _places(host):
                by_place[place][host.total_centicores, host.thread_mode][has] = host
        return {place: [it for hosts in sizes.values() for it in _largest(hosts)] for place, sizes in by_place.items()}


class LayerRest:
    """Per process. What rests does so in one cluster, for ``seconds`` at most: longer than the cluster sleeps."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._clusters: dict[str, _Aside] = {}
        self._changes: deque[tuple[int, _Room]] = deque(maxlen=_REMEMBERED_CHANGES)
        self._forget_at = 0.0
        self._lock = threading.Lock()
        self._roused = 0

    @property
    def roused(self) -> int:
        """How often hosts changed: to be read before the hosts that layers are looked up among."""
        return self._roused

    def rest(
        self,
        cluster: str,
        blocked: Iterable[UnschedulableLayer],
        *,
        roused: int,
        placed: Collection[str] = frozenset(),
    ) -> None:
        """These layers found no host in this cluster just now; of these kinds (``placed``) frames were placed.

        ``roused`` was read before they were looked up. Those to which a host that changed since could make a difference
        do not rest: another pass has taken note of that change already, and none would rouse them again.
        """
        now = self._clock()
        by_kind: defaultdict[str, list[UnschedulableLayer]] = defaultdict(list)
        for one in blocked:
            by_kind[one.kind].append(one)
        with self._lock:
            self._forget(now)
            forgotten = self._roused - roused > len(self._changes)
            rooms = [room for number, room in self._changes if number > roused]
            aside = self._clusters.setdefault(cluster, _Aside())
            for kind in placed:
                aside.vain.pop(kind, None)
            for kind, layers in by_kind.items():
                pause = self._pause(aside, kind, now)
                search = layers[0].search
                called = forgotten or any(room.may_do(search) for room in rooms)
                if called and not pause:
                    continue
                aside.kinds[kind] = _Rest(
                    search,
                    frozenset.intersection(*(it.open_allocs for it in layers)),
                    now + (pause if called else self._seconds),
                    now + pause,
                    {it.verdict.layer_id: it.verdict for it in layers},
                    called,
                )

    def count_pass(
        self, cluster: str, blocked: Iterable[UnschedulableLayer], others: Iterable[Resting], *, full: bool
    ) -> None:
        """A pass over the cluster looked at these in vain: ``blocked`` ones found no host, the ``others`` had another
        reason. After a few in a row that were ``full`` (there may be more jobs than they looked at) and looked at
        something in vain, those behind have a turn."""
        kinds: defaultdict[str, dict[str, LayerVerdict]] = defaultdict(dict)
        for one in blocked:
            kinds[one.kind][one.verdict.layer_id] = one.verdict
        rows = {row.verdict.layer_id: row for row in others}
        with self._lock:
            here = self._clusters.setdefault(cluster, _Aside())
            here.full_passes = here.full_passes + 1 if full and (kinds or rows) else 0
            if here.full_passes >= PASSES_BEFORE_A_TURN:
                here.full_passes = 0
                here.turn, here.turn_rows = dict(kinds), rows
                here.turn_until = self._clock() + _TURN_SECONDS

    def rest_rows(self, cluster: str, rows: Iterable[Resting]) -> None:
        """No host can help these layers: their rows have to change."""
        until = self._clock() + self._seconds
        with self._lock:
            for row in rows:
                self._clusters.setdefault(cluster, _Aside()).rows[row.verdict.layer_id] = (until, row)

    def aside(self, cluster: str, room: Mapping[str, float]) -> Aside:
        """What is to be left out of a pass over the cluster now. ``room``: allocation id -> the cores that the show's
        subscription has left under its burst."""
        now = self._clock()
        with self._lock:
            here = self._clusters.get(cluster)
            if here is None:
                return Aside(LeftOut(), {})
            here.forget(now, self._seconds)
            for kind, rest in list(here.kinds.items()):
                if not _open_allocs(rest.search, room) <= rest.open_allocs:
                    del here.kinds[kind]
            rows = {layer_id: row for layer_id, (_, row) in here.rows.items()}
            rows |= here.walked if here.walked_until > now else {}
            kinds = {kind: rest.layers for kind, rest in here.kinds.items()}
            if here.turn_until > now:
                here.turned = not (here.turn.keys() <= kinds.keys() and here.turn_rows.keys() <= rows.keys())
                kinds, rows = {**here.turn, **kinds}, {**here.turn_rows, **rows}
            here.turn, here.turn_rows, here.turn_until = {}, {}, 0.0
            verdicts = {layer_id: row.verdict for layer_id, row in rows.items()}
            for layers in kinds.values():
                verdicts |= layers
            left_out = LeftOut({layer_id: row.version for layer_id, row in rows.items()}, list(kinds))
            return Aside(left_out, verdicts)

    def given_back(self, cluster: str, hosts: Collection[Host]) -> frozenset[str]:
        """A plan of the cluster had these hosts and did not book all it had of them. Rouse the kinds that could have
        had one of them instead, for which that was no look in vain: which."""
        room = _Room(HostNews(tuple(hosts)))
        with self._lock:
            here = self._clusters.get(cluster)
            if here is None or not hosts:
                return frozenset()
            kinds = frozenset(kind for kind, rest in here.kinds.items() if room.may_do(rest.search))
            for kind in kinds:
                del here.kinds[kind]
                here.vain.pop(kind, None)
            return kinds

    def look_again(self, cluster: str) -> float | None:
        """Seconds until the first pause ends in which there were news, or hardly any after a turn: no longer must the
        cluster sleep. None without such a pause."""
        now = self._clock()
        with self._lock:
            here = self._clusters.get(cluster)
            if here is None:
                return None
            ends = [rest.until for rest in here.kinds.values() if rest.called]
            if here.turned:
                here.turned = False
                ends.append(now)
            return max(0.001, min(ends) - now) if ends else None

    def walk_on(self, cluster: str, looked_at: Iterable[Resting], wakes: int) -> None:
        """A pass over the cluster booked nothing and there are more jobs: leave these layers out of the next one.

        ``wakes``: how often the cluster had been woken when the pass began. Another process may end the walk: what this
        one has not gone on with in the time of a rest is forgotten.
        """
        now = self._clock()
        with self._lock:
            here = self._clusters.setdefault(cluster, _Aside())
            looked = {layer.verdict.layer_id: layer for layer in looked_at}
            if here.walked_until <= now:
                here.walked, here.walk_began = {}, wakes
            here.walked |= looked
            here.walked_until = now + self._seconds

    def lost_before(self, cluster: str, layers: Collection[str]) -> frozenset[str]:
        """Which of these layers, all of whose frames a pass over the cluster just lost to others, had lost them all in
        the pass before it as well."""
        now = self._clock()
        with self._lock:
            here = self._clusters.setdefault(cluster, _Aside())
            before = here.lost if here.lost_until > now else frozenset()
            here.lost, here.lost_until = frozenset(layers), now + self._seconds if layers else 0.0
        return before.intersection(layers)

    def walk_ends(self, cluster: str, wakes: int) -> bool:
        """The next pass begins with the highest priority again; whether it has to come at once, because the cluster was
        woken since the walk began: for those that were passed over, it may be."""
        now = self._clock()
        with self._lock:
            here = self._clusters.get(cluster)
            if here is None:
                return False
            woken = here.walked_until > now and here.walk_began != wakes
            here.walked, here.walked_until = {}, 0.0
            return woken

    def hosts_changed(self, news: HostNews) -> None:
        """Rouse all to which these hosts could make a difference, now or when its pause ends."""
        if not news:
            return
        room = _Room(news)
        now = self._clock()
        with self._lock:
            self._roused += 1
            self._changes.append((self._roused, room))
            for here in self._clusters.values():
                for kind, rest in list(here.kinds.items()):
                    if not room.may_do(rest.search):
                        continue
                    if rest.pause_until > now:
                        rest.until, rest.called = min(rest.until, rest.pause_until), True
                    else:
                        del here.kinds[kind]

    def _pause(self, aside: _Aside, kind: str, now: float) -> float:
        """Seconds in which the kind is not looked at again whatever happens: none after the first look in vain."""
        vain = aside.vain.get(kind)
        if vain is None or vain.at + self._seconds <= now:
            vain = aside.vain[kind] = _Vain(now)
        vain.at, vain.looks = now, vain.looks + 1
        return 0.0 if vain.looks == 1 else PAUSE_SECONDS

    def _forget(self, now: float) -> None:
        """Once in the time of a rest, forget clusters of which nothing is left: they may be no more."""
        if now < self._forget_at:
            return
        self._forget_at = now + self._seconds
        for cluster in [key for key, here in self._clusters.items() if here.forget(now, self._seconds)]:
            del self._clusters[cluster]


def _open_allocs(search: Search, room: Mapping[str, float]) -> frozenset[str]:
    """The allocations with room for a frame."""
    return frozenset(alloc_id for alloc_id, cores in room.items() if cores >= search.need.cores)


def _places(host: Host) -> Iterable[_Place]:
    threads = (True,) if host.thread_mode is ThreadMode.ALL else (True, False)
    return ((tag, os_name, thread) for tag in host.tags for os_name in ("", *host.os_names) for thread in threads)


def _largest(hosts: Mapping[Need, Host]) -> list[tuple[Need, Host]]:
    """Those of hosts, by what they have idle, that no other covers."""
    kept: list[tuple[Need, Host]] = []
    for idle in sorted(hosts, key=lambda it: (it.cores, it.memory_kb, it.gpus, it.gpu_memory_kb), reverse=True):
        if not any(larger.covers(idle) for larger, _ in kept):
            kept.append((idle, hosts[idle]))
    return kept


# How long a host is left alone whose row another transaction had: it would be found locked again at once.
#
# Mostly a completion or a report has it, for a few milliseconds; then every moment its cores are left idle is lost. Now
# and then somebody keeps it for long, and looking again and again costs a pass each time. Nobody can tell which it is,
# so the rest grows with the looks in vain.

FIRST_REST_SECONDS = 0.05
LONGEST_REST_SECONDS = 1.0
_FORGOTTEN_SECONDS = 2 * LONGEST_REST_SECONDS


class LockedHosts:
    """Of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rests: dict[str, tuple[float, float]] = {}

    def found(self, host_ids: Collection[str]) -> dict[str, float]:
        """These hosts were found locked just now: the seconds for which each is to rest.

        Twice as long as the last time, unless the host has been left in peace for a while since.
        """
        now = self._clock()
        with self._lock:
            self._rests = {host: rest for host, rest in self._rests.items() if rest[0] + _FORGOTTEN_SECONDS > now}
            for host in host_ids:
                _, last = self._rests.get(host, (now, FIRST_REST_SECONDS / 2))
                self._rests[host] = (now, min(2 * last, LONGEST_REST_SECONDS))
            return {host: self._rests[host][1] for host in host_ids}


# Clusters that rest because work of theirs waits at a cap, and are to be roused when something ends under it.
#
# A run that ends gives back cores of a host, which rouses the clusters that could use that host, and room under the
# caps of a licence, a folder or a job, at which work of quite other tags may wait. Every process hears of every run
# that ends; each keeps what its own passes wait for. Lost with the process, or full, it costs the rest of a cluster's
# sleep.

WAITS_OF_A_CLUSTER = 20
"""Enough to be roused by most of what could; a cluster that waits at more is roused by the others' turn."""
MOST_CLUSTERS = 200
_KINDS = {
    Verdict.OVER_FOLDER: CapKind.FOLDER,
    Verdict.OVER_FOLDER_GPUS: CapKind.FOLDER,
    Verdict.OVER_JOB: CapKind.JOB,
    Verdict.OVER_JOB_GPUS: CapKind.JOB,
    Verdict.OVER_LIMIT: CapKind.LIMIT,
}


@dataclass(frozen=True, slots=True)
class CapWait:
    """What a frame has too little of: cores and GPUs of a folder or job, or a seat (of ``cores``) of a limit."""

    at: Capped
    need: Room


def waits_of(verdicts: Iterable[LayerVerdict], snapshot: Snapshot) -> Iterator[CapWait]:
    """At which caps the layers of a pass wait that had too little room under them when it began. What the counters
    refused, or a host would take more than the least for, has room by this count and waits for something else."""
    layers = {layer.id: (job, layer) for job in snapshot.jobs for layer in job.layers}
    for verdict in verdicts:
        kind = _KINDS.get(verdict.verdict)
        if kind is None or verdict.layer_id not in layers:
            continue
        job, layer = layers[verdict.layer_id]
        if kind is CapKind.LIMIT:
            full = [key for key in layer.limit_ids if key in snapshot.limits and snapshot.limits[key].left < 1]
            yield from (CapWait(Capped(kind, key), Room(1, 0)) for key in full[:1])
            continue
        of_folder = kind is CapKind.FOLDER
        caps = snapshot.folders.get(job.folder_id) if of_folder else snapshot.job_caps.get(job.id)
        least = smallest_need(layer)
        need = Room(least.cores, least.gpus)
        if caps is not None and not Room(caps.cores.left, caps.gpus.left).covers(need):
            yield CapWait(Capped(kind, job.folder_id if of_folder else job.id), need)


@dataclass(frozen=True, slots=True)
class _Waiting:
    since: float
    until: float
    waits: frozenset[CapWait]


class CapWaits:
    """Of one process. Thread-safe. Forgets what no pass has said for ``seconds``: the cluster wakes by itself then."""

    def __init__(self, seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._clusters: dict[str, _Waiting] = {}

    def note(self, cluster: str, waits: Iterable[CapWait]) -> None:
        """A pass over the cluster ended with nothing booked, and these waits."""
        now = self._clock()
        with self._lock:
            self._clusters = {key: it for key, it in self._clusters.items() if it.until > now}
            before = self._clusters.get(cluster, _Waiting(now, now, frozenset()))
            known = before.waits.union(islice(waits, WAITS_OF_A_CLUSTER - len(before.waits)))
            if known and (before.waits or len(self._clusters) < MOST_CLUSTERS):
                self._clusters[cluster] = _Waiting(before.since, now + self._seconds, known)

    def forget(self, clusters: Iterable[str]) -> None:
        """These clusters have been roused; what they still wait for, their next pass says anew."""
        with self._lock:
            for cluster in clusters:
                self._clusters.pop(cluster, None)

    def caps(self) -> frozenset[Capped]:
        """Whatever is waited at; mostly nothing."""
        with self._lock:
            return frozenset(wait.at for waiting in self._clusters.values() for wait in waiting.waits)

    def with_room(self, room: Mapping[Capped, Room]) -> frozenset[str]:
        """The clusters for which there is room now, those that have waited longest first, and no more of them than the
        room is for: who comes next would find it taken."""
        left = dict(room)
        chosen = set()
        with self._lock:
            for cluster, waiting in sorted(self._clusters.items(), key=lambda item: item[1].since):
                fits = next((it for it in waiting.waits if it.at in left and left[it.at].covers(it.need)), None)
                if fits is not None:
                    left[fits.at] = left[fits.at].less(fits.need)
                    chosen.add(cluster)
        return frozenset(chosen)


# What failed is left alone for a while: longer each time it fails again, and not at all once it has worked.
#
# One rule for all: the first cooldown, doubled by each failure in a row up to a bound. Clusters keep theirs on the
# board, where every process sees them (coordination.postings); what only one process has to know is in Cooldowns.

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 300.0
_REMEMBERED = 10_000

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
    """What this process leaves alone, and why. Thread-safe.

    Something that has not failed again for as long as its last cooldown took begins anew. The latest 10,000 are kept.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._cooldowns: OrderedDict[What, _Cooldown] = OrderedDict()

    def failed(self, what: What, why: str) -> None:
        """Leave it alone from now on. What failed while it was left alone anyway had been begun before: once more says
        nothing."""
        now = self._clock()
        with self._lock:
            before = self._cooldowns.get(what)
            if before is not None and now < before.until:
                return
            failures = 1 if before is None or before.forgotten <= now else before.failures + 1
            seconds = cooldown_seconds(failures, first=self._first, longest=self._longest)
            self._cooldowns[what] = _Cooldown(now + seconds, now + 2 * seconds, failures, why)
            self._cooldowns.move_to_end(what)
            while len(self._cooldowns) > _REMEMBERED:
                self._cooldowns.popitem(last=False)

    def worked(self, what: What) -> None:
        """It need not be left alone any more."""
        with self._lock:
            self._cooldowns.pop(what, None)

    def active(self) -> dict[What, str]:
        """What is to be left alone now, and why."""
        now = self._clock()
        with self._lock:
            for what in [what for what, it in self._cooldowns.items() if it.forgotten <= now]:
                del self._cooldowns[what]
            return {what: it.why for what, it in self._cooldowns.items() if it.until > now}
