"""What waits for GPUs: which frames count, and how often it is read."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.gather import READ_SECONDS, GpuWaits
from opencue_sched.domain.frame_needs import Demand
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import counted_statements


def waits_of(engine: Engine, **options: Any) -> GpuWaits:
    with engine.connect() as connection:
        facts = check_schema(connection)
    return GpuWaits(engine, lambda: facts, options.pop("in_use", lambda _: {}), **options)


def test_it_says_how_many_frames_wait_for_which_hosts(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        facility, alloc = farm.facility(), farm.default_alloc().id
        same = LayerSpec(frames=3, cores=4, memory_gb=8, gpus=1, tags="b | a")
        farm.job([same, same, LayerSpec(frames=50)], name="one")
        farm.job([LayerSpec(frames=2, gpu_memory_gb=4)], name="other")

    found = {demand.search.tags: demand for demand in waits_of(engine).demands()}

    assert found.keys() == {("a", "b"), ("general",)}
    demand = found["a", "b"]
    assert demand == Demand(facility, demand.search, frozenset({alloc}), 6)
    assert (demand.search.need.cores, demand.search.need.gpus, demand.search.os_name) == (4, 1, "linux")
    assert demand.search.need.memory_kb == 8 * 1024 * 1024
    assert (found["general",].frames, found["general",].search.need.gpus) == (2, 0)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE job SET b_paused = true",
        "UPDATE job_resource SET int_max_cores = 300",
        "UPDATE job_resource SET int_max_gpus = 1",
        "UPDATE folder_resource SET int_max_cores = 300",
        "UPDATE folder_resource SET int_max_gpus = 1",
        "UPDATE limit_record SET int_max_value = 1",
        "UPDATE subscription SET int_burst = 300",
        "UPDATE layer_stat SET int_waiting_count = 0",
        "UPDATE show SET b_scheduler_managed = false",
    ],
)
def test_demand_that_cannot_run_is_no_demand(engine: Engine, change: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 5)
        host = farm.host(cores=8, gpus=4, gpu_memory_gb=8)
        job = farm.job([LayerSpec(frames=3, cores=4, gpus=1, limits=[limit])], name="job")
        farm.run(job.layers[0].frames[:1], host, cores=4, gpus=1)
    assert [demand.frames for demand in waits_of(engine).demands()] == [2]

    with engine.begin() as connection:
        connection.execute(text(change))

    assert waits_of(engine).demands() == ()


def test_a_full_subscription_opens_no_allocation(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.default_show(), farm.default_alloc()
        farm.job([LayerSpec(frames=3, cores=4, gpus=1)])
        burst = connection.execute(text("SELECT int_burst FROM subscription")).scalar_one() // 100

    full = waits_of(engine, in_use=lambda _: {(show.id, alloc.id): burst - 3})
    open_ = waits_of(engine, in_use=lambda _: {(show.id, alloc.id): burst - 4})

    assert full.demands() == ()
    assert [demand.alloc_ids for demand in open_.demands()] == [{alloc.id}]


def test_it_is_read_once_in_two_seconds(engine: Engine) -> None:
    now = 100.0
    waits = waits_of(engine, clock=lambda: now)
    with counted_statements(engine) as statements:
        for _ in range(5):
            waits.demands()
        assert len(statements) == 1
        now += READ_SECONDS
        waits.demands()
        assert len(statements) == 2
