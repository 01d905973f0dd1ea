"""What waits for GPUs, as a pass knows it: which frames count, and for which hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps
from opencue_sched.dispatch.headroom import gpu_demands, read_snapshot
from opencue_sched.domain.frame_needs import Demand
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.placement.policies.admissions import kept_for_gpus
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.quarantine import quarantine_jobs
from tests.kit.limits import set_type
from tests.kit.passes import Passes, passes
from tests.kit.plans import hosts_of


@pytest.fixture
def here(engine: Engine, settings: Settings) -> Iterator[Passes]:
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as runner:
        yield runner


def demands(here: Passes) -> list[Demand]:
    """What a pass that has read everything again, over whichever cluster, knows to wait for GPUs."""
    runner = here.runner
    runner.backlog.missed()
    runner.backlog.resync()
    runner.backlog.follow()
    snapshot = read_snapshot(runner.ledger, runner.backlog, [], runner.watched, idle_cores=0)
    return gpu_demands(runner.backlog, snapshot)


def test_it_says_how_many_frames_wait_for_which_hosts(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        facility, alloc = farm.facility(), farm.default_alloc().id
        same = LayerSpec(frames=3, cores=4, memory_gb=8, gpus=1, tags="b | a")
        farm.job([same, same, LayerSpec(frames=50)], name="one")
        farm.job([LayerSpec(frames=2, gpu_memory_gb=4)], name="other")

    found = {demand.search.tags: demand for demand in demands(here)}

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
        "UPDATE show SET b_booking_enabled = false",
        "UPDATE show SET b_paused = true",
    ],
)
def test_demand_that_cannot_run_is_no_demand(here: Passes, engine: Engine, change: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 5)
        host = farm.host(cores=8, gpus=4, gpu_memory_gb=8)
        job = farm.job([LayerSpec(frames=3, cores=4, gpus=1, limits=[limit])], name="job")
        farm.run(job.layers[0].frames[:1], host, cores=4, gpus=1)
    assert [demand.frames for demand in demands(here)] == [2]

    with engine.begin() as connection:
        connection.execute(text(change))

    assert demands(here) == []


def test_frames_under_a_limit_of_machines_are_demand_for_those_that_can_take_a_seat(
    here: Passes, engine: Engine
) -> None:
    # given a limit of which a machine without GPUs holds one, and frames under it that wait for GPUs
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 2)
        set_type(connection, limit, "HOST")
        job = farm.job([LayerSpec(frames=2, limits=[limit]), LayerSpec(frames=2, gpus=1, limits=[limit])])
        with_gpus = [farm.host(name=name, gpus=1, gpu_memory_gb=8) for name in ("gpu1", "gpu2")]
        farm.run(job.layers[0].frames[:1], farm.host(name="holder"))

    def kept() -> list[str]:
        load_caps(engine, here.runner.ledger, [keys.limit(limit)])
        found = demands(here)
        with engine.connect() as connection:
            return sorted(host.name for host in hosts_of(connection) if kept_for_gpus(found, host).cores)

    assert kept() == ["gpu1", "gpu2"]
    # when no other machine may hold it, then nothing is kept for them
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_max_value = 1"))
    assert kept() == []
    # and when one with GPUs is the last that may, there alone.
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_max_value = 2"))
        Farm(connection).run(job.layers[0].frames[1:], with_gpus[0])
    assert kept() == ["gpu1"]


def test_a_quarantined_job_waits_for_no_gpus(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3, gpus=1)])
        quarantine_jobs(connection, {job.id: "a row that fails"}, 300)

    assert demands(here) == []


@pytest.mark.parametrize(("left", "opens"), [(3, False), (4, True)])
def test_a_subscription_with_too_little_left_opens_no_allocation(
    here: Passes, engine: Engine, left: int, opens: bool
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        alloc = farm.default_alloc()
        host = farm.host(cores=32)
        busy = farm.job([LayerSpec(frames=1, cores=12)])
        farm.run(busy.frames, host, cores=12)
        farm.job([LayerSpec(frames=3, cores=4, gpus=1)])
        connection.execute(text("UPDATE subscription SET int_burst = :burst"), {"burst": 100 * (12 + left)})

    assert [demand.alloc_ids for demand in demands(here)] == ([{alloc.id}] if opens else [])
