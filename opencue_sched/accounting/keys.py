"""Names of the ``acct:*`` keys: the only place in Python that spells them (in Lua: lua/includes/ledger.lua).

The six namespaces and their field names are the contract of the accounting reference ("Redis schema"); the ledger,
the limits, the epoch and the tombstones are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from opencue_sched.domain.farm import Vertices

SEQ = "acct:seq"
LEDGER = "acct:ledger"
EPOCH = "acct:epoch"
AUDIT = "acct:audit"
AUDIT_LOG = "acct:audit:log"
CORRECTED = "acct:corrected"
BOOTSTRAP_LEASE = "acct:bootstrap"
FILLERS_WAITED = "acct:waited"
RECOMPUTED_AT = "acct:recomputed"
COUNTED = "acct:counted"
SIGHTINGS_PREFIX = "acct:seen:"
TOMBSTONE_PREFIX = "acct:tomb:"
LIMIT_PREFIX = "acct:limit:"
EVERYTHING = "acct:*"

TOMBSTONE_SECONDS = 120
"""Of Redis TIME, for each of the keys with TOMBSTONE_PREFIX (lua/includes/ledger.lua)."""

LEDGER_KEYS = (SEQ, LEDGER, EPOCH, AUDIT)


class VertexKind(StrEnum):
    """What a counter counts for. The value is the second part of the key."""

    SUBSCRIPTION = "sub"
    FOLDER = "folder"
    JOB = "job"
    LAYER = "layer"
    POINT = "point"
    LIMIT = "limit"


def subscription(show_id: str, alloc_id: str) -> str:
    return f"acct:sub:{show_id}:{alloc_id}"


def folder(folder_id: str) -> str:
    return f"acct:folder:{folder_id}"


def job(job_id: str) -> str:
    return f"acct:job:{job_id}"


def layer(layer_id: str) -> str:
    return f"acct:layer:{layer_id}"


def point(dept_id: str, show_id: str) -> str:
    return f"acct:point:{dept_id}:{show_id}"


def limit(limit_id: str) -> str:
    return f"acct:limit:{limit_id}"


def pattern(kind: VertexKind) -> str:
    """A SCAN pattern for all vertices of one kind."""
    return f"acct:{kind.value}:*"


def capped(vertices: Vertices) -> tuple[str, ...]:
    """Keys of the vertices that can refuse a booking. An empty id means that there is no such vertex."""
    return (*_hierarchy(vertices), *(limit(limit_id) for limit_id in vertices.limit_ids))


def counted(vertices: Vertices) -> tuple[str, ...]:
    """Keys of all vertices a booking moves, limits last."""
    keys = _hierarchy(vertices)
    if vertices.layer_id:
        keys.append(layer(vertices.layer_id))
    if vertices.dept_id:
        keys.append(point(vertices.dept_id, vertices.show_id))
    return (*keys, *(limit(limit_id) for limit_id in vertices.limit_ids))


def _hierarchy(vertices: Vertices) -> list[str]:
    keys = []
    if vertices.alloc_id:
        keys.append(subscription(vertices.show_id, vertices.alloc_id))
    if vertices.folder_id:
        keys.append(folder(vertices.folder_id))
    if vertices.job_id:
        keys.append(job(vertices.job_id))
    return keys


_KINDS = {kind.value: kind for kind in VertexKind}


@dataclass(frozen=True, slots=True)
class VertexRef:
    """A vertex key taken apart. ``ids`` has two entries for subscriptions (show, alloc) and points (dept, show)."""

    kind: VertexKind
    ids: tuple[str, ...]


def parse(key: str) -> VertexRef | None:
    """The vertex a key stands for; None when it is no vertex key."""
    parts = key.split(":")
    kind = _KINDS.get(parts[1]) if len(parts) > 2 and parts[0] == "acct" else None
    if kind is None:
        return None
    wanted = 2 if kind in (VertexKind.SUBSCRIPTION, VertexKind.POINT) else 1
    return VertexRef(kind, tuple(parts[2:])) if len(parts) == 2 + wanted else None
