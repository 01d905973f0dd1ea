"""The clusters there are, and which of them have work (distributed scheduler, "ClusterFeed").

Which of them rest and who works on them is told by their postings, which all processes share.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import structlog
from sqlalchemy import Connection

from opencue_sched.domain.cluster import Cluster, ClusterKind, chunk_tags, normalise_tag
from opencue_sched.domain.farm import TagType
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Queue, Settings
from opencue_sched.store.pending import (
    AllocationTag,
    WaitingTag,
    facility_ids,
    managed_subscriptions,
    tags_of_allocations,
    waiting_tags,
)

# Which clusters there are: one per allocation tag, and chunks of the other tags (seed 001, "Load Algorithm").

log = structlog.get_logger(__name__)

_KINDS = {
    TagType.ALLOC.value: ClusterKind.ALLOC,
    TagType.MANUAL.value: ClusterKind.MANUAL,
    TagType.HOSTNAME.value: ClusterKind.HOSTNAME,
    TagType.HARDWARE.value: ClusterKind.HARDWARE,
}


def load_clusters(connection: Connection, settings: Settings) -> frozenset[Cluster]:
    """Every cluster of the active, managed shows, in the facility of the settings or in all of them.

    Two statements (three with a facility), whatever the size of the farm. A tag type nobody defined is treated as a
    hardware tag rather than lost. Raises InvalidInput when the facility of the settings does not exist.
    """
    facilities = scoped_facilities(connection, settings)
    return build_clusters(
        tags_of_allocations(connection, facilities),
        managed_subscriptions(connection),
        ignore_tags=settings.scheduler.ignore_tags,
        queue=settings.queue,
    )


def scoped_facilities(connection: Connection, settings: Settings) -> tuple[str, ...] | None:
    """The facility ids this fleet works on; None means all. The name must match exactly, case included."""
    name = settings.scheduler.facility
    if name is None:
        return None
    found = facility_ids(connection, name)
    if not found:
        raise InvalidInput(f"scheduler.facility: there is no facility named {name!r}")
    return found


def build_clusters(
    tags: Iterable[AllocationTag],
    subscriptions: Iterable[tuple[str, str]],
    *,
    ignore_tags: Iterable[str],
    queue: Queue,
) -> frozenset[Cluster]:
    """The clusters of (show id, allocation id) ``subscriptions`` over the ``tags`` of the allocations' hosts. Pure."""
    ignored = {normalise_tag(tag) for tag in ignore_tags}
    tags_by_alloc: dict[str, list[AllocationTag]] = defaultdict(list)
    for tag in tags:
        if tag.tag and tag.tag not in ignored:
            tags_by_alloc[tag.alloc_id].append(tag)
    by_show: dict[tuple[str, str, ClusterKind], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for show_id, alloc_id in subscriptions:
        for tag in tags_by_alloc.get(alloc_id, ()):
            kind = _KINDS.get(tag.tag_type, ClusterKind.HARDWARE)
            by_show[tag.facility_id, show_id, kind][tag.tag].add(alloc_id)
    return frozenset(
        cluster
        for (facility_id, show_id, kind), allocs in by_show.items()
        for cluster in _clusters_of(facility_id, show_id, kind, allocs, queue)
    )


def _clusters_of(
    facility_id: str, show_id: str, kind: ClusterKind, allocs_by_tag: dict[str, set[str]], queue: Queue
) -> Iterator[Cluster]:
    if kind is ClusterKind.ALLOC:
        for tag, allocs in allocs_by_tag.items():
            # Two allocations of a facility may carry one tag; the cluster is theirs together then.
            alloc_id = next(iter(allocs)) if len(allocs) == 1 else None
            yield Cluster(facility_id, show_id, kind, (tag,), alloc_id)
        return
    size = queue.hostname_tags_chunk_size if kind is ClusterKind.HOSTNAME else queue.manual_tags_chunk_size
    for chunk in chunk_tags(allocs_by_tag, size):
        yield Cluster(facility_id, show_id, kind, chunk)


# The awake gate: which clusters have work at all, from one scan for the whole farm.
#
# Most clusters of a show are idle at any moment; asking each in turn cost upstream a query per cluster and round. One
# scan of the waiting layers' tags answers for all of them. It must never miss a cluster in which the pending-jobs query
# would find work, so it has fewer conditions than that query, never more.


class AwakeSet:
    """The tags with waiting work, by facility and show."""

    def __init__(self, waiting: Iterable[WaitingTag]) -> None:
        self._tags: dict[tuple[str, str], set[str]] = defaultdict(set)
        for found in waiting:
            self._tags[found.facility_id, found.show_id].add(found.tag)

    def __contains__(self, cluster: Cluster) -> bool:
        tags = self._tags.get((cluster.facility_id, cluster.show_id))
        return tags is not None and not tags.isdisjoint(cluster.tags)

    def __len__(self) -> int:
        """The number of (facility, show, tag) with waiting work: the metric ``scheduler_active_tags``."""
        return sum(len(tags) for tags in self._tags.values())

    def clusters(self, clusters: Iterable[Cluster]) -> frozenset[Cluster]:
        """Those of ``clusters`` that have waiting work."""
        return frozenset(cluster for cluster in clusters if cluster in self)


def scan_awake(connection: Connection, facilities: tuple[str, ...] | None) -> AwakeSet:
    """One statement. ``facilities`` as from ``scoped_facilities``; None means all."""
    return AwakeSet(waiting_tags(connection, facilities))


class ClusterFeed:
    """The clusters of one process, read anew now and then, and the awake gate's last answer. Thread-safe.

    ``load`` reads the clusters (``load_clusters``); ``clock`` counts seconds and never goes back.
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
