"""A layer that could not be placed is placed by the very next pass after whatever lets it be placed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Rqd, Settings
from tests.kit.passes import Passes, passes


@pytest.fixture
def here(engine: Engine, settings: Settings) -> Iterator[Passes]:
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as runner:
        yield runner


def execute(engine: Engine, sql: str, **parameters: object) -> None:
    with engine.begin() as connection:
        assert connection.execute(text(sql), parameters).rowcount > 0


def run(here: Passes, cluster: Cluster) -> PassReport:
    return here.run([cluster])[0]


def verdicts(report: PassReport) -> list[Verdict]:
    return [it.verdict for it in report.verdicts]


def test_a_burst_that_is_raised_serves_layers_that_wait_for_other_allocations(here: Passes, engine: Engine) -> None:
    # given idle hosts of an allocation whose burst is used up, and busy ones of another, with one tag
    with engine.begin() as connection:
        farm = Farm(connection)
        show, full, busy = farm.show(), farm.alloc("full"), farm.alloc("busy")
        subscription = farm.subscription(show, full, size=0, burst=0)
        farm.subscription(show, busy, size=100)
        farm.host(alloc=full, tags=["fast"])
        farm.host(alloc=busy, tags=["fast"], idle_cores=0)
        farm.job([LayerSpec(frames=2, tags="fast")], show=show)
        cluster = Cluster(farm.facility(), show.id, ClusterKind.MANUAL, ("fast",))
    assert verdicts(run(here, cluster)) == [Verdict.CAPACITY]

    # when somebody raises the burst
    execute(engine, "UPDATE subscription SET int_burst = 500 WHERE pk_subscription = :id", id=subscription)

    # then the next pass books there
    assert run(here, cluster).frames_booked == 2


def test_cores_that_come_free_under_a_burst_serve_layers_on_any_host_of_the_allocation(
    here: Passes, engine: Engine
) -> None:
    """The host on which they come free is too small, another has been idle all the time."""
    with engine.begin() as connection:
        farm = Farm(connection)
        show, tight, busy = farm.show(), farm.alloc("tight"), farm.alloc("busy")
        farm.subscription(show, tight, size=4)
        farm.subscription(show, busy, size=100)
        small = farm.host(alloc=tight, tags=["fast"], cores=4, memory_gb=4)
        farm.host(alloc=tight, tags=["fast"], cores=4, memory_gb=64)
        farm.host(alloc=busy, tags=["fast"], memory_gb=64, idle_cores=0)
        running = farm.job([LayerSpec(frames=1, cores=4)], show=show)
        (proc,) = farm.run(running.frames, small, memory_gb=1)
        waiting = farm.job([LayerSpec(frames=1, cores=4, memory_gb=32, tags="fast")], show=show)
        cluster = Cluster(farm.facility(), show.id, ClusterKind.MANUAL, ("fast",))
    assert verdicts(run(here, cluster)) == [Verdict.CAPACITY]

    execute(engine, "DELETE FROM proc WHERE pk_proc = :id", id=proc)
    execute(engine, "UPDATE host SET int_cores_idle = int_cores WHERE pk_host = :id", id=small.id)
    here.runner.hosts.note([small.id])

    assert run(here, cluster).frames_booked == 1
    with engine.connect() as connection:
        assert connection.execute(text("SELECT pk_job FROM proc")).scalars().all() == [waiting.id]


@pytest.mark.parametrize(
    "change",
    ["int_cores_min = 100", "int_cores_max = 800", "int_mem_min = 1048576", "str_tags = 'fast | general'"],
)
def test_a_layer_that_its_owner_changes_is_looked_at_again(here: Passes, engine: Engine, change: str) -> None:
    wants = {"cores_min": {"cores": 64}, "cores_max": {"cores": 64}, "mem_min": {"memory_gb": 500}}
    layer = next((asked for name, asked in wants.items() if name in change), {})
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(tags=["fast"], idle_cores=0, alloc_tag=False, hostname_tag=False)
        farm.host(hostname_tag=False)
        tags = "fast" if "tags" in change else "general"
        job = farm.job([LayerSpec(frames=2, tags=tags, **layer)])
        alloc = farm.default_alloc()
        cluster = Cluster(farm.facility(), job.show.id, ClusterKind.MANUAL, ("fast", "general"), alloc.id)
    assert run(here, cluster).frames_booked == 0

    execute(engine, f"UPDATE layer SET {change} WHERE pk_job = :job", job=job.id)  # noqa: S608

    assert run(here, cluster).frames_booked > 0


def test_a_host_that_was_read_for_one_tag_serves_layers_for_its_others(here: Passes, engine: Engine) -> None:
    # given a layer that waits for a busy host
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(tags=["one", "other"], idle_cores=0)
        job = farm.job([LayerSpec(frames=2, tags="other")])
        one, other = (Cluster(farm.facility(), job.show.id, ClusterKind.MANUAL, (tag,)) for tag in ("one", "other"))
    assert verdicts(run(here, other)) == [Verdict.CAPACITY]

    # when it is idle and nobody says so, but it is read with the hosts of another of its tags
    execute(engine, "UPDATE host SET int_cores_idle = int_cores WHERE pk_host = :id", id=host.id)
    run(here, one)

    # then the layer does not sleep past it
    assert run(here, other).frames_booked == 2
