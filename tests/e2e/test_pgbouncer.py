"""A whole fleet behind a connection pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.e2e.fleets import NONE_IS_LOST, fleet_on
from tests.kit.pgbouncer import pgbouncer


@pytest.mark.parametrize("pool_mode", ["session", "transaction"])
def test_a_fleet_behind_a_connection_pool_runs_a_job_to_its_end(
    pool_mode: str, settings: Settings, engine: Engine, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """By transaction too, which is not supported: there it hears nothing, and says so."""
    with engine.begin() as connection:
        Farm(connection).default_show()
    with (
        pgbouncer(settings, pool_mode=pool_mode, more="default_pool_size = 50") as pool,
        fleet_on(pool.settings, engine, redis_client, tmp_path, environment=NONE_IS_LOST) as fleet,
    ):
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("second")
            farm.subscription(show, farm.default_alloc(), size=100)
            job = farm.job(layers=[LayerSpec(frames=20), LayerSpec(frames=1)], show=show, os=None)
            farm.layer_on_layer((job, 1), (job, 0))
        fleet.wait_for("the job's end", lambda: fleet.finished(job.id))
        fleet.assert_audit()
        log = fleet.fleet.processes["worker1"].log.read_text()
    assert ("listener_is_deaf" in log) == (pool_mode == "transaction")
