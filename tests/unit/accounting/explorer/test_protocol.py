"""The accounting protocol, exhausted: no reachable state of the model breaks it, and each comes right by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.examples import DEEP
from tests.unit.accounting.explorer.rules import Rules, Scope
from tests.unit.accounting.explorer.search import Search

NO_LATE_CALLS = Scope(late_copies=False)
MACHINES_ALONE = replace(NO_LATE_CALLS, cap=2, crashes=0, flushes=0, reconcilers=0, seats=1)

# What is searched, and a number of states that shows that it was searched to the end.
SCOPES = {
    "a crash, a flush, late and doubled calls": (Scope(), 140_000),
    "somebody else's proc": (replace(NO_LATE_CALLS, foreign=1), 95_000),
    "a clock that jumps": (replace(NO_LATE_CALLS, flushes=0, jumps=1), 40_000),
    "a filler that pauses": (replace(NO_LATE_CALLS, pauses=1), 60_000),
    "a COMMIT that hangs": (replace(NO_LATE_CALLS, hangs=1), 80_000),
    "a limit of machines, reported twice": (replace(MACHINES_ALONE, reports=2), 30_000),
    "two reconcilers": (replace(NO_LATE_CALLS, crashes=0, flushes=0, reconcilers=2), 60_000),
}
DEEP_SCOPES = {
    "everything at once": (Scope(jumps=1, pauses=1), 800_000),
    "three bookers": (replace(NO_LATE_CALLS, bookers=3, cap=2, flushes=0), 1_000_000),
    "two reconcilers, a crash and a flush": (replace(NO_LATE_CALLS, reconcilers=2), 200_000),
    "a limit of two machines, three bookers": (replace(MACHINES_ALONE, bookers=3, cap=3, seats=2, reports=1), 550_000),
    "a limit of machines, a report and a recompute": (replace(MACHINES_ALONE, reconcilers=1, reports=1), 550_000),
    "a COMMIT that hangs, late and doubled calls": (Scope(hangs=1), 380_000),
    "a COMMIT that hangs, two reconcilers": (
        replace(NO_LATE_CALLS, crashes=0, flushes=0, reconcilers=2, hangs=1),
        240_000,
    ),
}
if DEEP:
    SCOPES |= DEEP_SCOPES


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("scope", "at_least"), SCOPES.values(), ids=SCOPES)
def test_nothing_that_can_happen_breaks_the_protocol(scope: Scope, at_least: int) -> None:
    explored = Search(Rules(), scope).run()
    print(f"{explored.states} states, {explored.transitions} transitions, at most {explored.depth} steps deep")
    assert explored.finding is None, str(explored.finding)
    assert explored.states >= at_least, "the search ended early"


def test_a_tombstone_that_expires_too_soon_costs_room_for_a_while_and_nothing_else() -> None:
    explored = Search(Rules(), Scope(crashes=0, flushes=0, forgets=True)).run()
    assert explored.finding is None, str(explored.finding)


def test_what_may_be_booked_is_booked() -> None:
    """Not safe for want of bookings: with a cap of 2 both places are taken, and one less would be passed."""
    finding = Search(Rules(), Scope(cap=2), judged_by=1).run().finding
    assert finding is not None
    assert finding.steps == ("proc 1 books", "proc 2 books")
