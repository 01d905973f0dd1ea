"""What a worker does with notifications while the counters are not there."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from redis import Redis
from sqlalchemy import Engine

from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.keys import EPOCH, subscription
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker.handlers import MOST_LEFT_TO_FOLLOW, Handlers
from tests.kit.brief_fleet import open_counters
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
