"""The consumer of a worker: what a message must be before Celery sees it.

A message is only a hint. Where its headers or body do not have the form that Celery expects, Celery's plain consumer
raises inside the event loop, which takes the worker down, or in a thread of the pool, which then neither acknowledges
the message nor takes another in its place. Here a message is read completely before Celery sees it. A message that is
no task of ours is counted, acknowledged, and logged once for each kind of mistake. What Celery raises afterwards is no
message's fault and is not caught here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal

from celery.worker.consumer import Consumer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.errors import InvalidInput

_log = logging.getLogger(__name__)


class _Message(BaseModel):
    """What a message of ours consists of: the headers that Celery reads, those that a leader writes, and the payload
    of arguments, keywords and options.

    A message with callbacks, chain or chord is refused, well formed or not: no task of ours has any, and Celery reads
    them in the thread that runs the task, where a malformed one would keep the thread's slot. A message with an ``eta``
    is refused as well: none of ours waits for a time, and Celery would keep it in memory until then.
    """

    model_config = ConfigDict(strict=True)

    task: str
    id: str
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    eta: None = None
    sent_at: float | None = None
    """When the message was sent, in epoch seconds."""
    fence: int | None = None
    """The fence of the leader that sent the message of a tick."""
    tick: int | None = None
    """The tick: whole intervals since the epoch, or minutes where the schedule has no interval."""
    tick_of: str | None = None
    """The series that the tick belongs to (leader.tick_series)."""
    # Not strict, for lists are what is sent for these tuples.
    payload: Annotated[
        tuple[list[Any], dict[str, Any], dict[Literal["callbacks", "errbacks", "chain", "chord"], None]],
        Field(strict=False),
    ]


class TolerantConsumer(Consumer):
    """The consumer of our workers (``worker_consumer``)."""

    strategies: dict[str, Any]
    connection_errors: tuple[type[BaseException], ...]

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            try:
                message.headers = read_headers(message, self.strategies)
            except InvalidInput as problem:
                return self._drop(message, str(problem))
            return handle(message)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Drop a message that kombu itself cannot decompress or decode."""
        self._drop(message, f"cannot be decoded: {type(exc).__name__}")

    def _drop(self, message: Any, problem: str) -> None:
        """Count and log a message that cannot be used, and take it off its queue."""
        note_unreadable(
            "task",
            problem,
            task=repr((message.headers or {}).get("task")),
            queue=str((message.delivery_info or {}).get("routing_key")),
            message=repr(message.body),
        )
        message.ack_log_error(_log, self.connection_errors)


def read_headers(message: Any, tasks: Collection[str]) -> dict[str, Any]:
    """The headers of a message that is complete and for one of ``tasks``. Headers that are not ours are left out,
    because Celery makes an attribute of the task's request of each, and reads time limits, stamps and groups without
    checking their types.

    Raises InvalidInput with the kind of mistake, never a value from the message.
    """
    try:
        payload = message.payload
    except Exception as error:  # a codec may raise anything over a body, and nothing but the codec runs here
        raise InvalidInput(f"a body that cannot be decoded: {type(error).__name__}") from error
    try:
        read = _Message.model_validate({**message.headers, "payload": payload})
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidInput(f"{problem['loc'][0]}: {problem['type']}") from error
    # Celery's own tasks (celery.chord, celery.map, ...) are among ``tasks``; nothing here sends any.
    if read.task not in tasks or read.task.startswith("celery."):
        raise InvalidInput("no task of ours")
    # What a task returns is not stored, whatever the message asks for: a caller that waits has a reply queue.
    return read.model_dump(exclude={"payload"}, exclude_unset=True) | {"ignore_result": True}
