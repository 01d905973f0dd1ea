"""What to change so that the ledger says what the proc table says: pure decisions.

Three readings are compared, taken in this order: the mark (the ledger's sequence number), a snapshot of the proc table,
the ledger. An entry that another process changes meanwhile has a sequence number above the mark, or another one than
was read when our change comes to be applied. Such an entry is left to the next recompute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from opencue_sched.accounting.consistency import ConsistencyCheck
from opencue_sched.accounting.keys import EntryState, Record
from opencue_sched.accounting.ledger import Cause, Change, Mark


def find_differences(
    mark_seq: int,
    snapshot: Mapping[str, str],
    ledger: Iterable[Record],
    *,
    too_old: Collection[str],
    managed: Collection[str],
    only: Collection[str] | None = None,
) -> tuple[list[Change], list[str]]:
    """Compare ``ledger`` with ``snapshot``, which has the entry that each proc should have, as text, by proc id.

    ``managed`` are the ids of all managed shows: the snapshot has procs of theirs only. With ``only``, which are ids of
    shows, the snapshot has procs of these shows alone, and entries of other shows are not judged.

    Returns changes that can be applied at once, and the ids of procs without an entry, which are to be read again
    first.

    ``too_old``: the ids of bookings that were in flight for so long *at the mark* that they cannot be committed any
    more. An entry is judged by its state at the mark: judged by its state when the change is applied, a live booking
    would be lost.
    """
    changes: list[Change] = []
    known: set[str] = set()
    for record in ledger:
        known.add(record.proc_id)
        if only is not None and record.show_id not in only:
            continue
        change = _judge(record, snapshot.get(record.proc_id), mark_seq, too_old=record.proc_id in too_old)
        if change is None:
            continue
        if change.entry is None and record.show_id not in managed:
            # The proc may run on: it is not in the snapshot because its show was given back.
            change = replace(change, cause=Cause.RETIRED)
        changes.append(change)
    return changes, [proc_id for proc_id in snapshot if proc_id not in known]


def _judge(record: Record, actual: str | None, mark_seq: int, *, too_old: bool) -> Change | None:
    """The change that an entry needs; None for an entry that is right, or is left to the next recompute.

    ``actual`` is the entry that the proc should have, as text; None: the proc is not in the snapshot.
    """
    proc_id, seq = record.proc_id, record.changed_seq
    in_flight = record.state is EntryState.IN_FLIGHT
    overdue = in_flight and too_old
    changed_since_mark = seq > mark_seq
    if actual is None:
        if overdue:
            return Change(proc_id, seq, None, cause=Cause.CRASHED_BOOKING)
        if in_flight or changed_since_mark:
            return None
        return Change(proc_id, seq, None, cause=Cause.MISSED_RELEASE)
    # A proc in the snapshot was committed. While its booking is not overdue, the worker that booked it confirms it.
    state = EntryState.CONFIRMED if overdue else record.state
    if actual != record.entry:
        # An entry that changed since the mark may have been moved by a newer snapshot.
        return None if changed_since_mark else Change(proc_id, seq, actual, state, Cause.MOVED)
    return Change(proc_id, seq, actual, state, Cause.LATE_SETTLE) if overdue else None


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass of a recompute read, found and applied."""

    mark: Mark
    """The moment before anything was read."""
    managed: frozenset[str]
    """The ids of the managed shows."""
    procs: int
    """How many procs of managed shows are in the proc table."""
    check: ConsistencyCheck
    """The check of the counters, with the ledger as it was read."""
    changes: Sequence[Change]
    """The changes that were found."""
    passed_over: Sequence[str]
    """The proc ids of the changes that were not applied, because their entries had changed since they were read."""
    seqs: Sequence[int]
    """The sequence numbers that applying the changes took."""

    def entries_now(self) -> dict[str, str]:
        """The entries of the ledger after the changes, as text by proc id, provided that no other process changed the
        ledger meanwhile."""
        entries = {proc_id: record.entry for proc_id, record in self.check.records.items()}
        for change in self.changes:
            if change.proc_id in self.passed_over:
                continue
            if change.entry is None:
                entries.pop(change.proc_id, None)
            else:
                entries[change.proc_id] = change.entry
        return entries
