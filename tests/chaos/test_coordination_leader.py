"""Real beat processes that take turns to lead: killed, frozen, with wrong clocks, with a Redis emptied or restarted."""

from __future__ import annotations

import json
import sys
import textwrap
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, pairwise

import pytest
import redis
from redis.exceptions import RedisError
from sqlalchemy import text

from opencue_sched.coordination.keys import LeaderKeys, QueueName, QueueType, priority_lists
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.presence import BEAT_TYPE, list_members
from opencue_sched.embedded.servers.processes import GuardedProcess, free_port
from opencue_sched.store.fences import PersistentFences
from tests.kit.frozen_clock import Clock
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog

KEYS = LeaderKeys("cue", "beat")
TTL_SECONDS, RETRY_SECONDS = 3.0, 0.5
NUMBERS = count()


@contextmanager
def taking(site) -> Iterator[None]:
    """Take each message from its queue as a worker does, at once, and keep it: the next one of its task takes the
    place of one that waits."""
    over = threading.Event()

    def take() -> None:
        with redis.Redis.from_url(site.server.url, socket_timeout=1.0) as client:
            while not over.wait(0.02):
                with suppress(RedisError):
                    for type_ in QueueType:
                        for name in priority_lists(QueueName("cue", type_.value)):
                            while client.lmove(name, f"taken:{name}", "RIGHT", "LEFT"):
                                pass

    taker = threading.Thread(target=take)
    taker.start()
    try:
        yield
    finally:
        over.set()
        taker.join()


@pytest.fixture
def site(idle_site):
    with taking(idle_site):
        yield idle_site


@pytest.fixture(scope="module")
def shared_site(shared_site):
    with taking(shared_site):
        yield shared_site


def sent(client, *, then_flush: bool = False) -> Counter:
    """(task, tick) of every periodic message that was sent.

    With ``then_flush`` Redis is emptied in the same moment.
    """
    with client.pipeline(transaction=True) as pipe:
        for type_ in QueueType:
            for name in priority_lists(QueueName("cue", type_.value)):
                pipe.lrange(name, 0, -1)
                pipe.lrange(f"taken:{name}", 0, -1)
        if then_flush:
            pipe.flushall()
        lists = [answer for answer in pipe.execute() if isinstance(answer, list)]
    headers = [json.loads(text)["headers"] for texts in lists for text in texts]
    return Counter((header["tick_of"], header["tick"]) for header in headers)


def fences(client) -> list[int]:
    """Fences of all messages, oldest first in each queue."""
    return [headers["fence"] for headers in sweep_headers(client)]


def sweep_headers(client) -> list[dict]:
    """Headers of all sweep messages, oldest first in each queue."""
    found = []
    for name in priority_lists(QueueName("cue", "sweep")):
        with client.pipeline(transaction=True) as pipe:
            waiting, taken = pipe.lrange(name, 0, -1).lrange(f"taken:{name}", 0, -1).execute()
        found += [json.loads(text)["headers"] for text in reversed([*waiting, *taken])]
    return found


def assert_one_leader_at_a_time(client) -> None:
    """By when ticks were claimed. A leader that stood still between its claim and the message, as on a busy machine,
    sends that one after those of the next; whoever gets it sees by the fence that it is late."""
    claims = [(headers["sent_at"], headers["fence"]) for headers in sweep_headers(client)]
    order = [fence for _, fence in sorted(claims)]
    assert order == sorted(order), claims


def freeze_between_ticks(site) -> tuple[GuardedProcess, int]:
    """Freeze the leader while no tick is claimed that was not sent; its process and its fence."""
    for _ in range(20):
        name, fence = leader(site)
        process = site.fleet.processes[name]
        process.pause()
        claimed = PersistentFences(site.engine).leader(KEYS.name).ticks
        if claimed.items() <= sent(site.client).keys():
            return process, fence
        process.resume()
    raise AssertionError("a claimed tick that nobody sends")


def holder(client) -> str | None:
    lease = client.get(KEYS.lease)
    return None if lease is None else str(lease)


def leading(site, name: str) -> bool:
    return "leadership_taken" in site.fleet.log(name).read_text()


@pytest.fixture
def pair(shared_site):
    """A fleet, shared by tests, of which one beat leads and has fired and one stands by."""
    if not shared_site.fleet.processes:
        start_two(shared_site)
    elif len(shared_site.fleet.processes) < 2:
        start_standby(shared_site, f"standby{next(NUMBERS)}")
    eventually(lambda: leader(shared_site) and sweeps(shared_site.client), 30, "a leader that has fired")
    return shared_site


def start_two(site) -> None:
    """One leads and has fired, one stands by: ``first`` and ``second``, unless the first one fell behind."""
    site.fleet.beat("first")
    eventually(lambda: sweeps(site.client), 60, "first tick")
    start_standby(site, "second")


def start_standby(site, name: str) -> None:
    site.fleet.beat(name)
    eventually(lambda: "beat: Starting" in site.fleet.log(name).read_text(), 60, "start of the standby")


def leader(site) -> tuple[str, int]:
    """Name and fence of the beat that leads now."""
    return eventually(lambda: _leader(site), 60, "a leader")


def _leader(site) -> tuple[str, int] | None:
    fence = (holder(site.client) or "").rpartition("|")[2]
    for name in site.fleet.processes:
        for line in site.fleet.log(name).read_text().splitlines():
            if '"leadership_taken"' in line and str(json.loads(line)["fence"]) == fence:
                return name, int(fence)
    return None


def presence_of_leader(site) -> str | None:
    """The token of its presence; none while it has not said that it leads."""
    _, fence = leader(site)
    return next((beat.token for beat in list_members(site.client, "cue").of(BEAT_TYPE) if beat.fence == fence), None)


@dataclass(frozen=True)
class Succession:
    """One leader ended, and the one that stood by followed; by what Redis was asked, and its clock."""

    released: bool
    """Whether anybody gave it up."""
    looks: int
    """How often the other one asked for the lease after it was free, up to the moment it had it."""
    between_looks: float
    """Seconds, while it stood by; the least."""


def succeed(site, end: str) -> Succession:
    """End the one that leads, in this way, and wait until the one that stands by leads."""
    with RedisLog(site.server.url) as log:
        if len(site.fleet.processes) < 2:
            start_standby(site, f"after-{leader(site)[0]}")
        eventually(lambda: len(looks(log)) >= 5, 30, "looks of the standby")
        name, fence = eventually(lambda: _renewed(site, log), 30, "a renewal of the leader")
        getattr(site.fleet.processes.pop(name), end)()
        eventually(lambda: (_leader(site) or ("", 0))[1] > fence, 30, "take-over")
        released = log.calls("lease_drop")
        renewed = renewals(log, fence)[-1]
        free_from = released[0].at if released else renewed + TTL_SECONDS + 0.05
        asked = looks(log)
        # Each lease that was granted is a fence: one of these looks found it, and any that follow were renewals lost.
        granted = int(site.client.get(KEYS.fence)) - fence
    print(f"{end}: {asked[-1] - renewed:.2f} s from the last renewal to the last look, {granted} granted")
    in_vain = len([at for at in asked if at > free_from]) - granted
    return Succession(bool(released), 1 + in_vain, min(b - a for a, b in pairwise(asked)))


def _renewed(site, log: RedisLog) -> tuple[str, int] | None:
    name, fence = leader(site)
    return (name, fence) if renewals(log, fence) else None


def renewals(log: RedisLog, fence: int) -> list[float]:
    """When the leader of this fence prolonged its lease."""
    return [call.at for call in log.calls("lease_acquire", naming=f" renew {fence} ")]


def looks(log: RedisLog) -> list[float]:
    """When anybody that did not lead asked for the lease."""
    return [call.at for call in log.calls("lease_acquire", naming=" take ")]


def assert_followed_at_the_first_look(successions: list[Succession]) -> None:
    """How long that takes is made of the rest of the lease and of the time until the next look. A slow machine makes a
    look late; it does not let one pass by a lease that is free, nor make every look late: they come three quarters of
    the interval apart to a whole one."""
    for succession in successions:
        assert succession.looks <= 1, succession
        assert succession.between_looks < 1.5 * RETRY_SECONDS, succession


def sweeps(client) -> int:
    return sum(count for (task, _), count in sent(client).items() if task.startswith("sweep-clusters@"))


def test_after_sigkill_a_standby_takes_over_within_the_ttl_and_a_poll(pair):
    successions = [succeed(pair, "kill") for _ in range(2)]
    assert_followed_at_the_first_look(successions)
    fired = sweeps(pair.client)
    eventually(lambda: sweeps(pair.client) > fired, 30, "next tick")
    assert set(sent(pair.client).values()) == {1}
    assert_one_leader_at_a_time(pair.client)


def test_a_clean_stop_hands_over_within_the_retry_interval(pair):
    successions = []
    for _ in range(2):
        presence = eventually(lambda: presence_of_leader(pair), 30, "the leader's presence")
        successions.append(succeed(pair, "stop"))
        assert presence not in {beat.token for beat in list_members(pair.client, "cue").alive}
    assert all(succession.released for succession in successions), successions
    assert_followed_at_the_first_look(successions)
    assert set(sent(pair.client).values()) == {1}


def test_a_frozen_leader_fires_nothing_after_it_goes_on(pair):
    first, old_fence = freeze_between_ticks(pair)
    fired = fences(pair.client).count(old_fence)
    eventually(lambda: int((holder(pair.client) or "|0").rpartition("|")[2]) > old_fence, 30, "take-over")
    eventually(lambda: fences(pair.client)[-1] > old_fence, 30, "a tick of the successor")
    first.resume()
    seen = len(fences(pair.client))
    eventually(lambda: len(fences(pair.client)) >= seen + 2, 30, "two more ticks")
    assert fences(pair.client).count(old_fence) == fired
    assert_one_leader_at_a_time(pair.client)
    assert set(sent(pair.client).values()) == {1}
    assert first.running


SKEWED = """
    import sys, time
    real = time.time
    time.time = lambda: real() + float({skew!r})
    sys.argv = ["celery", "-A", "opencue_sched", "beat", "--schedule", {schedule!r}]
    from celery.__main__ import main
    sys.exit(main())
"""


@pytest.mark.parametrize("end", ["kill", "stop", "redis error"])
def test_skewed_clocks_fire_each_tick_at_most_once(site, end):
    """The clocks of two beats are more than a TTL apart, through a crash, a clean stop and a silent Redis."""
    for name, skew in (("early", "-120"), ("late", "120")):
        source = textwrap.dedent(SKEWED).format(skew=skew, schedule=str(site.fleet.directory / name))
        # Started plainly: what is loaded already could have kept the real clock.
        process = GuardedProcess(
            [sys.executable, "-c", source],
            log=site.fleet.log(name),
            env=site.fleet.environment,
            cwd=site.fleet.directory,
        )
        site.fleet.processes[name] = process.start()
    eventually(lambda: sweeps(site.client) >= 1, 60, "first tick")
    eventually(lambda: all("beat: Starting" in site.fleet.log(n).read_text() for n in ("early", "late")), 60)
    before, (name, fence) = sweeps(site.client), leader(site)
    if end == "redis error":
        site.server.pause()
        time.sleep(TTL_SECONDS + 1)  # the outage itself
        site.server.resume()
    else:
        getattr(site.fleet.processes[name], end)()
        eventually(lambda: (_leader(site) or ("", 0))[1] > fence, 30, "take-over")
    eventually(lambda: sweeps(site.client) >= before + 2, 60, "two more ticks")
    counts = sent(site.client)
    assert set(counts.values()) == {1}
    now = float(site.client.time()[0])
    interval = site.settings.queue.active_scan_interval
    assert all(abs(tick * interval - now) < 120 for task, tick in counts if task.startswith("sweep-clusters@"))


def test_the_lease_never_exists_without_a_ttl_under_a_storm_of_kills(site):
    seen = []

    def watch() -> bool:
        ttl = site.client.pttl(KEYS.lease)
        assert ttl != -1, "a lease without a TTL"
        seen.append(ttl)
        return False

    for generation in range(3):
        process = site.fleet.beat(f"beat{generation}")
        eventually(lambda name=f"beat{generation}": watch() or leading(site, name), 60, "leadership")
        process.kill()
        watch()
    assert max(seen) <= TTL_SECONDS * 1000


@pytest.mark.parametrize("accident", ["lease deleted", "everything deleted", "restarted"])
def test_the_fence_grows_and_the_fleet_goes_on_after_redis_lost_something(pair, accident):
    _, before = leader(pair)
    if accident == "lease deleted":
        pair.client.delete(KEYS.lease)
    elif accident == "everything deleted":
        pair.client.flushall()
    else:
        pair.server.restart()

    def took_over() -> bool:
        try:
            lease = holder(pair.client)
        except RedisError:
            return False
        return lease is not None and int(lease.rpartition("|")[2]) > before

    eventually(took_over, 30, "a higher fence")
    eventually(lambda: fences(pair.client) and fences(pair.client)[-1] > before, 30, "a tick under it")
    assert not pair.fleet.ended()


def test_no_tick_is_fired_twice_though_everything_in_redis_was_deleted(site):
    """Most tasks have intervals so long that their ticks of before are still going on afterwards."""
    start_two(site)
    eventually(lambda: {"recover-depends@60", "reap@30"} <= {task for task, _ in sent(site.client)}, 30, "all tasks")
    before = sent(site.client, then_flush=True)
    fired = eventually(lambda: sweeps(site.client) >= 2 and sent(site.client), 30, "two more sweeps")
    assert set((before + fired).values()) == {1}


def test_the_conservative_hand_over_keeps_quiet_for_the_full_time_out(redis_client, engine):
    """The proposal's own mode."""
    clock = Clock()

    def gate() -> LeaderGate:
        return LeaderGate(
            redis_client,
            KEYS,
            fences=PersistentFences(engine),
            ttl_seconds=180,
            retry_seconds=0,
            quiet_seconds=180,
            clock=clock,
        )

    first, second = gate(), gate()
    first.renew()
    assert first.may_fire("t", 1)
    first.resign()
    assert second.renew() is not None
    assert not second.may_fire("t", 2)
    # PostgreSQL, whose clock goes on, says how long ago the other fired
    clock.advance(120)
    assert second.renew() is not None
    assert not second.may_fire("t", 2)
    clock.advance(60)
    assert second.renew() is not None
    assert second.may_fire("t", 2)


def test_the_conservative_lease_lives_anew_at_each_fire(redis_client, engine):
    gate = LeaderGate(
        redis_client,
        KEYS,
        fences=PersistentFences(engine),
        ttl_seconds=180,
        retry_seconds=5,
        quiet_seconds=180,
    )
    gate.renew()
    redis_client.pexpire(KEYS.lease, 5_000)
    assert gate.may_fire("t", 1)
    assert redis_client.pttl(KEYS.lease) > 170_000


def test_who_never_knew_of_a_predecessor_fires_at_once_and_who_lost_the_record_waits(redis_client, engine):
    clock = Clock()

    def gate() -> LeaderGate:
        return LeaderGate(
            redis_client,
            KEYS,
            fences=PersistentFences(engine),
            ttl_seconds=180,
            retry_seconds=0,
            quiet_seconds=180,
            clock=clock,
        )

    first, second = gate(), gate()
    first.renew()
    assert first.may_fire("t", 1)
    redis_client.delete(KEYS.lease)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM opencue_sched_fence WHERE name = :name"), {"name": f"{KEYS.name}|fired"})
    second.renew()
    clock.advance(170)
    assert second.renew() is not None
    assert not second.may_fire("t", 2)
    clock.advance(10)
    assert second.may_fire("t", 2)


def figures_of(port: int) -> dict[str, float]:
    """What a beat shows of this program, by series."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(("scheduler_", "cuebot_"))}


def test_only_the_leading_beat_shows_what_waits_while_no_worker_lives(idle_site):
    # given a beat that leads, one that stands by, and nobody who takes their messages
    first, second = free_port(), free_port()
    idle_site.fleet.beat("b1", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(first - 100))
    eventually(lambda: sent(idle_site.client), 60, "first tick")
    idle_site.fleet.beat("b2", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(second - 100))
    eventually(lambda: 'scheduler_queue_depth{type="sweep"}' in figures_of(first), 60, "a census")
    eventually(lambda: figures_of(first)['scheduler_queue_depth{type="sweep"}'] > 0, 60, "a message that waits")
    assert figures_of(first)["scheduler_workers_alive"] == 0
    of_a_standby = {
        "scheduler_leader_fence",
        "scheduler_tick_age_seconds",
        "scheduler_ticks_ahead_seconds",
    }
    assert eventually(lambda: figures_of(second), 60, "the standby's figures").keys() == of_a_standby
    # when the leader ends
    idle_site.fleet.processes["b1"].kill()
    # then the other one shows them
    eventually(lambda: figures_of(second).get("scheduler_workers_alive") == 0, 60, "another leader's census")


def test_a_beat_shows_its_fence_and_the_age_of_the_last_tick(site):
    port = free_port()
    site.fleet.beat("b1", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(port - 100))
    eventually(lambda: sent(site.client), 60, "first tick")

    def figures() -> dict[str, float]:
        return figures_of(port)

    eventually(lambda: figures()["scheduler_leader_fence"] == leader(site)[1], 30, "its fence")
    assert figures()["scheduler_tick_age_seconds"] < 30
    site.server.pause()
    age = figures()["scheduler_tick_age_seconds"]
    eventually(lambda: figures()["scheduler_leader_fence"] == 0, 30, "no leadership without Redis")
    eventually(lambda: figures()["scheduler_tick_age_seconds"] > age, 30, "an age that grows")
    site.server.resume()
    eventually(lambda: figures()["scheduler_leader_fence"] > 0, 60, "leadership again")
