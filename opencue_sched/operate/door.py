"""What every task does first: count itself, and drop what a former leader sent or a later tick overtook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from celery import Task

from opencue_sched.coordination.leader import Standing, tick_standing
from opencue_sched.coordination.ticks import CatchUp
from opencue_sched.operate import fleet_metrics

if TYPE_CHECKING:
    from opencue_sched.operate.runtime import Runtime

log = structlog.get_logger(__name__)


class Door(Task):  # type: ignore[type-arg]
    """Base of our tasks (``Celery(task_cls=...)``)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task, unless its message carries the fence of a leader that was succeeded."""
        from opencue_sched.operate.runtime import runtime

        mine = runtime()
        with mine.membership.duty.task():
            standing = self._standing(mine)
            if standing is not Standing.CURRENT:
                fleet_metrics.messages_dropped.labels(standing.value).inc()
                log.warning("periodic_message_dropped", task=self.name, reason=standing.value)
                return {"dropped": standing.value}
            return self.run(*args, **kwargs)

    def _standing(self, mine: Runtime) -> Standing:
        """What this message is worth. Messages that no leader sent always count."""
        fence = self._header("fence")
        if fence is None:
            return Standing.CURRENT
        repeats = self._header("catch_up") == CatchUp.ALL
        task = None if repeats else self._header("tick_of")
        return tick_standing(mine.client, mine.leader_keys, int(fence), task, int(self._header("tick") or 0))

    def _header(self, name: str) -> Any:
        value = self.request.get(name)
        return value if value is not None else (self.request.headers or {}).get(name)
