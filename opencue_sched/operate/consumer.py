"""Celery's consumer behind one guard: what is no task of ours never reaches Celery.

A message is only a hint. With the plain consumer, one whose headers or body are not of the form that Celery expects
raises inside the event loop and takes the worker down, or raises in a thread of the pool, which then neither
acknowledges the message nor takes another in its place. Here a message is read completely before Celery sees it: one
that is not a task of ours is counted, logged once by kind and acknowledged. What Celery raises afterwards is no
message's fault and is not caught here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from celery.utils.time import maybe_iso8601
from celery.worker.consumer import Consumer

from opencue_sched.coordination.transport import note_unreadable

_log = logging.getLogger(__name__)

_TEXTS = ("task", "id")
_TEXTS_OR_NONE = ("root_id", "parent_id", "argsrepr", "kwargsrepr", "origin")
_TIMES = ("eta", "expires")
_OURS = ("sent_at", "fence", "tick", "tick_of", "catch_up")
"""Headers of our own messages. operate/door.py checks those that it reads."""
_SIGNATURES = {"callbacks", "errbacks", "chain", "chord"}


class TolerantConsumer(Consumer):
    """The consumer of our workers (``worker_consumer``)."""

    strategies: dict[str, Any]
    connection_errors: tuple[type[BaseException], ...]

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with each message."""
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            if problem := problem_of(message, self.strategies):
                return self._drop(message, problem)
            message.headers = readable_headers(message.headers)
            return handle(message)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A message that kombu itself cannot decompress or decode."""
        self._drop(message, f"cannot be decoded: {type(exc).__name__}")

    def _drop(self, message: Any, problem: str) -> None:
        note_unreadable(
            "task",
            problem,
            task=repr((message.headers or {}).get("task")),
            queue=str((message.delivery_info or {}).get("routing_key")),
            message=repr(message.body),
        )
        message.ack_log_error(_log, self.connection_errors)


def problem_of(message: Any, tasks: Collection[str]) -> str:
    """Why ``message`` is none of ``tasks``; empty when it is one. The words name a kind of mistake, never a value.

    Callbacks, chains and chords are refused whether they are well formed or not: no task of ours has any, and Celery
    reads them in the thread that runs the task, where a malformed one would keep the thread's slot.
    """
    headers = message.headers
    if not all(isinstance(headers.get(name), str) for name in _TEXTS):
        return "no task and id in its headers"
    if headers["task"] not in tasks or headers["task"].startswith("celery."):
        return "no task of ours"
    if not all(isinstance(headers.get(name), str | None) for name in _TEXTS_OR_NONE):
        return "a header that is no text"
    if not all(map(_is_time_or_none, map(headers.get, _TIMES))):
        return "eta or expires is no time"
    try:
        payload = message.payload
    except Exception as error:  # a codec may raise anything over a body, and nothing but the codec runs here
        return f"a body that cannot be decoded: {type(error).__name__}"
    if not isinstance(payload, list) or len(payload) != 3:
        return "a body that is not arguments, keywords and options"
    args, kwargs, options = payload
    if not (isinstance(args, list) and isinstance(kwargs, dict) and isinstance(options, dict)):
        return "arguments, keywords or options of another kind"
    if options.keys() - _SIGNATURES or any(options.values()):
        return "callbacks, a chain, a chord or unknown options"
    return ""


def _is_time_or_none(value: object) -> bool:
    if not isinstance(value, str):
        return value is None
    try:
        return maybe_iso8601(value) is not None
    except (ValueError, OverflowError):
        return False


def readable_headers(headers: dict[str, Any]) -> dict[str, Any]:
    """The headers that were checked and our own, without any other: Celery makes attributes of the task's request of
    them all, and reads limits, stamps and groups without looking at their kind. No task of ours has a result."""
    names = (*_TEXTS, *_TEXTS_OR_NONE, *_TIMES, *_OURS)
    return {name: headers[name] for name in names if name in headers} | {"ignore_result": True}
