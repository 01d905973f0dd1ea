"""The messages that a process sends itself: that there is work for a posting, or events of jobs are to be sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog
from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from opencue_sched.coordination.postings import Enqueued
from opencue_sched.coordination.routing import Router

log = structlog.get_logger(__name__)

DISPATCH_TASK = "opencue_sched.dispatch.dispatch_cluster"
EVENTS_TASK = "opencue_sched.maintenance.send_events"
EVENTS_EXPIRE_SECONDS = 5.0
"""How long a message that events are to be sent lives: then beat sends the next."""
URGENT, NORMAL = 0, 1
"""The priorities of messages: of those that a client waits for, and of all others."""


class Messenger:
    """Sends the messages of one process that say where there is work. Safe to share between threads.

    A message is a hint: the posting it names decides. While queues are renamed, ``legacy_queues`` get a copy of what
    ``send`` sends: the copy that comes later does nothing, because its ticket is answered. ``to_all`` makes no copies.
    """

    def __init__(self, app: Celery, router: Router, *, legacy_queues: Sequence[str] = ()) -> None:
        # Any: _put gives the queue as a Queue, which the types do not allow. Given by name, Celery would add it to the
        # queues that this worker consumes after its next reconnect.
        self._send: Any = app.send_task
        self._router = router
        self._legacy = tuple(legacy_queues)

    def send(self, enqueued: Enqueued) -> None:
        """Send a message for a posting to the best queue. A message that cannot be sent is left to the next sweep."""
        try:
            queue = self._router.queue_for(enqueued.cluster, again=enqueued.again)
            for name in (str(queue), *self._legacy):
                self._put(name, enqueued.uuid, ticket=enqueued.ticket)
        except (OperationalError, RedisError) as error:
            log.warning("message_left_to_the_next_sweep", cluster=enqueued.cluster.key, error=str(error))

    def to_all(self, posting: str, ticket: int | None = None, *, reply: str | None = None) -> None:
        """Send a message for any worker of the fleet; the pass is reported to the reply queue ``reply``, if any."""
        self._put(str(self._router.queue_of_all()), posting, ticket=ticket, reply=reply)

    def send_events(self, queue: str) -> None:
        """Have the process that takes from this queue first send events of jobs. Where the message cannot be sent,
        beat's next one does."""
        try:
            self._send(EVENTS_TASK, queue=Queue(queue), declare=[], expires=EVENTS_EXPIRE_SECONDS)
        except (OperationalError, RedisError) as error:
            log.warning("events_left_to_beat", error=str(error))

    def _put(self, queue: str, posting: str, *, ticket: int | None = None, reply: str | None = None) -> None:
        """Send a message for a posting to a queue, ahead of others where a reply is waited for. Raises OperationalError
        and RedisError."""
        # Neither declared nor bound: the anonymous exchange leads straight to the list, in one command.
        self._send(
            DISPATCH_TASK,
            args=(posting,),
            kwargs={name: value for name, value in (("ticket", ticket), ("reply", reply)) if value is not None},
            queue=Queue(queue),
            declare=[],
            priority=NORMAL if reply is None else URGENT,
            headers={"sent_at": round(time.time(), 3)},
        )
