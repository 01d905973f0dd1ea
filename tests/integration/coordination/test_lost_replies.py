"""A reply of Redis that is lost on its way: the client's second try must get the answer of the first."""

from __future__ import annotations

import pytest
from redis.exceptions import RedisError

from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.store.fences import PersistentFences


@pytest.fixture
def leader(proxied, engine) -> LeaderGate:
    """Leads, by the client of a beat."""
    gate = LeaderGate(
        proxied,
        LeaderKeys("cue", "beat"),
        ttl_seconds=15,
        retry_seconds=0,
        fences=PersistentFences(engine),
    )
    assert gate.renew() is not None
    assert gate.may_fire("recompute", 1)
    return gate


def test_a_tick_whose_first_answer_was_lost_is_fired_and_only_once(proxy, leader):
    proxy.lose("EVALSHA")
    assert leader.may_fire("recompute", 2)
    assert proxy.lost == 1
    assert not leader.may_fire("recompute", 2)


def test_a_lease_whose_first_answer_was_lost_is_led_by(proxy, leader, redis_client):
    before = leader.fence
    redis_client.delete(leader.keys.lease)
    assert not leader.may_fire("recompute", 2)
    proxy.lose("EVALSHA")
    after = leader.renew()
    assert proxy.lost == 1
    assert after > before
    assert redis_client.get(leader.keys.lease) == f"{leader.token}|{after}"
    assert leader.may_fire("recompute", 2)


def test_a_tick_to_which_no_try_got_an_answer_is_asked_for_again(proxy, leader):
    proxy.lose("EVALSHA", times=2)
    with pytest.raises(RedisError):
        leader.may_fire("recompute", 2)
    assert proxy.lost == 2
    assert leader.last_ticks == {"recompute": 1}
    assert leader.may_fire("recompute", 2)
    assert leader.last_ticks == {"recompute": 2}
    assert not leader.may_fire("recompute", 2)
