"""Leaders that cannot record in PostgreSQL what they are given or fire."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import OperationalError

from opencue_sched.store.fences import LeaderRecord, PersistentFences
from tests.kit.frozen_clock import Clock


def test_who_cannot_record_its_fence_leaves_the_lease_to_others(redis_client, keys, engine, gate):
    """A beat whose PostgreSQL is away, or a standby that takes no writes, must not keep the others from leading."""

    class ReadOnly(PersistentFences):
        def claim(self, name: str, fence: int) -> bool:
            raise OperationalError("INSERT", {}, Exception(f"read-only: {name} {fence}"))

    unlucky = gate(redis_client, keys, fences=ReadOnly(engine))
    assert unlucky.renew() is None
    assert isinstance(unlucky.trouble, OperationalError)
    assert not redis_client.exists(keys.lease)
    assert gate(redis_client, keys, fences=PersistentFences(engine)).renew() is not None


class Away(PersistentFences):
    """PostgreSQL, as one process reaches it or not; or takes no writes from there."""

    there = writes = True

    def leader(self, name: str) -> LeaderRecord:
        if not self.there:
            raise OperationalError("SELECT", {}, Exception("connection refused"))
        return super().leader(name)

    def renew(self, name: str, fence: int, *, store: int) -> int:
        if not (self.there and self.writes):
            raise OperationalError("INSERT", {}, Exception("connection refused"))
        return super().renew(name, fence, store=store)

    def claim(self, name: str, fence: int) -> bool:
        if not (self.there and self.writes):
            raise OperationalError("INSERT", {}, Exception("connection refused"))
        return super().claim(name, fence)

    def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
        if not (self.there and self.writes):
            raise OperationalError("INSERT", {}, Exception("connection refused"))
        return super().claim_tick(name, fence, task, tick)


def test_a_tick_that_is_due_while_postgresql_is_away_is_fired_when_it_is_back(redis_client, keys, engine, gate):
    clock, fences = Clock(), Away(engine)
    leader = gate(redis_client, keys, clock=clock, fences=fences)
    leader.renew()
    assert leader.may_fire("recompute", 7)
    fences.there = False
    for _ in range(2):
        clock.now += 4.5
        assert leader.renew() is not None, "it goes on leading for a while"
        with pytest.raises(OperationalError):
            leader.may_fire("recompute", 8)
    assert leader.last_ticks == {"recompute": 7}
    fences.there = True
    assert leader.may_fire("recompute", 8)


@pytest.mark.parametrize("trouble", ["there", "writes"])
def test_a_leader_that_cannot_record_what_it_fires_leaves_the_lease_to_one_that_can(
    redis_client, keys, engine, trouble, gate
):
    """Its own network is broken, or its address leads to a standby: reading may go on well."""
    clock, cut_off = Clock(), Away(engine)
    leader = gate(redis_client, keys, clock=clock, fences=cut_off)
    standby = gate(redis_client, keys, clock=clock, fences=PersistentFences(engine))
    leader.renew()
    setattr(cut_off, trouble, False)
    seconds = 0
    while leader.renew() is not None:
        assert standby.renew() is None
        with pytest.raises(OperationalError):
            leader.may_fire("recompute", 8)
        clock.now += 1
        seconds += 1
    assert seconds == 10, "the renewal deadline"
    assert not redis_client.exists(keys.lease)
    assert standby.renew() is not None
    assert standby.may_fire("recompute", 8)
    assert leader.renew() is None


def test_a_leader_that_reached_postgresql_in_between_goes_on(redis_client, keys, engine, gate):
    clock, fences = Clock(), Away(engine)
    leader = gate(redis_client, keys, clock=clock, fences=fences)
    leader.renew()
    for tick in range(20):
        clock.now += 4
        fences.there = tick % 2 == 0
        assert leader.renew() is not None
        if fences.there:
            assert leader.may_fire("recompute", tick)
        else:
            with pytest.raises(OperationalError):
                leader.may_fire("recompute", tick)
