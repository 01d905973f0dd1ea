"""Celery's events of tasks, published only while a Flower or a ``celery events`` listens.

A pass has three events (received, started, succeeded). Publishing them takes a tenth of a worker's processor time, and
most of the time there is no listener. Redis answers each broadcast with the number of its listeners.
"""

from __future__ import annotations

import time
from typing import Any

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher

UNHEARD_SECONDS = 1.0
"""How long no event of a task is published after a broadcast that nobody heard.

A listener that comes meanwhile sees events of tasks after that time at the latest."""
_OF_TASKS = "task"
"""How the types of these events, and their routing keys, begin."""


class HeardEvents(EventDispatcher):
    """The dispatcher of our workers: it leaves out the events of tasks while nobody listens.

    Events of workers are always published, because workers listen to each other's.
    """

    _unheard_until = 0.0
    """The end of the time in which nobody is known to listen, on the monotonic clock. Any thread may read it; only one
    that publishes, under the dispatcher's own lock, sets it."""

    def send(self, type: str, *given: Any, **fields: Any) -> Any:
        if type.startswith(_OF_TASKS) and time.monotonic() < self._unheard_until:
            return None
        return super().send(type, *given, **fields)

    def _publish(self, event: Any, producer: Any, routing_key: str, *given: Any, **options: Any) -> None:
        """Publish events as Celery does. Where nobody heard events of tasks, none is published for UNHEARD_SECONDS."""
        # A private method of Celery's: the stubs do not know it, and it alone has the producer and the routing key.
        super()._publish(event, producer, routing_key, *given, **options)  # type: ignore[misc]
        # ``heard_by`` is our transport's (coordination/transport.py). Where another one is used, each event counts as
        # heard.
        if routing_key.startswith(_OF_TASKS) and not getattr(producer.channel, "heard_by", 1):
            self._unheard_until = time.monotonic() + UNHEARD_SECONDS


class HeardEventsOnly(Events):
    """Makes the event dispatchers of our application (``Celery.events_cls``)."""

    dispatcher_cls = "opencue_sched.worker.task_events:HeardEvents"
