"""Messages that are lost or copied, or came from a former leader: no cluster is stranded, and nothing is done twice."""

from __future__ import annotations

import json
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from celery import Celery
from kombu import Queue
from sqlalchemy import text

from opencue_sched.coordination.board import RESEND_SECONDS
from opencue_sched.coordination.keys import LeaderKeys, QueueName, consumed_queues, priority_lists
from opencue_sched.coordination.postings import Claim, ClusterPostings
from opencue_sched.coordination.presence import list_members
from opencue_sched.coordination.transport import broker_settings
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.store.fences import PersistentFences
from tests.chaos.conftest import Site
from tests.chaos.planted_site import (
    BOARD,
    assert_sent_by_the_first_look,
    booked,
    cluster_key,
    has_posting,
    opencue_sched,
    plant,
    posting,
    redis_ms,
    waiting_for,
)
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog

CLAIM_SECONDS = 1.0


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
    key = cluster_key(site)
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
