"""What workers do when the limits of running frames change."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import redis
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker.handlers import Handlers
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
    assert 0 < workers.world.store.client.ttl(keys.FOLLOWER) <= 5
    workers.world.store.client.delete(keys.FOLLOWER)
    workers.world.sql("DELETE FROM layer_limit")
    assert [workers.follows(worker, bound) for worker in (1, 0)] == [True, False]
    assert workers.machines == set()
    workers.world.exact()
