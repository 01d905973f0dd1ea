"""Routing on real Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opencue_sched.coordination import routing
from opencue_sched.coordination.keys import QueueName
from opencue_sched.coordination.routing import Router
from opencue_sched.domain.clusters import Cluster
from tests.kit.frozen_clock import Clock
from tests.kit.instances import CLUSTER, GROUP, TYPE, present

OWN = QueueName("cue", "dispatch", "default", "a")


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
    clock = Clock(100.0)
    monkeypatch.setattr(routing, "boot_clock", clock)
    router = Router(redis_client, "cue", "default")
    assert router.queue_for(CLUSTER).instance == "a"
    presence.withdraw()
    clock.now += 1
    assert router.queue_for(CLUSTER) == TYPE
