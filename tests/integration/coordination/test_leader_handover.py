"""The conservative hand-over: a new leader keeps quiet for the whole time-out of the one before."""

from __future__ import annotations

import pytest

from opencue_sched.beat import make_gate
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.settings import Coordination
from opencue_sched.store.fences import PersistentFences
from tests.integration.coordination.candidates import Copy, fired_seconds_ago
from tests.kit.frozen_clock import Clock


def quiet_for(gate, clock, seconds) -> None:
    """Let so much time pass, and see that it leads all the while and fires nothing until then."""
    clock.now += seconds - 30  # on a machine that stands still for as long
    assert gate.renew() is not None
    assert not gate.may_fire("recompute", 10**9)
    clock.now += 31
    assert gate.may_fire("recompute", 10**9)


def test_a_new_leader_keeps_quiet_no_longer_than_the_time_out_though_the_clock_was_put_back(redis_client, keys, engine):
    clock = Clock()
    first, second = (careful(redis_client, keys, engine, clock) for _ in range(2))
    first.renew()
    assert first.may_fire("recompute", 7)
    first.resign()
    fired_seconds_ago(engine, keys, -3600)
    assert second.renew() is not None
    quiet_for(second, clock, 180)


def test_the_conservative_setting_is_the_proposals_rule_and_the_other_is_not(settings, redis_client, keys):
    """180 s, and nothing fired for 180 s after the last fire of a predecessor."""
    for tick, handover, seconds in ((7, "conservative", 180), (17, "fenced", 15)):
        redis_client.flushdb()
        chosen = settings.model_copy(update={"coordination": Coordination(handover=handover)})
        first, second = make_gate(chosen), make_gate(chosen)
        assert first.renew() is not None
        assert seconds * 500 < redis_client.pttl(keys.lease) <= seconds * 1000
        assert first.may_fire("recompute", tick)
        first.resign()
        assert second.renew() is not None
        assert second.may_fire("recompute", tick + 1) == (handover == "fenced")


@pytest.mark.parametrize("wait", [60.0, 600.0])
def test_how_long_the_conservative_hand_over_waits_is_a_setting(settings, redis_client, keys, wait):
    coordination = Coordination(handover="conservative", lease_ttl=wait)
    chosen, clock = settings.model_copy(update={"coordination": coordination}), Clock()
    first, looking_on, second = make_gate(chosen), make_gate(chosen), make_gate(chosen, clock=clock)
    assert first.renew() is not None
    assert first.may_fire("recompute", 7)
    assert looking_on.renew() is None
    assert wait * 900 < redis_client.pttl(keys.lease) <= wait * 1000
    first.resign()
    assert second.renew() is not None
    quiet_for(second, clock, wait)


def careful(client, keys, engine, clock=None) -> LeaderGate:
    return LeaderGate(
        client,
        keys,
        ttl_seconds=180,
        retry_seconds=0,
        quiet_seconds=180,
        fences=PersistentFences(engine),
        clock=clock or Clock(),
    )


def test_a_new_leader_keeps_quiet_for_the_whole_time_out_where_redis_forgot_what_was_fired_since(
    redis_client, keys, engine
):
    """Redis comes back as it was when the last fire was long ago; the successor has fired a moment ago."""
    clock = Clock()
    first, second, third = (careful(redis_client, keys, engine, clock) for _ in range(3))
    first.renew()
    assert first.may_fire("recompute", 7)
    fired_seconds_ago(engine, keys, 175)
    older = Copy(redis_client, keys)
    redis_client.delete(keys.lease)
    assert second.renew() == 2
    assert not second.may_fire("recompute", 8)
    clock.now += 5
    assert second.may_fire("recompute", 8)
    older.comes_back()
    redis_client.delete(keys.lease)
    assert third.renew() == 3
    quiet_for(third, clock, 180)


def test_a_leader_that_is_elected_anew_waits_for_nobody_but_for_the_rest_of_its_quiet_time(redis_client, keys, engine):
    clock = Clock()
    first, second = (careful(redis_client, keys, engine, clock) for _ in range(2))
    first.renew()
    assert first.may_fire("recompute", 7)
    redis_client.flushdb()
    clock.now += 60
    assert first.renew() == 2
    assert first.may_fire("recompute", 8)
    first.resign()
    assert second.renew() is not None
    redis_client.flushdb()
    clock.now += 61
    assert second.renew() == 4
    quiet_for(second, clock, 180 - 61)


def test_a_tick_is_not_used_up_by_a_leader_that_keeps_quiet(redis_client, keys, engine):
    clock = Clock()
    first, second, third = (careful(redis_client, keys, engine, clock) for _ in range(3))
    first.renew()
    assert first.may_fire("recompute", 7)
    first.resign()
    second.renew()
    assert not second.may_fire("recompute", 8)
    second.resign()
    third.renew()
    fired_seconds_ago(engine, keys, 180)
    third.resign()
    fourth = careful(redis_client, keys, engine, clock)
    fourth.renew()
    assert fourth.may_fire("recompute", 8)
