"""What workers do when the limits of running frames change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker.handlers import Handlers
from opencue_sched.worker.process import Process
from tests.kit.counters import Store
from tests.kit.limits import set_type
from tests.kit.world import World


class Workers:
    """Two workers that are told of the same changes, of a world with three running frames."""

    def __init__(self, engine: Engine, client: redis.Redis, settings: Settings) -> None:
        self.world = World.make(engine, Store(client))
        self.world.store.open()
        self.world.run(3)
        self.world.recompute()
        with engine.begin() as connection:
            self.limit = Farm(connection).limit("nuke", 9)
            set_type(connection, self.limit, "HOST")
        self.handlers = []
        for owner in ("first", "second"):
            ledger = make_ledger(engine, client, owner=owner, accounting=Accounting())
            feeds: Any = MagicMock()
            self.handlers.append(Handlers(engine, settings, ledger, MagicMock(), hosts=feeds, backlog=feeds))
            ledger.learn_epoch()

    def bind(self) -> str:
        """Bind the layer; returns the vertex that is told."""
        self.world.sql(
            "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES ('bound', :layer, :limit)",
            layer=self.world.job.layers[0].id,
            limit=self.limit,
        )
        return f"bound:{self.world.job.layers[0].id}"

    def follows(self, worker: int, vertex: str) -> bool:
        """Whether a worker that is told of this looks at the ledger."""
        client = self.world.store.client
        client.config_resetstat()
        self.handlers[worker].caps_changed([vertex])
        stats: Any = client.info("commandstats")
        return "cmdstat_evalsha" in stats

    @property
    def machines(self) -> set[str]:
        return self.world.store.machines(self.limit)


@pytest.fixture
def workers(engine: Engine, redis_client: redis.Redis, settings: Settings) -> Workers:
    return Workers(engine, redis_client, settings)


def test_one_worker_counts_what_runs_under_a_new_limit(workers: Workers) -> None:
    # given a layer of which frames run, bound to a limit
    bound = workers.bind()
    # when both workers are told, then the first of them follows and the other leaves it to it.
    assert [workers.follows(worker, bound) for worker in (0, 1)] == [True, False]
    assert workers.machines == {workers.world.host.id}
    # Of what comes next the other may hear first.
    workers.world.sql("DELETE FROM layer_limit")
    assert [workers.follows(worker, bound) for worker in (1, 0)] == [False, True]
    assert workers.machines == set()


def test_another_worker_follows_when_the_one_that_did_is_gone(workers: Workers) -> None:
    bound = workers.bind()
    assert workers.follows(0, bound)
    ttl = workers.world.store.client.ttl(keys.FOLLOWER)
    assert ttl <= 5
    assert ttl != -1, "it ends by itself"
    workers.world.store.client.delete(keys.FOLLOWER)
    workers.world.sql("DELETE FROM layer_limit")
    assert [workers.follows(worker, bound) for worker in (1, 0)] == [True, False]
    assert workers.machines == set()
    workers.world.exact()


@pytest.fixture
def process(settings: Settings, workers: Workers) -> Iterator[Process]:
    """A third worker, with what it does from time to time."""
    app = Celery("follows", broker="memory://", set_as_current=False)
    made = Process(settings, app)
    made.bootstrap()
    yield made
    made.close()
    app.close()


def test_what_was_left_to_a_worker_that_died_is_followed_soon(workers: Workers, process: Process) -> None:
    # given a worker that took it on to follow layers, and died
    workers.world.store.client.set(keys.FOLLOWER, "dead", ex=5)
    # when a layer of which frames run is bound to a limit, and all others leave it to that one
    bound = workers.bind()
    process.handlers.caps_changed([bound])
    assert workers.machines == set()
    # then each of them looks some seconds later,
    process.keep_counters()
    assert workers.machines == {workers.world.host.id}
    workers.world.exact()
    # and, when there is nothing more to follow, at nothing any more.
    workers.world.sql("DELETE FROM layer_limit")
    process.keep_counters()
    assert workers.machines == {workers.world.host.id}


def test_a_limit_that_was_left_to_a_worker_that_died_is_followed_soon(workers: Workers, process: Process) -> None:
    # given frames that run under a limit of frames, and a worker that died
    workers.bind()
    with process.engine.begin() as connection:
        set_type(connection, workers.limit, "FRAME")
    process.handlers.caps_changed([f"limit:{workers.limit}"])
    workers.world.recompute()
    workers.world.store.client.set(keys.FOLLOWER, "dead", ex=5)
    # when the limit counts machines from now on
    with process.engine.begin() as connection:
        set_type(connection, workers.limit, "HOST")
    process.handlers.caps_changed([f"limit:{workers.limit}"])
    assert workers.machines == set()
    # then its frames say so some seconds later.
    process.keep_counters()
    assert workers.machines == {workers.world.host.id}
