"""The consumer of a worker: what a message must be before Celery sees it.

A message is only a hint. With Celery's plain consumer, one whose headers or body are not of the form that Celery
expects raises inside the event loop and takes the worker down, or raises in a thread of the pool, which then neither
acknowledges the message nor takes another in its place. Here a message is read completely before Celery sees it: one
that is not a task of ours is counted, logged once by kind and acknowledged. What Celery raises afterwards is no
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

    No callbacks, chain or chord, well formed or not: no task of ours has any, and Celery reads them in the thread that
    runs the task, where a malformed one would keep the thread's slot. And no time before which it is not to be run.
    """

    model_config = ConfigDict(strict=True)

    task: str
    id: str
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    eta: None = None
    sent_at: float | None = None
    fence: int | None = None
    tick: int | None = None
    tick_of: str | None = None
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
    """The headers of a message that is complete and for one of ``tasks``, without any that are not ours: Celery makes
    attributes of the task's request of them all, and reads limits, stamps and groups without looking at their kind.

    Raises InvalidInput with the kind of mistake, never a value.
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
    if read.task not in tasks or read.task.startswith("celery."):
        raise InvalidInput("no task of ours")
    # What a task returns is not stored, whatever the message asks for: who waits is answered by a reply queue.
    return read.model_dump(exclude={"payload"}, exclude_unset=True) | {"ignore_result": True}
