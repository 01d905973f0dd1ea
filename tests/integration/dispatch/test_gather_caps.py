"""The room under subscriptions and limits, from live procs."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.pending import SkippedLayers
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import by_alloc, cluster_of, counted_statements, gather_one, gathered, job_ids


def test_upstream_bug_stale_subscription_columns_count_live_procs_instead(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.default_show(), farm.default_alloc()
        host = farm.host(cores=16)
        job = farm.job([LayerSpec(frames=8)])
        farm.run(job.frames[:3], host, cores=2, gpus=0)
        connection.execute(text("UPDATE subscription SET int_burst = 1000, int_cores = 1000"))

        caps = by_alloc(gathered(connection, cluster_of(farm), settings))

    assert caps.keys() == {alloc.id}
    assert (caps[alloc.id].cores.cap, caps[alloc.id].cores.booked, caps[alloc.id].cores.left) == (10, 6, 4)
    assert caps[alloc.id].gpus.cap is None
    assert show.id


def test_a_subscription_counts_by_the_allocation_of_the_host_and_not_local_procs(
    engine: Engine, settings: Settings
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, here, there = farm.default_show(), farm.default_alloc(), farm.alloc("desktop")
        farm.subscription(show, there, size=50)
        job = farm.job([LayerSpec(frames=9)])
        farm.run(job.frames[:2], farm.host(alloc=here))
        farm.run(job.frames[2:5], farm.host(alloc=there))
        local = farm.run(job.frames[5:7], farm.host(alloc=there))
        connection.execute(text("UPDATE proc SET b_local = true WHERE pk_proc = ANY(:procs)"), {"procs": local})

        caps = by_alloc(gathered(connection, cluster_of(farm), settings))

    assert {alloc: each.cores.booked for alloc, each in caps.items()} == {here.id: 2, there.id: 3}


def test_a_burst_of_zero_or_less_than_a_core_leaves_no_room_for_a_core(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, none, half = farm.default_show(), farm.alloc("none"), farm.alloc("half")
        farm.subscription(show, none, size=0)
        farm.subscription(show, half, size=10, burst=0.5)
        farm.job()

        caps = by_alloc(gathered(connection, cluster_of(farm), settings))

    assert caps[none.id].cores.left == 0
    assert caps[half.id].cores.left < 1


def test_jobs_that_reach_only_full_allocations_give_their_places_to_others(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, full, free = farm.default_show(), farm.alloc("full"), farm.alloc("free")
        farm.subscription(show, full, size=1)
        farm.subscription(show, free, size=100)
        busy = farm.host(alloc=full, tags=["m1"])
        farm.host(alloc=free, tags=["m2"])
        first = farm.job([LayerSpec(frames=5, tags="m1")], priority=200)
        farm.run(first.frames[:1], busy)
        second = farm.job([LayerSpec(tags="m2")], priority=1)

        found = gathered(connection, cluster_of(farm, "m1", "m2"), settings, max_jobs_per_cluster_pass=1)

    assert job_ids(found) == [second.id]
    assert not found.held_back


def test_a_job_too_wide_for_what_is_left_of_the_burst_gives_its_place_to_a_narrow_one(
    engine: Engine, settings: Settings
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show("small"), farm.default_alloc()
        farm.subscription(show, alloc, size=6)
        host = farm.host(cores=64)
        wide, narrow = farm.jobs(
            [JobSpec([LayerSpec(frames=4, cores=cores)], show=show, priority=10 * cores) for cores in (4, 2)]
        )
        farm.run(wide.frames[:1], host, cores=4)
        cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",), alloc.id)

        found = gathered(connection, cluster, settings, max_jobs_per_cluster_pass=1)

    assert job_ids(found) == [narrow.id]
    assert by_alloc(found)[alloc.id].cores.left == 2


@pytest.mark.parametrize("reason", ["burst", "job", "folder", "limit"])
def test_work_that_is_held_back_is_saturation_and_shown_to_the_planner(
    engine: Engine, settings: Settings, reason: str
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show("small"), farm.default_alloc()
        farm.subscription(show, alloc, size=1 if reason == "burst" else 100)
        folder = farm.folder(show, "shots", max_cores=1 if reason == "folder" else -1)
        limits = [farm.limit("nuke", 1)] if reason == "limit" else []
        layers = [LayerSpec(frames=2, limits=limits)]
        job = farm.job(layers, show=show, folder_id=folder, max_cores=1 if reason == "job" else -1)
        farm.run(job.frames[:1], farm.host())
        cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",), alloc.id)

        found = gathered(connection, cluster, settings)

    assert found.held_back
    assert job_ids(found) == [job.id]
    assert by_alloc(found)[alloc.id].cores.left == (0 if reason == "burst" else 99)


def test_a_limit_of_a_newer_cuebot_bounds_frames_whatever_is_said_of_it(engine: Engine, settings: Settings) -> None:
    """V49 knows limits of hosts, and limits that are advice: held as frames they are never overrun."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE limit_record ADD COLUMN str_type varchar(16) DEFAULT 'HOST'"))
        connection.execute(text("ALTER TABLE limit_record ADD COLUMN str_enforcement varchar(16) DEFAULT 'ADVISORY'"))
        farm = Farm(connection)
        limit = farm.limit("nuke", 1)
        job = farm.job([LayerSpec(frames=2, limits=[limit])])
        farm.run(job.frames[:1], farm.host())

        found = gathered(connection, cluster_of(farm), settings)

    assert found.held_back
    assert found.snapshot.limits[limit].left == 0


def test_layers_that_all_rest_are_held_back_too(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job()

        versions = gathered(connection, cluster_of(farm), settings).versions
        found = gathered(connection, cluster_of(farm), settings, skipped=SkippedLayers(versions))

    assert found.held_back
    assert job_ids(found) == []


def test_a_cluster_without_waiting_work_is_empty(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job(paused=True)

        found = gathered(connection, cluster_of(farm), settings)

    assert not found.held_back
    assert job_ids(found) == []


def test_upstream_bug_any_limit_with_room_let_a_layer_through(engine: Engine, settings: Settings) -> None:
    """All limits of a layer must have room: a job that stands under a full one gives its place away."""
    with engine.begin() as connection:
        farm = Farm(connection)
        full, roomy = farm.limit("full", 1), farm.limit("roomy", 100)
        holder = farm.job([LayerSpec(frames=2, limits=[full])], priority=300)
        farm.run(holder.frames[:1], farm.host())
        blocked = farm.job([LayerSpec(limits=[full, roomy])], priority=200)
        mixed = farm.job([LayerSpec(limits=[full, roomy]), LayerSpec(limits=[roomy])], priority=100)

        found = gathered(connection, cluster_of(farm), settings)

    assert blocked.id not in job_ids(found)
    assert job_ids(found) == [mixed.id]
    first, second = found.snapshot.work[0].jobs[0].layers
    assert set(first.limit_ids) == {full, roomy}
    assert second.limit_ids == (roomy,)
    assert found.snapshot.limits[full].left == 0
    assert found.snapshot.limits[roomy].left == 100
    assert found.snapshot.limits[full].name == "full"


def test_a_limit_counts_the_running_frames_of_every_show(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit, unused = farm.limit("nuke", 10), farm.limit("unused", 5)
        cuebots = farm.show("cuebots", managed=False)
        host = farm.host(cores=32)
        theirs = farm.job([LayerSpec(frames=4, limits=[limit])], show=cuebots)
        ours = farm.job([LayerSpec(frames=4, limits=[limit, limit]), LayerSpec(frames=4, limits=[limit])])
        other = farm.job([LayerSpec(frames=4)])
        farm.run([*theirs.frames[:3], *ours.layers[0].frames[:2], *ours.layers[1].frames[:1], *other.frames], host)

        limits = gathered(connection, cluster_of(farm), settings).snapshot.limits

    assert limits.keys() == {limit}
    assert (limits[limit].cap, limits[limit].booked) == (10, 6)
    assert unused not in limits


def test_a_limit_without_a_value_admits_nothing(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(limits=[farm.limit("new", 1)])])
        connection.execute(text("UPDATE limit_record SET int_max_value = NULL"))

        found = gathered(connection, cluster_of(farm), settings)

    assert found.held_back
    assert found.snapshot.limits[found.snapshot.work[0].jobs[0].layers[0].limit_ids[0]].left == 0


def test_a_folder_without_caps_is_not_listed(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        capped = farm.folder(show, "capped", max_gpus=4)
        farm.jobs([JobSpec([LayerSpec()]), JobSpec([LayerSpec()], folder_id=capped)])

        snapshot = gathered(connection, cluster_of(farm), settings).snapshot

    assert snapshot.caps.keys() - {job.id for job in snapshot.work[0].jobs} == {capped}
    assert snapshot.caps[capped].cores.cap is None
    assert snapshot.caps[capped].gpus.left == 4


def test_work_held_back_costs_one_more_statement_and_never_two(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("full")
        for number in range(6):
            alloc = farm.alloc(f"full{number}")
            farm.subscription(show, alloc, size=0, burst=0.5)
            farm.host(alloc=alloc, tags=["m1", "m2"])
        farm.jobs([JobSpec([LayerSpec(tags="m1")], show=show) for _ in range(30)])
        cluster, facts = cluster_of(farm, "m1", "m2", show_id=show.id), check_schema(connection)

        with counted_statements(engine) as statements:
            found = gather_one(connection, cluster, settings, facts)

    assert found.held_back
    assert len(statements) == 5
