"""Sends the messages that say where there is work. A message is a hint: the posting it names decides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog
from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from opencue_sched.coordination.job import JobPriority
from opencue_sched.coordination.postings import POSTING_PRIORITY, Offered
from opencue_sched.coordination.routing import Router

log = structlog.get_logger(__name__)

DISPATCH_TASK = "opencue_sched.dispatch.dispatch_cluster"
SOMEBODY_WAITS = JobPriority.HIGH


class Messenger:
    """Dispatch messages of one process. Safe to share between threads.

    ``legacy_queues`` get a copy of each message while queues are renamed; the ticket keeps copies from doing anything.
    """

    def __init__(self, app: Celery, router: Router, *, legacy_queues: Sequence[str] = ()) -> None:
        # A queue may be given by name or as itself; the types say only the first. By name, Celery would add it to the
        # queues this worker consumes after its next reconnect.
        self._send: Any = app.send_task
        self._router = router
        self._legacy = tuple(legacy_queues)

    def send(self, offered: Offered) -> None:
        """Send a message for a posting to the best place. One that cannot be sent is left to the next sweep."""
        try:
            queue = self._router.queue_for(offered.cluster, again=offered.again)
            self._put(str(queue), offered.uuid, ticket=offered.ticket)
            for name in self._legacy:
                self._put(name, offered.uuid, ticket=offered.ticket)
        except (OperationalError, RedisError) as error:
            log.warning("message_left_to_the_next_sweep", cluster=offered.cluster.key, error=str(error))

    def give_back(self, posting: str, ticket: int | None, *, reply: str | None = None) -> None:
        """Hand a message that this process does not work on to the others; who takes it answers."""
        priority = POSTING_PRIORITY if reply is None else SOMEBODY_WAITS
        self._put(str(self._router.queue_of_all()), posting, ticket=ticket, reply=reply, priority=priority)

    def ask(self, posting: str, *, reply: str, delay_seconds: float = 0.0) -> None:
        """Send a message whose pass is to be reported to the reply queue ``reply``."""
        queue = str(self._router.queue_of_all())
        self._put(queue, posting, reply=reply, countdown=delay_seconds, priority=SOMEBODY_WAITS)

    def _put(
        self,
        queue: str,
        posting: str,
        *,
        ticket: int | None = None,
        reply: str | None = None,
        countdown: float = 0.0,
        priority: JobPriority = POSTING_PRIORITY,
    ) -> None:
        # Neither declared nor bound: the anonymous exchange leads straight to the list, in one command.
        self._send(
            DISPATCH_TASK,
            args=(posting,),
            kwargs={name: value for name, value in (("ticket", ticket), ("reply", reply)) if value is not None},
            queue=Queue(queue),
            declare=[],
            priority=priority.queue_priority,
            countdown=countdown or None,
            headers=_headers(),
        )


def _headers() -> dict[str, float]:
    return {"sent_at": round(time.time(), 3)}
