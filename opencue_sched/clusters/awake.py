"""The awake gate: which clusters have work at all, from one scan for the whole farm.

Most clusters of a show are idle at any moment; asking each in turn cost upstream a query per cluster and round. One
scan of the waiting layers' tags answers for all of them. It must never miss a cluster that the pending-jobs query
would find work in, so it looks at fewer conditions than that query, never at more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import Connection

from opencue_sched.domain.cluster import Cluster
from opencue_sched.store.clusters import WaitingTag, waiting_tags


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
    """One statement. ``facilities`` as from ``discovery.scoped_facilities``; None means all."""
    return AwakeSet(waiting_tags(connection, facilities))
