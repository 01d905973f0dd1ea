"""How a booking is written in the ledger, and read back. The Lua side is lua/includes/ledger.lua."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.farm import Vertices

RECORD_VERSION = "1"
_FIELDS_OF_A_RECORD = 14


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
        """The entry as the scripts read it. Raises InvalidInput for an id that would be read as two."""
        v = self.vertices
        ids = (v.show_id, v.alloc_id, v.folder_id, v.job_id, v.layer_id, v.dept_id)
        text = f"{self.cores}|{self.gpus}|{'|'.join(ids)}|{','.join(v.limit_ids)}"
        if text.count("|") != len(ids) + 2 or ":" in text or text.count(",") != max(0, len(v.limit_ids) - 1):
            raise InvalidInput(f"proc {self.proc_id}: an id contains one of | , : and cannot be booked: {text}")
        return text


@dataclass(frozen=True, slots=True)
class Record:
    """One ledger entry. ``booked_at`` is Redis TIME in seconds; ``changed_seq`` is acct:seq at the entry's last change."""

    booking: Booking
    state: EntryState
    booked_at: int
    changed_seq: int
    owner: str


def unpack(proc_id: str, record: str) -> Record:
    """Read a ledger record. Raises InvalidInput when it is of another version or was tampered with."""
    parts = record.split("|")
    if len(parts) != _FIELDS_OF_A_RECORD or parts[0] != RECORD_VERSION:
        raise InvalidInput(f"ledger entry of proc {proc_id} is not understood: {record!r}")
    _, state, booked_at, changed, owner, cores, gpus, show, alloc, folder, job, layer, dept, limits = parts
    vertices = Vertices(show, alloc, folder, job, layer, dept, tuple(limits.split(",")) if limits else ())
    try:
        booking = Booking(proc_id, vertices, int(cores), int(gpus))
        return Record(booking, EntryState(state), int(booked_at), int(changed), owner)
    except ValueError as error:
        raise InvalidInput(f"ledger entry of proc {proc_id} is not understood: {record!r}") from error
