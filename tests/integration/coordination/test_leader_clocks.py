"""The age of the last tick and the end of a lease, also where the clock of a store was put back."""

from __future__ import annotations

from tests.integration.coordination.candidates import fired_seconds_ago
from tests.kit.frozen_clock import Clock


def test_every_beat_knows_when_a_tick_was_fired_last(redis_client, keys, gate):
    clock = Clock()
    leader, standby = gate(redis_client, keys, clock=clock), gate(redis_client, keys, clock=clock)
    leader.renew()
    standby.renew()
    assert leader.tick_age == standby.tick_age == float("inf")
    leader.may_fire("recompute", 7)
    standby.renew()
    clock.now += 30
    assert leader.tick_age == 30
    assert 30 <= standby.tick_age < 40


def test_the_age_of_the_last_tick_grows_though_the_clock_of_postgresql_was_put_back(redis_client, keys, engine, gate):
    """Its moment is still to come, then: a beat that hangs must not look alive until it has."""
    clock = Clock()
    standby = gate(redis_client, keys, clock=clock)
    leader = gate(redis_client, keys, clock=clock)
    leader.renew()
    assert leader.may_fire("recompute", 7)
    fired_seconds_ago(engine, keys, -3600)
    for seconds in (0, 30, 60):
        clock.now = 1000.0 + seconds
        standby.renew()
        assert standby.tick_age == seconds


def test_a_lease_that_a_clock_put_back_made_longer_than_any_is_cut_short(redis_client, keys, gate):
    """A dead leader's would keep everybody out until the clock gets there again; a living one prolongs its own."""
    leader, standby = gate(redis_client, keys), gate(redis_client, keys)
    leader.renew()
    for left, kept in ((3_600_000, 180_000), (180_000, 180_000), (5_000, 5_000)):
        redis_client.pexpire(keys.lease, left)
        assert standby.renew() is None
        assert kept / 2 < redis_client.pttl(keys.lease) <= kept
