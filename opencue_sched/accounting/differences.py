"""What to change so that the ledger says what the proc table says: pure decisions.

Three readings are compared, taken in this order: the mark (a sequence number), a snapshot of the proc table, the
ledger. Everything that happens meanwhile shows as a sequence number above the mark, or as an entry that changed
before it could be touched, and is left for the next pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
    """Compare ``snapshot`` (proc id to entry, of ``managed`` shows) with the ledger, of all shows or ``only`` some.

    Returns changes that can be applied at once, and procs without an entry, which are to be read again first.

    ``too_old`` are in-flight ids that no commit can belong to any more, as judged *at the mark*. An entry is judged by
    what it was at the mark: judging it by its state when the change is applied loses a live booking.
    """
    changes: list[Change] = []
    known: set[str] = set()
    for record in ledger:
        known.add(record.proc_id)
        if only is not None and record.show_id not in only:
            continue
        change = _judge(record, snapshot.get(record.proc_id), mark_seq, record.proc_id in too_old)
        if change is not None:
            retired = change.entry is None and record.show_id not in managed
            changes.append(replace(change, cause=Cause.RETIRED) if retired else change)
    return changes, [proc_id for proc_id in snapshot if proc_id not in known]


def _judge(record: Record, actual: str | None, mark_seq: int, too_old: bool) -> Change | None:
    in_flight = record.state is EntryState.IN_FLIGHT
    before_mark = record.changed_seq <= mark_seq
    settled_before_mark = not in_flight and before_mark
    seen = partial(Change, record.proc_id, record.changed_seq)
    if actual is None:
        if not (settled_before_mark or (in_flight and too_old)):
            return None
        return seen(None, cause=Cause.CRASHED_BOOKING if in_flight else Cause.MISSED_RELEASE)
    state = EntryState.CONFIRMED if too_old else record.state
    if actual != record.entry:
        # An entry that changed since the mark may have been moved by a newer snapshot.
        return seen(actual, state, Cause.MOVED) if before_mark else None
    return seen(actual, state, Cause.LATE_SETTLE) if in_flight and too_old else None


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass read, found and applied."""

    mark: Mark
    managed: frozenset[str]
    """The ids of the managed shows."""
    procs: int
    """How many procs of managed shows are in the proc table."""
    check: ConsistencyCheck
    changes: Sequence[Change]
    passed_over: Sequence[str]
    seqs: Sequence[int]

    def entries_now(self) -> dict[str, str]:
        """The ledger after the changes, provided that nobody else changed it meanwhile."""
        entries = {proc_id: record.entry for proc_id, record in self.check.records.items()}
        for change in self.changes:
            if change.proc_id in self.passed_over:
                continue
            if change.entry is None:
                entries.pop(change.proc_id, None)
            else:
                entries[change.proc_id] = change.entry
        return entries
