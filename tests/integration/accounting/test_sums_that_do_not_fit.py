"""Procs that reserve what no host has, or so much together that no column holds the sum: they stop nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import redis
from sqlalchemy import Connection, Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.recompute import recompute
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.insight.doctor import diagnose
from opencue_sched.insight.farm_view import farm_view
from opencue_sched.settings import Settings
from opencue_sched.store.folders import list_folders
from opencue_sched.store.jobs import list_jobs
from opencue_sched.store.shows import list_shows, list_subscriptions
from tests.kit.passes import Passes, passes

INT_MAX = 2**31 - 1
FRAMES = 6


@pytest.fixture
def one(engine: Engine, settings: Settings) -> Iterator[Passes]:
    """A process in dry run, whose ledger knows the procs."""
    dry_run = settings.rqd.model_copy(update={"dry_run_mode": True})
    with passes(engine, settings.model_copy(update={"rqd": dry_run}), past_ledger=False) as found:
        yield found


def capped_job(farm: Farm, show_name: str) -> str:
    """The id of a job with six waiting frames, of a show of its own, under a cap of its own and of its folder."""
    show = farm.show(show_name)
    farm.subscription(show, farm.default_alloc(), size=100)
    (job,) = farm.jobs([JobSpec([LayerSpec(frames=FRAMES)], show=show)])
    for table, key in (("job_resource", "pk_job"), ("folder_resource", "pk_folder")):
        farm.connection.execute(
            text(f"UPDATE {table} SET int_max_cores = 9000 WHERE {key} = (SELECT {key} FROM job WHERE pk_job = :job)"),  # noqa: S608
            {"job": job.id},
        )
    return job.id


def odd_procs(farm: Farm, job_id: str, column: str, amounts: Sequence[int]) -> None:
    """Run a frame of the job for each of these amounts, which its proc reserves in this column."""
    connection = farm.connection
    frames = connection.execute(
        text("SELECT pk_frame FROM frame WHERE pk_job = :job LIMIT :n"), {"job": job_id, "n": len(amounts)}
    )
    procs = farm.run(list(frames.scalars()), farm.host(cores=16, memory_gb=64))
    for proc, amount in zip(procs, amounts, strict=True):
        connection.execute(
            text(f"UPDATE proc SET {column} = :amount WHERE pk_proc = :proc"),  # noqa: S608
            {"amount": amount, "proc": proc},
        )


def running_frames(connection: Connection, job_id: str) -> int:
    return int(connection.scalar(text("SELECT int_running_count FROM job_stat WHERE pk_job = :job"), {"job": job_id}))


@pytest.mark.parametrize(
    ("column", "amounts"),
    [
        ("int_cores_reserved", [2**63 - 1]),
        ("int_cores_reserved", [-(2**63) + 1]),
        ("int_cores_reserved", [2**63 - 1, 2**63 - 1, -(2**63)]),
        ("int_cores_reserved", [2_000_000_000, 2_000_000_000]),
        ("int_gpus_reserved", [INT_MAX, INT_MAX]),
        ("int_gpus_reserved", [-(2**31), -(2**31)]),
    ],
    ids=lambda value: str(value),
)
def test_a_recompute_and_passes_go_on_for_everybody_else(
    one: Passes, engine: Engine, redis_client: redis.Redis, settings: Settings, column: str, amounts: list[int]
) -> None:
    # Given such procs of one show, and frames of it and of another that wait
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=32, memory_gb=128)
        odd, well = capped_job(farm, "odd"), capped_job(farm, "well")
        odd_procs(farm, odd, column, amounts)
    # When the counters are recomputed
    report = recompute(engine, one.runner.ledger, age_seconds=1)
    # Then every proc counts, as what it can have at most, in Redis and, as far as a column holds that, in PostgreSQL
    counted = [min(max(0, amount), INT_MAX) for amount in amounts]
    assert report.procs == len(amounts)
    unit = "int_cores" if column == "int_cores_reserved" else "int_gpus"
    in_redis = sum(-(-amount // 100) for amount in counted) if unit == "int_cores" else sum(counted)
    assert int(str(redis_client.hget(keys.job(odd), unit))) == in_redis
    with engine.connect() as connection:
        for table in ("job_resource", "folder_resource", "layer_resource", "subscription", "point"):
            largest = connection.scalar(text(f"SELECT max({unit}) FROM {table}"))  # noqa: S608
            assert largest == min(sum(counted), INT_MAX), table
    # And a second recompute finds nothing to do
    assert recompute(engine, one.runner.ledger, age_seconds=1).healed == 0
    # When passes are made, then all frames of the other show start
    one.drain()
    with engine.connect() as connection:
        assert running_frames(connection, well) == FRAMES
        # And whoever looks sees the farm
        assert len(list_jobs(connection)) == len(list_shows(connection)) == len(list_subscriptions(connection)) == 2
        assert list_folders(connection)
    farm_view(engine, redis_client, settings)
    said = [*run_audit(engine, redis_client, settings).findings, *diagnose(engine, redis_client, settings).findings]
    assert not [finding.text for finding in said if "out of range" in finding.text]
