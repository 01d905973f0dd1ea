"""The leader gate on a real Redis, with clocks under the test's control: who leads, by which lease and fence."""

from __future__ import annotations

import inspect
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from opencue_sched.beat import LeaderScheduler, make_gate
from opencue_sched.clock import boot_clock
from opencue_sched.coordination import postings
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.settings import Coordination
from opencue_sched.store.fences import LeaderRecord, PersistentFences
from tests.kit.environment import stores_of
from tests.kit.frozen_clock import Clock
from tests.kit.polling import eventually


@pytest.fixture
def keys() -> LeaderKeys:
    return LeaderKeys("cue", "beat")


@pytest.fixture
def fences(engine) -> PersistentFences:
    return PersistentFences(engine)


@pytest.fixture
def gate(fences):
    return partial(gate_of, fences=fences)


def gate_of(client, keys, *, fences, clock=None, ttl=15.0) -> LeaderGate:
    return LeaderGate(
        client,
        keys,
        ttl_seconds=ttl,
        retry_seconds=0.0,
        fences=fences,
        clock=clock or Clock(),
    )


def test_one_of_two_candidates_leads_and_the_other_never_prolongs_its_lease(redis_client, keys, gate):
    leader, standby = gate(redis_client, keys), gate(redis_client, keys)
    assert leader.renew() is not None
    redis_client.pexpire(keys.lease, 5000)
    for _ in range(5):
        assert standby.renew() is None
    assert redis_client.pttl(keys.lease) <= 5000


def test_the_lease_always_has_a_time_to_live(redis_client, keys, gate):
    gate(redis_client, keys).renew()
    assert 0 < redis_client.pttl(keys.lease) <= 15000


def test_take_over_after_the_lease_ran_out_has_a_higher_fence(redis_client, keys, gate):
    first, second = gate(redis_client, keys), gate(redis_client, keys)
    old = first.renew()
    redis_client.delete(keys.lease)
    new = second.renew()
    assert new > old


def test_a_leader_that_cannot_renew_in_time_stops_by_itself(redis_client, keys, gate):
    clock = Clock()
    leader = gate(redis_client, keys, clock=clock)
    leader.renew()
    clock.now += 9.9
    assert leader.fence is not None
    clock.now += 0.2
    assert leader.fence is None


def test_the_deadline_counts_from_before_the_call_that_renewed_on_a_clock_that_runs_through_a_suspend(
    redis_client, proxy, proxied, keys, monkeypatch, gate
):
    """The lease lives from when Redis was asked, at the latest; its answer may have taken long."""
    clock = Clock()
    for calls in (1, 2):
        leader = gate(proxied, keys, clock=clock)
        for _ in range(calls):
            clock.now += 5
            asked = clock.now
            with ThreadPoolExecutor(1) as thread:
                proxy.hold("EVALSHA", answer=True)
                fence = thread.submit(leader.renew)
                assert proxy.holds.wait(100)
                clock.now += 4
                proxy.let_go()
                assert fence.result() is not None
        clock.now = asked + 9.9
        assert leader.fence is not None
        clock.now = asked + 10
        assert leader.fence is None
        redis_client.delete(keys.lease)
    assert inspect.signature(LeaderGate).parameters["clock"].default is postings.boot_clock is boot_clock
    clocks = []
    monkeypatch.setattr("time.clock_gettime", clocks.append)
    boot_clock()
    assert clocks == [time.CLOCK_BOOTTIME]


def test_a_paused_ex_leader_fires_nothing(redis_client, keys, gate):
    """A paused leader's own clock stood still with it, so only the fence can stop it."""
    paused, successor = gate(redis_client, keys), gate(redis_client, keys)
    paused.renew()
    redis_client.delete(keys.lease)
    successor.renew()
    assert paused.fence is not None
    assert not paused.may_fire("recompute", 7)
    assert successor.may_fire("recompute", 7)
    assert paused.fence is None


def test_a_leader_paused_between_its_look_at_the_lease_and_its_claim_of_a_tick_fires_nothing(
    redis_client, keys, engine, gate
):
    """The statement that records a tick looks at the fence: every earlier look was true when it was made."""

    class Pausing(PersistentFences):
        def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
            redis_client.delete(keys.lease)
            assert successor.renew() is not None
            return super().claim_tick(name, fence, task, tick)

    paused, successor = gate(redis_client, keys, fences=Pausing(engine)), gate(redis_client, keys)
    paused.renew()
    assert not paused.may_fire("recompute", 7)
    assert paused.fence is None
    assert successor.may_fire("recompute", 7), "it was used up by nobody"


def test_a_tick_fires_once_across_a_change_of_leader(redis_client, keys, gate):
    first, second = gate(redis_client, keys), gate(redis_client, keys)
    first.renew()
    assert first.may_fire("recompute", 7)
    first.resign()
    second.renew()
    assert not second.may_fire("recompute", 7)
    assert second.may_fire("recompute", 8)
    assert second.last_ticks == {"recompute": 8}
    assert not second.may_fire("recompute", 6)
    assert second.last_ticks == {"recompute": 8}


def test_resigning_releases_only_ones_own_lease(redis_client, keys, gate):
    first, second = gate(redis_client, keys), gate(redis_client, keys)
    first.renew()
    redis_client.delete(keys.lease)
    second.renew()
    first.resign()
    assert redis_client.exists(keys.lease)


def test_each_process_has_a_token_of_its_own_that_says_nothing_of_it(redis_client, keys, gate):
    """A token is not host and pid, which another process may have too."""
    tokens = [gate(redis_client, keys).token for _ in range(100)]
    assert len(set(tokens)) == 100
    assert all(uuid.UUID(token).version == 4 for token in tokens)
    leader = gate(redis_client, keys)
    leader.renew()
    assert redis_client.get(keys.lease) == f"{leader.token}|1"


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


class Copy:
    """What Redis holds of one role at one moment: as a lagging replica, or a snapshot, has it later."""

    def __init__(self, client, keys) -> None:
        self._client, self._prefix = client, keys.lease.removesuffix("lease")
        with closing(redis.Redis.from_url(url_of(client))) as raw:
            self._values = {key: (raw.dump(key), max(0, raw.pttl(key))) for key in raw.keys(f"{self._prefix}*")}

    def comes_back(self) -> None:
        """The failover: all since is forgotten."""
        for key in self._client.keys(f"{self._prefix}*"):
            self._client.delete(key)
        with closing(redis.Redis.from_url(url_of(self._client))) as raw:
            for key, (value, ttl) in self._values.items():
                raw.restore(key, ttl, value)


def url_of(client) -> str:
    options = client.connection_pool.connection_kwargs
    password = f":{options['password']}@" if options.get("password") else ""
    return f"redis://{password}{options['host']}:{options['port']}/{options['db']}"


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


def test_a_holder_whose_lease_went_to_another_stands_by(redis_client, keys, gate):
    clock = Clock()
    first, second = gate(redis_client, keys, clock=clock), gate(redis_client, keys, clock=clock)
    first.renew()
    redis_client.delete(keys.lease)
    new = second.renew()
    clock.now += 5
    assert first.renew() is None
    assert second.renew() == new


def test_of_many_racing_candidates_exactly_one_fires_each_tick(redis_client, keys, gate):
    gates = [gate(redis_client, keys) for _ in range(8)]

    def campaign(candidate: LeaderGate) -> int:
        candidate.renew()
        return sum(candidate.may_fire("sweep", tick) for tick in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(campaign, gates)) == 50


def test_redis_errors_count_as_not_renewed(redis_server, keys, gate):
    dead = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.2, retry=None)
    assert gate(dead, keys).renew() is None
    dead.close()


def test_standbys_do_not_campaign_in_step(redis_client, keys, gate, fences, monkeypatch):
    clock = Clock()
    draws = iter([0.0, 1.0, 0.5])
    gate(redis_client, keys).renew()
    monkeypatch.setattr("random.random", lambda: next(draws))
    standby = LeaderGate(
        redis_client,
        keys,
        ttl_seconds=15,
        retry_seconds=2.0,
        fences=fences,
        clock=clock,
    )
    naps = []
    for _ in range(3):
        standby.renew()
        naps.append(round(standby.next_look, 3))
        clock.now += standby.next_look
    assert naps == [2.0, 1.5, 1.75]


def test_a_periodic_message_is_worth_something_until_a_later_leader_or_tick(redis_client, keys, gate, fences):
    first, second = gate(redis_client, keys), gate(redis_client, keys)
    fence = first.renew()
    first.may_fire("recompute", 7)
    assert fences.leader(keys.name).why_stale(fence, "recompute", 7) == ""
    first.may_fire("recompute", 8)
    assert fences.leader(keys.name).why_stale(fence, "recompute", 7) == "overtaken"
    assert fences.leader(keys.name).why_stale(fence, "", 7) == ""
    first.resign()
    assert fences.leader(keys.name).why_stale(fence, "recompute", 8) == ""
    second.renew()
    assert fences.leader(keys.name).why_stale(fence, "recompute", 8) == "former_leader"
    assert fences.leader(keys.name).why_stale(fence, "", 8) == "former_leader"


def fired_seconds_ago(engine, keys, seconds) -> None:
    """Have the last tick fired so long ago, by the clock of PostgreSQL."""
    statement = (
        "UPDATE opencue_sched_fence SET fence = 1000000 * (extract(epoch FROM clock_timestamp()) - :seconds)"
        " WHERE name = :name"
    )
    with engine.begin() as connection:
        assert connection.execute(text(statement), {"name": f"{keys.name}|fired", "seconds": seconds}).rowcount == 1


def quiet_for(gate, clock, seconds) -> None:
    """Let so much time pass, and see that it leads all the while and fires nothing until then."""
    clock.now += seconds - 30  # on a machine that stands still for as long
    assert gate.renew() is not None
    assert not gate.may_fire("recompute", 10**9)
    clock.now += 31
    assert gate.may_fire("recompute", 10**9)


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


def test_a_new_leader_keeps_quiet_no_longer_than_the_time_out_though_the_clock_was_put_back(redis_client, keys, engine):
    clock = Clock()
    first, second = (careful(redis_client, keys, engine, clock) for _ in range(2))
    first.renew()
    assert first.may_fire("recompute", 7)
    first.resign()
    fired_seconds_ago(engine, keys, -3600)
    assert second.renew() is not None
    quiet_for(second, clock, 180)


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


def test_fleets_of_two_namespaces_fire_their_own_ticks(redis_client, engine, gate):
    fences = PersistentFences(engine)
    for ns in ("cue", "cue2"):
        leader = gate(redis_client, LeaderKeys(ns, "beat"), fences=fences)
        assert leader.renew() == 1
        assert leader.may_fire("recompute", 7)


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
