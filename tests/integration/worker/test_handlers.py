"""What a worker does with notifications: while the counters are not there, and where one transaction sends many."""

from __future__ import annotations

import json
from unittest.mock import MagicMock

import pytest
from redis import Redis
from sqlalchemy import Engine, text

from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.keys import EPOCH, subscription
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker.events import BACKLOG_CHANNEL, WORK_CHANNEL, NotificationListener
from opencue_sched.worker.handlers import MANY_LAYERS, MOST_LEFT_TO_FOLLOW, Handlers
from tests.kit.brief_fleet import open_counters
from tests.kit.listening import eventually_listen
from tests.kit.polling import eventually
from tests.kit.statements import listening


@pytest.fixture
def waker() -> MagicMock:
    return MagicMock()


@pytest.fixture
def handlers(engine: Engine, settings: Settings, redis_client: Redis, waker: MagicMock) -> Handlers:
    """Of a worker that nobody follows layers before."""
    ledger = make_ledger(engine, redis_client, owner="one", accounting=settings.accounting)
    feeds = MagicMock()
    return Handlers(engine, settings, ledger, waker, hosts=feeds, backlog=feeds)


def layers_asked_for(engine: Engine, handlers: Handlers) -> list[int]:
    """How many layers each statement names with which the worker follows again what it has kept."""
    asked: list[int] = []

    def note(*seen: object) -> None:
        parameters = seen[3]
        assert isinstance(parameters, dict)
        asked.extend(len(value) for value in parameters.values() if isinstance(value, list) and "layer0" in value)

    with listening(engine, "before_cursor_execute", note):
        handlers.follow_again()
    return asked


def test_shows_are_woken_though_the_running_frames_of_a_layer_cannot_be_followed(
    engine: Engine, handlers: Handlers, redis_client: Redis, waker: MagicMock
) -> None:
    # given a store that is lost once the caps are written
    open_counters(redis_client)

    def lose(*_: object) -> None:
        if redis_client.exists(subscription("show", "alloc")):
            redis_client.delete(EPOCH)

    with listening(engine, "before_cursor_execute", lose), pytest.raises(NotReady):
        handlers.caps_changed(["bound:layer0", "sub:show:alloc", "limit:nuke"])
    waker.note.assert_called_once_with(shows={"show"})


def test_layers_that_cannot_be_followed_are_followed_when_they_can(
    engine: Engine, handlers: Handlers, redis_client: Redis
) -> None:
    # given a worker that hears of a layer, and cannot follow it then or later
    with pytest.raises(NotReady):
        handlers.caps_changed(["bound:layer0", "limit:nuke"])
    with pytest.raises(NotReady):
        handlers.follow_again()
    # when it can, then it follows the layer, once
    open_counters(redis_client)
    assert layers_asked_for(engine, handlers) == [1]
    assert layers_asked_for(engine, handlers) == []


def test_no_more_is_kept_to_be_followed_than_fits(engine: Engine, handlers: Handlers, redis_client: Redis) -> None:
    # given a worker that leaves what it hears to another one, for the moment
    open_counters(redis_client)
    make_ledger(engine, redis_client, owner="another", accounting=Accounting()).follows_limits()
    for first in range(0, 3 * MOST_LEFT_TO_FOLLOW, 1000):
        handlers.caps_changed([f"bound:layer{number}" for number in range(first, first + 1000)])
    # when it makes up for what the other one may not have done
    assert layers_asked_for(engine, handlers) == [MOST_LEFT_TO_FOLLOW]


def test_a_show_is_woken_with_the_last_of_many_layers_that_a_transaction_names(
    engine: Engine, handlers: Handlers, waker: MagicMock
) -> None:
    # given a worker that listens, and notes in which calls it hears of layers and wakes shows
    heard: list[set[str]] = []
    woken: list[set[str]] = []

    def name_layers(layers: list[str]) -> None:
        handlers.backlog_changed(layers=layers)
        heard.append(set(layers))
        woken.append(set(waker.note.call_args.kwargs["shows"]))

    listener = NotificationListener(engine, {WORK_CHANNEL: handlers.work_waits, BACKLOG_CHANNEL: name_layers})
    listener.start()
    try:
        eventually_listen(engine)
        # when one transaction names more layers of a show with new work than one read has
        with engine.begin() as connection:
            notify = text("SELECT pg_notify(:channel, :payload)")
            work = {"channel": WORK_CHANNEL, "payload": json.dumps({"shows": ["show"]})}
            named = [
                {"channel": BACKLOG_CHANNEL, "payload": json.dumps({"layers": [f"{number:036}"]})}
                for number in range(400)
            ]
            connection.execute(notify, [work, *named])
        eventually(lambda: sum(map(len, heard)) == 400)
    finally:
        listener.stop()
    # then the show is woken each time
    assert len(heard) > 1
    assert woken == [{"show"}] * len(heard)


def test_a_show_is_woken_once_its_layers_are_named_whatever_other_show_has_work_by_then(
    handlers: Handlers, waker: MagicMock
) -> None:
    handlers.work_waits(["first"])
    handlers.work_waits(["second"])
    handlers.backlog_changed(layers=["of the first", "of the second"])
    waker.note.assert_called_with(shows={"first", "second"})


def test_a_show_is_not_woken_for_layers_that_are_named_after_its_own(handlers: Handlers, waker: MagicMock) -> None:
    handlers.work_waits(["show"])
    handlers.backlog_changed(layers=[f"layer{number}" for number in range(MANY_LAYERS)])
    handlers.backlog_changed(layers=["the last"])
    handlers.backlog_changed(layers=["another"])
    waker.note.assert_called_with(shows=set())
