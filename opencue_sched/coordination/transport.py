"""kombu's Redis transport, made to survive what is not a message, and a Redis that is gone.

With the plain transport, a value that is not one of kombu's envelopes - pushed by a script, a person, an older
producer - is popped, raises inside the event loop and takes the worker down. Here each value is checked before kombu
sees it: a message is only a hint, so one that cannot be read, or a broadcast, is counted, logged once by kind and
dropped. What the envelope holds is checked in worker/consumer.py.

A push whose answer was lost is made again by Celery. A periodic message is on its queue once for all that, and takes
the place of the one before it that still waits, so that a queue holds one of each however long no worker lives. Of any
other a second copy changes nothing: a posting's ticket is answered once.

When Redis is lost while two channels hold unacknowledged messages, or before a task ends whose message came by that
connection, the plain transport speaks to a connection that is closed for good, raises, and the worker ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import redis
import structlog
from kombu.exceptions import KombuError
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps, loads
from prometheus_client import Counter
from redis.commands.core import Script
from redis.exceptions import DataError

from opencue_sched.clients.lua_scripts import LuaScript, call_script, call_text
from opencue_sched.coordination.keys import waiting_ticks
from opencue_sched.domain.redis_url import read_redis_url
from opencue_sched.settings import get_settings

log = structlog.get_logger(__name__)
messages_unreadable = Counter("scheduler_messages_unreadable_total", "Messages dropped because they cannot be read.")
_logged: set[tuple[str, str]] = set()
MISSHAPEN = (Empty, KombuError, ValueError, LookupError, TypeError, AttributeError, RecursionError, DataError)
"""What kombu stumbles with over a broadcast that is not as it expects. Trouble of the broker is none of it."""


def note_unreadable(what: str, kind: str, **details: str) -> None:
    """Count a message that cannot be read and is dropped. ``what``: what it was to be; ``kind``: what is wrong with it.

    The first of the same ``what`` and ``kind`` is logged with ``details``, each cut to 200 characters; the following
    ones are only counted.
    """
    messages_unreadable.inc()
    if (what, kind) not in _logged:
        _logged.add((what, kind))
        shown = {name: text[:200].encode(errors="backslashreplace").decode() for name, text in details.items()}
        log.error("message_unreadable", what=what, kind=kind, **shown)


def unreadable(value: str | bytes) -> str:
    """Why kombu cannot make a message of ``value`` that it can give back; empty when it can."""
    try:
        message = virtual.Message(loads(value), channel=_DECODER)
        place = message.delivery_info
        if not all(isinstance(text, str) for text in (message.delivery_tag, place["exchange"], place["routing_key"])):
            return "an envelope whose tag, exchange or routing key is no text"
    except Exception as error:  # whatever kombu stumbles over would raise in the event loop of the worker
        return f"no envelope: {type(error).__name__}"
    return ""


_DECODER: Any = SimpleNamespace(decode_body=partial(virtual.Channel.decode_body, virtual.Channel))  # type: ignore[arg-type]
"""The only thing that a message asks of its channel while it is read."""


class _Script(Script):
    """A script of kombu's, or of redis-py's lock, called as ours are: redis-py loads what a server does not know by
    SCRIPT, which a server may not have."""

    def __call__(self, keys: Any = None, args: Any = None, client: Any = None) -> Any:
        at: Any = client or self.registered_client
        called = LuaScript(str(self.script), self.sha)
        return call_text(at, called, list(keys or ()), list(args or ()))


class _CheckingClient(redis.Redis):
    """Gives the transport the messages that can be read, and in place of any other the answer of an empty queue."""

    heard_by = 1
    """How many subscribers heard the last broadcast of this client."""

    def register_script(self, script: Any) -> Script:
        return _Script(self, script)

    def publish(self, channel: Any, message: Any, **options: Any) -> Any:
        self.heard_by = super().publish(channel, message, **options)
        return self.heard_by

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        answer = super().parse_response(connection, command_name, **options)  # type: ignore[no-untyped-call]
        if command_name == "BRPOP" and answer and (problem := unreadable(answer[1])):
            note_unreadable("envelope", problem, queue=str(answer[0]), message=str(answer[1]))
            return None
        return answer


class _Unacknowledged(kombu_redis.QoS):
    """The messages a channel has in hand."""

    def restore_unacked(self, client: Any = None) -> None:
        """Put the messages back on their queues. Once the connection is given up, the visibility time-out does that."""
        if client is None and self._given_up:
            delivered: Any = self._delivered
            delivered.clear()
            return
        super().restore_unacked(client)

    def ack(self, delivery_tag: Any) -> None:
        """Say that a message is done with. A closed channel says nothing any more: the message comes again, and its
        work finds itself done."""
        if not self._given_up:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Say that a message is not wanted. A closed channel says nothing, as in ack()."""
        if not self._given_up:
            super().reject(delivery_tag, requeue=requeue)

    @property
    def _given_up(self) -> bool:
        """Whether the channel has no connection any more, so that no message can be acknowledged or put back."""
        connection = self.channel.connection
        return connection is None or connection.client is None


def replacing_tick(message: dict[str, Any]) -> tuple[str, int]:
    """Series and tick of a periodic message, which makes the one before it needless; an empty series for any other."""
    headers = message.get("headers") or {}
    return (str(headers["tick_of"]), int(headers["tick"])) if headers.get("tick_of") else ("", 0)


class _Guarded:
    """Mixed into a channel of kombu's."""

    QoS: Any = _Unacknowledged
    client: Any
    pool: Any
    _sender: Any = None
    """The client that sends, of the pool that the channel has now. Any thread may replace it: clients of one pool are
    alike."""

    def _get_client(self) -> Any:
        """The class of the clients that kombu makes for this channel."""
        return _CheckingClient

    def _create_client(self, asynchronous: bool = False) -> Any:
        """The client of all that is sent. The plain transport makes one for each command, at four times the cost of the
        command."""
        if asynchronous:
            return super()._create_client(asynchronous)  # type: ignore[misc]
        if self._sender is None or self._sender.connection_pool is not self.pool:
            self._sender = super()._create_client()  # type: ignore[misc]
        return self._sender

    @property
    def heard_by(self) -> int:
        """How many subscribers heard the last broadcast of this channel."""
        return int(getattr(self._sender, "heard_by", 1))

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """Put a message on a queue, in one call: a periodic one once and in the place of the one before it."""
        series, tick = replacing_tick(message)
        if not series:
            super()._put(queue, message, **options)  # type: ignore[misc]
            return
        name = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))  # type: ignore[attr-defined]
        keys = [name, waiting_ticks(get_settings().coordination.namespace)]
        with self.conn_or_acquire() as client:  # type: ignore[attr-defined]
            call_script(client, "queue_put", keys, [dumps(message), series, tick])

    def _receive_one(self, subscribed: Any) -> Any:
        """Read a broadcast, or drop one that cannot be read, such as another program's. What came with it is read at
        once all the same."""
        try:
            return super()._receive_one(subscribed)  # type: ignore[misc]
        except MISSHAPEN as error:
            note_unreadable("broadcast", type(error).__name__, error=str(error))
            return False


class Channel(_Guarded, kombu_redis.Channel):
    """A guarded channel."""


class Transport(kombu_redis.Transport):
    """kombu's Redis transport with guarded channels; see guard_transports."""

    Channel = Channel


class SentinelChannel(_Guarded, kombu_redis.SentinelChannel):
    """A guarded channel to the master that Sentinels name."""


class SentinelTransport(kombu_redis.SentinelTransport):
    """kombu's transport by way of Sentinels, with guarded channels."""

    Channel = SentinelChannel


QUEUE_AGE_SECONDS = 5.0
"""How long a queue may be passed over before it is asked first. With less time, messages for any worker more often come
before those of this instance; with more, they wait longer behind them where all instances are busy."""


class AgedOrder:
    """The order in which a worker asks its queues (``queue_order_strategy``): as declared - instance, group, type - but
    a queue that has been passed over for ``age_seconds`` is asked first once.

    So the message at the end of any queue waits no longer than that for each message before it, however busy the more
    specific queues are. Kombu's queue cycle: ``update`` sets the queues, ``consume`` lists them, ``rotate`` says which
    gave one. Used by the thread of the consumer alone.
    """

    def __init__(self, *, age_seconds: float = QUEUE_AGE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._age_seconds = age_seconds
        self._clock = clock
        self._asked: dict[str, float] = {}
        """When each queue was last asked first, or gave a message, by ``clock``; in the declared order."""

    def update(self, it: Iterable[str]) -> None:
        """Take ``it`` as the queues from now on, in their order. The argument's name is kombu's."""
        now = self._clock()
        self._asked = {name: self._asked.get(name, now) for name in it}

    def consume(self, n: int) -> list[str]:
        """The first ``n`` queues, in the order to ask them."""
        order, now = list(self._asked)[:n], self._clock()
        longest = min(order, key=self._asked.__getitem__, default="")
        if order and now - self._asked[longest] >= self._age_seconds:
            order.remove(longest)
            order.insert(0, longest)
        self._asked.update(dict.fromkeys(order[:1], now))
        return order

    def rotate(self, last_used: str) -> str:
        """Note that the queue ``last_used`` gave a message."""
        if last_used in self._asked:
            self._asked[last_used] = self._clock()
        return last_used


# The broker as Celery wants it named, from the one Redis URL of the settings.


def guard_transports() -> None:
    """Have kombu use our transports for Redis in this process. The URL keeps its scheme, which Flower looks at."""
    ours = "opencue_sched.coordination.transport:{}".format
    TRANSPORT_ALIASES.update(redis=ours("Transport"), rediss=ours("Transport"), sentinel=ours("SentinelTransport"))
    logging.getLogger("kombu.connection").addFilter(_is_true_of_our_broker)


def _is_true_of_our_broker(record: logging.LogRecord) -> bool:
    """Whether a line of kombu's may be logged. Celery's reports show ``rediss://`` by way of a connection that is never
    made and has no TLS options, of which kombu says that it would verify nothing; the broker's have theirs."""
    return "insecure SSL behaviour" not in record.getMessage()


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The broker as Celery's settings name it."""

    url: str = field(repr=False)
    """``broker_url``. It may contain a password: never log it."""
    options: dict[str, object] = field(default_factory=dict, repr=False)
    """``broker_transport_options``."""
    use_ssl: dict[str, str | bool] | None = field(default=None, repr=False)
    """``broker_use_ssl``; None without TLS."""


def broker_settings(url: str) -> BrokerSettings:
    """Celery's broker settings for the URLs of domain/redis_url.py. Raises InvalidInput.

    TLS is given apart from the URL: kombu verifies no certificate for a ``rediss://`` that says nothing of it.
    """
    named = read_redis_url(url)
    credentials, at = ":".join(quote(part or "", safe="") for part in (named.username, named.password)), "@"
    if credentials == ":":
        credentials = at = ""
    if named.scheme == "unix":
        database = f"?virtual_host={named.database}" if named.database else ""
        return BrokerSettings(f"redis+socket://{credentials}{at}{quote(named.path)}{database}")
    if named.scheme != "sentinel":
        return BrokerSettings(f"{named.scheme}://{url.partition('?')[0].partition('://')[2]}", use_ssl=named.tls)
    urls = [f"sentinel://{credentials}{at}{host}:{port}/{named.database}" for host, port in named.nodes]
    options: dict[str, object] = {"master_name": named.service, "sentinel_kwargs": named.sentinel_options}
    return BrokerSettings(";".join(urls), options, named.tls)
