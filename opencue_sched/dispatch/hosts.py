"""The hosts of a process, kept current: groups from PostgreSQL, changes from the change log in Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import cast

import redis
import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine

from opencue_sched.coordination import names
from opencue_sched.dispatch.cooldown import HostNews
from opencue_sched.dispatch.gather import BadRowLog
from opencue_sched.domain.cluster import Cluster
from opencue_sched.domain.farm import Host
from opencue_sched.placement.host_cache import HOLD_SECONDS, HostCache
from opencue_sched.settings import HostCacheSettings
from opencue_sched.store.hosts import fetch_groups, fetch_hosts_by_id

log = structlog.get_logger(__name__)

_FIELD = "hosts"
_START = "0-0"
_IDS_PER_ENTRY = 250
_MAX_ENTRIES_KEPT = 10_000
_MAX_ENTRIES_READ = 1_000
_CLEAN_UP_SECONDS = 300.0
"""Between evictions of idle groups, which live for hours (``host_cache.group_idle_timeout``)."""

_Entry = tuple[str, dict[str, str]]


class HostChanges:
    """Reads and writes ``{namespace}:hosts:changed``, a Redis stream with the ids of hosts whose rows changed.

    Who commits a booking or a release appends the hosts it touched; every worker reads what is new at its next gather
    and reads just those hosts again. So every cache sees freed cores at once, without waiting for a host report or for
    a group to expire. The log is a hint, never a truth: when it cannot answer, the caller reads every host. Holds no
    state: readers keep their own cursor.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._key = names.host_changes(namespace)

    def publish(self, host_ids: Collection[str]) -> None:
        """Append the ids, in one round trip; 250 to an entry. Call it after the commit that changed the hosts."""
        ids = iter(dict.fromkeys(host_ids))
        pipeline = self._client.pipeline(transaction=False)
        while batch := list(islice(ids, _IDS_PER_ENTRY)):
            pipeline.xadd(self._key, {_FIELD: " ".join(batch)}, maxlen=_MAX_ENTRIES_KEPT, approximate=True)
        if len(pipeline):
            pipeline.execute()

    def since(self, cursor: str | None) -> tuple[str, frozenset[str] | None]:
        """What was appended after ``cursor``: the new cursor, and the ids, or None for "read every host again".

        None when there is no cursor yet, when the entry it names is gone (trimmed, or a flushed or failed-over Redis),
        or when more than 1,000 entries are new. Read the hosts *after* this call: then nothing can fall between. One
        round trip.
        """
        pipeline = self._client.pipeline(transaction=True)
        at = cursor or _START
        pipeline.xrange(self._key, at, at)
        pipeline.xrange(self._key, f"({at}", "+", count=_MAX_ENTRIES_READ + 1)
        pipeline.xrevrange(self._key, count=1)
        answers = cast("list[list[_Entry]]", pipeline.execute())
        named, new, last = answers
        if not last:
            return _START, frozenset() if cursor == _START else None
        now = last[0][0]
        if cursor is None or not named or len(new) > _MAX_ENTRIES_READ:
            return now, None
        return now, frozenset(host_id for _, fields in new for host_id in fields.get(_FIELD, "").split())


class HostFeed:
    """Cache and change log together. Thread-safe; the log is read by one thread at a time."""

    def __init__(
        self,
        engine: Engine,
        changes: HostChanges,
        settings: HostCacheSettings,
        *,
        instance: str,
        hold_seconds: float = HOLD_SECONDS,
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
        self.cache = HostCache(settings, self._fetch, instance=instance, hold_seconds=hold_seconds, clock=clock)

    def refresh(self, cluster: Cluster) -> HostNews:
        """Make the cluster's groups current. Whatever was read for them is news, also to clusters of other tags."""
        hosts = self.cache.refresh(cluster.facility_id, cluster.tags)
        if self._clock() >= self._evict_at:
            self._evict_at = self._clock() + _CLEAN_UP_SECONDS
            self.cache.evict_idle_groups()
        return HostNews(tuple(hosts))

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

    def _fetch(self, facility_id: str, tags: Sequence[str]) -> list[Host]:
        with self._engine.connect() as connection:
            hosts, bad = fetch_groups(connection, facility_id, tags, self._settings.host_staleness_threshold)
        self.bad_rows.report(bad)
        return hosts

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
            read_at = self.cache.instant()
            with self._engine.connect() as connection:
                hosts, bad = fetch_hosts_by_id(connection, sorted(wanted), self._settings.host_staleness_threshold)
            self.bad_rows.report(bad)
            self.cache.apply(hosts, wanted - {host.id for host in hosts}, read_at=read_at)
            self._noted.clear()
            return HostNews(tuple(hosts), everything=ids is None)
