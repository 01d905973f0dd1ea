"""One message of the fleet's to send events of jobs, however many of its workers hear that some were written.

Whoever hears of it first sets a key and sends the message; the others find the key. It goes when events are taken up:
for what is written from then on the next message is sent. A message that is lost costs what beat's interval costs.
"""

from __future__ import annotations

import redis
import structlog
from redis.exceptions import RedisError

from opencue_sched.coordination.keys import QueueType, common_queue, events_woken
from opencue_sched.settings import Settings
from opencue_sched.worker.messenger import EVENTS_EXPIRE_SECONDS, Messenger

_log = structlog.get_logger(__name__)


class EventWakes:
    """The messages of one process that events are to be sent. Thread-safe."""

    def __init__(self, client: redis.Redis, settings: Settings, messenger: Messenger) -> None:
        namespace, facility = settings.coordination.namespace, settings.scheduler.facility
        self._client = client
        self._messenger = messenger
        self._key = events_woken(namespace, facility)
        self._queue = str(common_queue(namespace, QueueType.MAINTENANCE, facility))

    def wake(self) -> None:
        """Send a message, unless one is on its way. Raises RedisError."""
        if self._client.set(self._key, "1", nx=True, px=round(1000 * EVENTS_EXPIRE_SECONDS)):
            self._messenger.send_events(self._queue)

    def taken_up(self) -> None:
        """Note that this process looks for events now: one that is written from now on gets another message. Call it
        before the first look. Raises RedisError."""
        self._client.delete(self._key)

    def wake_again(self) -> None:
        """Send the message again if one came while this process was sending events. Call it once others may send: a
        process that was woken meanwhile could not."""
        try:
            if self._client.exists(self._key):
                self._messenger.send_events(self._queue)
        except RedisError as error:
            _log.warning("events_left_to_beat", error=str(error))
