"""kombu's Redis transport, made to survive what is not a message, and a Redis that is gone.

With the plain transport, a value that is not one of kombu's envelopes - pushed by a script, a person, an older
producer - is popped, raises inside the event loop and takes the worker down; the value is lost. Here it goes to the
dead-letter list and the worker goes on.

The same goes for what has the form of an envelope and still cannot be delivered; what Celery then cannot make a task of
is met with in operate/consumer.py. A broadcast of that kind is told of and forgotten.

A push whose answer was lost is made again by Celery; here the message is on the queue once for all that.

And when Redis is lost while two channels hold unacknowledged messages, the plain transport gives up closing the second
one, finds it open when the connection is closed for good, and raises for want of a connection: another way to end.
So is a task that outlives the connection its message came by: it is acknowledged on a channel that is closed.
"""

from __future__ import annotations

from queue import Empty
from typing import Any

import redis
import structlog
from kombu.exceptions import KombuError
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps, loads
from redis.exceptions import DataError

from opencue_sched.coordination.dead_letters import bury, readable
from opencue_sched.coordination.names import put_mark
from opencue_sched.lua_scripts import call_script
from opencue_sched.settings import get_settings

log = structlog.get_logger(__name__)

MISSHAPEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError, DataError)
"""What kombu and Celery stumble with over a message that is not as they expect. Trouble of the broker is none of it."""


def unreadable(value: str | bytes) -> str:
    """Why ``value`` has not the form of a message that kombu can deliver to Celery; empty when it has."""
    try:
        envelope = loads(value)
    except MISSHAPEN as error:
        return f"not JSON: {error}"
    if not isinstance(envelope, dict):
        return f"a JSON {type(envelope).__name__} instead of an envelope"
    properties = envelope.get("properties")
    if not isinstance(properties, dict) or "delivery_tag" not in properties:
        return "an envelope without properties.delivery_tag"
    if not isinstance(properties["delivery_tag"], str):
        return "an envelope whose properties.delivery_tag is no string"
    delivery_info = properties.get("delivery_info")
    if not isinstance(delivery_info, dict) or not delivery_info.keys() >= {"exchange", "routing_key"}:
        return "an envelope without properties.delivery_info, or without its exchange and routing_key"
    if not isinstance(envelope.get("headers", {}), dict):
        return "an envelope whose headers are no object"
    if not isinstance(envelope.get("body"), str):
        return "an envelope without a body"
    return ""


class _RememberingClient(redis.Redis):
    """Keeps the last answer of BRPOP, which the transport throws away when it cannot read it."""

    last_popped: Any = None

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        answer = super().parse_response(connection, command_name, **options)  # type: ignore[no-untyped-call]
        if command_name == "BRPOP":
            self.last_popped = answer
        return answer


class _Unacknowledged(kombu_redis.QoS):
    """The messages a channel has in hand."""

    def restore_unacked(self, client: Any = None) -> None:
        """Put them back on their queues; once the connection is given up, the visibility time-out does that."""
        if client is None and self._given_up:
            delivered: Any = self._delivered
            delivered.clear()
            return
        super().restore_unacked(client)

    def ack(self, delivery_tag: Any) -> None:
        """Done with. On a closed channel there is nothing to say any more: the message comes again, for nothing."""
        if not self._given_up:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Not wanted; as above."""
        if not self._given_up:
            super().reject(delivery_tag, requeue=requeue)

    @property
    def _given_up(self) -> bool:
        connection = self.channel.connection
        return connection is None or connection.client is None


PUT_REMEMBERED_MS = 60_000
"""Longer than Celery tries to send one message."""


def sending(message: dict[str, Any]) -> str:
    """What tells one sending of a message from every other, but not from its own second try: of a task, its id and how
    often the task was retried; of all else, the tag that is new with each try.
    """
    headers, properties = message.get("headers") or {}, message["properties"]
    if headers.get("id"):
        return f"{headers['id']}.{headers.get('retries') or 0}"
    return str(properties["delivery_tag"])


class _Guarded:
    """Mixed into a channel of kombu's."""

    QoS: Any = _Unacknowledged
    client: Any

    @property
    def popped(self) -> tuple[Any, Any]:
        """The list and the value of the last message taken; both empty before there was one."""
        return getattr(self.client, "last_popped", None) or ("", "")

    def _get_client(self) -> Any:
        return _RememberingClient

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """Put a message on a queue, in one call. Kombu's own batches, and queues that expire, are left to it."""
        expires: Any = getattr(self, "_expires", None) or ()
        if options.get("_publish_batch") is not None or queue in expires:
            super()._put(queue, message, **options)  # type: ignore[misc]
            return
        priority = self._get_message_priority(message, reverse=False)  # type: ignore[attr-defined]
        name = self._q_for_pri(queue, priority)  # type: ignore[attr-defined]
        mark = put_mark(get_settings().coordination.namespace, name, sending(message))
        with self.conn_or_acquire() as client:  # type: ignore[attr-defined]
            call_script(client, "queue_put", [name, mark], [dumps(message), PUT_REMEMBERED_MS])

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except MISSHAPEN as error:
            queue, body = self.popped
            if not queue:
                raise
            reason = unreadable(body) or f"cannot be delivered: {type(error).__name__}: {error}"
            with self.conn_or_acquire() as client:  # type: ignore[attr-defined]
                bury(
                    client,
                    get_settings().coordination.namespace,
                    queue=readable(queue),
                    reason=reason,
                    body=readable(body),
                )
            return True

    def _receive_one(self, subscribed: Any) -> Any:
        """A broadcast that is none, or one of a program of others, in a format that is not read here, is only told of:
        every worker hears it, and Redis keeps it nowhere. What came with it is read at once all the same."""
        try:
            return super()._receive_one(subscribed)  # type: ignore[misc]
        except Empty:  # kombu has told of it
            return False
        except (KombuError, *MISSHAPEN) as error:
            log.error("broadcast_unreadable", error=f"{type(error).__name__}: {error}")
            return False


class Channel(_Guarded, kombu_redis.Channel):
    """A guarded channel."""


class Transport(kombu_redis.Transport):
    """kombu's Redis transport with guarded channels; see broker.guard_transports."""

    Channel = Channel


class SentinelChannel(_Guarded, kombu_redis.SentinelChannel):
    """A guarded channel to the master that Sentinels name."""


class SentinelTransport(kombu_redis.SentinelTransport):
    """The same by way of Sentinels."""

    Channel = SentinelChannel
