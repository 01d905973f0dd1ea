"""The hosts of one process, shared by the passes in its threads (distributed scheduler reference, "Host Cache").

Locking: one lock around the hosts and groups, never held during a fetch, nor while a planner's predicate runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

from opencue_sched.domain.farm import Host, Reservation
from opencue_sched.domain.reservation import Need
from opencue_sched.placement.groups import GroupKey, HostGroups, Survey
from opencue_sched.placement.known import HostReading, KnownHosts
from opencue_sched.placement.pool import Accept, Preference
from opencue_sched.placement.strategy import Strategy
from opencue_sched.settings import HostCacheSettings

FetchHosts = Callable[[str, Sequence[str]], Mapping[str, Sequence[HostReading]]]
"""``fetch(facility_id, tags)``: the bookable hosts (UP, OPEN) of the facility by tag, in one query."""

_FIRST_LISTED = 4
"""Hosts listed under the lock at first; each further listing is four times as long."""
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
    """A thread-safe ``HostPool`` over PostgreSQL's hosts, in groups by facility and tag.

    ``fetch`` reads hosts for groups that are absent or older than ``group_refresh_interval``; hosts named by the change
    log come through ``reading`` and ``apply`` in between. ``clock`` is in seconds and never runs backwards.
    ``checkout_timeout`` also bounds holds (see ``known``), so it must be longer than a booking's commit deadline.
    """

    def __init__(
        self,
        settings: HostCacheSettings,
        fetch: FetchHosts,
        *,
        instance: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._clock = clock
        self._hosts = KnownHosts(
            HostGroups(memory_key_divisor_kb=settings.memory_key_divisor // 1024, instance=instance),
            hold_seconds=settings.checkout_timeout,
            checkout_seconds=settings.checkout_timeout,
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
        self._fetch_permits = threading.BoundedSemaphore(settings.concurrent_fetch_permit)

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
        pass had them. Told once, to whoever asks first, also when the refresh that read them failed afterwards."""
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

    # Handing hosts out (HostPool)

    def check_out(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        preference: Preference | None = None,
        patient: bool = True,
    ) -> Host | None:
        """See ``HostPool``. A host is handed out only if its ``last_updated`` is still what ``accept`` saw.

        If the hosts that would have done were out or were taken meanwhile, the search is repeated a few times: on a
        small farm a moment's absence must not look like a full farm.
        """
        raced: list[Host] = []
        for _ in range(_RESCANS + 1):
            listed = self._listed(facility_id, tags, need, strategy, allocs)
            host, raced = self._first(listed, accept) if preference is None else self._best(listed, accept, preference)
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
        return self._hosts.being_booked

    def check_in(self, host: Host, taken: Mapping[str, Reservation]) -> bool:
        with self._lock:
            valid = self._hosts.give_back(host, taken, self._clock())
            if host.id in self._missed:
                self._missed.discard(host.id)
                self._tell((host.id,))
            self._lock.notify_all()
            return valid

    def survey(
        self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None = None
    ) -> Survey:
        with self._lock:
            found = self._hosts.groups.survey(facility_id, tags, need, allocs)
            return replace(found, refused=tuple(self._hosts.refused(facility_id, tags)))

    def settle(self, host_id: str, *, committed: Collection[str], lost: Collection[str]) -> None:
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
        return now - group.fetched_at >= self._settings.group_refresh_interval

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

    def _best(self, listed: Iterator[Host], accept: Accept, preference: Preference) -> tuple[Host | None, list[Host]]:
        """The preferred one of the first accepted hosts, else the next best; otherwise as ``_first``."""
        accepted = list(islice(filter(accept, listed), preference.candidates))
        for host in sorted(accepted, key=preference.score):
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
