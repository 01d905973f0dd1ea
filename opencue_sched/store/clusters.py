"""What clusters are made of: host tags, subscriptions, and which tags have work waiting (facts C).

A cluster is a show's right to a tag, so it starts from the tags of hosts and reaches the show through the host's own
allocation. (Upstream joins allocation tags by their text instead, which gives a show subscribed to one ``general``
clusters of another allocation that happens to be called the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from opencue_sched.domain.states import TagType

_FACILITY_IDS = text("SELECT pk_facility FROM facility WHERE str_name = :name ORDER BY pk_facility")

_TAGS_OF_ALLOCATIONS = text(
    """
    SELECT DISTINCT a.pk_facility, h.pk_alloc, upper(t.str_tag_type) AS tag_type, replace(t.str_tag, ' ', '') AS tag
    FROM host_tag t
    JOIN host h ON h.pk_host = t.pk_host
    JOIN alloc a ON a.pk_alloc = h.pk_alloc
    WHERE CAST(:facility_ids AS varchar[]) IS NULL OR a.pk_facility = ANY(CAST(:facility_ids AS varchar[]))
    """
)

_MANAGED_SUBSCRIPTIONS = text(
    """
    SELECT sub.pk_show, sub.pk_alloc
    FROM subscription sub
    JOIN show s ON s.pk_show = sub.pk_show
    WHERE s.b_active AND s.b_scheduler_managed
    """
)

# Exactly the conditions of the pending-jobs query that do not change while frames run, and no others: a condition
# added here and not there would let work wait unseen. Tags are unnested after DISTINCT: many layers, few spellings.
_WAITING_TAGS = text(
    """
    SELECT DISTINCT w.pk_facility, w.pk_show, tag
    FROM (
        SELECT DISTINCT j.pk_facility, j.pk_show, l.str_tags
        FROM job j
        JOIN show s ON s.pk_show = j.pk_show
        JOIN layer_stat ls ON ls.pk_job = j.pk_job AND ls.int_waiting_count > 0
        JOIN layer l ON l.pk_layer = ls.pk_layer
        WHERE j.str_state = 'PENDING' AND j.b_paused = false
          AND s.b_active AND s.b_scheduler_managed
          AND EXISTS (SELECT 1 FROM subscription sub WHERE sub.pk_show = j.pk_show AND sub.int_burst > 0)
          AND (CAST(:facility_ids AS varchar[]) IS NULL OR j.pk_facility = ANY(CAST(:facility_ids AS varchar[])))
    ) w
    CROSS JOIN LATERAL unnest(string_to_array(replace(w.str_tags, ' ', ''), '|')) AS tag
    WHERE tag <> ''
    """
)


@dataclass(frozen=True, slots=True)
class AllocationTag:
    """A tag, without spaces, that at least one host of an allocation carries. ``tag_type`` is a TagType, or unknown."""

    facility_id: str
    alloc_id: str
    tag_type: str
    tag: str


@dataclass(frozen=True, slots=True, order=True)
class WaitingTag:
    """A tag that a layer with waiting frames asks for, in one facility and show."""

    facility_id: str
    show_id: str
    tag: str


def facility_ids(connection: Connection, name: str) -> tuple[str, ...]:
    """The ids of the facilities of exactly this name; empty when there is none."""
    return tuple(connection.execute(_FACILITY_IDS, {"name": name}).scalars())


def tags_of_allocations(connection: Connection, facilities: Sequence[str] | None) -> list[AllocationTag]:
    """Every distinct tag of every allocation's hosts, in ``facilities`` or everywhere."""
    rows = connection.execute(_TAGS_OF_ALLOCATIONS, {"facility_ids": _ids(facilities)})
    return [AllocationTag(row.pk_facility, row.pk_alloc, row.tag_type or TagType.HARDWARE, row.tag) for row in rows]


def managed_subscriptions(connection: Connection) -> list[tuple[str, str]]:
    """(show id, allocation id) of every subscription of an active show that this scheduler manages."""
    return [(row.pk_show, row.pk_alloc) for row in connection.execute(_MANAGED_SUBSCRIPTIONS)]


def waiting_tags(connection: Connection, facilities: Sequence[str] | None) -> frozenset[WaitingTag]:
    """Where work waits: a superset of what ``store.pending`` can return for any cluster."""
    rows = connection.execute(_WAITING_TAGS, {"facility_ids": _ids(facilities)})
    return frozenset(WaitingTag(row.pk_facility, row.pk_show, row.tag) for row in rows)


def _ids(ids: Sequence[str] | None) -> list[str] | None:
    return None if ids is None else list(ids)
