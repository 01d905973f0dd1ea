"""Steps of Celery's consumer: the heartbeat of this worker's presence, started anew after each reconnect."""

from __future__ import annotations

import os
import signal
from typing import Any

import structlog
from celery import bootsteps
from celery.worker import state

from opencue_sched.coordination.presence import REFRESH_SECONDS, InstanceTaken

log = structlog.get_logger(__name__)

EX_CONFIG = 78


class PresenceStep(bootsteps.StartStopStep):
    """Refreshes the presence every few seconds from the consumer's timer."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **_: Any) -> None:  # noqa: ARG002 - celery's signature
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        from opencue_sched.operate.runtime import runtime

        membership = runtime().membership
        membership.in_flight = lambda: len(state.reserved_requests)
        membership.duty.begin()

        def beat() -> None:
            try:
                membership.heartbeat()
            except InstanceTaken as error:
                log.error("worker_stops", reason=str(error))
                state.should_stop = EX_CONFIG  # type: ignore[assignment]

        beat()
        self._timer = parent.timer.call_repeatedly(REFRESH_SECONDS, beat)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - celery's signature
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    shutdown = stop


def begin_to_drain(**_: Any) -> None:
    """At the first signal to stop: take nothing new. A second SIGTERM ends the process at once.

    That is safe: claims and presence expire, PostgreSQL rolls back, and Redis bookings without a proc are reconciled.
    """
    from opencue_sched.operate.runtime import runtime

    runtime().membership.duty.drain()
    signal.signal(signal.SIGTERM, lambda signum, _: os._exit(128 + signum))
