"""How a booking is written in the ledger, and read back. The Lua side is lua/includes/ledger.lua.

An *entry* is one line of text, ``cores|gpus|show|alloc|folder|job|layer|dept|limit,limit`` with the limits sorted, so
that two entries say the same exactly when they are the same text. A *record* is an entry with its state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from opencue_sched.accounting import keys
from opencue_sched.domain.farm import Vertices
from opencue_sched.errors import InvalidInput

RECORD_VERSION = "1"
SEPARATORS = "|,:"
"""What no id in an entry, or in a vertex's key, may contain."""

_FIELDS_OF_AN_ENTRY = 9
_RECORD = re.compile(rf"{RECORD_VERSION}\|([FC])\|([0-9]+)\|([0-9]{{1,15}})\|([^|]*)\|([^|]*(?:\|[^|]*){{8}})")


class EntryState(StrEnum):
    """``IN_FLIGHT``: booked in Redis, the proc row may not be committed yet. ``CONFIRMED``: it was."""

    IN_FLIGHT = "F"
    CONFIRMED = "C"


@dataclass(frozen=True, slots=True)
class Booking:
    """What one proc takes, and from whom. Whole cores. ``proc_id`` exists before anything is booked.

    A vertex with an empty id is not counted (a local proc has no subscription).
    """

    proc_id: str
    vertices: Vertices
    cores: int
    gpus: int = 0

    def negated(self) -> Booking:
        """The same booking as a rollback."""
        return replace(self, cores=-self.cores, gpus=-self.gpus)

    def packed(self) -> str:
        """The entry as text. Raises InvalidInput for an id that would be read as two."""
        v = self.vertices
        ids = (v.show_id, v.alloc_id, v.folder_id, v.job_id, v.layer_id, v.dept_id)
        text = f"{self.cores}|{self.gpus}|{'|'.join(ids)}|{','.join(sorted(v.limit_ids))}"
        separators = text.count("|"), text.count(","), text.count(":")
        if separators != (_FIELDS_OF_AN_ENTRY - 1, max(0, len(v.limit_ids) - 1), 0):
            check_ids(*ids, *v.limit_ids)
        return text


def check_ids(*ids: str) -> None:
    """Raise InvalidInput for an id that an entry of the ledger would show as two."""
    for it in ids:
        if any(mark in it for mark in SEPARATORS):
            raise InvalidInput(f"the id {it!r} contains one of | , : and cannot be booked")


@dataclass(frozen=True, slots=True)
class Record:
    """One ledger entry. ``booked_at`` is Redis TIME in seconds; ``changed_seq`` is acct:seq at its last change."""

    proc_id: str
    state: EntryState
    booked_at: int
    changed_seq: int
    owner: str
    entry: str

    @property
    def booking(self) -> Booking:
        return unpack_entry(self.proc_id, self.entry)

    @property
    def show_id(self) -> str:
        return show_of(self.entry)


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


def show_of(entry: str) -> str:
    """The show an entry belongs to."""
    return entry.split("|", 3)[2]


def most_vertices(entry: str) -> int:
    """How many vertices an entry moves at most: the five of the hierarchy and its limits; none of an empty text."""
    limits = entry.rpartition("|")[2]
    return 5 + (limits.count(",") + 1 if limits else 0) if entry else 0


def amounts(entry: str) -> tuple[tuple[str, int, int], ...]:
    """What an entry adds to which vertex: key, cores (a limit: 1 frame) and GPUs (a limit: 0). Nothing of an entry that
    that is spoilt, which the scripts take out of no counter either (lua/includes/moves.lua)."""
    try:
        booking = unpack_entry("", entry)
    except InvalidInput:
        return ()
    return tuple(
        (key, 1, 0) if key.startswith(keys.LIMIT_PREFIX) else (key, booking.cores, booking.gpus)
        for key in keys.counted(booking.vertices)
    )
