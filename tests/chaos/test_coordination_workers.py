"""Workers killed, frozen and drained while they work; what is left behind, and who goes on."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest

from benchmarks import warm_start
from opencue_sched.coordination.keys import QueueName, frame_permit, presence_key, priority_lists
from opencue_sched.coordination.postings import CLAIM_SECONDS as LIFE_SECONDS
from opencue_sched.coordination.presence import REFRESH_SECONDS, TTL_SECONDS, list_members
from opencue_sched.embedded.servers.processes import ServiceFailed
from opencue_sched.insight.audit import run_audit
from tests.chaos.conftest import Site
from tests.chaos.planted_site import (
    add_job,
    assert_sent_by_the_first_look,
    booked,
    claim,
    cluster_key,
    commits_held_up,
    plant,
    posting,
    redis_ms,
    steer,
    waiting_for,
)
from tests.kit.command import PROGRAM
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog


def waiting_for_hosts(site: Site) -> bool:
    return waiting_for(site, "host")


# Presence


def test_a_duplicate_instance_is_refused_with_a_clear_error(site):
    site.fleet.worker("w1")
    with pytest.raises(ServiceFailed, match=r"'w1'.*'default'"):
        site.fleet.worker("second", OPENCUE_SCHED_INSTANCE="w1")
    assert site.fleet.processes["second"].exit_code == 78
    assert site.fleet.processes["w1"].running
    assert {actor.instance for actor in list_members(site.client, "cue").alive} == {"w1"}


def test_a_killed_instance_is_gone_within_15_seconds_and_its_messages_go_to_its_group(site):
    site.fleet.worker("w1")
    site.fleet.worker("w2")
    key = presence_key("cue", "dispatch", "default", "w1")
    assert site.client.pttl(key) <= TTL_SECONDS * 1000
    steer(site, "pause", "--instance", "w2")
    site.fleet.processes["w1"].kill()
    # Nobody prolongs it, so that is how long it lives at most; most of it is cut short here.
    assert 0 < site.client.pttl(key) <= TTL_SECONDS * 1000
    site.client.pexpire(key, 1000)
    instance = priority_lists(QueueName("cue", "dispatch", "default", "w1"))
    group = priority_lists(QueueName("cue", "dispatch", "default"))
    eventually(lambda: not site.client.exists(key), 30, "end of the presence")
    # The first time that anybody looks after the queues moves all that waits; each worker does at every heartbeat.
    assert REFRESH_SECONDS <= 5
    with RedisLog(site.server.url) as log:
        for batch in range(3):
            before = len(log.calls("queue_drain", naming=key))
            site.client.lpush(instance[1], *(f"message {5 * batch + number}" for number in range(5)))
            eventually(lambda: not site.client.llen(instance[1]), 30, "moved messages")
            assert len(log.calls("queue_drain", naming=key)) - before <= 2, "one may have come just before the push"
    consumed_in_order = list(reversed(site.client.lrange(group[1], 0, -1)))
    # What waited at an instance has waited longest: each batch goes before those that are in the group's queue.
    batches = [[f"message {5 * batch + number}" for number in range(5)] for batch in range(3)]
    assert consumed_in_order == [message for batch in reversed(batches) for message in batch]


def test_presence_survives_lost_broker_connections(site):
    site.fleet.worker("w1")

    def heartbeat() -> float:
        (actor,) = list_members(site.client, "cue").of("dispatch")
        return actor.last_heartbeat

    before = heartbeat()
    site.client.client_kill_filter(_type="normal", skipme=True)
    eventually(lambda: heartbeat() > before + 8, 40, "heartbeats after the reconnect")
    assert site.fleet.processes["w1"].running


# Take-over


def test_a_worker_killed_in_mid_pass_is_followed_by_another(site):
    """Three kills with default times, the last two with no beat: from then on nobody sweeps, and nobody is elected.

    What a slow machine cannot change: when the claim ends (its life, 3 s, after its holder prolonged it for the last
    time), and that whoever looks first after that sends the message. What it can is not judged: how late that look is,
    the pass and its commit. The goal of 6 s is made of the claim, 2 to 3 (it is prolonged each second), a look, 1 at
    most, and a pass, 0.1 on a quiet machine. And nothing half-done stays.
    """
    plant(site, frames=1)
    site.fleet.environment["OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS"] = "3s"
    site.fleet.beat()
    for name in ("w1", "w2"):
        site.fleet.worker(name)
    eventually(lambda: booked(site) == 1, 60, "first frame")
    seconds: list[float] = []
    with RedisLog(site.server.url) as log:
        for round_ in range(3):
            if round_ == 1:
                site.fleet.processes.pop("beat").kill()
            killed_ms, held = kill_in_mid_pass(site, f"job{round_}")
            assert int(held["expires"]) <= killed_ms + 1000 * LIFE_SECONDS
            eventually(lambda held=held: int(posting(site)["fence"]) > int(held["fence"]), 60, "take-over")
            assert_sent_by_the_first_look(log, held["name"], posting(site)["uuid"], int(held["expires"]) / 1000)
            eventually(lambda round_=round_: booked(site) == 2 + round_, 60, "the frame of the killed pass")
            seconds.append((redis_ms(site) - killed_ms) / 1000)
            if round_ < 2:
                site.fleet.worker(held["owner"])
    print(f"SIGKILL in mid-pass to the next committed booking: {[round(value, 2) for value in seconds]}")
    site.fleet.beat("later")
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")


def kill_in_mid_pass(site: Site, job: str) -> tuple[int, dict[str, str]]:
    """Kill the worker that works on a new job; when that was by Redis' clock, ms, and the claim it had."""
    with commits_held_up(site):
        add_job(site, job)
        while True:
            held = eventually(lambda: waiting_for_hosts(site) and claim(site), 60, "a pass under way")
            site.fleet.processes.pop(held["owner"]).kill()
            killed_ms = redis_ms(site)
            left = posting(site)
            if (left["owner"], left["fence"]) == (held["owner"], held["fence"]):
                return killed_ms, left
            # Its pass waits for a lock but for a moment, and had given up before it was killed.
            site.fleet.worker(held["owner"])


def test_a_frozen_worker_does_no_harm_when_it_goes_on(site):
    """SIGSTOP in mid-pass until another has done the work, SIGCONT: no frame twice, no drift."""
    plant(site, frames=1)
    site.fleet.environment["OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS"] = "3s"
    site.fleet.beat()
    for name in ("w1", "w2"):
        site.fleet.worker(name)
    eventually(lambda: booked(site) == 1, 60, "first frame")
    with commits_held_up(site):
        add_job(site, "more", frames=6)
        held = eventually(lambda: waiting_for_hosts(site) and claim(site), 60, "a pass under way")
        frozen = site.fleet.processes[held["owner"]]
        frozen.pause()
    eventually(lambda: booked(site) == 7, 60, "the other one's work")
    frozen.resume()
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")
    assert booked(site) == 7
    eventually(lambda: len(list_members(site.client, "cue").of("dispatch")) == 2, 60, "both present")


# Draining


# A pass that waits for a lock as long as a slow machine takes to tell its worker to stop.
PATIENT = {
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "100s",
}


def test_sigterm_lets_the_pass_in_hand_end_and_leaves_nothing_behind(site):
    plant(site, frames=3)
    site.fleet.worker("w1", **PATIENT)
    worker = site.fleet.processes["w1"]
    with _pass_under_way(site) as held:
        worker.send_signal(signal.SIGTERM)
        eventually(lambda: list_members(site.client, "cue").of("dispatch")[0].state == "draining", 20, "draining")
        assert worker.running
    assert worker.wait(100) == 0
    assert booked(site) == 3
    assert claim(site) is None
    assert int(posting(site)["fence"]) == int(held["fence"])
    assert list_members(site.client, "cue").alive == ()


@contextmanager
def _pass_under_way(site: Site):
    """A pass that waits for the host table, with its claim; nobody sweeps."""
    with commits_held_up(site), (site.fleet.directory / "asked").open("wb") as said:
        command = [*PROGRAM, "dispatch", "--cluster", cluster_key(site)]
        asked = warm_start.Started(command, env=site.fleet.environment, stdout=said, stderr=said)
        try:
            yield eventually(lambda: waiting_for_hosts(site) and claim(site), 60, "a pass under way")
        finally:
            asked.wait(60)


def test_sigterm_waits_for_the_pass_in_hand_no_longer_than_the_grace(site):
    """Whatever stops it would kill it then, without its presence taken away."""
    plant(site, frames=3)
    site.fleet.environment["OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS"] = "3s"
    worker = site.fleet.worker("w1", OPENCUE_SCHED_COORDINATION__DRAIN_GRACE="1s", **PATIENT)
    with _pass_under_way(site):
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert waiting_for_hosts(site), "its pass had not ended"
        assert '"left_with_work_in_hand"' in site.fleet.log("w1").read_text()
        assert list_members(site.client, "cue").alive == ()
    # As if the permits of the one that left had run out, which live as long as its commit had time.
    permits = list(site.client.scan_iter(frame_permit("cue", "*", None) + "*"))
    assert site.client.delete(*permits) == 3
    site.fleet.beat()
    site.fleet.worker("w2")
    eventually(lambda: booked(site) == 3, 60, "the work of the one that left")
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")
