"""The hosts of one process, shared by the passes in its threads (distributed scheduler reference, "Host Cache").

Locking: one lock around the hosts and groups, never held during a fetch, nor while a planner's predicate runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import structlog

from opencue_sched.domain.farm import Host, Reservation
from opencue_sched.domain.reservation import Need
from opencue_sched.placement.host_groups import Accept, Census, GroupKey, HostGroups
from opencue_sched.placement.policy import Strategy
from opencue_sched.settings import HostCacheSettings

log = structlog.get_logger(__name__)


class HostReading(Protocol):
    """A host as PostgreSQL had it when it was read (``store.hosts.FetchedHost``)."""

    @property
    def host(self) -> Host: ...

    @property
    def report_age(self) -> float:
        """Seconds since host_stat.ts_ping, by the database's clock: ours may differ from it."""


@dataclass(slots=True)
class _Hold:
    taken: Reservation
    covered_from: float
    """Reads that begin at this time or later contain the hold, or show that it came to nothing."""
    open: bool = True
    """Nobody has said yet what became of its booking."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A host that is not to be read before ``until``, as it was last known."""

    until: float
    host: Host | None
    why: str


@dataclass(slots=True)
class _Entry:
    """``read`` and ``current`` are None for a host that is gone: a read beginning before ``read_at`` does not count."""

    read_at: float
    read: Host | None = None
    current: Host | None = None
    reported_at: float = 0.0
    holds: dict[str, _Hold] = field(default_factory=dict)


class KnownHosts:
    """The hosts, their holds and their check-outs, shown in ``groups`` as they can be booked now. Not thread-safe.

    Three things change a host: a read of PostgreSQL, a plan that takes from it, and the outcome of that plan. They
    arrive in any order, so a host is kept as *what the last read said, less the holds that read cannot have seen*:

    - Reads are ordered by when they *began*, on this process's clock; an older read never overwrites a newer one.
    - A hold starts at check-in. Once its booking is committed, reads that begin later contain it and end it; if it was
      lost, its idle is back at once. A hold that is never settled ends with the first read that begins
      ``hold_seconds`` after it. So a read that was under way during a commit does not bring back idle that the commit
      took, and the next read shows freed cores, not the host's next report (design trap I-3).

    Every doubt under-books: the host shows less idle than it has until the next read.

    Times are seconds of one clock that never runs backwards. Every change gives a host a larger ``last_updated``.
    """

    def __init__(self, groups: HostGroups, *, hold_seconds: float, checkout_seconds: float) -> None:
        self.groups = groups
        self._hold_seconds = hold_seconds
        self._checkout_seconds = checkout_seconds
        self._entries: dict[str, _Entry] = {}
        self._out: dict[str, tuple[float, float]] = {}
        self._invalidated: dict[str, _Refused] = {}
        self._being_booked: dict[str, int] = {}
        self._version = 0

    @property
    def checked_out(self) -> Collection[str]:
        """Ids of the hosts that planners have checked out."""
        return self._out.keys()

    @property
    def being_booked(self) -> Collection[str]:
        """Ids of the hosts on which plans whose outcome is not known yet hold something. A live view."""
        return self._being_booked.keys()

    def invalidated(self, now: float) -> frozenset[str]:
        """Ids of the hosts nobody has read since they were invalidated, and that may be read by now."""
        return frozenset(host_id for host_id, refused in self._invalidated.items() if refused.until <= now)

    def next_return(self) -> float | None:
        """When the first of the invalidated hosts may be read again; None when there are none."""
        return min((refused.until for refused in self._invalidated.values()), default=None)

    def refused(self, facility_id: str, tags: Collection[str]) -> list[str]:
        """Why the invalidated hosts of a facility with any of these tags are, one reason each; the latest last."""
        return [
            refused.why
            for refused in self._invalidated.values()
            if (host := refused.host) and host.facility_id == facility_id and not host.tags.isdisjoint(tags)
        ]

    def reported_at(self, host_id: str) -> float:
        """When the host last reported, by our clock."""
        return self._entries[host_id].reported_at

    def take_over(self, reading: HostReading, read_at: float) -> None:
        """A read that began at ``read_at`` found the host."""
        host = reading.host
        entry = self._entries.get(host.id)
        if entry is None:
            if not self.groups.wants(host):
                return
            entry = self._entries[host.id] = _Entry(read_at)
        elif read_at < entry.read_at:
            return
        unchanged = entry.read == host and not entry.holds
        self._end(host.id, entry, [proc_id for proc_id, hold in entry.holds.items() if hold.covered_from <= read_at])
        entry.read_at = read_at
        entry.reported_at = read_at - reading.report_age
        entry.read = host
        self._invalidated.pop(host.id, None)
        if not unchanged or entry.current is None:
            entry.current = self._less_holds(host, entry.holds)
        self._show(entry.current)

    def forget(self, host_id: str, read_at: float) -> None:
        """A read that began at ``read_at`` did not find the host. Remembered, so that an older read cannot undo it."""
        entry = self._entries.setdefault(host_id, _Entry(read_at))
        if read_at < entry.read_at:
            return
        entry.read_at = read_at
        entry.read = entry.current = None
        self._invalidated.pop(host_id, None)
        self._out.pop(host_id, None)
        self.groups.drop(host_id)

    def invalidate(self, host_id: str, until: float, why: str) -> None:
        """Forget the host until a read that begins at ``until`` or later. Of several reasons the first says most."""
        before = self._invalidated.get(host_id) or _Refused(until, self.groups.get(host_id), why)
        self.forget(host_id, until)
        self._invalidated[host_id] = replace(before, until=max(until, before.until), why=before.why or why)

    def take(self, host: Host, now: float) -> bool:
        """Check the host out if it is still as it was when looked up (the optimistic ``last_updated`` test)."""
        entry = self._entries.get(host.id)
        if entry is None or entry.current is None or host.id in self._out:
            return False
        if entry.current.last_updated != host.last_updated:
            return False
        self.groups.hide(host.id)
        self._out[host.id] = (now, host.last_updated)
        return True

    def give_back(self, host: Host, taken: Mapping[str, Reservation], now: float) -> bool:
        """Check in what ``take`` checked out, with new holds. False if the check-out had ended before."""
        checkout = self._out.get(host.id)
        valid = checkout is not None and checkout[1] == host.last_updated
        if valid:
            del self._out[host.id]
        entry = self._entries.get(host.id)
        if entry is None:
            return False
        for proc_id, reservation in taken.items():
            entry.holds[proc_id] = _Hold(reservation, now + self._hold_seconds)
        if taken:
            self._being_booked[host.id] = self._being_booked.get(host.id, 0) + len(taken)
        if entry.current is None:
            return False
        if taken:
            entry.current = entry.current.less(_sum(taken.values()), last_updated=self._next_version())
        self._show(entry.current)
        return valid

    def settle(self, host_id: str, committed: Collection[str], lost: Collection[str], now: float) -> None:
        """End holds: ``committed`` when a read that begins from now on arrives, ``lost`` at once."""
        entry = self._entries.get(host_id)
        if entry is None:
            return
        for proc_id in committed:
            hold = entry.holds.get(proc_id)
            if hold is not None:
                hold.covered_from = min(hold.covered_from, now)
                self._close(host_id, hold)
        if self._end(host_id, entry, lost) and entry.read is not None:
            entry.current = self._less_holds(entry.read, entry.holds)
            self._show(entry.current)

    def take_back_overdue(self, now: float) -> None:
        """End check-outs that lasted too long. They are in the order they began, so the first in time ends the look."""
        while self._out:
            host_id, (since, _) = next(iter(self._out.items()))
            if now - since <= self._checkout_seconds:
                return
            del self._out[host_id]
            log.warning("checkout_timed_out", host_id=host_id, held_seconds=round(now - since, 1))
            entry = self._entries[host_id]
            if entry.current is not None:
                entry.current = replace(entry.current, last_updated=self._next_version())
                self._show(entry.current)

    def purge(self, before: float) -> None:
        """Drop what is remembered of hosts in no open group, if no read as old as ``before`` can still arrive."""
        for host_id, entry in list(self._entries.items()):
            if self.groups.get(host_id) is not None or host_id in self._out or entry.read_at >= before:
                continue
            if all(hold.covered_from < before for hold in entry.holds.values()):
                del self._entries[host_id]
                self._being_booked.pop(host_id, None)
                self._invalidated.pop(host_id, None)

    def _end(self, host_id: str, entry: _Entry, proc_ids: Iterable[str]) -> bool:
        """End these holds, as far as they are there; whether one was."""
        ended = [entry.holds.pop(proc_id) for proc_id in proc_ids if proc_id in entry.holds]
        for hold in ended:
            self._close(host_id, hold)
        return bool(ended)

    def _close(self, host_id: str, hold: _Hold) -> None:
        """The hold's booking is known to have ended, or too old to be under way."""
        if not hold.open:
            return
        hold.open = False
        self._being_booked[host_id] -= 1
        if not self._being_booked[host_id]:
            del self._being_booked[host_id]

    def _less_holds(self, host: Host, holds: Mapping[str, _Hold]) -> Host:
        return host.less(_sum(hold.taken for hold in holds.values()), last_updated=self._next_version())

    def _show(self, host: Host) -> None:
        """Make the host bookable as it is, unless it is checked out: then its check-in will."""
        if not self.groups.shows(host):
            self.groups.put(host)
        if host.id in self._out:
            self.groups.hide(host.id)

    def _next_version(self) -> float:
        self._version += 1
        return float(self._version)


def _sum(taken: Iterable[Reservation]) -> Reservation:
    cores = memory_kb = gpus = gpu_memory_kb = 0
    for reservation in taken:
        cores += reservation.cores
        memory_kb += reservation.memory_kb
        gpus += reservation.gpus
        gpu_memory_kb += reservation.gpu_memory_kb
    return Reservation(cores, memory_kb, gpus, gpu_memory_kb)


FetchHosts = Callable[[str, Sequence[str]], Mapping[str, Sequence[HostReading]]]
"""``fetch(facility_id, tags)``: the bookable hosts (UP, OPEN) of the facility by tag, in one query."""

CHECKOUT_SECONDS = 12.0
GROUP_REFRESH_SECONDS = 10.0
"""Between full reads of a group. Changes in between arrive by the change log; this finds those whose news was lost."""
_FETCHES_AT_ONCE = 4
"""Host queries of one process: the pool's other connections are left to the passes."""
_FIRST_LISTED = 4
"""Hosts listed under the lock at first; each further listing is four times as long."""
_SCORED_CANDIDATES = 500
"""Hosts a policy's score chooses among: it is called for each, so this bounds what one check-out costs."""
_RESCANS = 3
"""Searches repeated because other passes held or took the hosts that would have done."""
_RETURN_WAIT_SECONDS = 0.05
"""How long a search waits for another pass to check a host in. Planning one layer on one host takes far less."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """``given_up``: searches that found nothing although repeated, because other passes had or took the hosts."""

    size: int
    groups: int
    hits: int
    misses: int
    checked_out: int
    given_up: int


@dataclass(slots=True)
class _Group:
    asked_at: float
    fetched_at: float | None = None
    fetching: bool = False


class HostCache:
    """PostgreSQL's hosts in groups by facility and tag, each handed out to one planner at a time. Thread-safe.

    A planner checks a host out, cuts reservations from it and checks it in with what it took. From then on everybody
    sees the host without those, although nothing is booked yet: that is a *hold*. ``settle`` ends the holds once the
    outcome of the booking is known.

    ``fetch`` reads hosts for groups that are absent or older than ``GROUP_REFRESH_SECONDS``; hosts named by the change
    log come through ``reading`` and ``apply`` in between. ``clock`` is in seconds and never runs backwards.
    A host checked out for ``checkout_seconds`` is taken back. That also bounds holds (see ``KnownHosts``), so it
    must be longer than ``accounting.commit_deadline``: else a host is handed out again while its plan may be committed.
    """

    def __init__(
        self,
        settings: HostCacheSettings,
        fetch: FetchHosts,
        *,
        instance: str = "",
        checkout_seconds: float = CHECKOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._clock = clock
        self._hosts = KnownHosts(
            HostGroups(memory_key_divisor_kb=settings.memory_key_divisor // 1024, instance=instance),
            hold_seconds=checkout_seconds,
            checkout_seconds=checkout_seconds,
        )
        self._groups: dict[GroupKey, _Group] = {}
        self._latest = self._expired_at = -math.inf
        self._news: list[Host] = []
        self._missed: set[str] = set()
        self._hits = 0
        self._misses = 0
        self._given_up = 0
        self._lock = threading.Condition()
        self._group_permits = threading.BoundedSemaphore(settings.concurrent_groups)
        self._fetch_permits = threading.BoundedSemaphore(_FETCHES_AT_ONCE)

    # Reading hosts

    def refresh(self, facility_id: str, tags: Sequence[str]) -> int:
        """Make sure the groups are there and not expired; how many were fetched.

        The groups that need it are fetched together, by one query under one of ``concurrent_groups`` permits, and no
        group by two threads at once: an absent group that another thread is fetching is waited for, an expired one is
        used as it is. Errors of ``fetch`` go to the caller and leave the groups as they were.
        """
        fetched = 0
        while True:
            wanted, awaited = self._claim_groups(facility_id, tags)
            if wanted:
                self._fetch_groups(facility_id, wanted)
                fetched += len(wanted)
            if not awaited:
                return fetched
            with self._lock:
                while any(self._groups[key].fetching for key in awaited if key in self._groups):
                    self._lock.wait()

    @contextmanager
    def reading(self) -> Iterator[float]:
        """Around a query for hosts that goes to ``apply``: takes a fetch permit, yields when the read began.

        The query must see whatever was committed before: do not use an older REPEATABLE READ snapshot.
        """
        with self._fetch_permits:
            with self._lock:
                began_at = self._instant()
            yield began_at

    def apply(self, readings: Iterable[HostReading], gone_ids: Collection[str], *, read_at: float) -> None:
        """Take over hosts that were read again, and forget those that were asked for and are not bookable any more.

        ``read_at`` is when the read began (see ``reading``): whatever is newer here stays.
        """
        with self._lock:
            for reading in readings:
                self._hosts.take_over(reading, read_at)
            for host_id in gone_ids:
                self._hosts.forget(host_id, read_at)
            self._lock.notify_all()

    def take_news(self) -> tuple[Host, ...]:
        """The hosts that groups were fetched with since the last call, and those that a search missed because another
        pass had them. Returned by one call only, also when the refresh that read them failed afterwards."""
        with self._lock:
            news, self._news = tuple(self._news), []
            return news

    def expire(self) -> None:
        """Make the next refresh of every group fetch it: for a change log that could not say what changed."""
        with self._lock:
            self._expired_at = self._instant()

    def invalidate(self, host_id: str, *, rest_seconds: float = 0.0, why: str = "") -> None:
        """Do not hand the host out until a read that begins ``rest_seconds`` from now or later.

        For a host that PostgreSQL or RQD refused, ``why`` being what they said. The rest is for what a read cannot
        show: that its RQD is gone, say.
        """
        with self._lock:
            self._hosts.invalidate(host_id, self._instant() + rest_seconds, why)

    def invalidated_ids(self) -> frozenset[str]:
        """Invalidated hosts whose rest is over: read them with the next hosts from the change log."""
        with self._lock:
            return self._hosts.invalidated(self._instant())

    def back_in(self) -> float | None:
        """Seconds until an invalidated host may be read again, 0 for one that may be by now; None for no such host."""
        with self._lock:
            at = self._hosts.next_return()
            return None if at is None else max(0.0, at - self._clock())

    def evict_idle_groups(self) -> int:
        """Drop the groups nobody asked for during ``group_idle_timeout``, and their hosts; how many groups."""
        with self._lock:
            now = self._clock()
            idle = [
                key
                for key, group in self._groups.items()
                if not group.fetching and now - group.asked_at > self._settings.group_idle_timeout
            ]
            for key in idle:
                del self._groups[key]
                self._hosts.groups.close(key)
            self._hosts.purge(now - self._settings.host_staleness_threshold)
            return len(idle)

    def stats(self) -> CacheStats:
        with self._lock:
            hosts = self._hosts
            return CacheStats(
                len(hosts.groups), len(self._groups), self._hits, self._misses, len(hosts.checked_out), self._given_up
            )

    # Handing hosts out

    def check_out(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        score: Callable[[Host], float] | None = None,
        patient: bool = True,
    ) -> Host | None:
        """The first host with one of ``tags`` and ``need`` idle that ``accept`` agrees to, or None.

        ``allocs`` leaves out the hosts of other allocations without looking at them. ``score`` replaces the strategy's
        order by the lowest score among the first 500 accepted hosts. Not ``patient``: return at once when there is no
        host at the moment, because the caller has others to look at.

        A host is handed out only if its ``last_updated`` is still what ``accept`` saw.
        """
        raced: list[Host] = []
        # Hosts that would have done were out or were taken meanwhile: on a small farm a moment's absence must not look
        # like a full farm, so the search is repeated a few times.
        for _ in range(_RESCANS + 1):
            listed = self._listed(facility_id, tags, need, strategy, allocs)
            host, raced = self._first(listed, accept) if score is None else self._best(listed, accept, score)
            if host is not None:
                return host
            if not patient:
                return None
            if not raced and not self._await_return(facility_id, tags):
                break
        else:
            with self._lock:
                self._given_up += 1
        with self._lock:
            self._misses += 1
            self._missed |= self._out_with(facility_id, tags)
            self._tell(host.id for host in raced if host.id not in self._hosts.checked_out)
        return None

    def being_booked(self) -> Collection[str]:
        """Ids of the hosts from which plans that are not settled yet took something, the caller's own among them."""
        return self._hosts.being_booked

    def check_in(self, host: Host, taken: Mapping[str, Reservation]) -> bool:
        """Give back a host as it was handed out, with what was taken from it by proc id.

        False if the check-out was no longer valid (timed out or invalidated); the holds count all the same.
        """
        with self._lock:
            valid = self._hosts.give_back(host, taken, self._clock())
            if host.id in self._missed:
                self._missed.discard(host.id)
                self._tell((host.id,))
            self._lock.notify_all()
            return valid

    def census(
        self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None = None
    ) -> Census:
        """What there is for a need that found no host."""
        with self._lock:
            found = self._hosts.groups.census(facility_id, tags, need, allocs)
            return replace(found, refused=tuple(self._hosts.refused(facility_id, tags)))

    def settle(self, host_id: str, *, committed: Collection[str], lost: Collection[str]) -> None:
        """End holds by proc id: ``committed`` stay taken until a read shows them, what ``lost`` took is idle again."""
        with self._lock:
            self._hosts.settle(host_id, committed, lost, self._instant())
            self._lock.notify_all()

    # Inside

    def _instant(self) -> float:
        """The time, later than at any call before: reads, commits and invalidations are strictly ordered by it."""
        self._latest = max(self._clock(), math.nextafter(self._latest, math.inf))
        return self._latest

    def _claim_groups(self, facility_id: str, tags: Sequence[str]) -> tuple[list[GroupKey], list[GroupKey]]:
        """The groups this thread is to fetch now, and those it has to wait for."""
        wanted: list[GroupKey] = []
        awaited: list[GroupKey] = []
        with self._lock:
            now = self._clock()
            for tag in dict.fromkeys(tags):
                key = (facility_id, tag)
                group = self._groups.setdefault(key, _Group(now))
                group.asked_at = now
                if group.fetching:
                    if group.fetched_at is None:
                        awaited.append(key)
                elif self._is_due(group, now):
                    group.fetching = True
                    wanted.append(key)
        return wanted, awaited

    def _is_due(self, group: _Group, now: float) -> bool:
        """Whether the group is absent or expired."""
        if group.fetched_at is None or group.fetched_at < self._expired_at:
            return True
        return now - group.fetched_at >= GROUP_REFRESH_SECONDS

    def _fetch_groups(self, facility_id: str, keys: Sequence[GroupKey]) -> None:
        readings: Mapping[str, Sequence[HostReading]] | None = None
        read_at = 0.0
        try:
            with self._group_permits, self.reading() as read_at:
                readings = self._fetch(facility_id, [tag for _, tag in keys])
        finally:
            with self._lock:
                for key in keys:
                    self._groups[key].fetching = False
                if readings is not None:
                    self._take_over_groups(keys, readings, read_at)
                self._lock.notify_all()

    def _take_over_groups(
        self, keys: Sequence[GroupKey], by_tag: Mapping[str, Sequence[HostReading]], read_at: float
    ) -> None:
        groups = self._hosts.groups
        for key in keys:
            groups.open(key)
            self._groups[key].fetched_at = read_at
        there = {reading.host.id: reading for readings in by_tag.values() for reading in readings}
        for reading in there.values():
            self._hosts.take_over(reading, read_at)
            self._news.append(reading.host)
        for key in keys:
            for host_id in groups.members(key):
                if host_id not in there:
                    self._hosts.forget(host_id, read_at)

    def _listed(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        allocs: Collection[str] | None,
    ) -> Iterator[Host]:
        """Candidates in the order of the strategy, listed in growing portions: mostly the first few are enough."""
        start, size = 0, _FIRST_LISTED
        hosts = self._hosts
        while True:
            with self._lock:
                now = self._clock()
                hosts.take_back_overdue(now)
                candidates = hosts.groups.candidates(facility_id, tags, need, strategy, allocs)
                listed = list(islice(candidates, start, start + size))
                oldest_report = now - self._settings.host_staleness_threshold
                stale = {host.id for host in listed if hosts.reported_at(host.id) < oldest_report}
                for host_id in stale:
                    hosts.groups.hide(host_id)
            yield from (host for host in listed if host.id not in stale)
            if len(listed) < size:
                return
            start, size = start + size - len(stale), size * 4

    def _first(self, listed: Iterator[Host], accept: Accept) -> tuple[Host | None, list[Host]]:
        """The first accepted host, now checked out, and those with which another pass was quicker."""
        raced: list[Host] = []
        for host in listed:
            if accept(host):
                if self._take(host):
                    return host, raced
                raced.append(host)
        return None, raced

    def _best(
        self, listed: Iterator[Host], accept: Accept, score: Callable[[Host], float]
    ) -> tuple[Host | None, list[Host]]:
        """Of the first accepted hosts the one with the lowest score, else the next; otherwise as ``_first``."""
        accepted = list(islice(filter(accept, listed), _SCORED_CANDIDATES))
        for host in sorted(accepted, key=score):
            if self._take(host):
                return host, []
        return None, accepted

    def _take(self, host: Host) -> bool:
        with self._lock:
            taken = self._hosts.take(host, self._clock())
            self._hits += taken
            return taken

    def _await_return(self, facility_id: str, tags: Sequence[str]) -> bool:
        """Wait a moment for a host with one of the tags that another pass has; False if none is out or none came."""
        with self._lock:
            return bool(self._out_with(facility_id, tags)) and self._lock.wait(_RETURN_WAIT_SECONDS)

    def _out_with(self, facility_id: str, tags: Sequence[str]) -> set[str]:
        """The hosts with one of the tags that passes have."""
        mine = frozenset(tags)
        known = (self._hosts.groups.get(host_id) for host_id in self._hosts.checked_out)
        return {
            host.id for host in known if host and host.facility_id == facility_id and not mine.isdisjoint(host.tags)
        }

    def _tell(self, host_ids: Iterable[str]) -> None:
        """Make news of hosts as they are now."""
        known = (self._hosts.groups.get(host_id) for host_id in host_ids)
        self._news += [host for host in known if host is not None]
