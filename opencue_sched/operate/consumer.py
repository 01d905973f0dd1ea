"""Celery's consumer, made to survive messages that are no tasks: each goes to the dead letters, and the worker goes on.

With the plain one, a body that cannot be decoded is logged and gone, and a message whose headers or body are not of the
form that Celery expects raises inside the event loop and takes the worker down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signals
from celery.worker.consumer import Consumer

from opencue_sched.coordination.dead_letters import bury, readable
from opencue_sched.coordination.transport import MISSHAPEN


class TolerantConsumer(Consumer):
    """The consumer of our workers (``worker_consumer``)."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with each message."""
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            try:
                return handle(message)
            except MISSHAPEN as error:
                return self.on_invalid_task(None, message, error)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A message whose body cannot be decoded: as one that is no task."""
        super().on_decode_error(message, exc)
        signals.task_rejected.send(sender=self, message=message, exc=exc)


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
