"""Steps of Celery's consumer: the heartbeat of this worker's presence, started anew after each reconnect."""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from types import FrameType
from typing import Any

import structlog
from celery import bootsteps
from celery.worker import state
from redis.exceptions import RedisError

from opencue_sched.coordination.duty import Duty
from opencue_sched.coordination.presence import REFRESH_SECONDS, InstanceTaken
from opencue_sched.operate.remote_control import fleet_figures, obey

log = structlog.get_logger(__name__)

EX_CONFIG = 78
_LOOK_FOR_AN_ORDER_SECONDS = 0.2
# Of this process, for the signal handler: it must not wait for a lock that the interrupted code holds.
_duty: Duty | None = None


class PresenceStep(bootsteps.StartStopStep):
    """Refreshes the presence every few seconds from the consumer's timer."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **_: Any) -> None:  # noqa: ARG002 - celery's signature
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        from opencue_sched.operate.runtime import runtime

        global _duty
        membership = runtime().membership
        _duty = membership.duty
        membership.in_flight = lambda: len(state.reserved_requests)
        membership.duty.begin()

        def beat(*, listens: bool = True) -> None:
            try:
                membership.heartbeat()
                if listens:
                    obey(parent, membership.control_messages())
                runtime().show_store()
            except InstanceTaken as error:
                log.error("worker_stops", reason=str(error))
                state.should_stop = EX_CONFIG  # type: ignore[assignment]
            except RedisError as error:
                log.warning("beat_of_the_worker_failed", error=str(error))
            except Exception:
                # As the timer does with the others: the first one would end the worker, at each reconnection.
                log.exception("beat_of_the_worker_failed")

        # The subscription to remote control begins with the event loop: what is passed on before, nobody here hears.
        beat(listens=False)
        self._timer = parent.timer.call_repeatedly(REFRESH_SECONDS, beat)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - celery's signature
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    shutdown = stop

    def info(self, obj: Any) -> dict[str, object]:  # type: ignore[override]  # noqa: ARG002 - celery's signature
        """Celery's ``stats`` has what its steps return here."""
        return fleet_figures()


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
    if _duty is not None:
        _duty.stop()


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
