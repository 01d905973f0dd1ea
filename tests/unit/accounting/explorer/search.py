"""Breadth-first search of the model: every state that can be reached, the shortest way to one that must not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from tests.unit.accounting.explorer.protocol import Protocol, SharedStep, Turn, at_stage
from tests.unit.accounting.explorer.rules import AGE, Rules, Scope
from tests.unit.accounting.explorer.state import Around, Booker, Entry, Late, Row, Slot, Stage, Store

_BITS = 16
_MASK = (1 << _BITS) - 1

State = int
_T = TypeVar("_T")
_F = TypeVar("_F")


class Fault(StrEnum):
    """What must never be."""

    OVERBOOKED = "more is committed, or can still be, than the cap allows"
    GHOST = "a released proc is counted again"
    MISCOUNTED = "the counter is not the sum of its entries"
    DIVERGED = "after quiescence and two recomputes the ledger is not the proc table"


EVERY_FAULT = frozenset(Fault)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, and a shortest way to it."""

    fault: Fault
    steps: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{number:3}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join((f"{self.fault.value}, after {len(lines)} steps:", *lines))


@dataclass(slots=True)
class Explored:
    """What a search saw. ``depth``: steps to the farthest state."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    finding: Finding | None = None


class _Numbers(Generic[_T, _F]):
    """Numbers for values, so that a state is one integer. ``facts`` of each are worked out once."""

    def __init__(self, facts_of: Callable[[_T], _F]) -> None:
        self.values: list[_T] = []
        self.facts: list[_F] = []
        self._numbers: dict[_T, int] = {}
        self._facts_of = facts_of

    def of(self, value: _T) -> int:
        known = self._numbers.get(value)
        if known is None:
            known = self._numbers[value] = len(self.values)
            self.values.append(value)
            self.facts.append(self._facts_of(value))
        return known


class _SlotFacts(NamedTuple):
    """What the search asks of a slot again and again."""

    counted: bool
    entered: bool
    ghost: bool
    read: tuple[bool, ...]


class _AroundFacts(NamedTuple):
    """And of what is around: places under the cap for entries, whether the store is open, which reconcilers read."""

    places: int
    drifted: bool
    open: bool
    reading: tuple[int, ...]


class Search:
    """One search. Slots and reconcilers are interchangeable, so a state is named by the least of its permutations. What
    can happen to one slot depends on that slot, on what is around and on whether there is room, and is worked out once
    for each of these."""

    def __init__(
        self, rules: Rules, scope: Scope, faults: frozenset[Fault] = EVERY_FAULT, *, judged_by: int | None = None
    ) -> None:
        """``judged_by``: the cap that must not be passed, when it is another than the one that is booked under."""
        self._protocol = Protocol(rules, scope)
        self._scope = scope
        self._cap = scope.cap if judged_by is None else judged_by
        self._faults = faults
        self._slots = _Numbers(_slot_facts)
        self._arounds = _Numbers(self._around_facts)
        self._alone: dict[tuple[int, int, bool], tuple[tuple[str, int, int], ...]] = {}
        self._shared: dict[int, tuple[tuple[SharedStep, int], ...]] = {}
        self._turns: dict[tuple[Turn, int, int, int], int] = {}
        self._mirrored: dict[tuple[bool, int], int] = {}
        self._recovers: dict[tuple[int, bool], bool] = {}

    def run(self) -> Explored:
        """Visit everything, or stop at the first fault looked for."""
        slot, around = self._slots.of(self._protocol.slot()), self._arounds.of(self._protocol.start())
        start = self._state([slot] * self._scope.bookers, around)
        came_from: dict[State, State] = {start: start}
        frontier, explored = [start], Explored()
        while frontier and explored.finding is None:
            following: list[State] = []
            for state in frontier:
                fault = self._fault(state)
                if fault is not None:
                    explored.finding = Finding(fault, self._retraced(came_from, state))
                    break
                slots, around = self._parts(state)
                for _, _, after_slots, after_around in self._steps(slots, around):
                    explored.transitions += 1
                    after = self._state(after_slots, after_around)
                    if after not in came_from:
                        came_from[after] = state
                        following.append(after)
            frontier = following
            explored.depth += bool(following)
        explored.states = len(came_from)
        return explored

    # States

    def _state(self, slots: Sequence[int], around: int) -> State:
        state = _packed(slots, around)
        if self._scope.reconcilers == 2:
            return min(state, _packed([self._mirror_slot(slot) for slot in slots], self._mirror_around(around)))
        return state

    def _parts(self, state: State) -> tuple[list[int], int]:
        slots = []
        for _ in range(self._scope.bookers):
            slots.append(state & _MASK)
            state >>= _BITS
        return slots, state

    def _mirror_slot(self, slot: int) -> int:
        key = (True, slot)
        if key not in self._mirrored:
            value = self._slots.values[slot]
            self._mirrored[key] = self._slots.of(value._replace(views=value.views[::-1]))
        return self._mirrored[key]

    def _mirror_around(self, around: int) -> int:
        key = (False, around)
        if key not in self._mirrored:
            value = self._arounds.values[around]
            self._mirrored[key] = self._arounds.of(value._replace(stages=value.stages[::-1]))
        return self._mirrored[key]

    # Steps

    def _steps(self, slots: list[int], around: int) -> list[tuple[int, str, list[int], int]]:
        """Every step: which slot takes it (-1: it is not about one), its label, the slots and what is around after."""
        facts, arounds = self._slots.facts, self._arounds.facts
        room = sum([facts[slot].entered for slot in slots]) < arounds[around].places
        steps: list[tuple[int, str, list[int], int]] = []
        for position, slot in enumerate(slots):
            for label, after, after_around in self._of_slot(slot, around, room):
                changed = slots.copy()
                changed[position] = after
                if arounds[after_around].reading:
                    steps.append((position, label, *self._finished(changed, after_around)))
                else:
                    steps.append((position, label, changed, after_around))
        for step, after_around in self._of_all(around):
            turned = [self._turned(step, slot, after_around) for slot in slots]
            steps.append((-1, step.label, *self._finished(turned, after_around)))
        return steps

    def _finished(self, slots: list[int], around: int) -> tuple[list[int], int]:
        """A reconciler with nothing left to do is idle again."""
        facts = self._slots.facts
        for who in self._arounds.facts[around].reading:
            if all(facts[slot].read[who] for slot in slots):
                idle = at_stage(self._arounds.values[around], who, Stage.IDLE)
                around = self._arounds.of(idle)
                step = SharedStep("", Turn.NOTHING, idle, who)
                slots = [self._turned(step, slot, around) for slot in slots]
        return slots, around

    # Worked out once

    def _of_slot(self, slot: int, around: int, room: bool) -> tuple[tuple[str, int, int], ...]:
        key = (slot, around, room)
        steps = self._alone.get(key)
        if steps is None:
            found = self._protocol.alone(self._slots.values[slot], self._arounds.values[around], room)
            steps = self._alone[key] = tuple((label, self._slots.of(s), self._arounds.of(a)) for label, s, a in found)
        return steps

    def _of_all(self, around: int) -> tuple[tuple[SharedStep, int], ...]:
        steps = self._shared.get(around)
        if steps is None:
            found = self._protocol.shared(self._arounds.values[around])
            steps = self._shared[around] = tuple((step, self._arounds.of(step.after)) for step in found)
        return steps

    def _turned(self, step: SharedStep, slot: int, after: int) -> int:
        key = (step.turn, step.who, slot, after)
        turned = self._turns.get(key)
        if turned is None:
            turned = self._turns[key] = self._slots.of(self._protocol.turn(step, self._slots.values[slot]))
        return turned

    def _around_facts(self, around: Around) -> _AroundFacts:
        reading = tuple(who for who, stage in enumerate(around.stages) if stage is Stage.READING)
        places = self._scope.cap - around.drift
        return _AroundFacts(places, around.drift != 0, around.store is Store.OPEN, reading)

    # Faults

    def _fault(self, state: State) -> Fault | None:
        slots, around = self._parts(state)
        known, facts = [self._slots.facts[slot] for slot in slots], self._arounds.facts[around]
        here = (
            (Fault.OVERBOOKED, sum([fact.counted for fact in known]) > self._cap),
            (Fault.GHOST, any(fact.ghost for fact in known)),
            (Fault.MISCOUNTED, facts.drifted),
            (Fault.DIVERGED, not all(self._converges(slot, facts.open) for slot in slots)),
        )
        return next((fault for fault, found in here if found and fault in self._faults), None)

    def _converges(self, slot: int, is_open: bool) -> bool:
        """Whether a slot comes right by itself when from now on nobody does anything but recompute.

        Every process dies and every message is lost, which is the worst: whoever goes on, or a message that arrives,
        leads to another state, of which the same is asked. A store that is not open is filled from the proc table.
        """
        key = (slot, is_open)
        known = self._recovers.get(key)
        if known is None:
            known = self._recovers[key] = not is_open or self._recovered(self._slots.values[slot])
        return known

    def _recovered(self, slot: Slot) -> bool:
        quiet = Around((Stage.IDLE,) * self._scope.reconcilers)
        slot = slot._replace(booker=Booker.OVER, release=False, late=Late.NONE)
        for _ in range(2):
            for _ in range(AGE):
                slot = self._protocol.turn(SharedStep("", Turn.TICK, quiet), slot)
            marked, reading = at_stage(quiet, 0, Stage.MARKED), at_stage(quiet, 0, Stage.READING)
            slot = self._protocol.turn(SharedStep("", Turn.MARK, marked), slot)
            slot = self._protocol.turn(SharedStep("", Turn.SNAPSHOT, reading), slot)
            while not slot.read[0]:
                slot = next(s for label, s, _ in self._protocol.alone(slot, reading, False) if "reconcile" in label)
            slot = self._protocol.tidy(slot, quiet)
        return (slot.entry is not Entry.ABSENT) == (slot.row is Row.LIVE)

    # Counterexamples

    def _retraced(self, came_from: dict[State, State], state: State) -> tuple[str, ...]:
        """The steps to ``state``, with each proc and reconciler under one name all the way."""
        path = [state]
        while came_from[path[-1]] != path[-1]:
            path.append(came_from[path[-1]])
        path.reverse()
        slots, around = self._parts(path[0])
        labels = []
        for wanted in path[1:]:
            steps = self._steps(slots, around)
            position, label, slots, around = next(step for step in steps if self._state(step[2], step[3]) == wanted)
            labels.append(label if position < 0 else f"proc {position + 1} {label}")
        return tuple(labels)


def _slot_facts(slot: Slot) -> _SlotFacts:
    entered = slot.entry is not Entry.ABSENT
    return _SlotFacts(slot.counted, entered, slot.buried and entered, slot.read)


def _packed(slots: Sequence[int], around: int) -> State:
    state = around
    for slot in sorted(slots):
        state = state << _BITS | slot
    return state
