"""Each rule of the protocol is needed: without it, the search finds what goes wrong and the shortest way to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from tests.unit.accounting.explorer.rules import Rules, Scope
from tests.unit.accounting.explorer.search import EVERY_FAULT, Fault, Search

OVERBOOKED = frozenset({Fault.OVERBOOKED})
TWO_SEATS = Scope(bookers=3, cap=3, crashes=0, flushes=0, reconcilers=0, late_copies=False, seats=2, reports=1)
HANGS = Scope(crashes=0, flushes=0, hangs=1, late_copies=False)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Rules with one off, and the fault it must be found by, ``within`` so many steps."""

    rules: Rules
    within: int
    fault: Fault = Fault.OVERBOOKED
    scope: Scope = field(default_factory=Scope)


MUTANTS = {
    "no tombstone": Mutant(Rules(tombstones=False), 4, Fault.GHOST),
    "no in-flight carry": Mutant(Rules(carries_in_flight=False), 6),
    "age judged by the clock at apply time": Mutant(Rules(age_at_mark=False), 9),
    "what was confirmed after the mark is removed": Mutant(Rules(judges_by_mark=False), 8),
    "anything absent is removed": Mutant(Rules(judges_by_mark=False, carries_in_flight=False), 6),
    "release that counts twice": Mutant(Rules(idempotent_release=False), 9),
    "rollback that decrements after a flush": Mutant(Rules(exact_rollback=False), 12),
    "bootstrap that does not wait": Mutant(Rules(bootstrap_waits=False), 6),
    "age judged by Redis TIME alone": Mutant(Rules(two_sightings=False), 7, scope=Scope(jumps=1)),
    "unknown COMMIT rolled back": Mutant(Rules(unknown_stays=False), 4),
    "deadline that the client keeps": Mutant(Rules(server_deadline=False), 9),
    "entry dropped by age although its COMMIT hangs": Mutant(Rules(asks_for_commits=False), 12, scope=HANGS),
    "COMMITs that hang asked for after the snapshot": Mutant(Rules(asks_first=False), 13, scope=HANGS),
    "bootstrap that does not ask for COMMITs that hang": Mutant(
        Rules(filler_asks=False), 9, scope=replace(HANGS, flushes=1)
    ),
    "wipe that an overtaken filler can do": Mutant(Rules(fenced_wipe=False), 13, scope=Scope(pauses=1)),
    "successor of a dead filler that does not wait": Mutant(Rules(successor_waits=False), 9),
    "wait of before the store was open that is trusted": Mutant(
        Rules(wait_of_this_loss=False), 14, scope=Scope(crashes=0, flushes=2, late_copies=False)
    ),
    "machine that goes with any of its frames": Mutant(Rules(goes_with_last=False), 4, Fault.ASTRAY, TWO_SEATS),
    "seat too many for a machine that holds none": Mutant(Rules(holders_alone=False), 4, Fault.FORBIDDEN, TWO_SEATS),
    "machines too many that go on": Mutant(Rules(stops_above=False), 7, Fault.FORBIDDEN, TWO_SEATS),
    "machine that holds by what is in flight": Mutant(Rules(holds_when_settled=False), 5, Fault.FORBIDDEN, TWO_SEATS),
    "COMMIT of what was accepted before a report": Mutant(Rules(same_terms=False), 5, Fault.FORBIDDEN, TWO_SEATS),
    "wait measured by Redis TIME": Mutant(Rules(waits_by_boot_clock=False), 8, scope=Scope(jumps=1)),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_protocol_without_one_of_its_rules_is_found_out(mutant: Mutant) -> None:
    looked_for = OVERBOOKED if mutant.fault is Fault.OVERBOOKED else EVERY_FAULT
    finding = Search(mutant.rules, mutant.scope, looked_for).run().finding
    assert finding is not None
    print(finding)
    assert finding.fault is mutant.fault
    assert len(finding.steps) <= mutant.within


@pytest.mark.parametrize("rule", ["idempotent_release", "exact_rollback"])
def test_a_counter_that_leaves_its_entries_shows_before_it_does_harm(rule: str) -> None:
    finding = Search(replace(Rules(), **{rule: False}), Scope()).run().finding
    assert finding is not None
    assert finding.fault is Fault.MISCOUNTED


def test_a_booking_that_never_grows_too_old_is_never_got_rid_of() -> None:
    """Convergence is not vacuous either: with ages out of reach, a crash leaves something for ever."""
    finding = Search(Rules(resolves_in_flight=False), Scope(late_copies=False)).run().finding
    assert finding is not None
    assert finding.fault is Fault.DIVERGED
    assert finding.steps == ("proc 1 books",)
