"""From a message to a task that runs, what a process has in hand of these, and the messages that it sends itself.

A message is only a hint. With Celery's plain consumer, one whose headers or body are not of the form that Celery
expects raises inside the event loop and takes the worker down, or raises in a thread of the pool, which then neither
acknowledges the message nor takes another in its place. Here a message is read completely before Celery sees it: one
that is not a task of ours is counted, logged once by kind and acknowledged. What Celery raises afterwards is no
message's fault and is not caught here.

A task first counts itself, then drops a message that a former leader sent or a later tick overtook, then one whose
arguments it cannot be run with. It may be held up after that: so what it changes in the counters carries the leader's
fence, and the scripts refuse it once there is a newer leader. What does no harm late or twice does not look first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import structlog
from celery import Celery, Task
from celery.worker.consumer import Consumer
from kombu import Queue
from kombu.exceptions import OperationalError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, validate_call
from redis.exceptions import RedisError

from opencue_sched.coordination.postings import Enqueued
from opencue_sched.coordination.presence import WorkerState
from opencue_sched.coordination.routing import Router
from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.errors import FencedOff, InvalidInput
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker import fleet_metrics

if TYPE_CHECKING:
    from opencue_sched.worker.runtime import Runtime

log = structlog.get_logger(__name__)

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
    # What a task returns is not stored, whatever the message asks for: who waits is answered by a reply queue.
    return read.model_dump(exclude={"payload"}, exclude_unset=True) | {"ignore_result": True}


class Workload:
    """What this process has in hand, and whether it takes more: working, paused, or draining before its end.

    Thread-safe. The state is changed without the lock, so that a signal handler may do it.
    """

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        self._stopping = False
        self._changed = threading.Condition()
        self.in_hand = 0
        """Tasks under way in this process."""

    @property
    def takes_work(self) -> bool:
        """Whether new work may begin."""
        return self.state in (WorkerState.STARTING, WorkerState.WORKING)

    def begin(self) -> None:
        """The process is ready: take work, unless it was told not to already."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.WORKING

    def become(self, state: WorkerState) -> None:
        """Pause, drain or work again, unless this process is about to end."""
        if not self._stopping:
            self.state = state

    def stop(self) -> None:
        """Take no more work ever. Safe in a signal handler."""
        self._stopping = True
        self.state = WorkerState.DRAINING

    @contextmanager
    def task(self) -> Iterator[None]:
        with self._changed:
            self.in_hand += 1
        try:
            yield
        finally:
            with self._changed:
                self.in_hand -= 1
                self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until nothing is in hand; False when that took longer than ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.in_hand, seconds)


class SchedulerTask(Task):  # type: ignore[type-arg]
    """Base of our tasks (``Celery(task_cls=...)``)."""

    fenced = False
    """Its writes carry the fence, and late or twice it does no harm: not worth two statements for each message."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task, or return why its message was dropped as ``{"dropped": reason}``."""
        mine = runtime()
        with mine.membership.workload.task():
            try:
                if not (dropped := self._why_stale(mine)):
                    return self._checked_run(*args, **kwargs)
            except ValidationError as error:
                if error.title != self.run.__name__:  # raised within the task, not by the check of its arguments
                    raise
                reason = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
                note_unreadable(str(self.name), "malformed", reason=reason, message=repr((args, kwargs)))
                if isinstance(reply := kwargs.get("reply"), str):
                    mine.membership.answer_failed(reply, str(args[0] if args else ""), InvalidInput(reason))
                return {"dropped": "malformed"}
            except FencedOff:
                dropped = "fenced_off"
            fleet_metrics.messages_dropped.labels(dropped).inc()
            log.warning("periodic_message_dropped", task=self.name, reason=dropped)
            return {"dropped": dropped}

    @cached_property
    def _checked_run(self) -> Any:
        """``run``, which refuses other arguments than those it is annotated for."""
        return validate_call(config=ConfigDict(strict=True))(self.run)

    def _why_stale(self, mine: Runtime) -> str:
        """Why this message counts no more; empty while it does. One that no leader sent always does."""
        fence = fence_of(self)
        if fence is None or self.fenced:
            return ""
        task, tick = self.request.get("tick_of") or "", self.request.get("tick") or 0
        return PersistentFences(mine.engine).leader(mine.leader_keys.name).why_stale(fence, task, tick)


def runtime() -> Runtime:
    """This process's runtime, loaded when a task is run: beats and clients know the tasks and never run one."""
    from opencue_sched.worker import runtime

    return runtime.runtime()


def fence_of(task: Task | None) -> int | None:  # type: ignore[type-arg]
    """The fence of the leader that sent the message this task is run for; None when no leader did."""
    return None if task is None else task.request.get("fence")


DISPATCH_TASK = "opencue_sched.dispatch.dispatch_cluster"
URGENT, NORMAL = 0, 1
"""Message priorities: of what a client waits for, and of all else."""


class Messenger:
    """Sends the messages of one process that say where there is work. Safe to share between threads.

    A message is a hint: the posting it names decides. While queues are renamed, ``legacy_queues`` get a copy of what
    ``send`` sends; of the two the later does nothing, for the ticket is answered then. ``to_all`` makes no copies.
    """

    def __init__(self, app: Celery, router: Router, *, legacy_queues: Sequence[str] = ()) -> None:
        # Any: _put gives the queue as a Queue, which the types do not allow. Given by name, Celery would add it to the
        # queues that this worker consumes after its next reconnect.
        self._send: Any = app.send_task
        self._router = router
        self._legacy = tuple(legacy_queues)

    def send(self, enqueued: Enqueued) -> None:
        """Send a message for a posting to the best place. One that cannot be sent is left to the next sweep."""
        try:
            queue = self._router.queue_for(enqueued.cluster, again=enqueued.again)
            for name in (str(queue), *self._legacy):
                self._put(name, enqueued.uuid, ticket=enqueued.ticket)
        except (OperationalError, RedisError) as error:
            log.warning("message_left_to_the_next_sweep", cluster=enqueued.cluster.key, error=str(error))

    def to_all(self, posting: str, ticket: int | None = None, *, reply: str | None = None) -> None:
        """Send a message for whichever worker takes it; its pass is reported to the reply queue ``reply``, if any."""
        self._put(str(self._router.queue_of_all()), posting, ticket=ticket, reply=reply)

    def _put(self, queue: str, posting: str, *, ticket: int | None = None, reply: str | None = None) -> None:
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
