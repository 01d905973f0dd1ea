"""What kombu does with a connection whose Redis is gone must not end the worker."""

from __future__ import annotations

import socket
from queue import Empty
from typing import Any

import pytest
from kombu import Connection, Consumer, Message, Queue

from opencue_sched.coordination.transport import Transport
from opencue_sched.embedded.servers.services import EmbeddedRedis
from tests.kit.polling import MOST_SECONDS


@pytest.fixture
def server():
    with EmbeddedRedis() as found:
        yield found


def take(connection: Connection, channels: list[Any]) -> list[Message]:
    """One unacknowledged message by each channel."""
    got: list[Message] = []
    for number, channel in enumerate(channels):
        queue = Queue(f"queue{number}")
        connection.Producer().publish({}, routing_key=queue.name, declare=[queue])
        Consumer(channel, [queue], callbacks=[lambda _, message: got.append(message)], accept=["json"]).consume()
    while len(got) < len(channels):
        connection.drain_events(timeout=5)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.1)
    return got


def test_a_lost_connection_with_messages_in_hand_on_two_channels_is_closed_quietly(server):
    """As Celery does it: collect(), then close(). Plain kombu raises AttributeError here, and the worker ends."""
    connection = Connection(server.url, transport=Transport)
    channels = [connection.default_channel, connection.channel()]
    take(connection, channels)
    server.kill()
    connection.collect()
    connection.close()
    assert channels[0].closed
    assert not connection.connected


@pytest.mark.parametrize("how", ["ack", "reject", "requeue"])
def test_a_message_done_with_after_its_connection_was_closed_is_let_go_quietly(server, how):
    """A task that outlives the loss of Redis. Plain kombu raises AttributeError in the event loop: the worker ends."""
    connection = Connection(server.url, transport=Transport)
    messages = take(connection, [connection.default_channel, connection.channel()])
    server.kill()
    connection.collect()
    connection.close()
    server.revive()
    for message in messages:
        getattr(message, how)()
    assert all(message.acknowledged for message in messages)
    with Connection(server.url, transport=Transport) as again:
        assert again.connect()


def test_a_message_that_comes_again_after_a_cut_can_be_acknowledged(server):
    """Redis lives on: what was in hand when the connection was closed is put back, and is there once."""
    with Connection(server.url, transport=Transport) as connection:
        (message,) = take(connection, [connection.default_channel])
    message.ack()
    with Connection(server.url, transport=Transport) as again, again.SimpleQueue("queue0") as queue:
        queue.get(timeout=MOST_SECONDS).ack()
        with pytest.raises(Empty):
            queue.get_nowait()
