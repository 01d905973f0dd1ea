"""The leader gate on a real Redis, with clocks under the test's control: one leads, and each tick is fired once."""

from __future__ import annotations

import inspect
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import redis

from opencue_sched.clock import boot_clock
from opencue_sched.coordination import postings
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.store.fences import PersistentFences
from tests.kit.frozen_clock import Clock


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


def test_fleets_of_two_namespaces_fire_their_own_ticks(redis_client, engine, gate):
    fences = PersistentFences(engine)
    for ns in ("cue", "cue2"):
        leader = gate(redis_client, LeaderKeys(ns, "beat"), fences=fences)
        assert leader.renew() == 1
        assert leader.may_fire("recompute", 7)
