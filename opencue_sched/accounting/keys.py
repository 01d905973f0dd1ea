"""Names of the ``acct:*`` keys: the only place in Python that spells them (in Lua: lua/includes/ledger.lua).

The six namespaces and their field names are the contract of the accounting reference ("Redis schema"); the ledger,
the limits, the epoch and the tombstones are ours. The second half of the module writes and reads what the ledger holds:
bookings as entries and records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial

from opencue_sched.domain.caps import SEPARATORS, Vertices
from opencue_sched.errors import InvalidInput

SEQ = "acct:seq"
"""The sequence number, which grows with every change of the ledger."""
LEDGER = "acct:ledger"
"""The hash of the ledger: a record for each proc id."""
EPOCH = "acct:epoch"
"""The epoch (accounting.epoch)."""
AUDIT = "acct:audit"
"""The lease of the one consistency check that may run."""
AUDIT_LOG = "acct:audit:log"
"""The list of the entries that came into the ledger or went out of it during a consistency check."""
BOOTSTRAP_LEASE = "acct:bootstrap"
"""The lease of the process that fills the store."""
RECOMPUTED_AT = "acct:recomputed"
"""The time of the last whole recompute, in seconds of Redis TIME."""
FOUND = "acct:recomputed:found"
"""What the last whole recompute found (accounting.last_recompute)."""
FOLLOWER = "acct:follower"
"""The process that moves entries of running frames to other limits; it expires."""
IMPORTED = "acct:counted"
"""The hash of notes of imported shows, by show id (accounting.imported_shows)."""
HANDED_BACK = "handed-back:shows"
"""Sorted set of shows given back to Cuebot, by when every Cuebot knows (Redis TIME, seconds)."""
MARKS_PREFIX = "acct:marks:"
"""Prefix of the sorted sets of marks, one for each boot of a machine (accounting.age_marks)."""
TOMBSTONES_PREFIX = "acct:tomb:"
"""Prefix of the sets of released proc ids, one for each bucket of time."""
TOMBSTONE_BUCKET_SECONDS = 120
"""The length of such a bucket: TOMB_WIDTH of the scripts."""
LIMIT_PREFIX = "acct:limit:"
"""Prefix of the hashes of limits, and of the counters of their frames on one machine."""
MACHINES_PREFIX = "acct:machines:"
"""Prefix of the sorted set of machines on which the ledger has frames under a limit that counts machines, by when the
last was booked; below 0 those that had some, by when the last ended."""
STARTED_PREFIX = "acct:started:"
"""Prefix of the sorted sets of procs by when they were booked (lua/includes/machines.lua)."""
EVERYTHING = "acct:*"
"""The pattern of all keys of the accounting but HANDED_BACK."""

LEDGER_KEYS = (SEQ, LEDGER, EPOCH, AUDIT)
"""The keys of every script of the ledger, in their order."""


def tombstones(now: int) -> list[str]:
    """The keys of the buckets of released ids that a script may touch at ``now``, in seconds of Redis TIME."""
    bucket = now // TOMBSTONE_BUCKET_SECONDS
    return [f"{TOMBSTONES_PREFIX}{near}" for near in range(bucket - 1, bucket + 3)]


class VertexKind(StrEnum):
    """What a counter counts for. The value is the second part of the key."""

    SUBSCRIPTION = "sub"
    FOLDER = "folder"
    JOB = "job"
    LAYER = "layer"
    POINT = "point"
    LIMIT = "limit"


def vertex(kind: VertexKind, *ids: str) -> str:
    """The key of a vertex."""
    return f"acct:{kind}:{':'.join(ids)}"


subscription = partial(vertex, VertexKind.SUBSCRIPTION)
"""The key of a subscription, from a show id and an allocation id."""
folder = partial(vertex, VertexKind.FOLDER)
job = partial(vertex, VertexKind.JOB)
layer = partial(vertex, VertexKind.LAYER)
point = partial(vertex, VertexKind.POINT)
"""The key of a point, from a department id and a show id."""
limit = partial(vertex, VertexKind.LIMIT)


# All frames of a layer on the hosts of one allocation have the same vertices.
@lru_cache(maxsize=10_000)
def capped(vertices: Vertices) -> tuple[str, ...]:
    """Keys of the vertices that can refuse a booking. An empty id means that there is no such vertex."""
    return (*filter(None, _hierarchy(vertices)[:3]), *map(limit, vertices.limit_ids))


@lru_cache(maxsize=10_000)
def counted(vertices: Vertices) -> tuple[str, ...]:
    """Keys of all vertices whose counters a booking moves, limits last."""
    return (*filter(None, _hierarchy(vertices)), *map(limit, vertices.limit_ids))


def on_machine(limit_id: str, machine: str) -> tuple[str, str, str]:
    """How an entry lists a limit that counts machines: the limit, its frames whose machine is known, those on this one
    (lua/includes/machines.lua)."""
    return limit_id, f"{limit_id}@", f"{limit_id}@{machine}"


def other_machines(limit_id: str) -> str:
    """The key of the set of machines that hold a limit by what the ledger does not have."""
    return f"{MACHINES_PREFIX}{limit_id}:others"


def past_machines(limit_id: str) -> str:
    """The key of the set of machines that hold a limit by what the ledger does not have, and do not count."""
    return f"{MACHINES_PREFIX}{limit_id}:past"


def started(limit_id: str) -> str:
    """The key of the sorted set of procs under a limit of frames that was reported, by when they were booked."""
    return f"{STARTED_PREFIX}{limit_id}"


def reported(limit_id: str) -> tuple[str, str]:
    """How an entry lists a limit of frames of which a licence server reports: the limit, and its frames of which the
    ledger knows since when they run (lua/includes/machines.lua)."""
    return limit_id, f"{limit_id}@"


def starts_of(entry: str) -> list[tuple[str, str]]:
    """The limits and machines ('' for a limit of frames) at which the starts of a proc with this entry are noted.

    A damaged entry has none.
    """
    listed = [part.partition("@") for part in entry.rpartition("|")[2].split(",") if "@" in part]
    with_machine = {limit_id for limit_id, _, machine in listed if machine}
    return [(limit_id, machine) for limit_id, _, machine in listed if machine or limit_id not in with_machine]


def machine_of(host_id: str) -> str:
    """A host as an entry names it: its id, without what separates the parts of entries and keys."""
    return host_id.translate(_SEPARATORS_TO_DASHES)


_SEPARATORS_TO_DASHES = str.maketrans(dict.fromkeys(SEPARATORS, "-"))


def limit_and_machine(key: str) -> tuple[str, str] | None:
    """The limit and the machine of a counter of a limit's frames on one machine; None for any other key."""
    limit_id, _, machine = key.removeprefix(LIMIT_PREFIX).partition("@")
    return (limit_id, machine) if machine and key.startswith(LIMIT_PREFIX) else None


def _hierarchy(v: Vertices) -> tuple[str, ...]:
    """Subscription, folder, job, layer and point; empty for one that there is not."""
    return (
        v.alloc_id and subscription(v.show_id, v.alloc_id),
        v.folder_id and folder(v.folder_id),
        v.job_id and job(v.job_id),
        v.layer_id and layer(v.layer_id),
        v.dept_id and point(v.dept_id, v.show_id),
    )


_KINDS = {kind.value: kind for kind in VertexKind}


def ids_of(kind: VertexKind) -> int:
    """How many ids the key of a vertex has."""
    return 2 if kind in (VertexKind.SUBSCRIPTION, VertexKind.POINT) else 1


def parse(key: str) -> tuple[VertexKind, tuple[str, ...]] | None:
    """The kind and the ids of the vertex a key stands for: two of a subscription (show, alloc) and a point (dept,
    show); None when it is no vertex key."""
    prefix, _, name = key.partition(":")
    of_kind, *ids = name.split(":")
    kind = _KINDS.get(of_kind) if prefix == "acct" else None
    return (kind, tuple(ids)) if kind is not None and len(ids) == ids_of(kind) else None


_CAP_FIELDS = {
    VertexKind.SUBSCRIPTION: ("int_cores", "int_gpus", "burst"),
    VertexKind.FOLDER: ("int_cores", "int_gpus", "int_max_cores", "int_max_gpus"),
    VertexKind.JOB: ("int_cores", "int_gpus", "int_max_cores", "int_max_gpus"),
    VertexKind.LIMIT: ("int_running", "int_foreign", "int_max_value", "int_machines"),
}


def cap_fields(key: str) -> tuple[str, ...]:
    """The hash fields ``read_caps`` wants of a vertex that has caps, in its order."""
    return _CAP_FIELDS[VertexKind(key.split(":", 2)[1])]


@dataclass(frozen=True, slots=True)
class VertexCaps:
    """Caps and use of one vertex. Cores are whole, though a cap may be the fraction of one; a cap of None is
    unlimited."""

    kind: VertexKind
    cores: int
    gpus: int
    max_cores: float | None = None
    max_gpus: float | None = None
    frames: int = 0
    """Frames in use under a limit; 0 for other vertices."""
    max_frames: float | None = None
    """What the ledger's frames may use of a limit: its value less ``foreign_frames``."""
    foreign_frames: int = 0
    """Frames of unmanaged shows under a limit."""
    counts_machines: bool = False
    """Whether a limit counts machines: then nothing bounds its frames."""


def read_caps(key: str, values: Sequence[str | None] | Exception) -> VertexCaps | None:
    """The caps from an HMGET of ``cap_fields(key)``; None while the vertex is not seeded, or for a damaged one."""
    kind = VertexKind(key.split(":", 2)[1])
    machines = None
    if kind is VertexKind.LIMIT and not isinstance(values, Exception):
        *values, machines = values  # None where an older worker seeded the limit, empty where the limit counts frames
    if isinstance(values, Exception) or None in values[2:]:
        return None
    try:
        first, second = int(values[0] or 0), int(values[1] or 0)
        caps = [float(value or 0) for value in values[2:]]
    except ValueError:
        return None
    if kind is VertexKind.LIMIT:
        most = None if machines else caps[0] - second
        return VertexCaps(kind, 0, 0, None, None, first, most, second, counts_machines=bool(machines))
    if kind is VertexKind.SUBSCRIPTION:
        return VertexCaps(kind, first, second, max_cores=caps[0])
    # 0 and negative are unlimited to a folder or a job.
    max_cores, max_gpus = (cap if cap > 0 else None for cap in caps)
    return VertexCaps(kind, first, second, max_cores, max_gpus)


# How a booking is written in the ledger, and read back. The Lua side is lua/includes/ledger.lua.
#
# An *entry* is one line of text, ``cores|gpus|show|alloc|folder|job|layer|dept|limit,limit`` with the limits sorted, so
# that two entries say the same exactly when they are the same text. A limit that counts machines is listed as by
# on_machine(). A *record* is an entry with its state.

_RECORD = re.compile(r"1\|([FC])\|([0-9]+)\|([0-9]{1,15})\|([^|]*)\|([^|]*(?:\|[^|]*){8})")


class EntryState(StrEnum):
    """``IN_FLIGHT``: booked in Redis, the proc row may not be committed yet. ``CONFIRMED``: it was."""

    IN_FLIGHT = "F"
    CONFIRMED = "C"


@dataclass(frozen=True, slots=True)
class Booking:
    """What one proc takes, and from which vertices it is taken."""

    proc_id: str
    """The id that the proc will have: it exists before anything is booked."""
    vertices: Vertices
    """A vertex with an empty id is not counted: a local proc has no subscription."""
    cores: int
    """Whole cores."""
    gpus: int = 0
    machine: str = ""
    """The machine on which the proc is booked (machine_of). The script notes it under limits that count machines."""

    def packed(self) -> str:
        """The entry as text."""
        v = self.vertices
        ids = (v.show_id, v.alloc_id, v.folder_id, v.job_id, v.layer_id, v.dept_id)
        limits = sorted(v.limit_ids, key=lambda limit_id: limit_id.partition("@"))
        return f"{self.cores}|{self.gpus}|{'|'.join(ids)}|{','.join(limits)}"


@dataclass(frozen=True, slots=True)
class Record:
    """One ledger entry with what is recorded of it."""

    proc_id: str
    state: EntryState
    booked_at: int
    """Redis TIME in seconds."""
    changed_seq: int
    """The sequence number (acct:seq) of the entry's last change."""
    owner: str
    entry: str
    """The entry as text: see unpack_entry."""

    @property
    def show_id(self) -> str:
        """The id of the show in the entry."""
        return self.entry.split("|", 3)[2]


def unpack(proc_id: str, record: str) -> Record:
    """Read a ledger record. Raises InvalidInput when it is of another version or was tampered with."""
    read = _RECORD.fullmatch(record)
    if read is None:
        raise InvalidInput(f"ledger entry of proc {proc_id} is not understood: {record!r}")
    state, booked_at, changed, owner, entry = read.groups()
    return Record(proc_id, EntryState(state), int(booked_at), int(changed), owner, entry)


def unpack_entry(proc_id: str, entry: str) -> Booking:
    """The booking an entry was made from (limits sorted). Raises InvalidInput."""
    try:
        cores, gpus, show, alloc, folder, job, layer, dept, limits = entry.split("|")
        limit_ids = tuple(limits.split(",")) if limits else ()
        return Booking(proc_id, Vertices(show, alloc, folder, job, layer, dept, limit_ids), int(cores), int(gpus))
    except ValueError as error:
        raise InvalidInput(f"ledger entry of proc {proc_id} is not understood: {entry!r}") from error


def amounts(entry: str) -> tuple[tuple[str, int, int], ...]:
    """What an entry adds to which vertex: key, cores and GPUs; to a limit 1 frame and 0.

    A damaged entry adds nothing: the scripts take it out of no counter either (lua/includes/moves.lua).
    """
    try:
        booking = unpack_entry("", entry)
    except InvalidInput:
        return ()
    return tuple(
        (key, 1, 0) if key.startswith(LIMIT_PREFIX) else (key, booking.cores, booking.gpus)
        for key in counted(booking.vertices)
    )
