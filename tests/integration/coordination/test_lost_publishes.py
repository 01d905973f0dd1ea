"""A periodic message whose push was done although nobody heard so: sent again, it must not be there twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from celery import Celery
from kombu import Queue

from opencue_sched.coordination.keys import PRIORITY_SEPARATOR, QUEUE_PRIORITIES, QueueName, priority_lists
from opencue_sched.coordination.transport import broker_settings, guard_transports

SWEEPS = QueueName("cue", "sweep")


@pytest.fixture
def send(proxy, redis_server) -> Iterator[Callable[[str, int], object]]:
    """Sends the message of a tick as a beat does whose broker is beyond the proxy."""
    guard_transports()
    parts = urlsplit(redis_server.url)
    url = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()
    app = Celery("sender", broker=broker_settings(url).url, set_as_current=False)
    app.conf.update(broker_transport_options={"sep": PRIORITY_SEPARATOR, "priority_steps": list(QUEUE_PRIORITIES)})
    with closing(app):
        yield lambda series, tick: app.send_task(
            "sweep", queue=Queue(str(SWEEPS)), declare=[], headers={"tick_of": series, "tick": tick}
        )


def waiting(client) -> int:
    return sum(client.llen(name) for name in priority_lists(SWEEPS))


def test_the_message_of_a_tick_is_sent_once_though_the_answer_was_lost(proxy, send, redis_client):
    send("first", 1)
    proxy.lose("EVALSHA")
    send("second", 1)
    assert proxy.lost == 1
    assert waiting(redis_client) == 2


def test_it_is_not_put_there_again_when_a_worker_has_taken_it_meanwhile(send, redis_client):
    send("sweep@2", 1)
    redis_client.delete(*priority_lists(SWEEPS))
    send("sweep@2", 1)
    assert waiting(redis_client) == 0
    send("sweep@2", 2)
    assert waiting(redis_client) == 1
