"""Celery's consumer behind one guard: what is no task of ours never reaches Celery.

A message is only a hint. With the plain consumer, one whose headers or body are not of the form that Celery expects
raises inside the event loop and takes the worker down, or raises in a thread of the pool, which then neither
acknowledges the message nor takes another in its place. Here a message is read completely before Celery sees it: one
that is not a task of ours is counted, logged once by kind and acknowledged. What Celery raises afterwards is no
message's fault and is not caught here.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Annotated, Any, Literal

import structlog
from celery import bootsteps
from celery.utils.time import maybe_iso8601
from celery.worker import state
from celery.worker.consumer import Consumer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from redis.exceptions import RedisError

from opencue_sched.coordination.presence import REFRESH_SECONDS, InstanceTaken
from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.errors import InvalidInput
from opencue_sched.worker.control import fleet_figures
from opencue_sched.worker.metrics import PULSE
from opencue_sched.worker.task import Workload

_log = logging.getLogger(__name__)


def _time(value: str) -> str:
    """A time as Celery reads it. Raises ValueError."""
    try:
        maybe_iso8601(value)
    except OverflowError as error:
        raise ValueError("out of range") from error
    return value


class _Message(BaseModel):
    """What a message of ours consists of: the headers that Celery reads, those that a leader writes, and the payload
    of arguments, keywords and options.

    No callbacks, chain or chord, well formed or not: no task of ours has any, and Celery reads them in the thread that
    runs the task, where a malformed one would keep the thread's slot.
    """

    model_config = ConfigDict(strict=True)

    task: str
    id: str
    root_id: str | None = None
    parent_id: str | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    origin: str | None = None
    eta: Annotated[str, AfterValidator(_time)] | None = None
    sent_at: float | None = None
    fence: int | None = None
    tick: int | None = None
    tick_of: str | None = None
    catch_up: str | None = None
    payload: Annotated[
        tuple[list[Any], dict[str, Any], dict[Literal["callbacks", "errbacks", "chain", "chord"], None]],
        Field(strict=False),
    ]


class TolerantConsumer(Consumer):
    """The consumer of our workers (``worker_consumer``)."""

    strategies: dict[str, Any]
    connection_errors: tuple[type[BaseException], ...]

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with each message."""
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            try:
                message.headers = read_headers(message, self.strategies)
            except InvalidInput as problem:
                return self._drop(message, str(problem))
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
    # No task of ours has a result.
    return read.model_dump(exclude={"payload"}, exclude_unset=True) | {"ignore_result": True}


# Steps of Celery's consumer: the heartbeat of this worker's presence, started anew after each reconnect.

log = structlog.get_logger(__name__)

EX_CONFIG = 78
_LOOK_FOR_AN_ORDER_SECONDS = 0.2
# Of this process, for the signal handler: it must not wait for a lock that the interrupted code holds.
_workload: Workload | None = None


class PresenceStep(bootsteps.StartStopStep):
    """Refreshes the presence every few seconds from the consumer's timer, which is the pulse of the worker."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **_: Any) -> None:  # noqa: ARG002 - celery's signature
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        from opencue_sched.worker.runtime import runtime

        global _workload
        membership = runtime().membership
        _workload = membership.workload
        membership.in_flight = lambda: len(state.reserved_requests)
        membership.workload.begin()
        PULSE.store_answers = _redis_answers

        def beat() -> None:
            PULSE.beat()
            try:
                membership.heartbeat()
                runtime().show_store()
            except InstanceTaken as error:
                log.error("worker_stops", reason=str(error))
                state.should_stop = EX_CONFIG  # type: ignore[assignment]
            except RedisError as error:
                log.warning("beat_of_the_worker_failed", error=str(error))
            except Exception:
                # As the timer does with the others: the first one would end the worker, at each reconnection.
                log.exception("beat_of_the_worker_failed")

        beat()
        self._timer = parent.timer.call_repeatedly(REFRESH_SECONDS, beat)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - celery's signature
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        PULSE.rest()

    shutdown = stop

    def info(self, obj: Any) -> dict[str, object]:  # type: ignore[override]  # noqa: ARG002 - celery's signature
        """Celery's ``stats`` has what its steps return here."""
        return fleet_figures()


def _redis_answers() -> bool:
    from opencue_sched.worker.runtime import runtime

    try:
        return bool(runtime().client.ping())
    except RedisError:
        return False


def sleep_unless_stopped(seconds: float) -> None:
    """What a worker calls to wait before its consumer runs, which looks for the order to stop: here that is raised
    (WorkerShutdown or WorkerTerminate)."""
    deadline = time.monotonic() + seconds
    while True:
        state.maybe_shutdown()
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LOOK_FOR_AN_ORDER_SECONDS))


def begin_to_drain(**_: Any) -> None:
    """At the first signal to stop: take nothing new."""
    if _workload is not None:
        _workload.stop()


def end_at_a_second_sigterm() -> None:
    """Leave the first SIGTERM to Celery, which tells begin_to_drain; a second one ends the process at once.

    That is safe: claims and presence expire, PostgreSQL rolls back, and Redis bookings without a proc are reconciled.
    It never enters Celery's handler, which may be at work for the first one, with a lock that it would wait for.
    """
    drain: Any = signal.getsignal(signal.SIGTERM)
    orders = count()

    def handle(signum: int, frame: FrameType | None) -> None:
        if next(orders):  # one step: no other signal comes within
            os._exit(128 + signum)
        drain(signum, frame)

    if callable(drain):
        signal.signal(signal.SIGTERM, handle)


# The end of the children of Celery's prefork pool, which waits for what they have in hand without end.


def children_end(pool: Any, seconds: float) -> bool:
    """Have the children end when they have done what is in hand; whether all have within ``seconds``."""
    stopping = threading.Thread(target=pool.stop, name="pool-stop", daemon=True)
    stopping.start()
    stopping.join(seconds)
    return not stopping.is_alive()


def kill_children(pool: Any) -> None:
    """End them at once, whatever they are at."""
    for pid in pool.info["processes"]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
