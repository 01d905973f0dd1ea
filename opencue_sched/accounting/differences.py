"""What to change so that the ledger says what the proc table says: pure decisions (design section 4, "Recompute").

Three readings are compared, taken in this order: the mark (a sequence number), a snapshot of the proc table, the
ledger. Everything that happens meanwhile shows as a sequence number above the mark, or as an entry that changed before
it could be touched, and is left for the next pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from opencue_sched.accounting.entries import EntryState, Record, show_of
from opencue_sched.accounting.scripts import Change


class Cause(StrEnum):
    """Why an entry differs from the proc table."""

    MISSED_RELEASE = "missed_release"  # confirmed, and its proc is gone: nobody told us
    CRASHED_BOOKING = "crashed_booking"  # never confirmed, no proc, too old to be committed still
    RETIRED = "retired"  # the show is not managed any more
    MISSING = "missing"  # a proc without entry
    MOVED = "moved"  # job, host or amounts changed since the booking
    LATE_SETTLE = "late_settle"  # committed, but whoever booked it died before settling
    UNREADABLE = "unreadable"  # somebody spoilt the entry, and it has no proc
    FOREIGN_WRITE = "foreign_write"  # no entry at all: somebody else wrote to a counter (accounting.inventory)


@dataclass(frozen=True, slots=True)
class Scope:
    """The shows a pass may judge. ``managed`` is what the snapshot saw; ``only`` narrows a pass to these shows."""

    managed: frozenset[str]
    only: frozenset[str] | None = None

    def covers(self, show_id: str) -> bool:
        return self.only is None or show_id in self.only


@dataclass(slots=True)
class Differences:
    """``changes`` can be applied at once; ``absent`` are procs without an entry, to be read again first.

    ``cause_of`` has the cause of each change by proc id.
    """

    changes: list[Change] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    cause_of: dict[str, Cause] = field(default_factory=dict)
    in_flight: int = 0
    oldest_in_flight_at: int | None = None

    @property
    def causes(self) -> Counter[Cause]:
        """How many entries differ for which cause."""
        return Counter(self.cause_of.values())

    def add(self, cause: Cause, change: Change) -> None:
        self.changes.append(change)
        self.cause_of[change.proc_id] = cause

    def add_unreadable(self, proc_ids: Iterable[str]) -> None:
        """Entries nobody can read: those of procs that were found missing are written over, the others are removed."""
        for proc_id in proc_ids:
            if proc_id not in self.cause_of:
                self.add(Cause.UNREADABLE, Change(proc_id, None, None))

    def add_missing(self, changes: Iterable[Change]) -> None:
        """Procs of ``absent`` that a fresh read has found again."""
        for change in changes:
            self.add(Cause.MISSING, change)


def find_differences(
    mark_seq: int,
    snapshot: Mapping[str, str],
    ledger: Iterable[Record],
    *,
    too_old: Collection[str],
    scope: Scope,
) -> Differences:
    """Compare ``snapshot`` (proc id to entry, of managed shows) with the ledger.

    ``too_old`` are in-flight ids that no commit can belong to any more, as judged *at the mark*. An entry is judged by
    what it was at the mark: judging it by its state when the change is applied loses a live booking.
    """
    found = Differences()
    known: set[str] = set()
    for record in ledger:
        known.add(record.proc_id)
        if record.state is EntryState.IN_FLIGHT:
            found.in_flight += 1
            found.oldest_in_flight_at = min(found.oldest_in_flight_at or record.booked_at, record.booked_at)
        if not scope.covers(record.show_id):
            continue
        judged = _judge(record, snapshot.get(record.proc_id), mark_seq, record.proc_id in too_old, scope)
        if judged is not None:
            found.add(*judged)
    found.absent = [
        proc_id for proc_id, entry in snapshot.items() if proc_id not in known and scope.covers(show_of(entry))
    ]
    return found


def _judge(
    record: Record, actual: str | None, mark_seq: int, too_old: bool, scope: Scope
) -> tuple[Cause, Change] | None:
    in_flight = record.state is EntryState.IN_FLIGHT
    before_mark = record.changed_seq <= mark_seq
    settled_before_mark = not in_flight and before_mark
    if actual is None:
        if not (settled_before_mark or (in_flight and too_old)):
            return None
        cause = Cause.CRASHED_BOOKING if in_flight else Cause.MISSED_RELEASE
        if record.show_id not in scope.managed:
            cause = Cause.RETIRED
        return cause, Change(record.proc_id, record.changed_seq, None, before=record.entry)
    state = EntryState.CONFIRMED if too_old else record.state
    if actual != record.entry:
        if not before_mark:  # a newer snapshot may have moved it
            return None
        return Cause.MOVED, Change(record.proc_id, record.changed_seq, actual, state, before=record.entry)
    if in_flight and too_old:
        return Cause.LATE_SETTLE, Change(record.proc_id, record.changed_seq, actual, state, before=record.entry)
    return None


def additions(fresh: Mapping[str, str]) -> list[Change]:
    """Changes that add the procs of a fresh read. The script still refuses an id that is tombstoned by then."""
    return [Change(proc_id, None, entry) for proc_id, entry in fresh.items()]
