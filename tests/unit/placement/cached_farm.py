"""Hosts in memory in place of PostgreSQL's, and a host cache that reads them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from opencue_sched.domain.hosts import Host
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of, shard_of
from opencue_sched.placement.host_cache import FIRST_READ_HOSTS, HostCache, HostGroups, HostOrder
from opencue_sched.settings import HostCacheSettings
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_host, make_need


class Farm:
    """PostgreSQL as the cache sees it: its hosts, and every query for them."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = {host.id: host for host in hosts}
        self.queries: list[list[str]] = []
        self.read_ids: list[list[str]] = []
        self.failure: Exception | None = None

    def fetch(self, facility_id: str, tags: Sequence[str] | None, buckets: Collection[int]) -> Sequence[Host]:
        self.queries.append(list(tags or ()))
        if self.failure is not None:
            raise self.failure
        read = [host for host in self.hosts.values() if host.facility_id == facility_id]
        read = [host for host in read if bucket_of(host.id) in buckets]
        if tags is not None:
            read = [host for host in read if not host.tags.isdisjoint(tags)][:FIRST_READ_HOSTS]
        self.read_ids.append([host.id for host in read])
        return read

    def book(self, host_id: str, cores: int) -> None:
        host = self.hosts[host_id]
        self.hosts[host_id] = replace(host, idle_centicores=host.idle_centicores - cores * 100)

    def read(self, *host_ids: str) -> list[Host]:
        return [self.hosts[host_id] for host_id in host_ids if host_id in self.hosts]


def make_cache(farm: Farm, clock: Clock, **settings: Any) -> HostCache:
    """A cache of an instance called ``one`` that has read the farm's hosts with the tag ``general``."""
    cache = HostCache(HostCacheSettings(**settings), farm.fetch, instance="one", clock=clock)
    cache.refresh("fac", ["general"])
    return cache


def read_again(cache: HostCache, own: frozenset[int] = ALL_BUCKETS) -> list[Host]:
    """All that is to be read again now; the hosts that changed."""
    changed: list[Host] = []
    while not (reread := cache.reread(own)).pause:
        changed += reread.changed
    return changed


def find(cache: HostCache, cores: int = 1, **options: Any) -> Host | None:
    """A search of a plan among the hosts with the tag ``general``."""
    accept = options.pop("accept", lambda _: True)
    groups = HostGroups("fac", ["general"], options.pop("shard", ""))
    return cache.find(groups, make_need(cores), HostOrder(score=options.pop("score", None)), accept, **options)


def must_find(cache: HostCache, cores: int = 1, **options: Any) -> Host:
    host = find(cache, cores, **options)
    assert host is not None
    return host


def idle_cores(cache: HostCache, host_id: str = "h1") -> int | None:
    """What the cache would show of a host."""
    seen: dict[str, int] = {}

    def look(host: Host) -> bool:
        seen[host.id] = host.idle_cores
        return False

    find(cache, accept=look)
    return seen.get(host_id)


DIVISION = ("one", "two")
HOSTS = [make_host(f"h{number}") for number in range(60)]


def ids_of(shard: str, division: tuple[str, ...] = DIVISION) -> set[str]:
    """The ids of those of HOSTS that are a shard's."""
    return {host.id for host in HOSTS if shard_of(host.id, division) == shard}
