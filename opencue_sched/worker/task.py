"""The base of our Celery tasks: what a task looks at before it does its work.

A task first counts itself among the tasks in hand. Then it drops a message that a former leader sent or a later tick
overtook, then a message with arguments that the task cannot be run with. The task may be held up after that. So its
changes of the counters carry the leader's fence, and the Lua scripts refuse them once there is a newer leader. A task
all of whose writes are guarded by the fence so (``fenced``) does not look whether its message is stale.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import structlog
from celery import Celery, Task
from pydantic import ConfigDict, ValidationError, validate_call

from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.errors import FencedOff, InvalidInput
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker import fleet_metrics

if TYPE_CHECKING:
    from opencue_sched.worker.process import Process

log = structlog.get_logger(__name__)


class SchedulerTask(Task):  # type: ignore[type-arg]
    """Base of our tasks (``Celery(task_cls=...)``)."""

    fenced = False
    """Whether a late or second run does no harm, because whatever the task writes is refused to a former leader's
    fence. The messages of such a task are not checked against PostgreSQL, which would take two statements each."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task, or drop its message and return ``{"dropped": reason}``: ``former_leader``, ``overtaken``,
        ``malformed`` or ``fenced_off``.

        A client that waits for a reply (argument ``reply``) to a malformed message gets the failure, with the first
        argument as the posting. Raises what the task raises, and the errors of PostgreSQL and Redis.
        """
        mine = process_of(self.app)
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
        """``run``, made to refuse arguments of other types than its annotations say."""
        return validate_call(config=ConfigDict(strict=True))(self.run)

    def _why_stale(self, mine: Process) -> str:
        """Why the message is not valid any more, as LeaderRecord.why_stale says; empty while it is valid. A message
        that no leader sent is always valid. Raises SQLAlchemyError."""
        fence = fence_of(self)
        if fence is None or self.fenced:
            return ""
        # The headers that beat sends along: the task of the schedule, and the tick that the message is for.
        series, tick = self.request.get("tick_of") or "", self.request.get("tick") or 0
        return PersistentFences(mine.engine).leader(mine.leader_keys.name).why_stale(fence, series, tick)


def process_of(app: Celery) -> Process:
    """The Process of the worker whose Celery app this is (``SchedulerApp.process``)."""
    return cast("Process", app.process)  # type: ignore[attr-defined]


def fence_of(task: Task | None) -> int | None:  # type: ignore[type-arg]
    """The fence of the leader that sent the message this task is run for; None when no leader did."""
    return None if task is None else task.request.get("fence")
