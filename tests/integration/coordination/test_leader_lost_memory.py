"""Leaders of a Redis that was emptied, restored or split, and of two Redis under one database."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from structlog.testing import capture_logs

from opencue_sched.beat import LeaderScheduler
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.store.fences import LeaderRecord, PersistentFences
from tests.integration.coordination.candidates import Copy
from tests.kit.environment import stores_of
from tests.kit.frozen_clock import Clock
from tests.kit.polling import eventually


def test_the_fence_grows_although_redis_was_emptied(redis_client, keys, engine, gate):
    fences = PersistentFences(engine)
    first = gate(redis_client, keys, fences=fences)
    for _ in range(3):
        redis_client.delete(keys.lease)
        before = first.renew()
    redis_client.flushdb()
    after = gate(redis_client, keys, fences=fences).renew()
    assert after > before


def test_a_holder_that_renews_in_an_emptied_redis_gets_a_higher_fence(redis_client, keys, engine, gate):
    """It renews in time, so nothing else makes it ask for the highest fence again."""
    clock, fences = Clock(), PersistentFences(engine)
    assert fences.claim(keys.name, 6)
    leader = gate(redis_client, keys, clock=clock, fences=fences)
    assert leader.renew() == 7
    clock.now += 5
    assert leader.renew() == 7
    redis_client.flushdb()
    clock.now += 5
    assert leader.renew() == 8
    assert fences.leader(keys.name).fence == 8


def test_a_leader_whose_earlier_lease_comes_back_gets_a_higher_fence(redis_client, keys, engine, gate):
    """A failover to an older state that has an unexpired lease of its own, of a lower fence."""
    clock, fences = Clock(), PersistentFences(engine)
    leader = gate(redis_client, keys, clock=clock, fences=fences)
    assert leader.renew() == 1
    older = Copy(redis_client, keys)
    redis_client.delete(keys.lease)
    clock.now += 6
    assert leader.renew() == 2
    older.comes_back()
    assert not leader.may_fire("recompute", 1)
    clock.now += 6
    assert leader.renew() == 3
    assert int(redis_client.get(keys.fence)) == fences.leader(keys.name).fence == 3
    assert leader.may_fire("recompute", 1)


@pytest.mark.parametrize("seconds", [4, 6, 11])
def test_a_former_leader_whose_lease_comes_back_does_not_lead_by_it(redis_client, keys, engine, seconds, gate):
    """It looks first after the failover: stalled past its deadline, or not knowing yet that it was succeeded."""
    clock, fences = Clock(), PersistentFences(engine)
    former, leader = (gate(redis_client, keys, clock=clock, fences=fences) for _ in range(2))
    assert former.renew() == 1
    older = Copy(redis_client, keys)
    redis_client.delete(keys.lease)
    assert leader.renew() == 2
    older.comes_back()
    clock.now += seconds
    known = former.renew()
    if seconds < 5:
        assert known == 1, "it was not yet time to look"
        assert not former.may_fire("recompute", 1)
        known = former.renew()
    assert known == 3
    clock.now += 5
    assert leader.renew() is None


def test_a_lease_of_a_fence_that_was_succeeded_is_not_waited_for(redis_client, keys, engine, gate):
    """The former leader may be dead, or believe that it leads still: its lease is worth nothing to anybody."""
    clock, fences = Clock(), PersistentFences(engine)
    former, leader, third = (gate(redis_client, keys, clock=clock, fences=fences) for _ in range(3))
    assert former.renew() == 1
    older = Copy(redis_client, keys)
    redis_client.delete(keys.lease)
    assert leader.renew() == 2
    older.comes_back()
    assert third.renew() == 3
    assert former.fence is not None, "it does not know"
    assert not former.may_fire("recompute", 1)
    assert not leader.may_fire("recompute", 1)
    assert third.may_fire("recompute", 1)


def test_a_counter_that_is_lost_alone_is_put_back_and_one_ahead_is_overtaken(redis_client, keys, engine, gate):
    """Messages are judged by the counter, so a leader below it would be dropped for ever."""
    clock = Clock()
    leader = gate(redis_client, keys, clock=clock, fences=PersistentFences(engine))
    assert leader.renew() == 1
    redis_client.delete(keys.fence)
    clock.now += 5
    assert leader.renew() == 1
    assert redis_client.get(keys.fence) == "1"
    redis_client.set(keys.fence, 5)
    clock.now += 5
    assert leader.renew() == 6


def test_no_fence_is_given_to_two_leaders_though_redis_forgets_it_before_postgresql_knows(
    redis_client, keys, engine, gate
):
    """The window between the grant of Redis and the record in PostgreSQL."""
    fences = PersistentFences(engine)

    class Slow(PersistentFences):
        def claim(self, name: str, fence: int) -> bool:
            redis_client.flushdb()
            assert gate(redis_client, keys, fences=fences).renew() == fence
            return super().claim(name, fence)

    late = gate(redis_client, keys, fences=Slow(engine))
    assert late.renew() is None
    assert fences.leader(keys.name).fence == 1


def test_what_a_message_is_worth_is_known_though_redis_was_emptied(redis_client, keys, engine, gate):
    fences = PersistentFences(engine)
    first, second = (gate(redis_client, keys, fences=fences) for _ in range(2))
    old = first.renew()
    first.may_fire("recompute", 7)
    first.resign()
    new = second.renew()
    second.may_fire("recompute", 8)
    redis_client.flushdb()
    assert fences.leader(keys.name).why_stale(old, "recompute", 8) == "former_leader"
    assert fences.leader(keys.name).why_stale(new, "recompute", 7) == "overtaken"
    assert fences.leader(keys.name).why_stale(new, "recompute", 8) == ""


def test_no_tick_is_fired_twice_though_redis_was_emptied(redis_client, keys, engine, gate):
    clock, fences = Clock(), PersistentFences(engine)
    leader = gate(redis_client, keys, clock=clock, fences=fences)
    leader.renew()
    assert leader.may_fire("recompute", 7)
    redis_client.flushdb()
    clock.now += 6
    assert leader.renew() == 2
    assert leader.last_ticks == {"recompute": 7}, "so that it is not even asked for, and catching up is right"
    assert not leader.may_fire("recompute", 7)
    assert leader.may_fire("recompute", 8)
    assert not leader.may_fire("recompute", 7)


@pytest.mark.parametrize("who", ["the same leader", "its successor"])
def test_no_tick_is_fired_twice_though_redis_forgot_the_last_second(redis_client, keys, engine, who, gate):
    """A failover to a replica that has the lease, but not the newest marks. Nothing in Redis can tell."""
    fences = PersistentFences(engine)
    leader, standby = (gate(redis_client, keys, fences=fences) for _ in range(2))
    leader.renew()
    assert leader.may_fire("recompute", 7)
    older = Copy(redis_client, keys)
    assert leader.may_fire("recompute", 8)
    assert leader.may_fire("sweep", 1)
    older.comes_back()
    then = leader
    if who == "its successor":
        redis_client.delete(keys.lease)
        assert standby.renew() is not None
        then = standby
    assert then.last_ticks == {"recompute": 8, "sweep": 1}
    assert not then.may_fire("recompute", 8)
    assert not then.may_fire("sweep", 1)
    assert then.may_fire("recompute", 9)


def test_of_two_leaders_on_two_sides_of_a_split_redis_each_tick_is_fired_by_one(
    redis_client, redis_server, engine, gate
):
    """The side that was cut off goes on with its lease; PostgreSQL knows who was elected last."""
    keys, there = LeaderKeys("cue", "beat"), LeaderKeys("cut-off", "beat")
    fences = PersistentFences(engine)

    class Shared(PersistentFences):
        """Two namespaces of one Redis in the place of two servers; the record is one."""

        def claim(self, name: str, fence: int) -> bool:
            return super().claim(keys.name, fence)

        def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
            return super().claim_tick(keys.name, fence, task, tick)

        def leader(self, name: str) -> LeaderRecord:
            return super().leader(keys.name)

        def renew(self, name: str, fence: int, *, store: int) -> int:
            return super().renew(keys.name, fence, store=store)

    cut_off = gate(redis_client, there, fences=Shared(engine))
    assert cut_off.renew() == 1
    elected = gate(redis_client, keys, fences=fences)
    assert elected.renew() == 2
    assert cut_off.fence is not None
    assert not cut_off.may_fire("recompute", 7)
    assert cut_off.fence is None
    assert elected.may_fire("recompute", 7)


@pytest.fixture
def other_redis(redis_server):
    """Another Redis for the same namespace: another database of the server is one, to whoever has its URL."""
    client = redis.Redis.from_url(urlsplit(redis_server.url)._replace(path="/5").geturl(), decode_responses=True)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


def test_of_two_redis_under_one_database_the_beat_of_one_leads_and_the_other_says_so_and_stands_by(
    redis_client, other_redis, keys, engine, settings, gate
):
    # given a leader, and a beat that has the database and the namespace in common with it, and not the Redis
    clock, fences = Clock(), PersistentFences(engine)
    here, there = (gate(client, keys, clock=clock, fences=fences) for client in (redis_client, other_redis))
    assert here.renew() == 1
    for tick in range(5):
        assert there.renew() is None
        clock.now += 5.1
        assert here.renew() == 1
        assert here.may_fire("recompute", tick)

    # then the leader stays, and the other knows why it does not lead
    assert there.led_elsewhere
    assert not here.led_elsewhere
    beat = LeaderScheduler(app=Celery(set_as_current=False), lazy=True)
    beat.gate = there
    with capture_logs() as logs, stores_of(settings):
        for _ in range(3):
            beat.tick()
    (said,) = (log for log in logs if log["event"] == "two_redis_under_one_database")
    assert said["log_level"] == "error"
    assert "OPENCUE_SCHED_REDIS_URL" in said["cure"]
    assert fences.leader(keys.name).fence == 1


def test_two_beats_of_two_redis_that_led_at_once_do_not_take_turns(redis_client, other_redis, keys, engine, gate):
    clock, fences = Clock(), PersistentFences(engine)

    class Early(PersistentFences):
        """Looked before the other was recorded."""

        def leader(self, name: str) -> LeaderRecord:
            return LeaderRecord(super().leader(name).fence)

    here, there = (
        gate(redis_client, keys, clock=clock, fences=fences),
        gate(other_redis, keys, clock=clock, fences=Early(engine)),
    )
    assert here.renew() == 1
    assert there.renew() == 2
    fired = {here: 0, there: 0}
    for tick in range(6):
        for beat in (here, there):
            fired[beat] += beat.renew() is not None and beat.may_fire("recompute", tick)
        clock.now += 5.1
    assert fired == {here: 0, there: 6}
    assert fences.leader(keys.name).fence == 2


def test_a_beat_of_another_redis_leads_when_the_leader_is_no_more(redis_client, other_redis, keys, engine, gate):
    clock, fences = Clock(), PersistentFences(engine)
    here, there = (gate(client, keys, clock=clock, fences=fences, ttl=1.5) for client in (redis_client, other_redis))
    assert here.renew() is not None
    assert there.renew() is None
    eventually(lambda: there.renew(), 30)
    assert not there.led_elsewhere


class Succeeded:
    """The Redis at one address, where another takes its place."""

    def __init__(self, client: redis.Redis) -> None:
        self.now = client

    def __getattr__(self, name: str) -> object:
        return getattr(self.now, name)


def test_a_leader_whose_redis_was_succeeded_by_another_leads_on(redis_client, other_redis, keys, engine, gate):
    clock, fences, client = Clock(), PersistentFences(engine), Succeeded(redis_client)
    leader, standby = (gate(client, keys, clock=clock, fences=fences) for _ in range(2))
    assert leader.renew() == 1
    client.now = other_redis
    assert standby.renew() is None
    clock.now += 5.1
    assert leader.renew() == 2
    clock.now += 5.1
    assert standby.renew() is None
    assert not standby.led_elsewhere
