"""Finds the clusters of the farm, one per allocation tag and chunks of the other tags (distributed scheduler, "Load
Algorithm"), and how the hosts are divided among the instances of the fleet."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.postgres import reading
from opencue_sched.domain.clusters import Cluster, ClusterKind, normalise_tag
from opencue_sched.domain.shards import Division, divide, hosts_divided
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Queue, Settings
from opencue_sched.store.hosts import count_hosts
from opencue_sched.store.pending import facility_ids, fetch_shares, tags_of_allocations

log = structlog.get_logger(__name__)


def load_clusters(connection: Connection, settings: Settings) -> frozenset[Cluster]:
    """Every cluster of the active, managed shows, in the facility of the settings or in all of them.

    Two statements (three with a facility), whatever the size of the farm. A tag type nobody defined is treated as a
    hardware tag rather than lost. Raises InvalidInput when the facility of the settings does not exist.
    """
    facilities = scoped_facilities(connection, settings)
    return build_clusters(
        tags_of_allocations(connection, facilities),
        [(share.show_id, share.alloc_id) for share in fetch_shares(connection)],
        ignore_tags=settings.scheduler.ignore_tags,
        queue=settings.queue,
    )


def scoped_facilities(connection: Connection, settings: Settings) -> list[str] | None:
    """The facility ids this fleet works on; None means all. The name must match exactly, case included."""
    name = settings.scheduler.facility
    if name is None:
        return None
    found = facility_ids(connection, name)
    if not found:
        raise InvalidInput(f"scheduler.facility: there is no facility named {name!r}")
    return found


def build_clusters(
    tags: Iterable[Row[Any]],
    subscriptions: Iterable[tuple[str, str]],
    *,
    ignore_tags: Iterable[str],
    queue: Queue,
) -> frozenset[Cluster]:
    """The clusters of (show id, allocation id) ``subscriptions`` over the ``tags`` of the allocations' hosts, as
    tags_of_allocations has them. Pure."""
    ignored = {normalise_tag(tag) for tag in ignore_tags}
    tags_by_alloc: dict[str, list[Row[Any]]] = defaultdict(list)
    for tag in tags:
        if tag.tag and tag.tag not in ignored:
            tags_by_alloc[tag.alloc_id].append(tag)
    by_show: dict[tuple[str, str, ClusterKind], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for show_id, alloc_id in subscriptions:
        for tag in tags_by_alloc.get(alloc_id, ()):
            kind = ClusterKind.__members__.get(tag.tag_type, ClusterKind.HARDWARE)
            by_show[tag.facility_id, show_id, kind][tag.tag].add(alloc_id)
    return frozenset(
        cluster
        for (facility_id, show_id, kind), allocs in by_show.items()
        for cluster in _clusters_of(facility_id, show_id, kind, allocs, queue)
    )


def _clusters_of(
    facility_id: str, show_id: str, kind: ClusterKind, allocs_by_tag: dict[str, set[str]], queue: Queue
) -> Iterator[Cluster]:
    """The clusters of one show and kind of tag in a facility: one for each tag, or for each chunk of tags."""
    if kind is ClusterKind.ALLOC:
        for tag, allocs in allocs_by_tag.items():
            # Two allocations of a facility may carry one tag; the cluster is theirs together then.
            alloc_id = next(iter(allocs)) if len(allocs) == 1 else None
            yield Cluster(facility_id, show_id, kind, (tag,), alloc_id)
        return
    size = queue.hostname_tags_chunk_size if kind is ClusterKind.HOSTNAME else queue.manual_tags_chunk_size
    ordered = sorted(allocs_by_tag)  # so that the same tags always give the same chunks
    for start in range(0, len(ordered), size):
        yield Cluster(facility_id, show_id, kind, tuple(ordered[start : start + size]))


_HOSTS_COUNTED_SECONDS = 10.0
"""The time between two counts of the hosts, on which nothing but the number of shards depends: each count is a
statement over all hosts, and farms grow in days."""


class FarmDivision:
    """How the hosts of the fleet are divided among its live instances now; call it. Thread-safe.

    ``instances`` are those that take work. As long as a store cannot be read, the last answer stays in force.
    """

    def __init__(self, engine: Engine, settings: Settings, instances: Callable[[], Collection[str]]) -> None:
        self._engine = engine
        self._settings = settings
        self._instances = instances
        self._counted_at = -math.inf
        self._counted_for = 0
        """The number of instances for which hosts were counted last, and no further than these divide them."""
        self._hosts = 0
        self._last: Division = ()
        self._lock = threading.Lock()
        """Held for a whole call, which any thread may make: one counts for all."""

    def __call__(self) -> Division:
        with self._lock:
            try:
                instances = self._instances()
                # One more than the count was for: all have to come to the same division at once.
                cut_short = self._hosts >= hosts_divided(self._counted_for) and len(instances) > self._counted_for
                old = time.monotonic() - self._counted_at >= _HOSTS_COUNTED_SECONDS
                if len(instances) > 1 and (cut_short or old):
                    with reading(self._engine) as connection:
                        facilities = scoped_facilities(connection, self._settings)
                        # More would divide them no further.
                        self._hosts = count_hosts(connection, facilities, most=hosts_divided(len(instances)))
                    self._counted_at, self._counted_for = time.monotonic(), len(instances)
                self._last = divide(instances, self._hosts)
            except (RedisError, SQLAlchemyError) as error:
                log.warning("division_not_read", error=str(error))
            return self._last
