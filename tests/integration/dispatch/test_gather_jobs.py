"""Which jobs a pass sees, and in which order."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.gather import gather
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.pending import SkippedLayers, fetch_pending_jobs
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import (
    by_alloc,
    cluster_of,
    counted_statements,
    gathered,
    job_ids,
    with_start_times,
)


def test_jobs_come_by_priority_then_the_oldest_first(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        low, middle, newer, older = farm.jobs([JobSpec([LayerSpec()], priority=p) for p in (1, 50, 100, 100)])
        connection.execute(
            text("UPDATE job SET ts_started = ts_started - interval '1 hour' WHERE pk_job = :job"), {"job": older.id}
        )

        found = job_ids(gathered(connection, cluster_of(farm), settings))

    assert found == [older.id, newer.id, middle.id, low.id]


def test_jobs_of_the_same_age_always_come_in_the_same_order(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        jobs = farm.jobs([JobSpec([LayerSpec()]) for _ in range(5)])

        found = job_ids(gathered(connection, cluster_of(farm), settings))

    assert found == sorted(job.id for job in jobs)


def test_a_pass_sees_no_more_jobs_than_its_limit(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.jobs([JobSpec([LayerSpec()]) for _ in range(5)])

        found = gathered(connection, cluster_of(farm), settings, max_jobs_per_cluster_pass=3)

    assert len(found.snapshot.work[0].jobs) == 3


@pytest.mark.parametrize("cap", [-1, 0])
def test_upstream_bug_vs_waiting_hides_jobs_with_unlimited_caps(engine: Engine, settings: Settings, cap: int) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job(max_cores=cap, max_gpus=cap)
        hidden = connection.scalar(text("SELECT count(*) FROM vs_waiting")) == 0

        found = gathered(connection, cluster_of(farm), settings)

    assert hidden
    assert job_ids(found) == [job.id]
    assert found.snapshot.caps[job.id].cores.cap is None
    assert found.snapshot.caps[job.id].gpus.cap is None


def test_upstream_bug_stale_job_resource_usage_counts_live_procs_instead(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        job = farm.job([LayerSpec(frames=8)], max_cores=4)
        farm.run(job.frames[:2], host, cores=1)
        connection.execute(text("ALTER TABLE job_resource DISABLE TRIGGER USER"))
        connection.execute(text("UPDATE job_resource SET int_cores = int_max_cores"))

        found = gathered(connection, cluster_of(farm), settings)

    assert job_ids(found) == [job.id]
    assert found.snapshot.caps[job.id].cores.booked == 2
    assert found.snapshot.caps[job.id].cores.left == 2


@pytest.mark.parametrize(
    ("caps", "layer"),
    [
        ({"max_cores": 2}, LayerSpec(frames=5)),
        ({"max_cores": 3}, LayerSpec(frames=5, cores=2)),
        ({"max_cores": 0.5}, LayerSpec(frames=5)),
        ({"max_gpus": 2}, LayerSpec(frames=5, gpus=1)),
    ],
    ids=["full", "too little left", "cap below one core", "gpus"],
)
def test_a_job_at_its_cap_gives_its_place_to_the_next(
    engine: Engine, settings: Settings, caps: dict[str, float], layer: LayerSpec
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16, gpus=8)
        full = farm.job([layer], priority=200, **caps)
        farm.run(full.frames[:2], host, cores=1, gpus=layer.gpus)
        below = farm.job(priority=1)

        found = gathered(connection, cluster_of(farm), settings, max_jobs_per_cluster_pass=1)

    assert job_ids(found) == [below.id]


def test_a_job_at_its_gpu_cap_still_offers_its_layers_without_gpus(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16, gpus=8)
        job = farm.job([LayerSpec(frames=3, gpus=1), LayerSpec(frames=3)], max_gpus=1)
        farm.run(job.layers[0].frames[:1], host, gpus=1)

        found = gathered(connection, cluster_of(farm), settings)

    assert job_ids(found) == [job.id]
    assert found.snapshot.caps[job.id].gpus.left == 0


def test_a_folder_at_its_cap_gives_its_place_to_the_next(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        show = farm.default_show()
        folder = farm.folder(show, "small", max_cores=2)
        runs, waits = farm.jobs([JobSpec([LayerSpec(frames=4)], folder_id=folder, priority=p) for p in (300, 200)])
        farm.run(runs.frames[:2], host, cores=1)
        elsewhere = farm.job(priority=1)

        found = gathered(connection, cluster_of(farm), settings, max_jobs_per_cluster_pass=1)
        room_again = connection.execute(
            text("UPDATE folder_resource SET int_max_cores = 300 WHERE pk_folder = :folder"), {"folder": folder}
        )
        then = gathered(connection, cluster_of(farm), settings)

    assert job_ids(found) == [elsewhere.id]
    assert room_again.rowcount == 1
    assert job_ids(then) == [runs.id, waits.id, elsewhere.id]
    assert then.snapshot.caps[folder].cores.booked == 2
    assert then.snapshot.caps[folder].cores.left == 1


def test_upstream_bug_folder_sums_skip_finished_jobs_whose_procs_still_run(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        folder = farm.folder(farm.default_show(), "small", max_cores=3)
        finished, waiting = farm.jobs([JobSpec([LayerSpec(frames=3)], folder_id=folder) for _ in range(2)])
        farm.run(finished.frames[:2], host)
        connection.execute(text("UPDATE job SET str_state = 'FINISHED' WHERE pk_job = :job"), {"job": finished.id})

        found = gathered(connection, cluster_of(farm), settings)

    assert job_ids(found) == [waiting.id]
    assert found.snapshot.caps[folder].cores.booked == 2


def test_procs_of_a_fraction_of_a_core_count_as_a_core_each(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        job = farm.job([LayerSpec(frames=8)], max_cores=4)
        farm.run(job.frames[:3], host, cores=0.5)

        found = gathered(connection, cluster_of(farm), settings)

    assert found.snapshot.caps[job.id].cores.booked == 3
    assert by_alloc(found)[farm.default_alloc().id].cores.booked == 3


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET b_paused = true",
        "UPDATE job SET b_auto_book = false",
        "UPDATE job SET str_state = 'FINISHED'",
        "UPDATE job SET str_state = 'STARTUP'",
        "UPDATE show SET b_active = false",
        "UPDATE show SET b_scheduler_managed = false",
        "UPDATE show SET b_booking_enabled = false",
        "UPDATE show SET b_dispatch_enabled = false",
        "UPDATE show SET b_paused = true",
        "UPDATE subscription SET int_burst = 0",
        "UPDATE layer_stat SET int_waiting_count = 0",
        "UPDATE layer SET str_tags = 'elsewhere'",
        "UPDATE layer SET str_tags = ''",
        "UPDATE frame SET str_state = 'DEPEND'",
    ],
)
def test_what_may_not_run_is_not_gathered(engine: Engine, settings: Settings, statement: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job()
        assert job_ids(gathered(connection, cluster_of(farm), settings)) == [job.id]

        connection.execute(text(statement))

        assert job_ids(gathered(connection, cluster_of(farm), settings)) == []


def test_another_facility_is_another_cluster(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job(facility_id=farm.facility("Local"))
        here = farm.job()

        found = job_ids(gathered(connection, cluster_of(farm), settings))

    assert found == [here.id]


def test_a_layer_waits_for_its_start_time(engine: Engine, settings: Settings) -> None:
    now = datetime.now(UTC)
    with engine.begin() as connection:
        if not check_schema(connection).has_start_after:
            connection.execute(text("ALTER TABLE layer ADD COLUMN ts_start_after timestamptz"))
        farm = Farm(connection)
        later, earlier = (
            LayerSpec(start_after=now + timedelta(hours=1)),
            LayerSpec(start_after=now - timedelta(hours=1)),
        )
        farm.job([later], priority=200)
        job = farm.job([later, earlier])

        found = gathered(connection, cluster_of(farm), settings)

    assert job_ids(found) == [job.id]
    assert [layer.id for layer in found.snapshot.work[0].jobs[0].layers] == [job.layers[1].id]


def test_a_cluster_knows_when_the_next_layer_with_its_tags_may_start(engine: Engine, settings: Settings) -> None:
    with_start_times(engine)

    def delayed(farm: Farm, seconds: int, tags: str, **job: Any) -> None:
        farm.job([LayerSpec(tags=tags, name=f"in{seconds}")], name=f"job{seconds}", **job)
        start = text("UPDATE layer SET ts_start_after = now() + make_interval(secs => :secs) WHERE str_name = :name")
        farm.connection.execute(start, {"secs": seconds, "name": f"in{seconds}"})

    with engine.begin() as connection:
        farm = Farm(connection)
        for seconds in (3000, 2000):
            delayed(farm, seconds, "general")
        delayed(farm, 1000, "special")
        delayed(farm, 100, "general", paused=True)
        delayed(farm, -100, "general")
        delayed(farm, 50, "general", show=farm.show("another"))
        general, special, other = (
            gathered(connection, cluster_of(farm, *tags), settings).cluster.starts_in
            for tags in (("general",), ("other", "special"), ("other",))
        )

    assert general == pytest.approx(2000, abs=60)
    assert special == pytest.approx(1000, abs=60)
    assert other is None


def test_a_frame_waits_for_the_delay_that_the_cuebot_may_be_about_to_write(engine: Engine, settings: Settings) -> None:
    # given frames that ended a moment ago, the first of each layer with a status of which a Cuebot delays layers
    with engine.begin() as connection:
        farm = Farm(connection)
        urgent = farm.job([LayerSpec(frames=1)], priority=200)
        job = farm.job([LayerSpec(frames=2), LayerSpec(frames=1)])
        held, others = (urgent.frames[0], job.frames[0]), (job.frames[1], job.frames[2])
        ended = text("UPDATE frame SET int_exit_status = :status, ts_updated = :at WHERE pk_frame = ANY(:frames)")
        now = connection.scalar(text("SELECT now()"))
        moment = now - timedelta(seconds=0.5)
        connection.execute(ended, {"status": 200, "at": moment, "frames": list(held)})
        connection.execute(ended, {"status": 1, "at": moment, "frames": list(others)})

        def frames(**queue: Any) -> list[str]:
            (work,) = gathered(connection, cluster_of(farm), settings, **queue).snapshot.work
            return [frame.id for job in work.jobs for layer in job.layers for frame in layer.frames]

        # when a pass reads what waits, where the status is one of those and where it is none
        rules = {"uncounted_exit_statuses": (200, 330)}
        of_one_job = gathered(connection, cluster_of(farm), settings, max_jobs_per_cluster_pass=1, **rules)
        now_planned, without_rules = frames(**rules), frames()
        connection.execute(ended, {"status": 200, "at": now - timedelta(seconds=2.5), "frames": list(held)})
        later = frames(**rules)

    # then those frames alone are left out, take no job's place, and come back after two seconds
    assert now_planned == list(others)
    assert job_ids(of_one_job) == [job.id]
    assert set(without_rules) == set(later) == {*held, *others}


@pytest.mark.parametrize("spelling", ["general", "general|other", "other | general", " general |other", "gen eral"])
def test_tags_match_in_every_spelling(engine: Engine, settings: Settings, spelling: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(tags=spelling)])

        found = gathered(connection, cluster_of(farm), settings)

    assert job_ids(found) == [job.id]
    assert "general" in found.snapshot.work[0].jobs[0].layers[0].tags


def test_a_quarantined_job_is_left_alone_until_its_time_is_over(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        bad, good = farm.jobs([JobSpec([LayerSpec()]) for _ in range(2)])
        quarantine_jobs(connection, {bad.id: "a row that fails"}, 300)

        found = job_ids(gathered(connection, cluster_of(farm), settings))
        connection.execute(text("UPDATE opencue_sched_quarantine SET until = now() - interval '1 second'"))
        later = job_ids(gathered(connection, cluster_of(farm), settings))

    assert found == [good.id]
    assert set(later) == {bad.id, good.id}


def test_jobs_whose_layers_rest_give_their_place_to_the_next(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        resting = farm.job(priority=200)
        half = farm.job([LayerSpec(), LayerSpec()], priority=150)
        farm.job(priority=1)
        versions = "SELECT pk_layer, CAST(xmin AS text) FROM layer WHERE pk_layer = ANY(:layers)"
        layers = [resting.layers[0].id, half.layers[0].id]
        skip = {row.pk_layer: row.xmin for row in connection.execute(text(versions), {"layers": layers})}

        found = gathered(
            connection, cluster_of(farm), settings, skipped=SkippedLayers(skip), max_jobs_per_cluster_pass=1
        )

    assert job_ids(found) == [half.id]
    assert [layer.id for layer in found.snapshot.work[0].jobs[0].layers] == [half.layers[1].id]


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("layer", "int_cores_min = 300"),
        ("layer", "int_cores_max = 800"),
        ("layer", "int_mem_min = 9000000"),
        ("layer", "int_gpus_min = 1"),
        ("layer", "int_gpu_mem_min = 1048576"),
        ("layer", "b_threadable = NOT b_threadable"),
        ("layer", "str_tags = 'general|fast'"),
        ("job", "str_os = 'rhel9'"),
        ("job", "str_os = NULL"),
    ],
)
def test_a_kind_that_rests_is_left_out_with_all_its_jobs_and_no_other(
    engine: Engine, settings: Settings, table: str, change: str
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        ahead = farm.jobs([JobSpec([LayerSpec()], priority=200) for _ in range(5)])
        other = farm.job(priority=1)
        connection.execute(text("UPDATE job SET str_os = 'rocky9'"))
        connection.execute(text(f"UPDATE {table} SET {change} WHERE pk_job = :job"), {"job": other.id})  # noqa: S608
        first = gathered(connection, cluster_of(farm), settings, max_jobs_per_cluster_pass=1).snapshot.work[0].jobs[0]
        kinds = SkippedLayers(kinds=[first.layers[0].kind])

        found = gathered(connection, cluster_of(farm), settings, skipped=kinds)

    assert first.id in {job.id for job in ahead}
    assert job_ids(found) == [other.id]


def test_the_spelling_of_tags_and_what_places_no_frame_make_no_other_kind(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(tags="general | fast"), LayerSpec(tags="general|fast", name="b", command="other")])
        (job,) = gathered(connection, cluster_of(farm), settings).snapshot.work[0].jobs
    assert len({layer.kind for layer in job.layers}) == 1


def test_in_a_drawn_epoch_jobs_come_first_as_often_as_their_priority_says(engine: Engine, settings: Settings) -> None:
    draws = 300
    with engine.begin() as connection:
        farm = Farm(connection)
        low, high = farm.jobs([JobSpec([LayerSpec()], priority=p) for p in (1, 3)])
        cluster, facts = cluster_of(farm), check_schema(connection)

        def first(seed: str) -> str:
            rows, _ = fetch_pending_jobs(
                connection,
                [cluster],
                facts,
                draws=[seed],
                headroom={(cluster.show_id, farm.default_alloc().id): 99},
                full_limits=(),
                skipped=[SkippedLayers()],
                max_jobs=1,
            )
            return str(rows[0].pk_job)

        won = Counter(first(f"seed {number}|") for number in range(draws))
        by_rank = first("")

    assert by_rank == high.id
    assert won.keys() == {low.id, high.id}
    # a quarter of the draws is due; five standard deviations are 12 % of them
    assert 0.13 < won[low.id] / draws < 0.37


def test_several_clusters_are_gathered_in_as_many_statements_as_one(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        shows = [farm.default_show(), farm.show(), farm.show()]
        for show in shows[1:]:
            farm.subscription(show, farm.default_alloc(), size=50)
        jobs = [farm.job([LayerSpec()], show=show) for show in shows]
        clusters, facts = [cluster_of(farm, show_id=show.id) for show in shows], check_schema(connection)

        with counted_statements(engine) as statements:
            snapshot, found = gather(
                connection, clusters, settings, facts=facts, in_use=lambda pairs: dict.fromkeys(pairs, 7)
            )

    assert len(statements) == 4
    assert [[job.id for job in it.jobs] for it in found] == [[job.id] for job in jobs]
    assert {show_id for show_id, _ in snapshot.sizes} == {show.id for show in shows}
    assert {caps.cores.booked for caps in snapshot.subscriptions.values()} == {7}
