"""The protocol as an abstract model: what each process may do next, and what that does.

One vertex with one cap, in some searches a limit of machines beside it, and one slot for each booker, with what
everybody knows of the proc it is about. Scripts and transactions are atomic; between any two steps of one process any
other may take any number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from tests.unit.accounting.explorer.rules import AGE, DEADLINE, MACHINES, REPORTS, Rules, Scope
from tests.unit.accounting.explorer.scripts import Scripts
from tests.unit.accounting.explorer.state import (
    Around,
    Booker,
    Decision,
    Entry,
    Late,
    Row,
    Slot,
    Stage,
    Store,
    View,
)

Step = tuple[str, Slot, Around]


class Turn(Enum):
    """What a step does to every slot."""

    NOTHING = auto()
    TICK = auto()
    MARK = auto()
    ASK = auto()
    SNAPSHOT = auto()
    JUMP = auto()
    EMPTY = auto()
    FILL = auto()
    OPEN = auto()
    REPORT = auto()


class SharedStep(NamedTuple):
    """A step that concerns all slots. ``who`` is the reconciler that takes it."""

    label: str
    turn: Turn
    after: Around
    who: int = 0


class Protocol:
    """The steps under ``rules``. ``alone`` are those that touch one slot, ``shared`` those that touch all."""

    def __init__(self, rules: Rules, scope: Scope) -> None:
        self.rules = rules
        self.scope = scope
        self.scripts = Scripts(rules)

    def start(self) -> Around:
        """An open, empty store, with everything still to happen."""
        s = self.scope
        stages = (Stage.IDLE,) * s.reconcilers
        return Around(
            stages,
            crashes=s.crashes,
            flushes=s.flushes,
            jumps=s.jumps,
            pauses=s.pauses,
            foreign=s.foreign,
            hangs=s.hangs,
            frames_on=(0,) * MACHINES if s.seats else (),
            settled_on=(0,) * MACHINES if s.seats else (),
            reports=s.reports,
        )

    def slot(self) -> Slot:
        """A booker that has not begun."""
        return Slot((View(),) * self.scope.reconcilers)

    # Steps that touch one slot

    def alone(self, slot: Slot, around: Around, room: bool) -> Iterator[Step]:
        """What may happen to a slot next. ``room``: the counter is below the cap."""
        for steps in (
            self._booker(slot, around, room),
            self._releaser(slot, around),
            self._network(slot, around, room),
            self._reconcilers(slot, around),
        ):
            for label, after, after_around in steps:
                moved = self.scripts.moved(slot, after, after_around)
                yield label, self.tidy(after, moved), moved

    def _booker(self, slot: Slot, around: Around, room: bool) -> Iterator[Step]:
        is_open = around.store is Store.OPEN
        over = slot._replace(booker=Booker.OVER)
        if slot.booker is Booker.IDLE:
            yield from self._begins(slot, around, room and is_open)
        elif slot.booker is Booker.BOOKED:
            if (slot.age < DEADLINE or not self.rules.server_deadline) and self._accepted_still(slot):
                yield "commits", slot._replace(booker=Booker.COMMITTED, row=Row.LIVE), around
            yield "is refused by PostgreSQL", slot._replace(booker=Booker.FAILED), around
            yield "loses the connection in COMMIT", slot._replace(booker=Booker.LIMBO), around
            if around.hangs and slot.age < DEADLINE:
                taken = around._replace(hangs=around.hangs - 1, hanging=around.hanging + 1)
                yield "sends a COMMIT, which hangs", slot._replace(booker=Booker.HANGING), taken
        elif slot.booker is Booker.HANGING:
            ended = around._replace(hanging=around.hanging - 1)
            yield "is committed at last", slot._replace(booker=Booker.COMMITTED, row=Row.LIVE), ended
            yield "is committed at last, nobody hears of it", over._replace(row=Row.LIVE), ended
            yield "is not committed in the end", over, ended
        elif slot.booker is Booker.LIMBO:
            if slot.age < DEADLINE and self._accepted_still(slot):
                yield "is committed, nobody hears of it", over._replace(row=Row.LIVE), around
            if not self.rules.unknown_stays and is_open:
                yield ("rolls back without knowing", *self.scripts.roll_back(slot, around))
        elif slot.booker is Booker.COMMITTED and is_open:
            yield from self._settles(over, around)
        elif slot.booker is Booker.FAILED and is_open:
            yield ("rolls back", *self.scripts.roll_back(over, around))
        elif slot.booker in (Booker.COMMITTED, Booker.FAILED):
            yield "gives up", over, around
        elif self._forgotten(slot, around):
            yield "starts again with a new id", self.slot(), around
        if around.crashes and slot.booker in (Booker.BOOKED, Booker.COMMITTED, Booker.FAILED):
            yield "dies", over, around._replace(crashes=around.crashes - 1)

    def _accepted_still(self, slot: Slot) -> bool:
        """The commit compares terms while it keeps reports from being committed: one that comes after a COMMIT was sent
        finds it carried out or not."""
        return not (slot.other_terms and self.rules.same_terms)

    def _begins(self, slot: Slot, around: Around, accepted: bool) -> Iterator[Step]:
        for machine in range(MACHINES) if accepted and self.scope.seats else ():
            if self.scripts.takes(around, machine, self.scope.seats):
                held = bool(around.settled_on[machine] or around.known >> machine & 1)
                on_machine = slot._replace(machine=machine, held=held, other_terms=not around.told)
                booked = self.scripts.book(on_machine)._replace(booker=Booker.BOOKED)
                yield f"books on machine {machine + 1}", booked, around
        if accepted and not self.scope.seats:
            booked = self.scripts.book(slot)
            yield "books", booked._replace(booker=Booker.BOOKED), around
            yield "books, the answer is lost", booked._replace(booker=Booker.OVER), around
            if self.scope.late_copies:
                copied = booked._replace(booker=Booker.BOOKED, late=Late.BOOK)
                yield "books, a copy of the call is late", copied, around
        if around.foreign:
            foreign = slot._replace(booker=Booker.OVER, own=False, row=Row.LIVE)
            yield "is inserted by somebody else", foreign, around._replace(foreign=around.foreign - 1)

    def _settles(self, over: Slot, around: Around) -> Iterator[Step]:
        settled = self.scripts.settle(over)
        yield "settles", settled, around
        if self.scope.late_copies and over.late is Late.NONE:
            yield "settles, a copy of the call is late", settled._replace(late=Late.SETTLE), around
            yield "settles, the call is late", over._replace(late=Late.SETTLE), around

    def _releaser(self, slot: Slot, around: Around) -> Iterator[Step]:
        if slot.row is Row.LIVE:
            yield "is deleted", slot._replace(row=Row.GONE, release=True), around
        if slot.release:
            yield "has its release lost", slot._replace(release=False), around
            if around.store is Store.OPEN:
                after, moved = self.scripts.release(slot, around)
                yield "is released", after._replace(release=False), moved
                yield "is released, and will be again", after, moved
        if slot.buried and self.scope.forgets:
            yield "has its tombstone expire", slot._replace(buried=False), around

    def _network(self, slot: Slot, around: Around, room: bool) -> Iterator[Step]:
        if slot.late is Late.NONE:
            return
        arrived = slot._replace(late=Late.NONE)
        yield "has its late call lost", arrived, around
        if around.store is Store.OPEN and slot.late is Late.SETTLE:
            yield "is settled by the late call", self.scripts.settle(arrived), around
        elif around.store is Store.OPEN and slot.entry is Entry.ABSENT and room and not self.scripts.refuses(slot):
            yield "is booked by the late call", self.scripts.book(arrived), around

    def _reconcilers(self, slot: Slot, around: Around) -> Iterator[Step]:
        for who, (stage, view) in enumerate(zip(around.stages, slot.views, strict=True)):
            name = self._name(who)
            if stage is not Stage.READING or view.decision is Decision.NOTHING:
                continue
            if view.decision is Decision.UNREAD:
                judged = self.scripts.judge(slot, view)
                yield f"is read by {name}", _seen_by(slot, who, judged), around
            elif view.decision is Decision.FRESH:
                yield f"is read again by {name}", _seen_by(slot, who, self.scripts.reread(slot)), around
            else:
                done = self.scripts.apply(_seen_by(slot, who, Decision.NOTHING), view.decision)
                yield f"is reconciled by {name} ({view.decision.name.lower()})", done, around

    def _forgotten(self, slot: Slot, around: Around) -> bool:
        """Nobody knows the id any more, so that the slot may be used for another."""
        expected = slot.filled or any(
            stage is Stage.READING and view.snap for stage, view in zip(around.stages, slot.views, strict=True)
        )
        busy = any(view.decision not in (Decision.UNREAD, Decision.NOTHING) for view in slot.views)
        silent = slot.late is Late.NONE and not slot.release
        return slot.entry is Entry.ABSENT and slot.row is not Row.LIVE and silent and not expected and not busy

    # Steps that touch every slot

    def shared(self, around: Around) -> Iterator[SharedStep]:
        """What may happen to all at once; ``turn`` says what it does to a slot."""
        waited = min(AGE, around.waited + (around.store is Store.WAITING))
        yield SharedStep("time passes", Turn.TICK, around._replace(waited=waited))
        if around.store is Store.OPEN:
            for who in range(len(around.stages)):
                yield from self._passes(around, who)
            if around.jumps:
                yield SharedStep("Redis TIME jumps forward", Turn.JUMP, around._replace(jumps=around.jumps - 1))
        yield from self._filler(around)
        if around.reports:
            for who, machines in REPORTS.items():
                said = around._replace(reported=machines, told=False, reports=around.reports - 1)
                yield SharedStep(f"{who} is reported", Turn.REPORT, said)
        if not around.told:
            told = around._replace(known=around.reported, told=True)
            yield SharedStep("Redis learns what was reported", Turn.NOTHING, told)
        if around.flushes:
            idle = (Stage.IDLE,) * len(around.stages)
            lost = around._replace(stages=idle, store=Store.LOST, drift=0, flushes=around.flushes - 1)
            yield SharedStep("Redis is flushed", Turn.EMPTY, self._forgets_the_wait(lost))
        if around.overtaken:
            after = around._replace(overtaken=False)
            if self.rules.fenced_wipe:
                yield SharedStep("the overtaken filler is refused", Turn.NOTHING, after)
            else:
                yield SharedStep("the overtaken filler wipes", Turn.EMPTY, after._replace(drift=0))

    def _passes(self, around: Around, who: int) -> Iterator[SharedStep]:
        stage, name = around.stages[who], self._name(who)
        if stage is Stage.IDLE:
            yield SharedStep(f"{name} marks", Turn.MARK, at_stage(around, who, Stage.MARKED), who)
        elif stage in (Stage.MARKED, Stage.BETWEEN):
            yield self._looks(around, who, name)
        if stage is not Stage.IDLE:
            yield SharedStep(f"{name} stops", Turn.NOTHING, at_stage(around, who, Stage.IDLE), who)

    def _looks(self, around: Around, who: int, name: str) -> SharedStep:
        """The snapshot; where COMMITs can hang, with the question for them before it."""
        begun = around.stages[who] is Stage.BETWEEN
        after = at_stage(around, who, Stage.READING if begun or not self.scope.hangs else Stage.BETWEEN)
        if self.scope.hangs and begun != self.rules.asks_first:
            return SharedStep(f"{name} asks for COMMITs that hang", Turn.ASK, after, who)
        return SharedStep(f"{name} takes its snapshot", Turn.SNAPSHOT, after, who)

    def _filler(self, around: Around) -> Iterator[SharedStep]:
        waiting, left = around._replace(store=Store.WAITING), around._replace(store=Store.LEFT)
        if around.store is Store.LOST:
            yield SharedStep("a filler closes the store", Turn.NOTHING, waiting)
        elif around.store is Store.LEFT:
            goes_on = waiting if self.rules.successor_waits else waiting._replace(waited=AGE)
            yield SharedStep("another filler goes on", Turn.NOTHING, goes_on)
        elif around.store is Store.WAITING:
            yield from self._waits(around, left)
            yield SharedStep("the filler dies", Turn.NOTHING, left)
        elif around.store is Store.FILLING:
            opened = self._forgets_the_wait(around._replace(store=Store.OPEN))
            yield SharedStep("the filler opens the store", Turn.OPEN, opened)
            yield SharedStep("the filler dies", Turn.NOTHING, left)

    def _waits(self, around: Around, left: Around) -> Iterator[SharedStep]:
        waits = around.waited < AGE and self.rules.bootstrap_waits
        if not waits and not (around.hanging and self.rules.filler_asks):
            filling = around._replace(store=Store.FILLING)
            yield SharedStep("the filler takes its snapshot", Turn.FILL, filling)
            if around.pauses:
                paused = left._replace(overtaken=True, pauses=around.pauses - 1)
                yield SharedStep("the filler is paused", Turn.NOTHING, paused)
        if around.jumps:
            jumped = around._replace(jumps=around.jumps - 1)
            if not self.rules.waits_by_boot_clock:
                jumped = jumped._replace(waited=AGE)
            yield SharedStep("Redis TIME jumps forward", Turn.NOTHING, jumped)

    def _forgets_the_wait(self, around: Around) -> Around:
        return around._replace(waited=0) if self.rules.wait_of_this_loss else around

    def turn(self, step: SharedStep, slot: Slot) -> Slot:
        """What a shared step does to one slot."""
        return self.tidy(self._turned(step, slot), step.after)

    def _turned(self, step: SharedStep, slot: Slot) -> Slot:
        if step.turn is Turn.TICK:
            seen = min(AGE + 1, slot.seen + 1) if slot.seen else 0
            return slot._replace(age=min(AGE, slot.age + 1), seen=seen)
        if step.turn is Turn.MARK:
            view = View(old=self.scripts.too_old(slot))
            seen = slot.seen or int(slot.entry is Entry.FLIGHT)
            return _with_view(slot, step.who, view)._replace(seen=seen)
        if step.turn is Turn.ASK:
            view = slot.views[step.who]
            return _with_view(slot, step.who, view._replace(old=view.old and not self.scripts.may_still_commit(slot)))
        if step.turn is Turn.SNAPSHOT:
            return _with_view(slot, step.who, slot.views[step.who]._replace(snap=slot.row is Row.LIVE))
        if step.turn is Turn.JUMP:
            return slot._replace(jumped=slot.entry is Entry.FLIGHT)
        if step.turn is Turn.EMPTY:
            return self.scripts.emptied(slot)
        if step.turn is Turn.REPORT:
            return slot._replace(other_terms=True)
        if step.turn is Turn.FILL:
            return slot._replace(filled=slot.row is Row.LIVE)
        if step.turn is Turn.OPEN:
            return slot._replace(entry=Entry.CONFIRMED if slot.filled else Entry.ABSENT, buried=False)
        return slot

    # One state, one name: what can never matter again is forgotten

    def tidy(self, slot: Slot, around: Around) -> Slot:
        """The slot without what makes no difference any more."""
        waiting = slot.booker in (Booker.BOOKED, Booker.LIMBO, Booker.HANGING)
        if slot.booker is Booker.LIMBO and slot.age >= DEADLINE and self.rules.unknown_stays:
            slot, waiting = slot._replace(booker=Booker.OVER), False
        if not waiting and (slot.other_terms or slot.held):
            slot = slot._replace(other_terms=False, held=False)
        if slot.machine >= 0 and slot.entry is Entry.ABSENT and slot.row is not Row.LIVE and slot.booker is Booker.OVER:
            slot = slot._replace(machine=-1)
        if slot.entry is not Entry.FLIGHT:
            slot = slot._replace(seen=0, jumped=False, age=slot.age if waiting else 0)
        if slot.late is Late.BOOK and self.scripts.refuses(slot) and not self.scope.forgets:
            slot = slot._replace(late=Late.NONE)
        if slot.filled and around.store is not Store.FILLING:
            slot = slot._replace(filled=False)
        views = tuple(self._tidy_view(slot, view, stage) for view, stage in zip(slot.views, around.stages, strict=True))
        return slot if views == slot.views else slot._replace(views=views)

    def _tidy_view(self, slot: Slot, view: View, stage: Stage) -> View:
        if stage is Stage.IDLE:
            return View()
        if stage is Stage.READING and view.decision is not Decision.UNREAD:
            return View(decision=view.decision)
        spared = self.rules.spares_new_entries and (view.changed or slot.entry is Entry.ABSENT)
        if stage is Stage.READING and spared and not view.snap:
            return View(decision=Decision.NOTHING)
        return view

    def _name(self, who: int) -> str:
        return "the reconciler" if self.scope.reconcilers == 1 else f"reconciler {who + 1}"


def at_stage(around: Around, who: int, stage: Stage) -> Around:
    """The same with one reconciler at ``stage``."""
    return around._replace(stages=(*around.stages[:who], stage, *around.stages[who + 1 :]))


def _with_view(slot: Slot, who: int, view: View) -> Slot:
    return slot._replace(views=(*slot.views[:who], view, *slot.views[who + 1 :]))


def _seen_by(slot: Slot, who: int, decision: Decision) -> Slot:
    return _with_view(slot, who, slot.views[who]._replace(decision=decision))
