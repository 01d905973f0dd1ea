"""Running a task of ours with the process that a test has made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Task

from opencue_sched.celery import app
from opencue_sched.worker.process import Process


@contextmanager
def in_process(process: Process) -> Iterator[None]:
    """Have tasks find this process: otherwise their application makes that of the environment."""
    app.process = process
    try:
        yield
    finally:
        del app.process


def run_task(task: Task, process: Process, *args: object, **named: object) -> dict[str, Any]:  # type: ignore[type-arg]
    """What a task does, past what is looked at before it is run: its message and its arguments."""
    with in_process(process):
        answer: dict[str, Any] = task.run(*args, **named)
    return answer
