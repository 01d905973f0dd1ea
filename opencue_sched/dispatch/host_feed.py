"""Keeps what a process knows of hosts current: its host cache together with the change log of the fleet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine

from opencue_sched.background import PeriodicThread
from opencue_sched.clients.postgres import ask
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.hosts import Host
from opencue_sched.domain.shards import ALL_BUCKETS, Division, buckets, shards
from opencue_sched.placement.host_cache import FIRST_READ_HOSTS, TAKEN_SECONDS, HostCache
from opencue_sched.settings import HostCacheSettings
from opencue_sched.store.hosts import fetch_buckets, fetch_groups, fetch_hosts_by_id

log = structlog.get_logger(__name__)

_CLEAN_UP_SECONDS = 300.0
"""The time between evictions of idle groups, which live for hours (``host_cache.group_idle_timeout``)."""


class HostFeed:
    """The host cache of a process and the change log together. Thread-safe; the log is read by one thread at a time.

    Only the hosts of shards that were asked for are cached and read. ``division`` says how the hosts are divided now.
    While ``rereading`` runs, cached hosts are read again in the background: hosts of the process's own shard, and all
    where hosts are not divided, in rounds of ten seconds or more; hosts of another instance's shard, which few
    processes have and not for long, once a minute. A pass waits for no more than the first read of its hosts. ``found``
    is called with the ids of hosts that the background read found and for which work may wait.
    """

    def __init__(
        self,
        engine: Engine,
        changes: HostChanges,
        settings: HostCacheSettings,
        *,
        instance: str,
        taken_seconds: float = TAKEN_SECONDS,
        division: Callable[[], Division] = tuple,
        found: Callable[[Collection[str]], object] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._changes = changes
        self._instance = instance
        self._settings = settings
        self.division = division
        self._divided: Division = ()
        """The division of the last refresh. Without a lock: two passes that find a new one tell the cache the same."""
        self._found = found
        self._clock = clock
        self._lock = threading.Lock()
        """Held while the log is read; guards ``_cursor`` and ``_noted``."""
        self._cursor: str | None = None
        """The last entry of the log that was read; None before the first."""
        self._noted: set[str] = set()
        """The ids of hosts that are to be read again."""
        self._evict_at = clock() + _CLEAN_UP_SECONDS
        """When the next clean-up is due. Touched by the thread of ``rereading`` alone."""
        self.rereading = PeriodicThread(
            "host-rereads", self.reread, failed="hosts_not_read_again", retry_seconds=1.0, longest_retry_seconds=10.0
        )
        self.cache = HostCache(settings, self._fetch, instance=instance, taken_seconds=taken_seconds, clock=clock)

    def refresh(self, cluster: Cluster) -> None:
        """Read the hosts of the cluster that are not cached yet."""
        division = self.division()
        if division != self._divided:
            self._divided = division
            self.cache.keep_shards(shards(division))
        of_shard = buckets(cluster.shard, division)
        hosts = self.cache.refresh(cluster.facility_id, cluster.tags, cluster.shard, of_shard)
        if hosts:
            self.rereading.wake()

    def reread(self) -> float:
        """Read again the hosts that were read longest ago, if it is time to. Returns the seconds until the next
        call."""
        reread = self.cache.reread(self._own_buckets())
        if reread.appeared:
            self._found([host.id for host in reread.appeared])
        if self._clock() >= self._evict_at:
            self._evict_at = self._clock() + _CLEAN_UP_SECONDS
            self.cache.evict_idle_groups()
        return reread.pause

    def _own_buckets(self) -> frozenset[int]:
        """The buckets that this process reads again in each round: those of its shard. Where hosts are not divided,
        they are all: messages then go to one process, and no other caches these hosts."""
        division = self.division()
        if not division:
            return ALL_BUCKETS
        return buckets(self._instance, division) if self._instance in division else frozenset()

    def note(self, host_ids: Collection[str]) -> None:
        """Note that hosts changed, as every process was notified: the next refresh reads them again."""
        reached = self.cache.reaches(host_ids)
        with self._lock:
            self._noted |= reached

    def missed(self) -> None:
        """Note that changes were not heard for a while: passes read each host again before they use it."""
        self.cache.forget_reads()

    def changed(self, host_ids: Collection[str]) -> None:
        """Tell every process that these hosts changed. Where the message is lost, others see the change with their next
        read of all hosts."""
        try:
            self._changes.publish(host_ids, by=self._instance)
        except RedisError as error:
            log.warning("host_changes_not_published", hosts=len(host_ids), error=str(error))

    def _fetch(self, facility_id: str, tags: Sequence[str] | None, of_buckets: Collection[int]) -> list[Host]:
        """Read a facility's hosts in these buckets that reported within ``host_staleness_threshold`` (seconds):
        FIRST_READ_HOSTS at most of those with one of the tags, or all (``tags`` None). Errors of PostgreSQL go to the
        caller."""
        staleness = self._settings.host_staleness_threshold
        if tags is None:
            return ask(self._engine, fetch_buckets, [facility_id], staleness, of_buckets)
        return ask(self._engine, fetch_groups, facility_id, tags, staleness, of_buckets, most=FIRST_READ_HOSTS)

    def follow(self) -> None:
        """Read again what changed since this process looked last, in any of its shards."""
        with self._lock:
            try:
                self._cursor, by_writer = self._changes.by_writer_since(self._cursor, but_of=self._instance)
            except RedisError as error:
                log.warning("host_changes_not_read", error=str(error))
                return
            if by_writer is None:
                self.cache.expire()
                self.rereading.wake()
                by_writer = {}
            self._noted |= self.cache.reaches(frozenset[str]().union(*by_writer.values()))
            wanted = self._noted | self.cache.invalidated_ids()
            if wanted:
                # Entries of other instances are about bookings, of layers that this process does not know to run there.
                of_others = frozenset[str]().union(*(ids for writer, ids in by_writer.items() if writer))
                but_running = self.cache.running_known(wanted - of_others)
                read_at, staleness = self.cache.instant(), self._settings.host_staleness_threshold
                hosts = ask(
                    self._engine,
                    fetch_hosts_by_id,
                    sorted(wanted),
                    staleness,
                    but_running=but_running,
                    planned_once=True,
                )
                gone = wanted - {host.id for host in hosts}
                self.cache.apply(hosts, gone, read_at=read_at, but_running=but_running)
                self._noted.clear()
