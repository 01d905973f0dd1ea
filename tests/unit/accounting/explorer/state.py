"""What a state of the model is made of."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tests.unit.accounting.explorer.rules import DEADLINE


class Booker(IntEnum):
    """Where the booker of a slot is."""

    IDLE = 0
    BOOKED = 1  # accepted; its transaction is open
    COMMITTED = 2  # knows that it is committed, has to settle
    FAILED = 3  # knows that it is not, has to roll back
    LIMBO = 4  # lost the connection in COMMIT: the server may still carry it out
    OVER = 5  # finished, gave up or died
    HANGING = 6  # PostgreSQL has its COMMIT, and ends it when it can


class Row(IntEnum):
    """The proc in PostgreSQL."""

    NONE = 0
    LIVE = 1
    GONE = 2


class Entry(IntEnum):
    """The proc in the ledger."""

    ABSENT = 0
    FLIGHT = 1
    CONFIRMED = 2


class Late(IntEnum):
    """A script call that Redis has yet to execute although its caller went on."""

    NONE = 0
    BOOK = 1
    SETTLE = 2


class Decision(IntEnum):
    """What a reconciler has found about a slot."""

    UNREAD = 0
    NOTHING = 1
    REMOVE = 2
    CONFIRM = 3
    FRESH = 4  # in the snapshot only: to be read again
    ADD = 5


class View(NamedTuple):
    """What one reconciler knows of a slot.

    ``snap``: it is in its snapshot; ``changed``: the entry changed after its mark; ``old``: it was too old at the mark.
    """

    snap: bool = False
    changed: bool = False
    old: bool = False
    decision: Decision = Decision.UNREAD


class Slot(NamedTuple):
    """One proc and all that concerns it.

    ``own``: booked by us. ``buried``: a release or rollback of it was carried out in this epoch (its tombstone).
    ``age``: ticks since the booking. ``jumped``: by Redis TIME it is too old, whatever ``age`` says. ``seen``: 1 +
    ticks since the first mark that saw the entry as it is, 0 when none did. ``release``: a notification of its
    deletion is on its way. ``filled``: in the snapshot of the filler. ``machine``: where it is booked, -1 for nowhere,
    or where no limit asks; ``held``: that held the limit when it was booked; ``other_terms``: the limit was reported
    since what it was decided under.
    """

    views: tuple[View, ...]
    booker: Booker = Booker.IDLE
    own: bool = True
    row: Row = Row.NONE
    entry: Entry = Entry.ABSENT
    buried: bool = False
    age: int = 0
    jumped: bool = False
    seen: int = 0
    release: bool = False
    late: Late = Late.NONE
    filled: bool = False
    machine: int = -1
    held: bool = False
    other_terms: bool = False

    @property
    def may_commit(self) -> bool:
        """Accepted and within its deadline: it counts as if it were committed."""
        in_time = self.booker in (Booker.BOOKED, Booker.LIMBO) and self.age < DEADLINE
        return in_time or self.booker is Booker.HANGING

    @property
    def counted(self) -> bool:
        """It takes a place under the cap, whatever the ledger says. Somebody else's proc is not ours to refuse."""
        return self.own and (self.row is Row.LIVE or self.may_commit)

    @property
    def read(self) -> tuple[bool, ...]:
        """For each reconciler whether it has nothing left to do here."""
        return tuple(view.decision is Decision.NOTHING for view in self.views)


class Stage(IntEnum):
    """Where a reconciler is."""

    IDLE = 0
    MARKED = 1
    READING = 2
    BETWEEN = 3  # it has asked for COMMITs that hang, or has its snapshot, and the other is to come


class Store(IntEnum):
    """Where the store is: open for booking, emptied, being filled by a process that waits, then has its snapshot, or
    left closed by one that has died."""

    OPEN = 0
    LOST = 1
    WAITING = 2
    FILLING = 3
    LEFT = 4


class Around(NamedTuple):
    """What is not about one slot. ``waited``: ticks that fillers have waited with the store closed, and noted.
    ``drift``: the counter less the number of entries. ``overtaken``: a paused filler still means to wipe the store.
    ``hanging``: COMMITs that hang now. The next six count what may still go wrong.

    Of a limit of machines: ``frames_on`` each machine (empty where there is no such limit), those of them that are
    ``settled_on`` it, and the ``machines`` that have any, as the scripts keep them; ``reported``: those that its
    licence server has named, ``known``: as Redis knows them, ``told``: whether that is the last report; ``reports``
    that may still come."""

    stages: tuple[Stage, ...]
    store: Store = Store.OPEN
    waited: int = 0
    drift: int = 0
    overtaken: bool = False
    hanging: int = 0
    crashes: int = 0
    flushes: int = 0
    jumps: int = 0
    pauses: int = 0
    foreign: int = 0
    hangs: int = 0
    frames_on: tuple[int, ...] = ()
    settled_on: tuple[int, ...] = ()
    machines: int = 0
    reported: int = 0
    known: int = 0
    told: bool = True
    reports: int = 0
