"""Our commands of Celery's remote control: ``celery -A opencue_sched control drain`` and so on.

Pausing is done by not consuming, so it holds for every kind of pool.

The fleets of different facilities may share a Redis: each hears remote control by an exchange of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from celery.app.control import Control
from celery.worker.control import control_command, inspect_command

from opencue_sched.coordination.keys import QueueType, control_exchange, type_of
from opencue_sched.coordination.presence import Actor, WorkerState
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker.task import process_of


def _instance_command(function: Callable[..., dict[str, object]]) -> Any:
    """Make a control command of ``function``. A worker carries the command out only if its arguments name no
    ``instances``, or the worker among them: Celery's node names, by which ``destination`` goes, need not be unique."""

    @control_command()
    @wraps(function)
    def run(state: Any, instances: Sequence[str] | None = None, **named: Any) -> dict[str, object]:
        if instances and process_of(state.app).settings.instance not in instances:
            return {"ok": "not meant"}
        return function(state, **named)

    return run


def _work_queues(state: Any, *types: QueueType) -> list[str]:
    """The work queues this worker was started with, of these types, in order."""
    return [queue.name for queue in state.app.conf.task_queues if type_of(queue.name) in types]


def _stop_consuming(state: Any, *types: QueueType) -> None:
    """Have the consumer take nothing more from the work queues of these types."""
    for name in _work_queues(state, *types):
        state.consumer.cancel_task_queue(name)


@_instance_command
def pause_dispatch(state: Any) -> dict[str, object]:
    """Take no more dispatch messages until resume_dispatch; other work goes on."""
    process_of(state.app).membership.workload.become(WorkerState.PAUSED)
    _stop_consuming(state, QueueType.DISPATCH)
    return {"ok": "paused"}


@_instance_command
def drain(state: Any) -> dict[str, object]:
    """Take no more messages of any type until resume_dispatch; what is in hand is finished."""
    process_of(state.app).membership.workload.become(WorkerState.DRAINING)
    _stop_consuming(state, *QueueType)
    return {"ok": "draining", "in_hand": process_of(state.app).membership.in_flight()}


@_instance_command
def resume_dispatch(state: Any) -> dict[str, object]:
    """Take messages again after pause_dispatch or drain."""
    process_of(state.app).membership.workload.become(WorkerState.WORKING)
    queues = state.app.amqp.queues
    for name in _work_queues(state, *QueueType):
        # Celery 5.6 consumes what was cancelled and added only until its next reconnect.
        queues.select_add(queues[name])
        state.consumer.add_task_queue(name)
    return {"ok": "working"}


@_instance_command
def stop_worker(state: Any) -> dict[str, object]:  # noqa: ARG001 - celery's signature
    """Finish what is in hand and end this worker, as SIGTERM does."""
    os.kill(os.getpid(), signal.SIGTERM)
    return {"ok": "stopping"}


@control_command()
def reload_clusters(state: Any) -> dict[str, object]:
    """Read the set of clusters anew with the next sweep."""
    process_of(state.app).sweeper.reload()
    return {"ok": "reloading"}


@inspect_command()
def leader_status(state: Any) -> dict[str, object]:
    """The leader of the beats: its name, its fence, and how long ago a tick was fired."""
    from opencue_sched.insight.fleet import fleet_view

    mine = process_of(state.app)
    return dict(fleet_view(mine.client, mine.settings, PersistentFences(mine.engine))["leader"])


@inspect_command()
def accounting_audit(state: Any) -> dict[str, object]:
    """The invariants, checked against PostgreSQL and Redis."""
    from opencue_sched.insight.audit import run_audit

    mine = process_of(state.app)
    return run_audit(mine.engine, mine.client, mine.settings).as_dict()


def broadcast(app: Any, namespace: str, command: str, meant: Sequence[Actor], *, wait_seconds: float) -> list[Any]:
    """Send a command to the instances ``meant``, which are all of one facility scope, and return their answers as soon
    as all have answered, or after ``wait_seconds``. (``celery control`` reaches the scope of one's own settings
    only.)"""
    if not meant:
        return []
    app.conf.control_exchange = control_exchange(namespace, meant[0].facility)
    answers: list[Any] | None = Control(app).broadcast(
        command,
        arguments={"instances": [actor.instance for actor in meant]},
        destination=sorted({actor.node for actor in meant}),
        reply=True,
        timeout=wait_seconds,
        limit=len(meant),
    )
    return answers or []
