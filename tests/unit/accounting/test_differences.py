"""Which entries a pass touches: each rule of the protocol by itself."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from opencue_sched.accounting.differences import find_differences
from opencue_sched.accounting.keys import EntryState, Record
from opencue_sched.accounting.ledger import Cause, Change
from opencue_sched.accounting.recompute import additions

MARK = 100
ENTRY = "4|0|show|alloc|folder|job|layer|dept|"
MOVED = "4|0|show|alloc|other|job|layer|dept|"
CONFIRMED, IN_FLIGHT = EntryState.CONFIRMED, EntryState.IN_FLIGHT
OURS = frozenset({"show"})


class Judged(NamedTuple):
    changes: list[Change]
    absent: list[str]

    @property
    def causes(self) -> Counter[Cause | None]:
        return Counter(change.cause for change in self.changes)


def record(state: EntryState, changed: int = 50, entry: str = ENTRY, booked_at: int = 1000) -> Record:
    return Record("p", state, booked_at, changed, "me", entry)


def judge(
    found: Record | None,
    actual: str | None,
    *,
    old: bool = False,
    managed: frozenset[str] = OURS,
    only: frozenset[str] | None = None,
) -> Judged:
    snapshot = {} if actual is None else {"p": actual}
    ledger = [] if found is None else [found]
    too_old = {"p"} if old else set()
    return Judged(*find_differences(MARK, snapshot, ledger, too_old=too_old, managed=managed, only=only))


def test_what_agrees_is_left_alone() -> None:
    for state in EntryState:
        assert judge(record(state), ENTRY).changes == []


def test_an_entry_without_proc_goes_only_if_it_was_confirmed_by_the_mark() -> None:
    assert judge(record(CONFIRMED, MARK), None).changes == [Change("p", MARK, None)]
    assert judge(record(CONFIRMED, MARK + 1), None).changes == []


def test_an_entry_in_flight_without_proc_goes_only_if_it_was_too_old_at_the_mark() -> None:
    assert judge(record(IN_FLIGHT), None).changes == []
    assert judge(record(IN_FLIGHT), None, old=True).changes == [Change("p", 50, None)]


def test_an_entry_confirmed_after_the_mark_is_not_removed_because_it_had_been_too_old() -> None:
    assert judge(record(CONFIRMED, MARK + 1), None, old=True).changes == []


def test_a_proc_without_entry_is_read_again_before_it_is_added() -> None:
    found = judge(None, ENTRY)
    assert (found.changes, found.absent) == ([], ["p"])
    assert additions({"p": ENTRY}) == [Change("p", None, ENTRY, CONFIRMED)]


def test_a_moved_entry_keeps_its_state_unless_it_is_too_old() -> None:
    assert judge(record(CONFIRMED), MOVED).changes == [Change("p", 50, MOVED, CONFIRMED)]
    assert judge(record(IN_FLIGHT), MOVED).changes == [Change("p", 50, MOVED, IN_FLIGHT)]
    assert judge(record(IN_FLIGHT), MOVED, old=True).changes == [Change("p", 50, MOVED, CONFIRMED)]


def test_a_too_old_entry_with_a_proc_becomes_confirmed() -> None:
    found = judge(record(IN_FLIGHT), ENTRY, old=True)
    assert found.changes == [Change("p", 50, ENTRY, CONFIRMED)]
    assert found.causes == {Cause.LATE_SETTLE: 1}


def test_causes_tell_a_crash_from_a_missed_release_from_a_retired_show() -> None:
    assert judge(record(CONFIRMED), None).causes == {Cause.MISSED_RELEASE: 1}
    assert judge(record(IN_FLIGHT), None, old=True).causes == {Cause.CRASHED_BOOKING: 1}
    assert judge(record(CONFIRMED), None, managed=frozenset()).causes == {Cause.RETIRED: 1}


def test_a_narrow_pass_judges_only_its_shows() -> None:
    others = frozenset({"another"})
    assert judge(record(CONFIRMED), None, only=others).changes == []
    assert judge(record(CONFIRMED), None, only=OURS).changes == [Change("p", 50, None)]
