"""Tasks that die at a chosen moment: each is a process that is forked here, and killed by SIGKILL.

    python -m tests.chaos.stepped_task

As tests/chaos/stepped_pass.py: a line of standard input is ``{"die_after": n}``, the answer says what the task had
``done``, and its exit ``status``. What counts here are the statements that it sent to PostgreSQL, one by one, the
COMMIT, the commands by which it tells others, and each event of a job that its receiver has got. With n = 0 it goes to
its end. The task is the reservation task, or the maintenance ``task`` that the line names, or it is to ``complete`` the
runs of which the line has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from celery import Celery
from sqlalchemy import event
from tornado.httpclient import HTTPClient

from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import get_settings
from opencue_sched.worker.process import Process
from tasks import maintenance
from tests.chaos.stepped_pass import Steps, answer_lines
from tests.kit.tasks import run_task

DELIVERED = "delivered"


def live(out: int, die_after: int, task: str = "keep_promises", complete: Sequence[Mapping[str, Any]] = ()) -> None:
    app = Celery("stepped", broker="memory://", set_as_current=False)
    process = Process(get_settings(), app)
    _ = process.facts
    steps = Steps(out, die_after)

    def sent(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        steps.done(" ".join(statement.split())[:60])

    event.listen(process.engine, "after_cursor_execute", sent)
    steps.watch_commits(process.engine.dialect)
    steps.watch_redis()
    fetch, one_by_one = HTTPClient.fetch, Lock()

    def delivered(client: HTTPClient, *request: Any, **named: Any) -> Any:
        with one_by_one:
            answer = fetch(client, *request, **named)
            steps.done(DELIVERED)
        return answer

    HTTPClient.fetch = delivered  # type: ignore[method-assign]
    if complete:
        Releaser(process.engine).end([CompletedFrame(**fields) for fields in complete])
    else:
        run_task(getattr(maintenance, task), process)


if __name__ == "__main__":
    answer_lines(live)
