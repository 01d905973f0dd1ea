"""The cluster feed: whose turn it is (distributed scheduler, "ClusterFeed").

A state machine without I/O of its own: it is given a loader, a clock and a back-off store. It keeps the set of
clusters, the awake gate's last answer and the position of the round robin.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from opencue_sched.clusters.awake import AwakeSet
from opencue_sched.clusters.backoff import BackOff, MemoryBackOff, SleepReason, sleep_seconds
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.settings import Queue

log = structlog.get_logger(__name__)

ALL_ASLEEP_NAP_SECONDS = 5.0
SOME_ASLEEP_NAP_SECONDS = 0.1
NONE_ASLEEP_NAP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Reload:
    """What a look at the clusters' source changed. ``read``: there was one, with success; ``failed``: without, and the
    previous set stays in force."""

    read: bool = False
    added: int = 0
    removed: int = 0
    failed: bool = False

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed)


@dataclass(frozen=True, slots=True)
class FeedCounts:
    """For the metrics ``scheduler_clusters_total`` (by kind), ``_active`` and ``_sleeping``."""

    total: dict[ClusterKind, int]
    active: int
    sleeping: int


class ClusterFeed:
    """Clusters in fair turn: each awake, rested cluster is served once before any is served twice.

    ``load`` reads the clusters (``discovery.load_clusters``); ``clock`` counts seconds and never goes back. Safe to
    share between threads.
    """

    def __init__(
        self,
        load: Callable[[], frozenset[Cluster]],
        queue: Queue,
        *,
        back_off: BackOff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._queue = queue
        self._back_off = back_off if back_off is not None else MemoryBackOff(clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._clusters: dict[str, Cluster] | None = None
        self._order: list[str] = []
        self._last_served = ""
        self._reload_at = 0.0
        self._awake: AwakeSet | None = None
        self._awake_keys: frozenset[str] | None = None

    def reload_if_due(self) -> Reload:
        """Read the clusters again when ``queue.cluster_reload_interval`` has passed since the last time.

        The set is swapped only when it differs, and clusters in both sets keep their back-off and their turn. A
        failure keeps the old set and is retried after ``queue.active_scan_interval``; the first load raises instead,
        because there is nothing to keep.
        """
        if self._clusters is not None and self._clock() < self._reload_at:
            return Reload()
        return self.reload()

    def reload(self) -> Reload:
        """Read the clusters now."""
        try:
            loaded = {cluster.key: cluster for cluster in self._load()}
        except Exception as error:
            if self._clusters is None:
                raise
            self._reload_at = self._clock() + self._queue.active_scan_interval
            log.error("cluster_reload_failed", error=str(error), kept=len(self._clusters))
            return Reload(failed=True)
        with self._lock:
            before = self._clusters or {}
            self._reload_at = self._clock() + self._queue.cluster_reload_interval
            reload = Reload(
                read=True, added=len(loaded.keys() - before.keys()), removed=len(before.keys() - loaded.keys())
            )
            if reload.changed or self._clusters is None:
                self._clusters = loaded
                self._order = sorted(loaded)
                self._back_off.retain(loaded)
                self._gate(self._awake)
                log.info("clusters_swapped", total=len(loaded), added=reload.added, removed=reload.removed)
            return reload

    def observe(self, awake: AwakeSet | None) -> None:
        """Take the awake gate's answer; None (no scan yet) lets every cluster through.

        A cluster that had no work and has some now is woken: its sleep was for being empty. When a scan fails, do not
        call this, and the last answer stays in force.
        """
        with self._lock:
            before = self._awake_keys
            self._gate(awake)
            if before is not None and self._awake_keys is not None:
                self._back_off.wake(self._awake_keys - before)

    def ready(self, limit: int | None = None) -> list[Cluster]:
        """Up to ``limit`` (None: all) clusters with work and not asleep, in turn; the next call goes on after them."""
        with self._lock:
            clusters = self._clusters or {}
            start = bisect_right(self._order, self._last_served)
            turn = [key for key in self._order[start:] + self._order[:start] if self._is_awake(key)]
            asleep = self._back_off.remaining(turn)
            served = [key for key in turn if key not in asleep][:limit]
            if served:
                self._last_served = served[-1]
            return [clusters[key] for key in served]

    def next(self) -> Cluster | None:
        """The cluster whose turn it is; None when all sleep."""
        return next(iter(self.ready(1)), None)

    def clusters(self) -> list[Cluster]:
        """All clusters there are, with work or without."""
        return list((self._clusters or {}).values())

    def find(self, key: str) -> Cluster | None:
        """The cluster of this key, if it still exists."""
        return (self._clusters or {}).get(key)

    def sleep(self, cluster: Cluster, reason: SleepReason) -> float:
        """Leave the cluster alone after a pass that ended for this reason; the seconds it will sleep."""
        seconds = sleep_seconds(reason, self._queue)
        self._back_off.sleep(cluster.key, seconds)
        return seconds

    def wake(self, keys: Iterable[str]) -> None:
        """End the sleep of these clusters (by key)."""
        self._back_off.wake(keys)

    def wake_show(self, show_id: str) -> None:
        """End the sleep of every cluster of a show: a job of it was launched, unpaused or got more room."""
        self._back_off.wake([key for key, cluster in (self._clusters or {}).items() if cluster.show_id == show_id])

    def nap(self) -> float:
        """Seconds a loop may wait before it asks again: long when there is nothing to serve, short otherwise."""
        with self._lock:
            awake = [key for key in self._order if self._is_awake(key)]
            asleep = self._back_off.remaining(awake)
            if len(asleep) == len(awake):
                return min([ALL_ASLEEP_NAP_SECONDS, *asleep.values()])
            return SOME_ASLEEP_NAP_SECONDS if asleep else NONE_ASLEEP_NAP_SECONDS

    def counts(self) -> FeedCounts:
        """How many clusters there are, have work, and sleep although they have."""
        with self._lock:
            clusters = self._clusters or {}
            awake = [key for key in self._order if self._is_awake(key)]
            return FeedCounts(
                total=dict(Counter(cluster.kind for cluster in clusters.values())),
                active=len(awake),
                sleeping=len(self._back_off.remaining(awake)),
            )

    def _gate(self, awake: AwakeSet | None) -> None:
        self._awake = awake
        if awake is None:
            self._awake_keys = None
        else:
            self._awake_keys = frozenset(cluster.key for cluster in awake.clusters((self._clusters or {}).values()))

    def _is_awake(self, key: str) -> bool:
        return self._awake_keys is None or key in self._awake_keys
