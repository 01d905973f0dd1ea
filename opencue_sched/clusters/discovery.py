"""Which clusters there are: one per allocation tag, and chunks of the other tags (seed 001, "Load Algorithm")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import structlog
from sqlalchemy import Connection

from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.states import TagType
from opencue_sched.domain.tags import chunk_tags, normalise_tag
from opencue_sched.settings import Queue, Settings
from opencue_sched.store.clusters import AllocationTag, facility_ids, managed_subscriptions, tags_of_allocations

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
