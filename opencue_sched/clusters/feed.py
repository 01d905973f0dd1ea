"""The clusters there are, and which of them have work (distributed scheduler, "ClusterFeed").

Without I/O of its own: it is given a loader and a clock, and keeps the set of clusters and the awake gate's last
answer. Which of them rest, whose turn it is and who is at work is told by their postings, which all processes share.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import structlog

from opencue_sched.clusters.awake import AwakeSet
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.settings import Queue

log = structlog.get_logger(__name__)


class ClusterFeed:
    """The clusters of one process, read anew now and then.

    ``load`` reads the clusters (``discovery.load_clusters``); ``clock`` counts seconds and never goes back. Safe to
    share between threads.
    """

    def __init__(
        self,
        load: Callable[[], frozenset[Cluster]],
        queue: Queue,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._queue = queue
        self._clock = clock
        self._lock = threading.Lock()
        self._clusters: dict[str, Cluster] | None = None
        self._reload_at = 0.0
        self._awake: AwakeSet | None = None

    def reload_if_due(self) -> bool:
        """Read the clusters again when ``queue.cluster_reload_interval`` has passed since the last time; whether they
        were read.

        The set is swapped only when it differs. A failure keeps the old set and is retried after
        ``queue.active_scan_interval``; the first load raises instead, because there is nothing to keep.
        """
        if self._clusters is not None and self._clock() < self._reload_at:
            return False
        return self.reload()

    def reload(self) -> bool:
        """Read the clusters now; False when they cannot be read, and the previous set stays in force."""
        try:
            loaded = {cluster.key: cluster for cluster in self._load()}
        except Exception as error:
            if self._clusters is None:
                raise
            self._reload_at = self._clock() + self._queue.active_scan_interval
            log.error("cluster_reload_failed", error=str(error), kept=len(self._clusters))
            return False
        with self._lock:
            before = self._clusters or {}
            self._reload_at = self._clock() + self._queue.cluster_reload_interval
            if self._clusters is None or loaded.keys() != before.keys():
                added, removed = len(loaded.keys() - before.keys()), len(before.keys() - loaded.keys())
                self._clusters = loaded
                log.info("clusters_swapped", total=len(loaded), added=added, removed=removed)
            return True

    def observe(self, awake: AwakeSet) -> None:
        """Take the awake gate's answer. Until the first, every cluster counts as awake; when a scan fails, the last
        answer stays in force."""
        with self._lock:
            self._awake = awake

    def ready(self) -> list[Cluster]:
        """The clusters with work, in the order of their keys."""
        with self._lock:
            clusters = (self._clusters or {}).values()
            with_work = clusters if self._awake is None else self._awake.clusters(clusters)
            return sorted(with_work, key=lambda cluster: cluster.key)

    def active_tags(self) -> int:
        """The number of (facility, show, tag) with work, as the awake gate last told."""
        with self._lock:
            return 0 if self._awake is None else len(self._awake)

    def clusters(self) -> list[Cluster]:
        """All clusters there are, with work or without."""
        return list((self._clusters or {}).values())

    def find(self, key: str) -> Cluster | None:
        """The cluster of this key, if it still exists."""
        return (self._clusters or {}).get(key)

    def by_kind(self) -> dict[ClusterKind, int]:
        """How many clusters there are of each kind, with work or without."""
        return dict(Counter(cluster.kind for cluster in self.clusters()))
