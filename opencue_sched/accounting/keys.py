"""Names of the ``acct:*`` keys: the only place in Python that spells them (in Lua: lua/includes/ledger.lua).

The six namespaces and their field names are the contract of the accounting reference ("Redis schema"); the ledger,
the limits, the epoch and the tombstones are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from opencue_sched.domain.farm import Vertices
from opencue_sched.errors import InvalidInput

SEQ = "acct:seq"
LEDGER = "acct:ledger"
EPOCH = "acct:epoch"
AUDIT = "acct:audit"
AUDIT_LOG = "acct:audit:log"
CORRECTED = "acct:corrected"
BOOTSTRAP_LEASE = "acct:bootstrap"
FILLERS_WAITED = "acct:waited"
RECOMPUTED_AT = "acct:recomputed"
IMPORTED = "acct:counted"
FIRST_SEEN_PREFIX = "acct:seen:"
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


# What a vertex may have, and has: the fields of the ``acct:*`` hashes as values.

_INFINITY = float("inf")

_CAP_FIELDS = {
    VertexKind.SUBSCRIPTION: ("int_cores", "int_gpus", "burst"),
    VertexKind.FOLDER: ("int_cores", "int_gpus", "int_max_cores", "int_max_gpus"),
    VertexKind.JOB: ("int_cores", "int_gpus", "int_max_cores", "int_max_gpus"),
    VertexKind.LIMIT: ("int_running", "int_foreign", "int_max_value"),
}


@dataclass(frozen=True, slots=True)
class VertexCaps:
    """Caps and use of one vertex. Cores are whole (a cap may be the fraction of one core), None is unlimited.

    A limit counts frames: ``max_frames`` is its value less the frames of unmanaged shows (``foreign_frames``).
    """

    key: str
    kind: VertexKind
    cores: int
    gpus: int
    max_cores: float | None = None
    max_gpus: float | None = None
    frames: int = 0
    max_frames: float | None = None
    foreign_frames: int = 0

    @property
    def left_cores(self) -> float:
        return _INFINITY if self.max_cores is None else self.max_cores - self.cores

    @property
    def left_gpus(self) -> float:
        return _INFINITY if self.max_gpus is None else self.max_gpus - self.gpus

    @property
    def left_frames(self) -> float:
        return _INFINITY if self.max_frames is None else self.max_frames - self.frames


def cap_fields(key: str) -> tuple[str, ...]:
    """The hash fields ``read_caps`` wants, in its order. Raises InvalidInput for a vertex without caps."""
    ref = parse(key)
    if ref is None or ref.kind not in _CAP_FIELDS:
        raise InvalidInput(f"{key!r} is not a vertex with caps")
    return _CAP_FIELDS[ref.kind]


def read_caps(key: str, values: Sequence[str | None] | Exception) -> VertexCaps | None:
    """The caps from an HMGET of ``cap_fields(key)``; None while the vertex is not seeded, and for a spoilt one."""
    try:
        return None if isinstance(values, Exception) else _read(key, values)
    except ValueError:
        return None


def _read(key: str, values: Sequence[str | None]) -> VertexCaps | None:
    ref = parse(key)
    if ref is None or any(value is None for value in values[2:]):
        return None
    if ref.kind is VertexKind.LIMIT:
        foreign = int(values[1] or 0)
        cap = float(values[2] or 0) - foreign
        return VertexCaps(key, ref.kind, 0, 0, frames=int(values[0] or 0), max_frames=cap, foreign_frames=foreign)
    cores, gpus = int(values[0] or 0), int(values[1] or 0)
    if ref.kind is VertexKind.SUBSCRIPTION:
        return VertexCaps(key, ref.kind, cores, gpus, max_cores=float(values[2] or 0))
    return VertexCaps(key, ref.kind, cores, gpus, max_cores=_positive(values[2]), max_gpus=_positive(values[3]))


def _positive(value: str | None) -> float | None:
    """A folder or job cap: 0 and negative are unlimited."""
    number = float(value or 0)
    return number if number > 0 else None
