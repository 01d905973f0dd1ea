"""Routing, draining, depths and replies on real Redis."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest
from celery import Celery

import celeryconfig
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination import replies, routing
from opencue_sched.coordination.keys import (
    PRIORITY_SEPARATOR,
    QUEUE_PRIORITIES,
    QueueName,
    consumed_queues,
    job_hash,
    presence_index,
    presence_key,
    priority_lists,
    queue_stats,
    reply_queue,
)
from opencue_sched.coordination.postings import Enqueued
from opencue_sched.coordination.presence import Presence, list_members
from opencue_sched.coordination.queue_figures import FORGET_SECONDS, drain_dead_instances, queue_census
from opencue_sched.coordination.routing import Router
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.errors import SchedulerError
from opencue_sched.settings import Settings
from opencue_sched.worker.messenger import Messenger

CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
TYPE, GROUP = QueueName("cue", "dispatch"), QueueName("cue", "dispatch", "default")
OWN = QueueName("cue", "dispatch", "default", "a")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def present(
    client,
    instance: str,
    *,
    capacity: int = 2,
    group: str = "default",
    facility: str | None = None,
    consumes: Sequence[str] | None = None,
    **state,
) -> Presence:
    """Announce an instance that consumes all of its queues, or these."""
    presence = Presence(
        client,
        "cue",
        types=("dispatch",),
        group=group,
        instance=instance,
        capacity=capacity,
        facility=facility,
        capabilities=consumed_queues("cue", "dispatch", group, instance) if consumes is None else consumes,
    )
    presence.announce()
    presence.refresh(**state)
    return presence


# Routing


def test_a_cluster_without_a_shard_goes_to_the_first_instance_of_the_group_however_much_that_has_to_do(redis_client):
    present(redis_client, "b"), present(redis_client, "a", in_flight=9), present(redis_client, "0", group="other")
    router = Router(redis_client, "cue", "default")
    assert {router.queue_for(CLUSTER) for _ in range(5)} == {OWN}


def test_a_message_sent_again_never_waits_for_one_instance(redis_client):
    present(redis_client, "a")
    assert Router(redis_client, "cue", "default").queue_for(CLUSTER, again=True) == GROUP


def on(shard: str) -> Cluster:
    return replace(CLUSTER, shard=shard)


def test_a_posting_of_a_shard_goes_to_its_instance_however_much_that_has_to_do(redis_client):
    present(redis_client, "a", in_flight=9), present(redis_client, "b")
    router = Router(redis_client, "cue", "default")
    assert {router.queue_for(on("a")) for _ in range(5)} == {OWN}
    assert router.queue_for(on("b")).instance == "b"


def test_a_posting_of_a_shard_goes_to_all_when_its_instance_did_not_take_it_or_is_gone(redis_client):
    present(redis_client, "a")
    router = Router(redis_client, "cue", "default")
    assert router.queue_for(on("a"), again=True) == GROUP
    assert router.queue_for(on("gone")) == GROUP


def test_a_posting_of_a_shard_waits_in_no_queue_that_its_instance_does_not_consume(redis_client):
    present(redis_client, "a", consumes=[str(GROUP)]), present(redis_client, "b", consumes=[str(TYPE)])
    router = Router(redis_client, "cue", "default")
    assert router.queue_for(on("a")) == router.queue_for(on("b")) == GROUP


def test_the_hosts_of_a_board_are_divided_among_all_that_work_on_it(redis_client):
    present(redis_client, "a"), present(redis_client, "b", group="other"), present(redis_client, "c", state="paused")
    present(redis_client, "d", group="lax", facility="lax"), present(redis_client, "e", consumes=[str(TYPE)])
    router = Router(redis_client, "cue", "default")
    assert router.instances() == {"a", "b", "e"}
    assert router.queue_for(on("b")) == QueueName("cue", "dispatch", "other", "b")
    assert Router(redis_client, "cue", "lax", fixed=True).instances() == {"d"}


@pytest.mark.parametrize("state", ["starting", "paused", "draining"])
def test_an_instance_that_takes_no_work_gets_none(redis_client, state):
    present(redis_client, "a", state=state)
    assert Router(redis_client, "cue", "default").queue_for(CLUSTER) == TYPE


def test_without_anybody_in_the_group_the_type_queue_is_left_unless_the_group_is_fixed(redis_client):
    present(redis_client, "elsewhere", group="other")
    assert Router(redis_client, "cue", "default").queue_for(CLUSTER) == TYPE
    assert Router(redis_client, "cue", "default", fixed=True).queue_for(CLUSTER) == GROUP


@pytest.mark.parametrize(
    ("consumed", "first", "again", "of_all"),
    [
        ((TYPE,), TYPE, TYPE, TYPE),
        ((GROUP, TYPE), GROUP, GROUP, GROUP),
        ((OWN, TYPE), OWN, TYPE, TYPE),
        ((OWN, GROUP), OWN, GROUP, GROUP),
        ((OWN,), OWN, OWN, TYPE),
        (("farm.old.q",), TYPE, TYPE, TYPE),
    ],
)
def test_a_message_goes_where_somebody_consumes(redis_client, consumed, first, again, of_all):
    present(redis_client, "a", consumes=[str(queue) for queue in consumed])
    router = Router(redis_client, "cue", "default")
    assert (router.queue_for(CLUSTER), router.queue_for(CLUSTER, again=True)) == (first, again)
    assert router.queue_of_all() == of_all


def test_a_dead_instance_is_passed_over_within_a_second_of_its_end(redis_client, monkeypatch):
    presence = present(redis_client, "a")
    clock = Clock()
    monkeypatch.setattr(routing, "boot_clock", clock)
    router = Router(redis_client, "cue", "default")
    assert router.queue_for(CLUSTER).instance == "a"
    presence.withdraw()
    clock.now += 1
    assert router.queue_for(CLUSTER) == TYPE


# Priorities


@pytest.fixture
def sender(redis_server, redis_client):
    guard_transports()  # kombu remembers the first transport it made for a scheme
    app = Celery("sender", broker=broker_settings(redis_server.url).url, set_as_current=False)
    app.conf.update(broker_transport_options={"sep": PRIORITY_SEPARATOR, "priority_steps": list(QUEUE_PRIORITIES)})
    with closing(app):
        yield app


def test_a_message_for_whoever_is_there_goes_to_all_groups_when_nobody_is_in_ones_own(sender, redis_client):
    """Of a worker that was the last of its group and ends, or of a person whose shell names no group of workers."""
    present(redis_client, "elsewhere", group="big")
    for group, fixed, expected in (("default", False, TYPE), ("default", True, GROUP)):
        messenger = Messenger(sender, Router(redis_client, "cue", group, fixed=fixed))
        messenger.to_all("posting", 1)
        messenger.to_all("posting", reply="somebody")
        assert [redis_client.llen(name) for name in priority_lists(expected)] == [1, 1, 0]
    present(redis_client, "last", state="draining")
    assert Router(redis_client, "cue", "default").queue_of_all() == TYPE
    present(redis_client, "another")
    assert Router(redis_client, "cue", "default").queue_of_all() == GROUP


def test_a_message_somebody_waits_for_goes_before_the_others(sender, redis_client):
    messenger = Messenger(sender, Router(redis_client, "cue", "default", fixed=True))
    messenger.send(Enqueued(CLUSTER, "posting", ticket=1))
    messenger.to_all("posting", 1)
    messenger.to_all("posting", reply="somebody")
    assert [redis_client.llen(name) for name in priority_lists(GROUP)] == [1, 2, 0]


# Dead instances


def test_a_dead_instances_messages_move_once_in_order_to_the_consuming_end(redis_client):
    """Q5."""
    presence = present(redis_client, "a")
    source = priority_lists(QueueName("cue", "dispatch", "default", "a"))
    target = priority_lists(GROUP)
    for prio in range(3):
        for number in range(4):
            redis_client.lpush(source[prio], f"{prio}-{number}")
    redis_client.lpush(target[1], "younger")
    assert drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")) == 0
    presence.withdraw()
    members = list_members(redis_client, "cue")
    moved: list[int] = []
    threads = [
        threading.Thread(target=lambda: moved.append(drain_dead_instances(redis_client, "cue", members)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(moved) == 12
    assert not any(redis_client.exists(name) for name in source)
    for prio in range(3):
        consumed = list(reversed(redis_client.lrange(target[prio], 0, -1)))
        assert consumed[:4] == [f"{prio}-{number}" for number in range(4)]
    assert redis_client.lrange(target[1], 0, 0) == ["younger"]


def test_a_long_queue_moves_in_parts_and_in_order(redis_client, monkeypatch):
    monkeypatch.setattr("opencue_sched.coordination.queue_figures.MOVED_PER_CALL", 1500)
    present(redis_client, "a").withdraw()
    source = priority_lists(QueueName("cue", "dispatch", "default", "a"))[1]
    redis_client.lpush(source, *range(4000))
    taken = []
    while drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")):
        while (message := redis_client.rpop(priority_lists(GROUP)[1])) is not None:
            taken.append(int(message))
    assert taken == list(range(4000))


def test_an_instance_that_came_back_keeps_its_queue(redis_client):
    present(redis_client, "a").withdraw()
    members = list_members(redis_client, "cue")
    assert members.gone
    present(redis_client, "a")
    source = priority_lists(QueueName("cue", "dispatch", "default", "a"))[1]
    redis_client.lpush(source, "mine")
    assert drain_dead_instances(redis_client, "cue", members) == 0
    assert redis_client.llen(source) == 1


def test_what_the_broker_gives_back_to_an_instance_after_its_end_moves_too(redis_client):
    """What it had reserved and not acknowledged comes back to its queue when the visibility time-out is over."""
    assert celeryconfig.broker_transport_options["visibility_timeout"] < FORGET_SECONDS / 2
    present(redis_client, "a").withdraw()
    key = presence_key("cue", "dispatch", "default", "a")
    assert drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")) == 0
    redis_client.zincrby(presence_index("cue"), -500 * FORGET_SECONDS, key)
    assert drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")) == 0
    redis_client.lpush(priority_lists(QueueName("cue", "dispatch", "default", "a"))[1], "given back")
    assert drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")) == 1


def test_long_gone_instances_are_forgotten_once_their_queues_are_empty(redis_client):
    present(redis_client, "a").withdraw()
    key = presence_key("cue", "dispatch", "default", "a")
    redis_client.zadd(presence_index("cue"), {key: 1})
    source = priority_lists(QueueName("cue", "dispatch", "default", "a"))[1]
    redis_client.lpush(source, "late")
    assert drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")) == 1
    assert list_members(redis_client, "cue").gone == (key,)
    drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue"))
    assert list_members(redis_client, "cue").gone == ()


# Depths


def test_the_depth_of_a_type_is_that_of_all_its_queues_and_priorities(redis_client, monkeypatch):
    """Q9."""
    present(redis_client, "a", in_flight=3)
    own = QueueName("cue", "dispatch", "default", "a")
    for queue, prio, age in ((TYPE, 0, 5), (GROUP, 1, 20), (own, 2, 1)):
        message = json.dumps({"headers": {"sent_at": 1000 - age}})
        redis_client.lpush(priority_lists(queue)[prio], message, "younger")
    members = list_members(redis_client, "cue")
    monkeypatch.setattr("time.time", lambda: 1000.0)
    census = queue_census(redis_client, "cue", members, group="default")
    dispatch = census.by_type["dispatch"]
    assert dispatch.depth == 6
    assert dispatch.oldest_seconds == 20
    assert dispatch.queues[str(GROUP)] == 2
    assert census.by_type["sweep"].depth == 0
    assert census.backlog_per_worker == {"default": 9}
    stats = redis_client.hgetall(queue_stats("cue", "dispatch"))
    assert (stats["depth"], stats["oldest_seconds"]) == ("6", "20.0")
    assert 0 < redis_client.ttl(queue_stats("cue", "dispatch")) <= 60


def test_each_group_has_its_own_backlog_and_its_share_of_what_all_may_take(redis_client):
    present(redis_client, "a", in_flight=1)
    present(redis_client, "b", group="big", in_flight=2)
    present(redis_client, "c", group="big")
    for queue, messages in ((TYPE, 6), (GROUP, 3), (QueueName("cue", "dispatch", "big", "c"), 4)):
        redis_client.lpush(priority_lists(queue)[1], *range(messages))
    members = list_members(redis_client, "cue")
    census = queue_census(redis_client, "cue", members, group="default")
    assert census.workers == 3
    assert census.backlog_per_worker == {"big": (4 + 2) / 2 + 6 / 3, "default": 3 + 1 + 6 / 3}
    nobody = queue_census(redis_client, "cue", members, group="new")
    assert nobody.backlog_per_worker["new"] == 2


def test_a_fleet_counts_what_waits_for_it_and_not_what_waits_for_other_facilities(redis_client):
    """Else a busy facility would have the workers of an idle one scaled out."""
    present(redis_client, "a", group="alpha", facility="Alpha", in_flight=1)
    present(redis_client, "b", group="beta", facility="beta")
    present(redis_client, "c", in_flight=4)
    present(redis_client, "gone", group="alpha", facility="Alpha").withdraw()
    for messages, *place in (
        (1, "alpha"),
        (2, "alpha", "a"),
        (4, "alpha", "gone"),
        (8, "beta"),
        (16,),
        (32, "default"),
    ):
        redis_client.lpush(priority_lists(QueueName("cue", "dispatch", *place))[1], *range(messages))
    members = list_members(redis_client, "cue")
    found = {
        group: queue_census(redis_client, "cue", members, group=group, facility=facility)
        for group, facility in (("alpha", "Alpha"), ("beta", "beta"), ("default", None))
    }
    assert {group: census.backlog_per_worker for group, census in found.items()} == {
        "alpha": {"alpha": 1 + 2 + 4 + 1},
        "beta": {"beta": 8},
        "default": {"default": 16 + 32 + 4},
    }
    assert {group: (census.by_type["dispatch"].depth, census.workers) for group, census in found.items()} == {
        "alpha": (7, 1),
        "beta": (8, 1),
        "default": (48, 1),
    }
    stats = [
        redis_client.hget(queue_stats("cue", "dispatch", facility), "depth") for facility in ("Alpha", "beta", None)
    ]
    assert stats == ["7", "8", "48"]


# Replies


def test_an_answer_wakes_who_waits_and_ends_with_its_hash(redis_client):
    """Q7."""
    job = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=10)
    got: list[dict] = []
    waiter = threading.Thread(
        target=lambda: got.append(replies.await_reply(redis_client, "cue", job, timeout_seconds=10))
    )
    waiter.start()
    assert replies.answer_job(redis_client, "cue", job, {"booked": 3})
    waiter.join(10)
    assert got == [{"booked": 3}]
    hash_ = redis_client.hgetall(job_hash("cue", job))
    assert hash_["status"] == "done"
    assert json.loads(hash_["output"]) == {"booked": 3}
    assert {"created_at", "ended_at"} <= hash_.keys()
    assert 3500 < redis_client.ttl(job_hash("cue", job)) <= 3600


def test_a_late_reader_finds_the_answer_in_the_hash(redis_client):
    job = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=1)
    replies.answer_job(redis_client, "cue", job, {"booked": 3})
    assert 0 < redis_client.ttl(reply_queue("cue", job)) <= 3600
    unanswered = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=1)
    assert 3600 <= redis_client.ttl(job_hash("cue", unanswered)) <= 3601
    redis_client.delete(reply_queue("cue", job))
    assert replies.await_reply(redis_client, "cue", job, timeout_seconds=1) == {"booked": 3}


def test_the_first_answer_stands_and_no_answer_is_told(redis_client):
    job = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=1)
    assert replies.answer_job(redis_client, "cue", job, {"n": 1})
    assert not replies.answer_job(redis_client, "cue", job, {"n": 2})
    assert redis_client.llen(reply_queue("cue", job)) == 1
    silent = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=30)
    assert redis_client.hget(job_hash("cue", silent), "status") == "dispatched"
    with pytest.raises(SchedulerError, match="is a worker alive"):
        replies.await_reply(redis_client, "cue", silent, timeout_seconds=0.05)
    assert redis_client.hget(job_hash("cue", silent), "status") == "dispatched"


NO_TEXT = [b"\xff\xfe", b"[" * 100_000, b"null", b'{"headers": {"sent_at": []}}']


@pytest.fixture
def client(redis_server, redis_client):
    """As a worker's own: what anybody may have written comes to that."""
    settings = Settings(redis_url=redis_server.url)
    with closing(guarded_redis(settings.redis_dsn, settings)) as made:
        yield made


@pytest.mark.parametrize("value", NO_TEXT, ids=["bytes", "nested", "null", "odd"])
def test_what_is_no_message_is_counted_like_any_that_waits(client, value):
    present(client, "a")
    client.lpush(priority_lists(GROUP)[1], value)
    census = queue_census(client, "cue", list_members(client, "cue"), group="default")
    assert (census.by_type["dispatch"].depth, census.by_type["dispatch"].oldest_seconds) == (1, 0)
