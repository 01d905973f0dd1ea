"""Celery's consumer, made to survive messages that are no tasks: each goes to the dead letters, and the worker goes on.

With the plain one, a body that cannot be decoded is logged and gone, and a message whose headers or body are not of the
form that Celery expects raises inside the event loop and takes the worker down; or it raises in a thread of the pool,
which then neither acknowledges the message nor takes another in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signals
from celery.worker.consumer import Consumer
from kombu.exceptions import KombuError

from opencue_sched.coordination.dead_letters import bury, readable
from opencue_sched.coordination.transport import MISSHAPEN


class TolerantConsumer(Consumer):
    """The consumer of our workers (``worker_consumer``)."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with each message."""
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            try:
                check_shape(message)
                return handle(message)
            except MISSHAPEN as error:
                return self.on_invalid_task(None, message, error)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A message whose body cannot be decoded: as one that is no task."""
        super().on_decode_error(message, exc)
        signals.task_rejected.send(sender=self, message=message, exc=exc)


def check_shape(message: Any) -> None:
    """Raise TypeError for a body of arguments, keywords and options that are none. What else a body may be, and what
    cannot be decoded, Celery finds out by itself."""
    try:
        payload = message.payload
    except (KombuError, *MISSHAPEN):
        return
    if not isinstance(payload, list | tuple) or len(payload) != 3:
        return
    for what, value, kind in zip(("arguments", "keywords", "options"), payload, (list, dict, dict), strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{what} of a task cannot be {type(value).__name__}")


def bury_unreadable(message: Any, exc: BaseException | None = None, **_: Any) -> None:
    """A message that Celery itself could not make sense of (its signals task_unknown and task_rejected)."""
    from opencue_sched.operate.runtime import runtime

    mine = runtime()
    bury(
        mine.client,
        mine.membership.namespace,
        queue=readable(message.channel.popped[0]),
        reason=f"no task of ours: {type(exc).__name__}: {exc}" if exc else "no task of ours",
        body=readable(message.body),
    )
