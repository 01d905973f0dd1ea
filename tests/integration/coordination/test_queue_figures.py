"""Draining and depths on real Redis."""

from __future__ import annotations

import json
import threading
from contextlib import closing

import pytest

import celeryconfig
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.keys import QueueName, presence_index, presence_key, priority_lists, queue_stats
from opencue_sched.coordination.presence import list_members
from opencue_sched.coordination.queue_figures import (
    FORGET_SECONDS,
    MOVED_PER_CALL,
    drain_dead_instances,
    queue_census,
)
from opencue_sched.settings import Settings
from tests.kit.instances import GROUP, TYPE, present

# Dead instances


def test_a_dead_instances_messages_move_once_in_order_to_the_consuming_end(redis_client):
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


def test_a_long_queue_moves_in_parts_and_in_order(redis_client):
    messages = 2 * MOVED_PER_CALL + 1
    present(redis_client, "a").withdraw()
    source = priority_lists(QueueName("cue", "dispatch", "default", "a"))[1]
    redis_client.lpush(source, *range(messages))
    taken = []
    while drain_dead_instances(redis_client, "cue", list_members(redis_client, "cue")):
        taken += map(int, redis_client.rpop(priority_lists(GROUP)[1], messages))
    assert taken == list(range(messages))


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
