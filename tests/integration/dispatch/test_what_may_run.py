"""Which of the work that waits a pass books: what its rows, its times and its cluster say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import structlog
from sqlalchemy import Connection, Engine, text

from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.pending import fetch_waiting_work
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import cluster_of, with_start_times
from tests.kit.passes import Passes, passes
from tests.kit.polling import eventually
from tests.kit.wording import lacks


@pytest.fixture
def here(engine: Engine, settings: Settings, request: pytest.FixtureRequest) -> Iterator[Passes]:
    changes = {
        "rqd": Rqd(dry_run_mode=True),
        "queue": settings.queue.model_copy(update=getattr(request, "param", {})),
    }
    with passes(engine, settings.model_copy(update=changes)) as runner:
        yield runner


def running_layers(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(text("SELECT pk_layer FROM proc")).scalars())


def running_frames(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(text("SELECT pk_frame FROM proc")).scalars())


# Rows


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
def test_what_may_not_run_is_not_booked(here: Passes, engine: Engine, statement: str) -> None:
    # given a cluster that books
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        farm.job([LayerSpec(frames=1)], priority=200)
        cluster = cluster_of(farm)
    assert here.run([cluster])[0].frames_booked == 1

    # when more comes that may not run
    with engine.begin() as connection:
        Farm(connection).job([LayerSpec(frames=2)], name="later")
        connection.execute(text(statement))

    # then nothing of that is booked
    (report,) = here.run([cluster])
    assert (report.frames_booked, report.go_on) == (0, False)


def test_a_cluster_books_what_waits_in_its_own_facility(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        farm.job([LayerSpec()], facility_id=farm.facility("Local"))
        job = farm.job([LayerSpec()])
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_layers(engine) == {job.layers[0].id}


@pytest.mark.parametrize("spelling", ["general", "general|other", "other | general", " general |other", "gen eral"])
def test_tags_match_in_every_spelling(here: Passes, engine: Engine, spelling: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(tags=spelling)])
        cluster = cluster_of(farm)

    assert here.run([cluster])[0].frames_booked == 1


@pytest.mark.parametrize(
    "here",
    [{"priority_draw": 0, "layer_host_share": False, "dispatch_frames_per_layer_limit": 1_000}],
    indirect=True,
    ids=["by rank"],
)
def test_the_first_layer_has_the_hosts_also_when_all_that_was_read_of_it_is_planned(
    here: Passes, engine: Engine
) -> None:
    # given more idle cores than a read of frames brings, and a layer that has frames for all of them
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=240, memory_gb=2_000, hostname_tag=False)
        first = farm.job([LayerSpec(frames=300)], priority=100)
        farm.job([LayerSpec(frames=300)], priority=50)
        cluster = cluster_of(farm)

    # when a pass fills them
    (report,) = here.run([cluster])

    # then no frame of another is on them
    assert report.frames_booked == 240
    assert running_layers(engine) == {first.layers[0].id}


@pytest.mark.parametrize("here", [{"max_jobs_per_cluster_pass": 3}], indirect=True)
def test_a_plan_takes_frames_of_so_many_jobs_and_the_next_one_follows_at_once(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=16)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=2)], priority=100 - number) for number in range(5)])
        cluster = cluster_of(farm)

    (report,) = here.run([cluster])
    assert (report.go_on, running_layers(engine)) == (True, {job.layers[0].id for job in jobs[:3]})

    here.run([cluster])
    assert running_layers(engine) == {job.layers[0].id for job in jobs}


def test_a_layer_whose_row_makes_no_sense_is_named_once_and_costs_no_other_of_its_job(
    here: Passes, engine: Engine
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        odd, good = farm.job([LayerSpec(frames=3), LayerSpec()]).layers
        connection.execute(text("UPDATE layer SET int_mem_min = :m WHERE pk_layer = :l"), {"m": 2**55, "l": odd.id})
        cluster = cluster_of(farm)

    with structlog.testing.capture_logs() as logs:
        reports = [here.run([cluster])[0] for _ in range(3)]

    assert running_layers(engine) == {good.id}
    for report in reports:
        (failed,) = [verdict for verdict in report.verdicts if verdict.verdict is Verdict.FAILED]
        assert (failed.layer_id, failed.waiting) == (odd.id, 3)
        assert not lacks(failed.detail, "int_mem_min", str(2**55))
    assert [entry["id"] for entry in logs if entry["event"] == "layer_skipped"] == [odd.id]


@pytest.mark.parametrize("column", ["int_cores_min", "int_mem_min", "int_gpus_min", "int_gpu_mem_min"])
@pytest.mark.parametrize("value", [2**63 - 1, 2**55])
def test_a_layer_that_asks_for_more_than_there_can_be_keeps_no_other_waiting_and_is_counted(
    here: Passes, engine: Engine, column: str, value: int
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        odd, good = farm.job(), farm.job([LayerSpec()])
        connection.execute(
            text(f"UPDATE layer SET {column} = :value WHERE pk_layer = :layer"),  # noqa: S608 - our own constants
            {"value": value, "layer": odd.layers[0].id},
        )
        work = fetch_waiting_work(connection, None, check_schema(connection), settle_window_seconds=120)
        waiting = sum(row.frames for row in work)
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_layers(engine) == {good.layers[0].id}
    assert waiting == len(odd.frames) + 1


# Times


def test_a_layer_waits_for_its_start_time(here: Passes, engine: Engine) -> None:
    with_start_times(engine)
    with engine.begin() as connection:
        now = connection.execute(text("SELECT now()")).scalar_one()
        farm = Farm(connection)
        farm.host(cores=8)
        later, earlier = (LayerSpec(start_after=now + timedelta(hours=hours)) for hours in (1, -1))
        farm.job([later], priority=200)
        job = farm.job([later, earlier])
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_layers(engine) == {job.layers[1].id}


def test_a_cluster_is_looked_at_again_when_the_next_layer_with_its_tags_may_start(here: Passes, engine: Engine) -> None:
    with_start_times(engine)

    def delayed(farm: Farm, seconds: int, tags: str, **job: Any) -> None:
        farm.job([LayerSpec(tags=tags, name=f"in{seconds}")], name=f"job{seconds}", **job)
        start = text("UPDATE layer SET ts_start_after = now() + make_interval(secs => :secs) WHERE str_name = :name")
        farm.connection.execute(start, {"secs": seconds, "name": f"in{seconds}"})

    with engine.begin() as connection:
        farm = Farm(connection)
        another = farm.show("another")
        farm.subscription(another, farm.default_alloc())
        for seconds in (3000, 2000):
            delayed(farm, seconds, "general")
        delayed(farm, 1000, "special")
        delayed(farm, 100, "general", paused=True)
        delayed(farm, -100, "general")
        delayed(farm, 50, "general", show=another)
        clusters = [cluster_of(farm, *tags) for tags in (("general",), ("other", "special"), ("other",))]

    general, special, other = (here.run([cluster])[0].look_again for cluster in clusters)

    assert general == pytest.approx(2000, abs=60)
    assert special == pytest.approx(1000, abs=60)
    assert other is None


def test_a_quarantined_job_is_not_booked_until_its_time_is_over(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        bad, good = farm.jobs([JobSpec([LayerSpec()]) for _ in range(2)])
        quarantine_jobs(connection, {bad.id: "a row that fails"}, 300)
        cluster = cluster_of(farm)

    here.run([cluster])
    assert running_layers(engine) == {good.layers[0].id}

    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_quarantine SET until = now() - interval '1 second'"))
    here.run([cluster])
    assert running_layers(engine) == {good.layers[0].id, bad.layers[0].id}


def test_a_cluster_is_looked_at_again_when_the_quarantine_of_its_next_job_is_over(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        jobs = farm.jobs([JobSpec([LayerSpec()]) for _ in range(2)])
        for job, seconds in zip(jobs, (2000, 1000), strict=True):
            quarantine_jobs(connection, {job.id: "a row that fails"}, seconds)
        cluster = cluster_of(farm)

    assert here.run([cluster])[0].look_again == pytest.approx(1000, abs=60)


def test_a_cluster_with_work_is_looked_at_again_when_its_show_is_ours(here: Passes, engine: Engine) -> None:
    """Not when its sleep is over, which is seconds later. One without work is not."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec()])
        clusters = [cluster_of(farm), cluster_of(farm, "other")]
    imported = ImportedShows(engine, here.runner.ledger, quarantine_seconds=1000, age_seconds=60)
    here.runner = replace(here.runner, imported=imported)

    with_work, without = (report.look_again for report in here.run(clusters))
    assert (with_work, without) == (pytest.approx(1000, abs=60), None)


def ended(connection: Connection, frames: tuple[str, ...], *, status: int) -> None:
    connection.execute(
        text(
            "UPDATE frame SET int_exit_status = :status, ts_updated = clock_timestamp() WHERE pk_frame = ANY(:frames)"
        ),
        {"status": status, "frames": list(frames)},
    )


@pytest.mark.parametrize(
    "here", [{"uncounted_exit_statuses": (200, 330), "max_jobs_per_cluster_pass": 1}], indirect=True
)
def test_a_frame_waits_for_the_delay_that_the_cuebot_may_be_about_to_write(here: Passes, engine: Engine) -> None:
    # given frames that ended a moment ago, the first of each job with a status of which a Cuebot delays layers
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        urgent = farm.job([LayerSpec(frames=1)], priority=200)
        job = farm.job([LayerSpec(frames=2), LayerSpec(frames=1)])
        held, others = (urgent.frames[0], job.frames[0]), (job.frames[1], job.frames[2])
        ended(connection, others, status=1)
        cluster = cluster_of(farm)
    with engine.begin() as connection:
        ended(connection, held, status=200)

    # when a pass comes, then those frames alone wait, take no job's place, and are back after two seconds
    here.run([cluster])
    assert running_frames(engine) == set(others)
    eventually(lambda: here.run([cluster]) and running_frames(engine) == {*held, *others}, 20)


def test_a_frame_whose_status_delays_no_layer_waits_for_nothing(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        job = farm.job([LayerSpec(frames=2)])
        ended(connection, job.frames[:1], status=200)
        cluster = cluster_of(farm)

    assert here.run([cluster])[0].frames_booked == 2
