"""What the Lua scripts and the rules of a recompute do to one slot of the model."""

from __future__ import annotations

from tests.unit.accounting.explorer.rules import AGE, DEADLINE, Rules
from tests.unit.accounting.explorer.state import Around, Booker, Decision, Entry, Late, Row, Slot, View

_DRIFT_BOUND = 2


class Scripts:
    """The atomic steps of Redis under ``rules``."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def book(self, slot: Slot) -> Slot:
        """lua/book.lua, for an id without entry, when there is room."""
        again = slot.booker in (Booker.BOOKED, Booker.LIMBO, Booker.HANGING)
        return self._entered(slot, Entry.FLIGHT)._replace(age=slot.age if again else 0)

    def takes(self, around: Around, machine: int, seats: int) -> bool:
        """lua/includes/seats.lua: whether a limit of ``seats`` machines lets a frame start on this one."""
        use, reported = (around.machines | around.known).bit_count(), around.known >> machine & 1
        holding = around.settled_on if self.rules.holds_when_settled else around.frames_on
        holds = holding[machine] or reported
        counted_alone = 0 if holds else around.machines >> machine & 1
        if use - counted_alone < seats:
            return True
        if not holds:
            return not self.rules.holders_alone
        return use <= seats or not self.rules.stops_above or may_go_on(around.machines, use, seats, machine)

    def moved(self, before: Slot, after: Slot, around: Around) -> Around:
        """lua/includes/machines.lua: a machine comes with its first frame and goes with its last."""
        if before.entry is after.entry or not around.frames_on:
            return around
        frames, settled, machines = list(around.frames_on), list(around.settled_on), around.machines
        for slot, more in ((before, -1), (after, 1)):
            frames[slot.machine] += more * (slot.entry is not Entry.ABSENT)
            settled[slot.machine] += more * (slot.entry is Entry.CONFIRMED)
        machine = before.machine if before.entry is not Entry.ABSENT else after.machine
        machines |= 1 << machine
        if after.entry is Entry.ABSENT and (not frames[machine] or not self.rules.goes_with_last):
            machines &= ~(1 << machine)
        return around._replace(frames_on=tuple(frames), settled_on=tuple(settled), machines=machines)

    def settle(self, slot: Slot) -> Slot:
        """lua/reconcile.lua, whatever is there: confirm, or add what the ledger has lost."""
        if slot.entry is Entry.FLIGHT or (slot.entry is Entry.ABSENT and not self.refuses(slot)):
            return self._entered(slot, Entry.CONFIRMED)
        return slot

    def release(self, slot: Slot, around: Around) -> tuple[Slot, Around]:
        """lua/release.lua: remove or do nothing, leaving a tombstone either way."""
        return self._removed(slot, around, exact=self.rules.idempotent_release)

    def roll_back(self, slot: Slot, around: Around) -> tuple[Slot, Around]:
        """lua/book.lua, force with negated amounts: exactly this entry, and a tombstone either way."""
        return self._removed(slot, around, exact=self.rules.exact_rollback)

    def _removed(self, slot: Slot, around: Around, *, exact: bool) -> tuple[Slot, Around]:
        if slot.entry is Entry.ABSENT:
            drift = around.drift if exact else max(-_DRIFT_BOUND, around.drift - 1)
            return slot._replace(buried=True), around._replace(drift=drift)
        return self._touched(slot._replace(entry=Entry.ABSENT, buried=True)), around

    def refuses(self, slot: Slot) -> bool:
        """Whether the tombstone keeps the id out."""
        return slot.buried and self.rules.tombstones

    def _entered(self, slot: Slot, entry: Entry) -> Slot:
        return self._touched(slot._replace(entry=entry, jumped=False))

    def _touched(self, slot: Slot) -> Slot:
        """The entry has a new sequence number: first_seen, and differences found for the old one, do not hold."""
        return slot._replace(seen=0, views=tuple(map(_outdated, slot.views)))

    # A recompute (opencue_sched/accounting/recompute.py)

    def too_old(self, slot: Slot) -> bool:
        """In flight for an age by Redis TIME, and seen an age ago by the boot clock."""
        sighted = slot.seen > AGE or not self.rules.two_sightings
        if not self.rules.resolves_in_flight:
            return False
        return slot.entry is Entry.FLIGHT and (slot.jumped or slot.age >= AGE) and sighted

    def may_still_commit(self, slot: Slot) -> bool:
        """PostgreSQL says that it has the COMMIT, for as long as only a COMMIT can that was sent in time."""
        return self.rules.asks_for_commits and slot.booker is Booker.HANGING and slot.age >= DEADLINE

    def judge(self, slot: Slot, view: View) -> Decision:
        """What a reconciler decides about a slot as it reads it."""
        unchanged = not view.changed
        if slot.entry is Entry.ABSENT:
            return Decision.FRESH if view.snap else Decision.NOTHING
        too_old = slot.entry is Entry.FLIGHT and view.old and unchanged
        if view.snap:
            return Decision.CONFIRM if too_old else Decision.NOTHING
        if slot.entry is Entry.CONFIRMED:
            return Decision.REMOVE if unchanged or not self.rules.judges_by_mark else Decision.NOTHING
        if too_old or not self.rules.carries_in_flight or not self.rules.age_at_mark:
            return Decision.REMOVE
        return Decision.NOTHING

    def apply(self, slot: Slot, decision: Decision) -> Slot:
        """lua/reconcile.lua, for a difference that is still the one that was found."""
        if decision is Decision.ADD:
            taken = slot.entry is not Entry.ABSENT or self.refuses(slot)
            return slot if taken else self._entered(slot, Entry.CONFIRMED)
        if decision is Decision.CONFIRM:
            return self._entered(slot, Entry.CONFIRMED)
        spared_at_last = not self.rules.age_at_mark and slot.entry is Entry.FLIGHT
        if spared_at_last and not (slot.jumped or slot.age >= AGE):
            return slot
        return self._touched(slot._replace(entry=Entry.ABSENT))

    def reread(self, slot: Slot) -> Decision:
        """A second look at a proc the ledger lacks."""
        return Decision.ADD if slot.row is Row.LIVE else Decision.NOTHING

    def emptied(self, slot: Slot) -> Slot:
        """The keys are gone, and with the epoch every call that is late."""
        return self._touched(slot._replace(entry=Entry.ABSENT, buried=False, late=Late.NONE))


def may_go_on(ours: int, use: int, seats: int, machine: int) -> bool:
    """Whether a machine is among the first of ours, which are as many as may go on where ``use`` is above ``seats``."""
    first = (ours & ((1 << machine) - 1)).bit_count()
    return bool(ours >> machine & 1) and first < ours.bit_count() - (use - seats)


def _outdated(view: View) -> View:
    void = view.decision in (Decision.REMOVE, Decision.CONFIRM)
    return view._replace(changed=True, decision=Decision.NOTHING if void else view.decision)
