"""A store that may be booked in, and vertices with caps to book against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import redis
from sqlalchemy import Engine

from opencue_sched.accounting import bootstrap
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.settings import Settings
from tests.kit.counters import Store

if TYPE_CHECKING:
    from tests.integration.accounting.interleaved import Side
    from tests.kit.world import World


@pytest.fixture
def store(redis_client: redis.Redis, settings_url: str) -> Iterator[Store]:
    """An open store with generous caps for VERTICES."""
    client = guarded_redis(settings_url, Settings())
    try:
        opened = Store(client)
        opened.open()
        opened.seed()
        yield opened
    finally:
        client.close()


@pytest.fixture
def settings_url(redis_server: object) -> str:
    return str(redis_server.url)  # type: ignore[attr-defined]


@pytest.fixture
def world(engine: Engine, store: Store) -> World:
    """A small farm and an open store that knows nothing of it yet."""
    from tests.kit.world import World

    return World.make(engine, store)


@pytest.fixture
def limited(world: World) -> str:
    """A limit of two, of the layer of which the world runs frames."""
    from opencue_sched.embedded.farms.farm import Farm
    from tests.integration.accounting.seats import bind

    with world.engine.begin() as connection:
        limit = Farm(connection).limit("nuke", 2)
    bind(world, limit)
    return limit


@pytest.fixture
def play(
    engine: Engine, settings: Settings, settings_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[type[Side]], Side]]:
    """Makes one of the players of an interleaving (interleaved.py), on an open store without caps."""
    from tests.integration.accounting import interleaved, interleaved_ours, stepping

    clock = stepping.Clock()
    monkeypatch.setattr(bootstrap, "time", clock)
    client = stepping.SteppedRedis.from_url(settings_url, decode_responses=True)
    made: list[Side] = []
    # First: at the boundary of a COMMIT a test may have the server end the transaction.
    interleaved_ours.mark_transactions(engine)
    stepping.step_statements(engine)

    def make(player: type[Side], deadline: float = 60.0) -> Side:
        side = player(engine, client, clock, interleaved.with_deadline(settings, deadline))
        made.append(side)
        return side

    yield make
    for side in made:
        for actor in side.actors:
            actor.kill()
    client.close()
