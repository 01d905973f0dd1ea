"""Notifications from a real PostgreSQL, lost connections included."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from sqlalchemy import Engine, event, text

from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.worker import metrics
from opencue_sched.worker.events import CAPS_CHANNEL, RELEASE_CHANNEL, WORK_CHANNEL, NotificationListener
from tests.kit.listening import eventually_listen, nobody_hears
from tests.kit.polling import eventually
from tests.kit.refusing_postgres import refusing_postgres
from tests.kit.runs import FarmView, complete_frame, start


@dataclass
class Heard:
    procs: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    caps: list[str] = field(default_factory=list)
    shows: list[str] = field(default_factory=list)
    reconnects: int = 0

    def release(self, procs: Sequence[str], hosts: Sequence[str]) -> None:
        self.procs += procs
        self.hosts += hosts

    def cap(self, vertices: Sequence[str]) -> None:
        self.caps += vertices

    def work(self, shows: Sequence[str]) -> None:
        self.shows += shows

    def reconnect(self) -> None:
        self.reconnects += 1


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    metrics.release_events.clear()


def counted(event: str) -> float:
    return REGISTRY.get_sample_value("scheduler_release_events_total", {"event": event}) or 0.0


@pytest.fixture
def view(engine: Engine) -> FarmView:
    return FarmView(engine)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listener(engine: Engine, heard: Heard) -> Iterator[NotificationListener]:
    handlers = {
        RELEASE_CHANNEL: heard.release,
        CAPS_CHANNEL: heard.cap,
        WORK_CHANNEL: heard.work,
    }
    listener = NotificationListener(engine, handlers, on_reconnect=heard.reconnect)
    listener.start()
    eventually_listen(engine)
    try:
        yield listener
    finally:
        listener.stop()


def notify(engine: Engine, channel: str, payload: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_notify(:c, :p)"), {"c": channel, "p": payload})


@pytest.mark.usefixtures("listener")
def test_whoever_deletes_a_proc_is_heard_by_id(engine: Engine, view: FarmView, heard: Heard) -> None:
    run = start(view, LayerSpec(frames=3), running=3)
    complete_frame(engine, run.report(0))
    view.run_sql("DELETE FROM proc WHERE pk_proc = :p", p=run.procs[1])
    eventually(lambda: sorted(heard.procs) == sorted(run.procs[:2]))
    assert set(heard.hosts) == {run.host.id}


@pytest.mark.usefixtures("listener")
def test_caps_and_work_are_heard(engine: Engine, view: FarmView, heard: Heard) -> None:
    run = start(view)
    view.run_sql("UPDATE folder_resource SET int_max_cores = 5000")
    eventually(lambda: f"folder:{run.job.folder_id}" in heard.caps)
    with view.farm() as farm:
        farm.job(show=run.job.show, name="new")
    eventually(lambda: run.job.show.id in heard.shows)
    notify(engine, "opencue_sched_caps", json.dumps({"vertices": ["job:1"]}))
    notify(engine, "opencue_sched_work", json.dumps({"shows": ["show-1"]}))
    eventually(lambda: "job:1" in heard.caps and "show-1" in heard.shows)


@pytest.mark.parametrize("payload", ["", "not json", '["p1"]', '"text"', '{"procs": "p1"}', '{"procs": [1]}', "null"])
def test_a_malformed_payload_is_counted_and_the_next_one_heard(
    engine: Engine, listener: NotificationListener, heard: Heard, payload: str
) -> None:
    notify(engine, "opencue_sched_release", payload)
    notify(engine, "opencue_sched_release", json.dumps({"procs": ["p1"], "hosts": ["h1"]}))
    eventually(lambda: heard.procs == ["p1"])
    assert counted("notification_failed") == 1


def test_a_process_with_more_than_a_thousand_open_files_hears_as_any_other(engine: Engine, heard: Heard) -> None:
    """A worker has a connection to each RQD it talks to."""
    with ExitStack() as files:
        most, possible = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4096 if possible == resource.RLIM_INFINITY else min(possible, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, wanted), possible))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (most, possible))
        number = 0
        while number < 1024:
            number = os.open(os.devnull, os.O_RDONLY)
            files.callback(os.close, number)
        listener = NotificationListener(engine, {WORK_CHANNEL: heard.work})
        listener.start()
        files.callback(listener.stop)
        eventually_listen(engine)
        notify(engine, "opencue_sched_work", '{"shows": ["show-1"]}')
        eventually(lambda: heard.shows == ["show-1"])


def test_notifications_that_a_session_of_a_pool_still_has_for_others_are_nothing_to_us(
    engine: Engine, heard: Heard
) -> None:
    # given sessions that listen to something for a program that had them before
    @event.listens_for(engine, "connect")
    def had_before(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("LISTEN somebody_elses")
        connection.commit()

    engine.dispose()
    listener = NotificationListener(engine, {WORK_CHANNEL: heard.work}, on_reconnect=heard.reconnect)
    listener.start()
    try:
        eventually_listen(engine)
        # when that is notified of, then ours are heard as before, over the same connection
        notify(engine, "somebody_elses", "any text")
        notify(engine, "opencue_sched_work", '{"shows": ["show-1"]}')
        eventually(lambda: heard.shows == ["show-1"])
        assert (heard.reconnects, counted("listener_lost"), counted("notification_failed")) == (0, 0, 0)
    finally:
        listener.stop()
        engine.dispose()  # no later test is to get such a session


def test_a_failing_handler_costs_one_notification(engine: Engine) -> None:
    seen: list[Sequence[str]] = []

    def on_work(shows: Sequence[str]) -> None:
        seen.append(shows)
        if shows == ["bad"]:
            raise RuntimeError("handler failed")

    listener = NotificationListener(engine, {WORK_CHANNEL: on_work})
    listener.start()
    try:
        eventually_listen(engine)
        notify(engine, "opencue_sched_work", '{"shows": ["bad"]}')
        eventually(lambda: seen == [["bad"]])
        notify(engine, "opencue_sched_work", '{"shows": ["good"]}')
        eventually(lambda: seen == [["bad"], ["good"]])
        assert counted("notification_failed") == 1
    finally:
        listener.stop()


def test_what_is_notified_together_is_passed_on_together(engine: Engine) -> None:
    # given a handler that is under way with a first notification
    seen: list[Sequence[str]] = []
    go_on = Event()

    def on_work(shows: Sequence[str]) -> None:
        seen.append(shows)
        go_on.wait(30)

    listener = NotificationListener(engine, {WORK_CHANNEL: on_work})
    listener.start()
    try:
        eventually_listen(engine)
        notify(engine, WORK_CHANNEL, '{"shows": ["first"]}')
        eventually(lambda: seen == [["first"]])

        # when others follow, each a commit of its own
        shows = [f"show-{number:02d}" for number in range(20)]
        for show in shows:
            notify(engine, WORK_CHANNEL, json.dumps({"shows": [show]}))
        go_on.set()

        # then nothing is left out, and what came together needed few calls
        eventually(lambda: [show for call in seen[1:] for show in call] == shows)
        assert len(seen) <= 5
        eventually(lambda: counted(f"notification_{WORK_CHANNEL}") == 21)
    finally:
        go_on.set()
        listener.stop()


def test_among_notifications_that_come_together_a_bad_one_costs_itself_alone(engine: Engine) -> None:
    # given a handler that is under way with a first notification
    seen: list[str] = []
    go_on = Event()

    def on_work(shows: Sequence[str]) -> None:
        go_on.wait(30)
        if "bad" in shows:
            raise RuntimeError("handler failed")
        seen.extend(shows)

    listener = NotificationListener(engine, {WORK_CHANNEL: on_work})
    listener.start()
    try:
        eventually_listen(engine)
        notify(engine, WORK_CHANNEL, '{"shows": ["first"]}')

        # when those that follow have a payload that makes no sense, and one with which the handler fails
        for payload in ('{"shows": ["a"]}', "not json", '{"shows": ["bad"]}', '{"jobs": ["b"]}', '{"shows": ["c"]}'):
            notify(engine, WORK_CHANNEL, payload)
        go_on.set()

        # then the handler has all others
        eventually(lambda: set(seen) == {"first", "a", "c"})
        eventually(lambda: counted("notification_failed") == 3)
        assert counted(f"notification_{WORK_CHANNEL}") == 3
    finally:
        go_on.set()
        listener.stop()


def test_a_lost_connection_is_opened_again_and_said_so(
    engine: Engine, listener: NotificationListener, heard: Heard
) -> None:
    # given a listener whose connection the server ends
    with engine.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'opencue-sched-listener' AND datname = current_database()"
            )
        )

    # then it is back, told its owner that something may be missing, and hears again
    eventually(lambda: heard.reconnects == 1)
    notify(engine, "opencue_sched_work", '{"shows": ["show-1"]}')
    eventually(lambda: heard.shows == ["show-1"])
    assert counted("listener_lost") == 1


def test_a_database_that_does_not_answer_is_tried_until_stopped(settings: Settings, heard: Heard) -> None:
    nowhere = settings.model_copy(update={"database_url": SecretStr("postgresql://nobody@127.0.0.1:1/none")})
    handlers = {WORK_CHANNEL: heard.work}
    listener = NotificationListener(make_engine(nowhere), handlers, on_reconnect=heard.reconnect)
    listener.start()
    eventually(lambda: counted("listener_connect_failed") >= 2)
    listener.stop()
    assert heard.reconnects == 0


def test_a_database_that_is_away_for_long_is_still_tried_every_second(settings: Settings) -> None:
    """What happens after it is back and before the next attempt is heard by nobody."""
    with refusing_postgres(settings, b"the database system is starting up") as elsewhere:
        listener = NotificationListener(make_engine(elsewhere), {WORK_CHANNEL: lambda **_: None})
        listener.start()
        # Pauses that go on doubling, up to ten seconds, take 42 s.
        eventually(lambda: counted("listener_connect_failed") >= 10, 8)
        listener.stop()


def test_what_was_missed_before_the_first_connection_is_said_too(engine: Engine, heard: Heard) -> None:
    """A worker fills its caches before it listens."""
    listener = NotificationListener(engine, {WORK_CHANNEL: heard.work}, on_reconnect=heard.reconnect)
    try:
        # given a listener that is refused at its first attempts
        beside = engine.execution_options(isolation_level="AUTOCOMMIT")
        with beside.connect() as connection, nobody_hears(connection):
            listener.start()
            eventually(lambda: counted("listener_connect_failed") >= 1)
            assert heard.reconnects == 0
        # when it gets through, then its owner is told
        eventually(lambda: heard.reconnects == 1)
    finally:
        listener.stop()


def test_a_database_that_refuses_in_an_encoding_of_its_own_is_tried_until_stopped(settings: Settings) -> None:
    with refusing_postgres(settings, "Das Datenbanksystem f\u00e4hrt herunter".encode("latin-1")) as elsewhere:
        listener = NotificationListener(make_engine(elsewhere), {WORK_CHANNEL: lambda **_: None})
        listener.start()
        eventually(lambda: counted("listener_connect_failed") >= 2)
        listener.stop()
