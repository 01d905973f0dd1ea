"""Workers killed, frozen, drained and steered while they work; what is left behind, and who goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from celery import Celery
from kombu import Queue
from sqlalchemy import text

from benchmarks import warm_start
from opencue_sched.accounting.keys import LEDGER, unpack, unpack_entry
from opencue_sched.coordination.board import RESEND_SECONDS
from opencue_sched.coordination.keys import (
    BoardKeys,
    LeaderKeys,
    QueueName,
    consumed_queues,
    frame_permit,
    presence_key,
    priority_lists,
)
from opencue_sched.coordination.leader import tick_series
from opencue_sched.coordination.postings import CLAIM_SECONDS as LIFE_SECONDS
from opencue_sched.coordination.postings import Claim, ClusterPostings
from opencue_sched.coordination.presence import REFRESH_SECONDS, TTL_SECONDS, list_members
from opencue_sched.coordination.transport import broker_settings
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.embedded.servers.processes import ServiceFailed, free_port
from opencue_sched.insight.audit import run_audit
from opencue_sched.store.fences import PersistentFences
from tests.chaos.conftest import Site
from tests.kit.command import PROGRAM
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog

BOARD = BoardKeys("cue", "clusters")
CLAIM_SECONDS = 1.0


def opencue_sched(site: Site, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, as an operator has it."""
    return warm_start.run([*PROGRAM, *arguments], env={**site.fleet.environment, **environment})


def steer(site: Site, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``opencue-sched ctl``, said again when a worker of a slow machine answered too late."""

    def said() -> subprocess.CompletedProcess[str] | None:
        ran = opencue_sched(site, "ctl", *arguments, **environment)
        return None if ran.returncode else ran

    return eventually(said, 30, f"an answer to {arguments}")


def plant(site: Site, *, frames: int = 4, cores: float = 1, hosts: int = 2) -> None:
    """A managed show with hosts and one job."""
    with site.engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.show("show", managed=True)
        farm.subscription(show, farm.default_alloc(), burst=1000)
        farm.hosts([HostSpec(name=f"h{number}", cores=8) for number in range(hosts)])
        farm.job([LayerSpec(frames=frames, cores=cores)], show=show)


def add_job(site: Site, name: str, *, frames: int = 1) -> None:
    with site.engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=frames)], show=_show(connection), name=name)


def _show(connection):
    from opencue_sched.embedded.farms.farm_specs import ShowIds

    row = connection.execute(
        text(
            "SELECT s.pk_show, f.pk_folder, f.pk_dept FROM show s JOIN folder f USING (pk_show) "
            "WHERE s.str_name = 'show' ORDER BY f.b_default DESC LIMIT 1"
        )
    ).one()
    return ShowIds(row.pk_show, "show", row.pk_folder, row.pk_dept)


def booked(site: Site) -> int:
    with site.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM proc")).scalar() or 0)


@contextmanager
def commits_held_up(site: Site):
    """No pass can commit: it waits for the host table, with its claim in hand."""
    with site.engine.connect() as connection:
        connection.execute(text("LOCK TABLE host IN EXCLUSIVE MODE"))
        yield connection
        connection.rollback()


def waiting_for(site: Site, table: str) -> bool:
    with site.engine.connect() as connection:
        query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = to_regclass(:name)"
        return bool(connection.execute(text(query), {"name": table}).scalar())


def waiting_for_hosts(site: Site) -> bool:
    return waiting_for(site, "host")


def claim(site: Site) -> dict[str, str] | None:
    """The posting that is claimed now, if any."""
    for uuid in site.client.zrange(BOARD.of("claimed"), 0, -1):
        return {**site.client.hgetall(BOARD.job(uuid)), "uuid": uuid}
    return None


def posting(site: Site) -> dict[str, str]:
    (uuid,) = site.client.hvals(BOARD.of("names"))
    return {**site.client.hgetall(BOARD.job(uuid)), "uuid": uuid}


def has_posting(site: Site) -> bool:
    return bool(site.client.hlen(BOARD.of("names")))


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


def assert_sent_by_the_first_look(log: RedisLog, cluster: str, uuid: str, due: float) -> None:
    """Whoever enqueued the cluster first after a message for it was due (seconds since the epoch) sent that message.

    By what Redis was asked, in its order: a sweep or a watch that comes late is the machine's doing, one that passes by
    a cluster that has been waiting for it is ours.
    """
    asked = log.since(due - 0.01)  # scripts count in whole milliseconds, from when Redis last looked at its clock
    ticket = f"HINCRBY {BOARD.job(uuid)} ticket "
    sent = next(number for number, call in enumerate(asked) if call.text.startswith(ticket))
    looks = [call.at for call in asked[:sent] if call.runs("board_enqueue") and cluster in call.text]
    assert len(looks) <= 1, f"due {due}, sent {asked[sent].at}, looked at {looks}"


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
        command = [*PROGRAM, "dispatch", "--cluster", _cluster_key(site)]
        asked = warm_start.Started(command, env=site.fleet.environment, stdout=said, stderr=said)
        try:
            yield eventually(lambda: waiting_for_hosts(site) and claim(site), 60, "a pass under way")
        finally:
            asked.wait(60)


def _cluster_key(site: Site) -> str:
    from opencue_sched.dispatch.clusters import load_clusters

    with site.engine.connect() as connection:
        (cluster,) = [c for c in load_clusters(connection, site.settings) if c.kind.value == "alloc"]
    return cluster.key


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


# Messages are hints


ACCIDENTS = [
    "crash between post and send",
    "message lost",
    "message came during a claim",
    "woken while claimed",
    "claimant died",
    "message lost while no beat leads",
    "rest that nobody ends while no beat leads",
]
REST_SECONDS = 0.2


@pytest.fixture(scope="module")
def awake(shared_site):
    """A fleet of a worker and a beat, and work that fits no host: its cluster stays awake and rests between passes."""
    plant(shared_site, cores=100)
    shared_site.fleet.beat()
    shared_site.fleet.worker("w1", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(free_port()))
    eventually(lambda: has_posting(shared_site) and int(posting(shared_site)["fence"]) > 0, 60, "first pass")
    return shared_site


def metrics_port(site: Site, name: str) -> int:
    """Where a worker serves its metrics."""
    lines = site.fleet.log(name).read_text().splitlines()
    return next(urlsplit(json.loads(line)["address"]).port or 0 for line in lines if '"metrics_served"' in line)


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_no_accident_strands_a_cluster_beyond_three_seconds(awake, accident):
    """The 3 s are made of: 0.8 s (RESEND_SECONDS) until a message counts as lost, or the rest of the claim, at most
    2.0 s (active_scan_interval) until the next sweep looks, and its own time.

    That the first look after the message was due sends it is judged by the calls Redis had; how late a look is on a
    busy machine is not. Where nobody sweeps the workers look for themselves, as often or more, also when a rest ends.
    """
    site, port = awake, metrics_port(awake, "w1")
    if accident.endswith("while no beat leads") and (beat := site.fleet.processes.pop("beat", None)):
        beat.kill()
    board = ClusterPostings(site.client, BOARD)
    uuid = posting(site)["uuid"]
    with RedisLog(site.server.url) as log:
        held = eventually(lambda: _seize(board, uuid), 30, "our claim")
        before = redis_ms(site) / 1000
        lost = befall(site, board, held, accident, port)
        eventually(lambda: int(posting(site)["ticket"]) > lost, 30, "another message")
        since, due = stranded_since(log, accident, uuid, before)
        assert_sent_by_the_first_look(log, held.cluster.key, uuid, due)
        eventually(lambda: int(posting(site)["fence"]) > held.fence, 30, "the next pass")
    seconds = claimed_at_ms(site, uuid, round(1000 * since)) / 1000 - since
    print(f"{accident}, to the next claim: {seconds:.2f} s")


def stranded_since(log: RedisLog, accident: str, uuid: str, before: float) -> tuple[float, float]:
    """From when on nobody was at the cluster after the accident, and from when on a message for it was due."""
    if accident == "claimant died":
        (prolonged,) = log.calls("board_end", since=before, naming=f"{uuid} test ")
        return prolonged.at + CLAIM_SECONDS, prolonged.at + CLAIM_SECONDS
    (ended,) = log.calls("board_end", since=before, naming=f"{uuid} test ")
    if accident.startswith("rest "):
        return ended.at + REST_SECONDS, ended.at + REST_SECONDS
    sent_none = accident == "message came during a claim"
    return ended.at, ended.at + (0 if sent_none else RESEND_SECONDS)


def redis_ms(site: Site) -> int:
    seconds, micros = site.client.time()
    return seconds * 1000 + micros // 1000


def claimed_at_ms(site: Site, uuid: str, since_ms: int) -> int:
    """When a posting was claimed first since then, as the board's events say."""
    events = site.client.xrange(BOARD.of("events"), since_ms, "+")
    return next(int(at.partition("-")[0]) for at, it in events if (it["kind"], it["job"]) == ("CLAIMED", uuid))


def befall(site: Site, board: ClusterPostings, held: Claim, accident: str, port: int) -> int:
    """What happens to the posting we hold, and leaves nobody holding it; the last ticket nobody has a message of."""
    lost = int(posting(site)["ticket"])
    if accident == "claimant died":
        assert board.extend([held], ttl_seconds=CLAIM_SECONDS)
    elif accident == "woken while claimed":
        board.enqueue([held.cluster], wake=True)
        lost = board.end(held, "sleep", delay_seconds=600)  # and the message is never sent
        assert lost > 0
    elif accident == "message came during a claim":
        dropped = 'scheduler_messages_dropped_total{reason="held"}'
        before = _metric(port, dropped)
        send_dispatch(site, held.uuid, QueueName("cue", "dispatch", "default"))
        eventually(lambda: _metric(port, dropped) > before, 30, "the dropped message")
        board.end(held, "abandon")
    elif accident.startswith("rest "):
        board.end(held, "sleep", delay_seconds=REST_SECONDS)  # and we, who began it, are as good as dead
    else:
        lost = board.end(held, "again")  # the message is never sent
        assert lost > 0
    if accident.startswith("message lost"):
        for queue in consumed_queues("cue", "dispatch", "default", "w1"):
            site.client.delete(*priority_lists(queue))
    return lost


def send_dispatch(site: Site, uuid: str, to: QueueName) -> None:
    """A message for a posting, of nobody's sending: without a ticket."""
    with sender(site) as app:
        task = "opencue_sched.dispatch.dispatch_cluster"
        app.send_task(task, args=(uuid,), queue=Queue(str(to)), declare=[], priority=0)


def test_a_worker_killed_in_a_short_rest_is_followed_by_the_first_look_of_another(awake):
    """Between the end of its pass and the message that it alone means to send when the rest is over; no beat leads."""
    site, uuid = awake, posting(awake)["uuid"]
    if beat := site.fleet.processes.pop("beat", None):
        beat.kill()
    with RedisLog(site.server.url) as log:
        site.fleet.processes["w1"].pause()
        while not (due := kill_in_a_short_rest(site, log, uuid)):
            pass  # on a slow machine its rest was over
        rested = posting(site)
        site.fleet.processes["w1"].resume()
        eventually(lambda: int(posting(site)["fence"]) > int(rested["fence"]), 30, "the next pass")
        asked = log.since(due)
    ticket = f"HINCRBY {BOARD.job(uuid)} ticket "
    sent = next(number for number, call in enumerate(asked) if call.text.startswith(ticket))
    assert len([call for call in asked[:sent] if call.runs("board_due")]) == 1
    print(f"killed in a short rest, from its end to the message: {asked[sent].at - due:.2f}")


def kill_in_a_short_rest(site: Site, log: RedisLog, uuid: str) -> float:
    """Have a worker make a pass, and kill it; when the rest it began ends, seconds since the epoch, if it still goes
    on."""
    site.fleet.worker("w2", OPENCUE_SCHED_QUEUE__CLUSTER_SATURATED_SLEEP="1s")
    ended = _ended_by(log, f"{uuid} w2 ")
    ClusterPostings(site.client, BOARD).update(uuid, "rest", 0)
    send_dispatch(site, uuid, QueueName("cue", "dispatch", "default", "w2"))
    eventually(lambda: _ended_by(log, f"{uuid} w2 ") > ended, 30, "the end of its pass")
    site.fleet.processes.pop("w2").kill()
    return (site.client.zscore(BOARD.of("delayed"), uuid) or 0) / 1000


def _ended_by(log: RedisLog, claimant: str) -> int:
    """How many claims of a posting its claimant has ended; to prolong one is another call of the same script."""
    return len([call for call in log.calls("board_end", naming=claimant) if " extend " not in call.text])


def _seize(board: ClusterPostings, uuid: str):
    board.update(uuid, "rest", 0)
    answer = board.claim(uuid, "test", ttl_seconds=60)
    return answer if isinstance(answer, Claim) else None


def test_copies_of_a_message_are_dropped_and_counted(site):
    """A message that is pushed to its queue and to an old one leads to one pass."""
    plant(site, cores=100)
    port = free_port()
    site.fleet.environment["OPENCUE_SCHED_COORDINATION__LEGACY_QUEUES"] = '["cue.dispatch.old"]'
    resting = {"OPENCUE_SCHED_QUEUE__CLUSTER_SATURATED_SLEEP": "10m"}
    site.fleet.worker("w1", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(port), **resting)
    key = _cluster_key(site)
    assert opencue_sched(site, "dispatch", "--cluster", key).returncode == 0
    eventually(lambda: has_posting(site) and posting(site)["state"] == "delayed", 30, "the pass")
    # One, and one more of each message that a slow worker sent again because it had not taken the first in time.
    stale = 'scheduler_messages_dropped_total{reason="stale"}'
    eventually(lambda: _metric(port, stale) >= 1, 30, "the dropped copy")
    assert posting(site)["fence"] == "1"
    assert not site.client.llen("cue.dispatch.old:prio:1")


@pytest.mark.parametrize("asked", ["types alone", "an old queue alone", "own instance alone"])
def test_a_worker_that_consumes_a_part_of_the_queues_gets_its_work_by_these(site, asked):
    """What it consumes is what it announces, so nothing is sent where nobody takes it."""
    plant(site)
    site.fleet.environment["OPENCUE_SCHED_COORDINATION__LEGACY_QUEUES"] = '["farm.old.q"]'
    queue = {
        "types alone": str(QueueName("cue", "dispatch")),
        "an old queue alone": "farm.old.q",
        "own instance alone": str(QueueName("cue", "dispatch", "default", "w1")),
    }[asked]
    site.fleet.worker("w1", "-Q", queue)
    site.fleet.worker("w2", "-Q", str(QueueName("cue", "sweep")))
    site.fleet.beat()
    eventually(lambda: booked(site) == 4, 30, "all frames")
    (actor,) = list_members(site.client, "cue").of("dispatch")
    assert (actor.instance, actor.capabilities) == ("w1", (queue,))


@contextmanager
def sender(site: Site):
    """A Celery client that sends to our queues."""
    app = Celery("sender", broker=broker_settings(site.server.url).url, set_as_current=False)
    app.conf.update(broker_transport_options={"sep": ":prio:"})
    yield app
    app.close()


def led_by(site: Site, keys: LeaderKeys, fence: int) -> None:
    """As an election leaves it: in Redis, and in the record."""
    site.client.set(keys.fence, fence)
    assert PersistentFences(site.engine).claim(keys.name, fence)


def send_recomputes(site: Site, *sent: tuple[int, int], tick_of: str = "recompute") -> None:
    """Periodic messages, as a leader of this fence sends them for this tick."""
    queue = Queue(str(QueueName("cue", "accounting", "default")))
    with sender(site) as app:
        for fence, tick in sent:
            headers = {"fence": fence, "tick": tick, "tick_of": tick_of}
            app.send_task("opencue_sched.accounting.recompute", queue=queue, declare=[], priority=0, headers=headers)


def recomputes_in_hand(site: Site) -> int:
    """How many recomputes were handed out and are not acknowledged yet."""
    return sum("opencue_sched.accounting.recompute" in message for message in site.client.hvals("unacked"))


def test_what_a_former_leader_or_an_earlier_tick_sent_is_dropped_and_counted(site):
    """A worker looks at the fence of a message again before it acts, and what it changes carries that fence."""
    port = free_port()
    plant(site, frames=1)
    site.fleet.worker("w1", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(port))
    keys = LeaderKeys("cue", "beat")
    led_by(site, keys, 5)
    assert PersistentFences(site.engine).claim_tick(keys.name, 5, "recompute", 70)[0]
    send_recomputes(site, (4, 71), (5, 69), (5, 70))
    for line in (
        'scheduler_messages_dropped_total{reason="former_leader"} 1.0',
        'scheduler_messages_dropped_total{reason="overtaken"} 1.0',
        "scheduler_recompute_cycle_duration_seconds_count 1.0",
    ):
        eventually(lambda line=line: line in _metrics(port), 30, line)
    with site.engine.connect() as connection:
        connection.execute(text("LOCK TABLE proc IN ACCESS EXCLUSIVE MODE"))
        send_recomputes(site, (5, 72))
        eventually(lambda: waiting_for(site, "proc"), 30, "a recompute under way")
        site.client.set(keys.fence, 6)
        connection.rollback()
    fenced_off = 'scheduler_messages_dropped_total{reason="fenced_off"} 1.0'
    eventually(lambda: fenced_off in _metrics(port), 30, fenced_off)
    assert "periodic_message_dropped" in site.fleet.log("w1").read_text()
    assert "scheduler_recompute_cycle_duration_seconds_count 1.0" in _metrics(port)


def test_what_a_killed_worker_had_in_hand_is_done_by_another(site):
    """Acknowledged late, so the broker hands it out again; the two minutes until then are cut short here."""
    plant(site, frames=1)
    keys = LeaderKeys("cue", "beat")
    led_by(site, keys, 5)
    assert PersistentFences(site.engine).claim_tick(keys.name, 5, "recompute", 70)[0]
    # Of the accounting queue only: a message to dispatch the planted frame would be one of the two in hand.
    recomputes = str(QueueName("cue", "accounting", "default"))
    site.fleet.worker("w1", "--queues", recomputes, OPENCUE_SCHED_QUEUE__WORKER_THREADS="2")
    with site.engine.connect() as connection:
        connection.execute(text("LOCK TABLE proc IN ACCESS EXCLUSIVE MODE"))
        # None of them takes the place of one that waits.
        send_recomputes(site, *[(5, 70)] * 4, tick_of="")
        eventually(lambda: waiting_for(site, "proc"), 30, "a recompute under way")
        eventually(lambda: (recomputes_in_hand(site), site.client.llen(recomputes)) == (2, 2), 30, "two of each")
        site.fleet.processes["w1"].kill()
        connection.rollback()
    port, done = free_port(), "scheduler_recompute_cycle_duration_seconds_count {}.0"
    site.fleet.worker("w2", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(port))
    eventually(lambda: done.format(2) in _metrics(port), 60, "those that waited")
    eventually(lambda: recomputes_in_hand(site) == 2, 30, "their acknowledgements")
    for tag in site.client.zrange("unacked_index", 0, -1):
        site.client.zadd("unacked_index", {tag: 1}, xx=True)
    eventually(lambda: done.format(4) in _metrics(port), 60, "those that were in hand")
    eventually(lambda: not site.client.hlen("unacked"), 30, "acknowledgements")


def _metric(port: int, name: str) -> float:
    """A sample's value; 0 before there is one."""
    return next((float(line.rpartition(" ")[2]) for line in _metrics(port).splitlines() if line.startswith(name)), 0.0)


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


# Steering


def test_paused_workers_take_nothing_until_they_resume(site):
    plant(site, frames=2)
    site.fleet.worker("w1")
    said = steer(site, "pause", "--group", "default", "--json")
    assert json.loads(said.stdout) == {"w1@localhost": {"ok": "paused"}}
    eventually(lambda: list_members(site.client, "cue").of("dispatch")[0].state == "paused", 30)
    assert opencue_sched(site, "dispatch", "--cluster", _cluster_key(site)).returncode == 0
    waiting = [name for queue in ("group", "type") for name in _lists(queue)]
    eventually(lambda: any(site.client.llen(name) for name in waiting), 10, "a waiting message")
    assert booked(site) == 0
    steer(site, "resume")
    eventually(lambda: booked(site) == 2, 30, "the work")


def _lists(queue: str) -> tuple[str, ...]:
    name = QueueName("cue", "dispatch", "default" if queue == "group" else None)
    return priority_lists(name)


def test_a_worker_that_drains_stays_up_until_it_is_stopped(site):
    site.fleet.worker("w1")
    steer(site, "drain", "--instance", "w1")
    eventually(lambda: list_members(site.client, "cue").of("dispatch")[0].state == "draining", 30, "draining")
    assert site.fleet.processes["w1"].running
    assert opencue_sched(site, "ctl", "stop", "--instance", "w1").returncode == 0
    assert site.fleet.processes["w1"].wait(100) == 0


def last_sweep(site: Site, role: str) -> int:
    """Number of the last sweep that a leader of this role fired."""
    series = tick_series("sweep-clusters", site.settings.queue.active_scan_interval)
    return PersistentFences(site.engine).leader(LeaderKeys("cue", role).name).ticks.get(series, 0)


def test_a_cluster_told_to_rest_is_left_alone_until_it_is_told_otherwise(site):
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "first frame")
    key = _cluster_key(site)
    steer(site, "sleep", "--cluster", key, "--for", "10m")
    fence = posting(site)["fence"]
    add_job(site, "more")
    sweeps = last_sweep(site, "beat")
    eventually(lambda: last_sweep(site, "beat") >= sweeps + 2, 30, "sweeps")
    assert posting(site)["fence"] == fence
    steer(site, "sleep", "--cluster", key, "--for", "0")
    eventually(lambda: booked(site) == 2, 30, "the frame that waited")
    assert opencue_sched(site, "ctl", "sleep", "--cluster", "nobody", "--for", "1m").returncode == 1


def test_run_and_wait_reports_the_pass(site):
    plant(site, frames=2)
    site.fleet.worker("w1")
    done = opencue_sched(site, "dispatch", "--cluster", _cluster_key(site), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ended"], answer["booked"], answer["launched"]) == ("booked", 2, 2)
    assert opencue_sched(site, "dispatch", "--cluster", "nobody", "--wait").returncode == 1


def test_the_board_is_listed_trashed_and_restored_by_command(site):
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "first frame")
    key = _cluster_key(site)
    (row,) = json.loads(opencue_sched(site, "board", "list", "--json").stdout)
    assert (row["cluster"], row["tags"]) == (key, "general")
    eventually(lambda: opencue_sched(site, "board", "trash", key, "--reason", "odd").returncode == 0, 30)
    assert "odd" in opencue_sched(site, "board", "show", key).stdout
    add_job(site, "more")
    (row,) = json.loads(opencue_sched(site, "board", "list", "--state", "trash", "--json").stdout)
    assert row["cluster"] == key
    assert booked(site) == 1
    assert opencue_sched(site, "board", "restore", key).returncode == 0
    eventually(lambda: booked(site) == 2, 30, "the frame that waited")


POISON = """
    import redis
    from opencue_sched.dispatch.cluster_pass import PassRunner
    from opencue_sched.settings import get_settings

    client = redis.Redis.from_url(get_settings().redis_dsn)
    run = PassRunner.run

    def poisoned(self, cluster, **options):
        if client.exists("poison"):
            raise RuntimeError("a row nobody foresaw")
        return run(self, cluster, **options)

    PassRunner.run = poisoned
"""


def test_a_poison_cluster_is_cooled_down_with_its_traceback_and_comes_back_by_itself(site):
    """Its passes fail in a real worker, again and again."""
    plant(site, frames=1)
    (site.fleet.directory / "poison.py").write_text(textwrap.dedent(POISON), encoding="utf-8")
    path = f"{site.fleet.directory}:{site.fleet.environment.get('PYTHONPATH', '')}"
    site.client.set("poison", "1")
    worker = site.fleet.worker("w1", "--include=poison", PYTHONPATH=path)
    site.fleet.beat()
    eventually(lambda: has_posting(site) and posting(site)["failures"] == "2", 60, "two failures")
    key = _cluster_key(site)
    (row,) = json.loads(opencue_sched(site, "board", "list", "--state", "delayed", "--json").stdout)
    assert row["cluster"] == key
    shown = opencue_sched(site, "board", "show", key).stdout
    assert "Traceback (most recent call last)" in shown
    assert "RuntimeError: a row nobody foresaw" in shown
    site.client.delete("poison")
    eventually(lambda: booked(site) == 1, 30, "the frame that waited")
    assert worker.running


def test_the_fleet_is_shown_with_its_leader_and_queues(site):
    site.fleet.worker("w1")
    site.fleet.worker("w2")
    site.fleet.beat(OPENCUE_SCHED_INSTANCE="b1")
    view = eventually(lambda: _view_with_leader(site), 60, "a leader")
    assert [worker["instance"] for worker in view["workers"]] == ["w1", "w2"]
    assert view["workers"][0]["types"] == ["accounting", "dispatch", "maintenance", "sweep"]
    assert view["leader"]["fence"] >= 1
    assert set(view["queues"]) == {"accounting", "dispatch", "maintenance", "sweep"}
    shown = opencue_sched(site, "fleet").stdout
    assert f"leader: {view['leader']['instance']}, fence" in shown
    assert "w2" in shown
    patient = ("--timeout", "60", "--destination", "w1@localhost")
    assert f'"instance": "{view["leader"]["instance"]}"' in celery(site, "inspect", *patient, "leader_status", "--json")


def _view_with_leader(site: Site):
    view = json.loads(opencue_sched(site, "fleet", "--json").stdout)
    leader = view["leader"]
    return view if str(leader["instance"]).startswith("b1-") and leader["tick_age_seconds"] is not None else None


def celery(site: Site, *arguments: str, **environment: str) -> str:
    """What ``celery -A opencue_sched ARGUMENTS`` says."""
    command = [sys.executable, "-m", "celery", "-A", "opencue_sched", *arguments]
    ran = warm_start.run(command, env={**site.fleet.environment, **environment}, cwd=site.fleet.directory)
    ran.check_returncode()
    return ran.stdout


def heard_by_celery(site: Site, command: str, **environment: str) -> set[str]:
    """The nodes that answer to ``celery control``, of all that there are."""
    said = celery(site, "control", "--timeout", "3", "--json", command, **environment)
    return {node for reply in json.loads(said) for node in reply}


def resumes(site: Site, node: str, **environment: str) -> bool:
    """Whether a node hears that it is to go on, in the time of ``celery control``; no other one may."""
    try:
        heard = heard_by_celery(site, "resume_dispatch", **environment)
    except subprocess.CalledProcessError:  # nobody answered
        return False
    assert heard == {node}
    return True


# A lease that a beat of a slow machine does not lose by itself.
LASTING = {
    "OPENCUE_SCHED_COORDINATION__LEASE_TTL": "10s",
}


def test_fleets_of_different_facilities_do_not_disturb_each_other(site):
    """Two fleets on one database and one Redis: each books its own, leads itself, and goes on when the other stands."""
    allocs, facilities = {}, {}
    with site.engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.show("show", managed=True)
        for name in ("Alpha", "beta"):
            fleet = name.lower()
            alloc = farm.alloc(f"{fleet}tag", facility=name)
            allocs[fleet], facilities[fleet] = alloc.id, farm.facility(name)
            farm.subscription(show, alloc, burst=1000)
            farm.hosts([HostSpec(name=f"{fleet}-host", alloc=alloc, cores=8)])

    def add(fleet: str, name: str, frames: int) -> None:
        with site.engine.begin() as connection:
            layer = LayerSpec(frames=frames, tags=f"{fleet}tag")
            Farm(connection).job([layer], show=show, facility_id=facilities[fleet], name=f"{fleet}-{name}")

    def on(fleet: str) -> int:
        """Frames that run on the fleet's host, booked by it and nobody else."""
        query = text("SELECT p.pk_proc FROM proc p JOIN host h USING (pk_host) WHERE h.str_name = :host")
        with site.engine.connect() as connection:
            procs = connection.execute(query, {"host": f"{fleet}-host"}).scalars().all()
        for proc in procs:
            record = unpack(proc, site.client.hget(LEDGER, proc))
            alloc = unpack_entry(proc, record.entry).vertices.alloc_id
            assert (record.owner, alloc) == (f"w-{fleet}", allocs[fleet])
        return len(procs)

    def lease(fleet: str) -> str | None:
        return site.client.get(LeaderKeys("cue", f"beat.{fleet}").lease)

    def ticks(fleet: str) -> int:
        return last_sweep(site, f"beat.{fleet}")

    for name in ("Alpha", "beta"):
        add(name.lower(), "first", 3)
        scope = {"OPENCUE_SCHED_SCHEDULER__FACILITY": name, **LASTING}
        site.fleet.worker(f"w-{name.lower()}", **scope)
        site.fleet.beat(f"b-{name.lower()}", **scope)
    eventually(lambda: (on("alpha"), on("beta")) == (3, 3), 90, "both facilities' frames")
    assert {actor.group for actor in list_members(site.client, "cue").of("dispatch")} == {"alpha", "beta"}
    boards = {fleet: BoardKeys("cue", f"clusters.{fleet}") for fleet in allocs}
    names = {fleet: set(site.client.hkeys(board.of("names"))) for fleet, board in boards.items()}
    assert names["alpha"] and names["beta"] and not names["alpha"] & names["beta"]
    eventually(lambda: lease("alpha") and lease("beta"), 30, "two leaders")
    assert lease("alpha") != lease("beta")

    # What is said to the one, by either command line, is not heard by the other.
    for fleet in names:
        scope = {"OPENCUE_SCHED_SCHEDULER__FACILITY": fleet}
        node = f"w-{fleet}@localhost"
        assert json.loads(steer(site, "pause", "--json", **scope).stdout) == {node: {"ok": "paused"}}
        eventually(lambda scope=scope, node=node: resumes(site, node, **scope), 30, "an answer")
        steer(site, "sleep", "--cluster", sorted(names[fleet])[0], "--for", "0", **scope)
    eventually(lambda: {actor.state for actor in list_members(site.client, "cue").of("dispatch")} == {"working"}, 30)

    # The one stands still, past its lease; the other neither notices nor takes over anything.
    before = lease("beta")
    for process in ("w-alpha", "b-alpha"):
        site.fleet.processes[process].pause()
    for fleet in ("alpha", "beta"):
        add(fleet, "second", 2)
    eventually(lambda: on("beta") == 5, 30, "the other fleet's frames")
    eventually(lambda: lease("alpha") is None, 30, "the end of the lease")
    began = ticks("beta"), ticks("alpha")
    eventually(lambda: ticks("beta") >= began[0] + 2, 30, "two more sweeps")
    assert (lease("beta"), ticks("alpha"), on("alpha"), lease("alpha")) == (before, began[1], 3, None)
    for process in ("w-alpha", "b-alpha"):
        site.fleet.processes[process].resume()
    eventually(lambda: on("alpha") == 5, 60, "the frames that waited")
    eventually(lambda: ticks("alpha") > began[1], 30, "its own sweeps")
    assert lease("beta") == before
    assert on("beta") == 5
    for process in ("w-alpha", "w-beta"):
        log = site.fleet.log(process).read_text()
        assert "former_leader" not in log
        assert "fenced_off" not in log
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")
