"""What must be true of the ledger after each step of the model-based test, and the books it keeps for that."""

from __future__ import annotations

from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from opencue_sched.accounting.recompute import read_snapshot
from tests.integration.accounting.stepped_booker import Attempt, Booker
from tests.integration.accounting.stepped_cuebot import Cuebot
from tests.integration.accounting.stepped_disk import SteppedDisk
from tests.integration.accounting.stepped_farm import SteppedFarm
from tests.integration.accounting.stepped_seats import check_machines, check_seats, look_at_limits
from tests.integration.accounting.stepped_store import Seen, check_room, check_sums, differing, look, sums
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis


class Judged(RuleBasedStateMachine):
    """``watched``: bookings that must be in the ledger; ``foreign``: procs that are somebody else's; ``buried``: ids
    that were released; ``cuebot``: the other program of a dual store. ``done`` counts what was played."""

    farm: ClassVar[SteppedFarm]
    disk: ClassVar[SteppedDisk]
    client: ClassVar[SteppedRedis]
    clock: ClassVar[Clock]
    done: ClassVar[dict[str, int]]

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Actor] = []
        self.bookers: list[Booker] = []
        self.attempts: dict[str, Attempt] = {}
        self.watched: set[str] = set()
        self.foreign: set[str] = set()
        self.buried: set[str] = set()
        self.releases: list[str] = []
        self.versions: dict[str, int] = {}
        self.backup: dict[str, bytes] = {}
        self.epoch = ""
        self.ids = self.looked_at = 0
        self.closed = False
        self.cuebot: Cuebot | None = None

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.done["steps"] += 1
        self._judge()

    def _judge(self) -> None:
        if not hasattr(self, "workers") or self.client.used == self.looked_at:
            return
        seen = look(self.client, self.farm.vertex_keys)
        if seen.epoch != self.epoch:
            self.epoch, self.buried, self.versions = seen.epoch, set(), {}
        fresh = self._news()
        if self.cuebot:
            self.cuebot.look_at(seen)
        if seen.is_open:
            taken = sums(self._taken(seen) if fresh or self.cuebot else ())
            for attempt in fresh:
                check_room(seen, attempt.booking, taken, self.cuebot.lacking if self.cuebot else {})
            check_sums(seen)
            self._check_seats(seen, fresh)
            if self.cuebot:
                self.cuebot.check(seen, taken)
            self._check_counted(seen)
            ghosts = self.buried & seen.records.keys()
            assert not ghosts, f"released, and counted again: {ghosts}"
            for key, version in seen.versions.items():
                assert version >= self.versions.get(key, 0) or not version, f"older caps replaced newer ones of {key}"
            self.versions = seen.versions
        self.looked_at, self.closed = self.client.used, not seen.is_open
        self.bookers = [booker for booker in self.bookers if any(a.actor and a.actor.alive for a in booker.attempts)]

    def _news(self) -> list[Attempt]:
        """What was accepted since the last look."""
        fresh: list[Attempt] = []
        for booker in self.bookers:
            self.buried.update(booker.buried)
            fresh += booker.accepted
            booker.accepted, booker.buried = [], []
        self.done["accepted"] += len(fresh)
        self.watched |= {attempt.booking.proc_id for attempt in fresh}
        return fresh

    def _check_seats(self, seen: Seen, fresh: list[Attempt]) -> None:
        limits = look_at_limits(self.client, self.farm.limits, self.farm.machines)
        check_machines(limits, seen.records)
        accepted = [attempt.booking for attempt in fresh if attempt.booking.proc_id in seen.records]
        ids = {booking.proc_id for booking in accepted}
        before = [record for proc_id, record in seen.records.items() if proc_id not in ids]
        check_seats(
            limits, self.farm.machines, before, [(booking, seen.records[booking.proc_id]) for booking in accepted]
        )

    def _check_counted(self, seen: Seen) -> None:
        """What we committed, or still can, is in the ledger until it ends, or its show is given away."""
        unseen = self.watched - seen.records.keys() - self.foreign
        if unseen:
            pending = {i for i in unseen if self.attempts[i].may_commit(self.clock.now)}
            missing = unseen & self.farm.live().keys() | pending
            assert not missing, f"running, or about to, and not counted: {sorted(missing)}"
            self.watched -= {i for i in unseen if self.attempts[i].decided}

    def _taken(self, seen: Seen) -> list[str]:
        """What is committed or can still be: by the ledger where it knows of it, else as it was booked.

        Somebody else's procs count from the moment the ledger knows them.
        """
        ids = {
            i for i, attempt in self.attempts.items() if attempt.may_commit(self.clock.now)
        } | self.farm.live().keys()
        ours = {i: self.attempts[i].booking.packed() for i in ids & self.attempts.keys() if i not in self.foreign}
        return [*(ours | {i: seen.records[i].entry for i in ids & seen.records.keys()}).values()]

    def _off(self) -> tuple[str, ...]:
        """Where the ledger is not the proc table."""
        seen = look(self.client, self.farm.vertex_keys)
        check_sums(seen)
        return differing(seen, read_snapshot(self.farm.engine)[1])
