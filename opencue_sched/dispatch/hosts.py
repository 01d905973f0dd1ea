"""The host cache of a process, kept current: groups from PostgreSQL, changes from the change log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine

from opencue_sched.dispatch.cooldown import HostNews
from opencue_sched.dispatch.gather import BadRowLog
from opencue_sched.domain.cluster import Cluster
from opencue_sched.domain.farm import BadRow
from opencue_sched.placement.host_cache import CHECKOUT_SECONDS, HostCache, HostReading
from opencue_sched.placement.host_groups import HostChanges
from opencue_sched.settings import HostCacheSettings
from opencue_sched.store.hosts import fetch_groups, fetch_hosts_by_id

log = structlog.get_logger(__name__)

_CLEAN_UP_SECONDS = 300.0
"""Between evictions of idle groups, which live for hours (``host_cache.group_idle_timeout``)."""


class HostFeed:
    """Cache and change log together. Thread-safe; the log is read by one thread at a time."""

    def __init__(
        self,
        engine: Engine,
        changes: HostChanges,
        settings: HostCacheSettings,
        *,
        instance: str,
        checkout_seconds: float = CHECKOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._changes = changes
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._cursor: str | None = None
        self._noted: set[str] = set()
        self._evict_at = clock() + _CLEAN_UP_SECONDS
        self.bad_rows = BadRowLog()
        self.cache = HostCache(settings, self._fetch, instance=instance, checkout_seconds=checkout_seconds, clock=clock)

    def refresh(self, cluster: Cluster) -> HostNews:
        """Make the cluster's groups current. Whatever was read for them is news, also to clusters of other tags."""
        self.cache.refresh(cluster.facility_id, cluster.tags)
        if self._clock() >= self._evict_at:
            self._evict_at = self._clock() + _CLEAN_UP_SECONDS
            self.cache.evict_idle_groups()
        return HostNews(self.cache.take_news())

    def note(self, host_ids: Collection[str]) -> None:
        """These hosts changed, and every process was notified: read them again at the next refresh."""
        with self._lock:
            self._noted.update(host_ids)

    def changed(self, host_ids: Collection[str]) -> None:
        """Tell every process that these hosts changed. A lost message only delays them to the next full read."""
        if not host_ids:
            return
        try:
            self._changes.publish(sorted(host_ids))
        except RedisError as error:
            log.warning("host_changes_not_published", hosts=len(host_ids), error=str(error))

    def _fetch(self, facility_id: str, tags: Sequence[str]) -> Mapping[str, Sequence[HostReading]]:
        with self._engine.connect() as connection:
            return fetch_groups(connection, facility_id, tags, self._settings.host_staleness_threshold, self._bad)

    def _bad(self, row: BadRow) -> None:
        self.bad_rows.report([row])

    def follow(self) -> HostNews:
        """Read again what changed since this process looked last, in any cluster; each change is returned once."""
        with self._lock:
            try:
                self._cursor, ids = self._changes.since(self._cursor)
            except RedisError as error:
                log.warning("host_changes_not_read", error=str(error))
                return HostNews()
            if ids is None:
                self.cache.expire()
            self._noted.update(ids or ())
            wanted = self._noted | self.cache.invalidated_ids()
            if not wanted:
                return HostNews(everything=ids is None)
            with self.cache.reading() as read_at, self._engine.connect() as connection:
                readings = fetch_hosts_by_id(
                    connection, sorted(wanted), self._settings.host_staleness_threshold, self._bad
                )
            found = {reading.host.id for reading in readings}
            self.cache.apply(readings, wanted - found, read_at=read_at)
            self._noted.clear()
            return HostNews(tuple(reading.host for reading in readings), everything=ids is None)
