"""A message whose push was done although nobody heard so: sent again, it must not be there twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from celery import Celery

from opencue_sched.coordination.names import PRIORITY_SEPARATOR, QUEUE_PRIORITIES, QueueName, priority_lists, put_mark
from opencue_sched.coordination.postings import Enqueued
from opencue_sched.coordination.queues import Router, broker_settings, guard_transports
from opencue_sched.coordination.transport import sending
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.worker.task import Messenger

CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
GROUP = QueueName("cue", "dispatch", "default")


@pytest.fixture
def messenger(proxy, redis_server, redis_client) -> Iterator[Messenger]:
    """That of a worker whose broker is beyond the proxy."""
    guard_transports()
    parts = urlsplit(redis_server.url)
    url = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()
    app = Celery("sender", broker=broker_settings(url).url, set_as_current=False)
    app.conf.update(broker_transport_options={"sep": PRIORITY_SEPARATOR, "priority_steps": list(QUEUE_PRIORITIES)})
    with closing(app):
        yield Messenger(app, Router(redis_client, "cue", "default", fixed=True))


def waiting(client) -> int:
    return sum(client.llen(name) for name in priority_lists(GROUP))


def test_a_message_is_sent_once_though_the_answer_was_lost(proxy, messenger, redis_client):
    messenger.send(Enqueued(CLUSTER, "posting", ticket=1))
    proxy.lose("EVALSHA")
    messenger.send(Enqueued(CLUSTER, "posting", ticket=2))
    assert proxy.lost == 1
    assert waiting(redis_client) == 2


def test_a_task_that_is_tried_again_is_another_sending():
    def of(**headers):
        return sending({"headers": headers, "properties": {"delivery_tag": "tag"}})

    assert of(id="task", retries=0) == of(id="task") != of(id="task", retries=1)
    assert of() == "tag"


def test_messages_that_are_the_same_are_each_sent(messenger, redis_client):
    for _ in range(3):
        messenger.send(Enqueued(CLUSTER, "posting", ticket=1))
    assert waiting(redis_client) == 3
    assert {redis_client.pttl(mark) > 0 for mark in redis_client.scan_iter(put_mark("cue", "*", "*"))} == {True}
