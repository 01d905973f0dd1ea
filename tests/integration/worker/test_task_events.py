"""What a worker publishes of its tasks, on real Redis: as much as somebody hears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from celery import Celery

from opencue_sched.coordination.transport import broker_settings, guard_transports
from tests.kit.polling import eventually

TASK_EVENTS = ("task-received", "task-started", "task-succeeded")


@pytest.fixture
def app(redis_server, redis_client) -> Iterator[Celery]:
    guard_transports()  # kombu remembers the first transport it made for a scheme
    app = Celery(
        "worker",
        broker=broker_settings(redis_server.url).url,
        events="opencue_sched.worker.task_events:HeardEventsOnly",
        set_as_current=False,
    )
    with closing(app):
        yield app


@pytest.fixture
def dispatcher(app) -> Iterator[Any]:
    """As a worker makes it: what happens to tasks is kept until it is flushed."""
    with (
        app.connection_for_write() as connection,
        app.events.Dispatcher(connection, hostname="celery@one", buffer_group=["task"]) as dispatcher,
    ):
        yield dispatcher


def run_tasks(dispatcher: Any, *tasks: str) -> None:
    """Say of each of these tasks all that a worker says of one."""
    for task in tasks:
        for event in TASK_EVENTS:
            dispatcher.send(event, uuid=task)
        dispatcher.flush()


def published(client: Any) -> int:
    return int(client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0))


def test_events_of_tasks_are_not_published_while_nobody_listens(dispatcher, redis_client):
    before = published(redis_client)
    run_tasks(dispatcher, *map(str, range(100)))
    assert 1 <= published(redis_client) - before <= 20


def test_events_of_workers_are_published_whether_somebody_listens_or_not(dispatcher, redis_client):
    run_tasks(dispatcher, "unheard")
    before = published(redis_client)
    for _ in range(10):
        dispatcher.send("worker-heartbeat")
    assert published(redis_client) - before == 10


def test_who_comes_to_listen_soon_sees_every_task(app, dispatcher):
    run_tasks(dispatcher, "unheard")
    seen: list[tuple[str, str]] = []
    with app.connection_for_read() as broker:
        receiver = app.events.Receiver(
            broker, handlers={"*": lambda event: seen.append((event["uuid"], event["type"]))}
        )
        with receiver.consumer_context() as (connection, _, _):

            def hears() -> bool:
                run_tasks(dispatcher, "first")
                return bool(hear(connection) or seen)

            eventually(hears, 10, "an event")
            tasks = [f"later{number}" for number in range(10)]
            run_tasks(dispatcher, *tasks)
            expected = [(task, event) for task in tasks for event in TASK_EVENTS]
            eventually(lambda: hear(connection) or expected[-1] in seen, 10, "all")
    assert [event for event in seen if event[0] in tasks] == expected


def hear(connection: Any) -> None:
    """Take in what is there."""
    with suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=0.05)
