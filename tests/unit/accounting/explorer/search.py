"""Breadth-first search of the model: every state that can be reached, the shortest way to one that must not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from tests.unit.accounting.explorer.protocol import Protocol, SharedStep, Turn, at_stage
from tests.unit.accounting.explorer.rules import AGE, Rules, Scope
from tests.unit.accounting.explorer.scripts import may_go_on
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
    FORBIDDEN = "a frame starts, or is committed, on a machine on which a limit forbids it"
    ASTRAY = "the machines of a limit are not those of its entries"
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


class _Worked(dict[_T, _F]):
    """What ``work`` finds for a key, worked out once."""

    def __init__(self, work: Callable[[_T], _F]) -> None:
        super().__init__()
        self._work = work

    def __missing__(self, key: _T) -> _F:
        found = self[key] = self._work(key)
        return found


class _SlotFacts(NamedTuple):
    """What the search asks of a slot again and again. ``machine``: where its entry is, as a set."""

    counted: bool
    entered: bool
    ghost: bool
    read: tuple[bool, ...]
    machine: int


class _AroundFacts(NamedTuple):
    """And of what is around: places under the cap for entries, whether the store is open, which reconcilers read."""

    places: int
    drifted: bool
    open: bool
    reading: tuple[int, ...]
    machines: int


class _OfSlot(NamedTuple):
    """A step of one slot: what it and what is around are after it. ``reading``: reconcilers that may be done then."""

    label: str
    slot: int
    around: int
    reading: tuple[int, ...]


class _OfAll(NamedTuple):
    """A step that is not about one slot, and what each slot becomes by it."""

    label: str
    slots: _Worked[int, int]
    around: int
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
        self._of_slot = _Worked(self._steps_of_slot)
        self._of_all = _Worked(self._steps_of_all)
        self._idle = _Worked(self._step_to_idle)
        self._recovers = _Worked(self._recovered)
        self._turned: dict[tuple[Turn, int, int], _Worked[int, int]] = {}
        self._mirrored_slot = _Worked(self._mirror_slot)
        self._mirrored_around = _Worked(self._mirror_around)

    def run(self) -> Explored:
        """Visit everything, or stop at the first fault looked for."""
        slot, around = self._slots.of(self._protocol.slot()), self._arounds.of(self._protocol.start())
        start = self._state([slot] * self._scope.bookers, around)
        came_from: dict[State, State] = {start: start}
        frontier, explored = [start], Explored()
        while frontier and explored.finding is None:
            following: list[State] = []
            for state in frontier:
                slots, around = self._parts(state)
                fault = self._fault(slots, around)
                if fault is not None:
                    explored.finding = Finding(fault, self._retraced(came_from, state))
                    break
                steps = self._steps(slots, around)
                explored.transitions += len(steps)
                for position, label, after_slots, after_around in steps:
                    if self._scope.seats and position >= 0 and self._forbidden(slots, position, after_slots, around):
                        steps_to = (*self._retraced(came_from, state), f"proc {position + 1} {label}")
                        explored.finding = Finding(Fault.FORBIDDEN, steps_to)
                        return explored
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
            mirrored = [self._mirrored_slot[slot] for slot in slots]
            return min(state, _packed(mirrored, self._mirrored_around[around]))
        return state

    def _parts(self, state: State) -> tuple[list[int], int]:
        slots = []
        for _ in range(self._scope.bookers):
            slots.append(state & _MASK)
            state >>= _BITS
        return slots, state

    def _mirror_slot(self, slot: int) -> int:
        value = self._slots.values[slot]
        return self._slots.of(value._replace(views=value.views[::-1]))

    def _mirror_around(self, around: int) -> int:
        value = self._arounds.values[around]
        return self._arounds.of(value._replace(stages=value.stages[::-1]))

    # Steps

    def _steps(self, slots: list[int], around: int) -> list[tuple[int, str, list[int], int]]:
        """Every step: which slot takes it (-1: it is not about one), its label, the slots and what is around after."""
        facts = self._slots.facts
        room = sum([facts[slot].entered for slot in slots]) < self._arounds.facts[around].places
        steps: list[tuple[int, str, list[int], int]] = []
        for position, slot in enumerate(slots):
            for label, after, after_around, reading in self._of_slot[slot, around, room]:
                changed = slots.copy()
                changed[position] = after
                if reading:
                    changed, after_around = self._finished(changed, after_around, reading)
                steps.append((position, label, changed, after_around))
        for label, turned, after_around, reading in self._of_all[around]:
            changed = [turned[slot] for slot in slots]
            if reading:
                changed, after_around = self._finished(changed, after_around, reading)
            steps.append((-1, label, changed, after_around))
        return steps

    def _finished(self, slots: list[int], around: int, reading: tuple[int, ...]) -> tuple[list[int], int]:
        """A reconciler with nothing left to do is idle again."""
        facts = self._slots.facts
        for who in reading:
            for slot in slots:
                if not facts[slot].read[who]:
                    break
            else:
                around, turned = self._idle[around, who]
                slots = [turned[slot] for slot in slots]
        return slots, around

    # Worked out once

    def _steps_of_slot(self, key: tuple[int, int, bool]) -> tuple[_OfSlot, ...]:
        slot, around, room = key
        found = self._protocol.alone(self._slots.values[slot], self._arounds.values[around], room)
        return tuple(
            _OfSlot(label, self._slots.of(after), number, self._arounds.facts[number].reading)
            for label, after, number in [(label, after, self._arounds.of(changed)) for label, after, changed in found]
        )

    def _steps_of_all(self, around: int) -> tuple[_OfAll, ...]:
        steps = []
        for step in self._protocol.shared(self._arounds.values[around]):
            after = self._arounds.of(step.after)
            steps.append(_OfAll(step.label, self._turned_by(step, after), after, self._arounds.facts[after].reading))
        return tuple(steps)

    def _step_to_idle(self, key: tuple[int, int]) -> tuple[int, _Worked[int, int]]:
        around, who = key
        idle = at_stage(self._arounds.values[around], who, Stage.IDLE)
        after = self._arounds.of(idle)
        return after, self._turned_by(SharedStep("", Turn.NOTHING, idle, who), after)

    def _turned_by(self, step: SharedStep, after: int) -> _Worked[int, int]:
        key = (step.turn, step.who, after)
        if key not in self._turned:
            self._turned[key] = _Worked(
                lambda slot: self._slots.of(self._protocol.turn(step, self._slots.values[slot]))
            )
        return self._turned[key]

    def _around_facts(self, around: Around) -> _AroundFacts:
        reading = tuple(who for who, stage in enumerate(around.stages) if stage is Stage.READING)
        places = self._scope.cap - around.drift
        return _AroundFacts(places, around.drift != 0, around.store is Store.OPEN, reading, around.machines)

    # Faults

    def _fault(self, slots: list[int], around: int) -> Fault | None:
        known, facts = [self._slots.facts[slot] for slot in slots], self._arounds.facts[around]
        recomputed = facts.open and self._scope.reconcilers > 0
        here = (
            (Fault.OVERBOOKED, sum([fact.counted for fact in known]) > self._cap),
            (Fault.GHOST, True in [fact.ghost for fact in known]),
            (Fault.MISCOUNTED, facts.drifted),
            (Fault.ASTRAY, facts.machines != _together([fact.machine for fact in known])),
            (Fault.DIVERGED, recomputed and False in [self._recovers[slot] for slot in slots]),
        )
        for fault, found in here:
            if found and fault in self._faults:
                return fault
        return None

    def _forbidden(self, slots: list[int], position: int, after_slots: list[int], around: int) -> bool:
        """Whether a step books what entries and what Redis knows forbid, or commits what rows and the report do."""
        values = self._slots.values
        before, after = values[slots[position]], values[after_slots[position]]
        others = [values[slot] for other, slot in enumerate(slots) if other != position]
        if before.entry is Entry.ABSENT and after.booker is Booker.BOOKED:
            known = self._arounds.values[around].known
            ours = _together([1 << slot.machine for slot in others if slot.entry is not Entry.ABSENT])
            holders = _together([1 << slot.machine for slot in others if slot.entry is Entry.CONFIRMED])
        elif before.row is Row.NONE and after.row is Row.LIVE and not before.held:
            known = self._arounds.values[around].reported
            ours = holders = _together([1 << slot.machine for slot in others if slot.row is Row.LIVE])
        else:
            return False
        use, seats, machine = (ours | known).bit_count(), self._scope.seats, 1 << after.machine
        if (holders | known) & machine:
            return use > seats and not may_go_on(ours, use, seats, after.machine)
        return ((ours | known) & ~machine).bit_count() >= seats

    def _recovered(self, number: int) -> bool:
        """Whether a slot comes right by itself when from now on nobody does anything but recompute.

        Every process dies and every message is lost, which is the worst: whoever goes on, or a message that arrives,
        leads to another state, of which the same is asked. A store that is not open is filled from the proc table.
        """
        quiet = Around((Stage.IDLE,) * self._scope.reconcilers)
        slot = self._slots.values[number]._replace(booker=Booker.OVER, release=False, late=Late.NONE)
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
    machine = 1 << slot.machine if entered and slot.machine >= 0 else 0
    return _SlotFacts(slot.counted, entered, slot.buried and entered, slot.read, machine)


def _together(sets: Sequence[int]) -> int:
    """The machines that are in any of these."""
    together = 0
    for machines in sets:
        together |= machines
    return together


def _packed(slots: Sequence[int], around: int) -> State:
    state = around
    for slot in sorted(slots):
        state = state << _BITS | slot
    return state
