"""Running a task of ours in a process that a test has made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from celery import Task

from opencue_sched.worker.process import Process


@contextmanager
def in_process(process: object) -> Iterator[None]:
    """Have tasks, and what else Celery calls, find this process: otherwise each makes that of the environment."""
    with patch("opencue_sched.worker.process.process", lambda _app: process):
        yield


def run_task(task: Task, process: Process, *args: object, **named: object) -> dict[str, Any]:  # type: ignore[type-arg]
    """What a task does, past what is looked at before it is run: its message and its arguments."""
    with in_process(process):
        answer: dict[str, Any] = task.run(*args, **named)
    return answer
