"""What kombu does with a connection whose Redis is gone must not end the worker."""

from __future__ import annotations

import socket

import pytest
from kombu import Connection, Consumer, Queue

from opencue_sched.coordination.transport import Transport
from opencue_sched.embedded.services import EmbeddedRedis


@pytest.fixture
def server():
    with EmbeddedRedis() as found:
        yield found


def test_a_lost_connection_with_messages_in_hand_on_two_channels_is_closed_quietly(server):
    """As Celery does it: collect(), then close(). Plain kombu raises AttributeError here, and the worker ends."""
    got: list[object] = []
    connection = Connection(server.url, transport=Transport)
    channels = [connection.default_channel, connection.channel()]
    for number, channel in enumerate(channels):
        queue = Queue(f"queue{number}")
        connection.Producer().publish({}, routing_key=queue.name, declare=[queue])
        Consumer(channel, [queue], callbacks=[lambda _, message: got.append(message)], accept=["json"]).consume()
    while len(got) < len(channels):
        connection.drain_events(timeout=5)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.1)
    server.kill()
    connection.collect()
    connection.close()
    assert channels[0].closed
    assert not connection.connected
