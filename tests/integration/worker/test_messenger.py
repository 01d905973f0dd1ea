"""Where messages go, and before which others, on real Redis."""

from __future__ import annotations

from contextlib import closing

import pytest
from celery import Celery

from opencue_sched.coordination.keys import PRIORITY_SEPARATOR, QUEUE_PRIORITIES, priority_lists
from opencue_sched.coordination.postings import Enqueued
from opencue_sched.coordination.routing import Router
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.worker.messenger import Messenger
from tests.kit.instances import CLUSTER, GROUP, TYPE, present


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
