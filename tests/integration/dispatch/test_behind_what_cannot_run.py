"""Jobs that cannot be placed, however many, must not keep those behind them waiting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from opencue_sched.accounting import keys
from opencue_sched.coordination.postings import ClaimRenewer, Enqueued
from opencue_sched.dispatch.commit import PlanSizes
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.settings import Rqd, Settings
from tests.kit.passes import Passes, dispatch, passes

WINDOW = 20
"""Jobs of which a plan takes frames, by default."""


@pytest.fixture
def here(engine: Engine, settings: Settings) -> Iterator[Passes]:
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as runner:
        yield runner


def plant(engine: Engine, first: JobSpec, *, hosts: HostSpec | None = None, jobs: int = WINDOW) -> tuple[str, str]:
    """``jobs`` like ``first`` of high priority, and one of two single-core frames behind them; its id, and a host's."""
    with engine.begin() as connection:
        farm = Farm(connection)
        made = farm.hosts([hosts or HostSpec(cores=16) for _ in range(4)])
        farm.jobs([first for _ in range(jobs)])
        return farm.job([LayerSpec(frames=2)], priority=1).id, made[0].id


def wide(**layer: Any) -> JobSpec:
    return JobSpec(layers=[LayerSpec(frames=2, **layer)], priority=100)


def running(engine: Engine, job_id: str) -> int:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT count(*) FROM proc WHERE pk_job = :job"), {"job": job_id}).scalar()
        return int(found or 0)


def make_rows_bad(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE layer SET int_mem_min = 1::bigint << 55 WHERE pk_job IN "
                "(SELECT pk_job FROM job_resource WHERE int_priority = 100)"
            )
        )


def make_counters_wrong(engine: Engine) -> None:
    """They say that frames wait, and all have ended."""
    layers = "(SELECT pk_layer FROM layer JOIN job_resource USING (pk_job) WHERE int_priority = 100)"
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE frame SET str_state = 'EATEN' WHERE pk_layer IN {layers}"))  # noqa: S608
        connection.execute(text(f"UPDATE layer_stat SET int_waiting_count = 2 WHERE pk_layer IN {layers}"))  # noqa: S608


@pytest.mark.parametrize(
    ("first", "hosts", "spoil"),
    [
        pytest.param(wide(cores=64), None, None, id="too large for any host"),
        pytest.param(wide(cores=16), HostSpec(cores=16, idle_cores=8), None, id="too large for what is idle"),
        pytest.param(wide(tags="general | nowhere", memory_gb=500), None, None, id="too much memory"),
        pytest.param(
            JobSpec(layers=[LayerSpec(frames=2, cores=0)], priority=100, max_cores=8), None, None, id="over their cap"
        ),
        pytest.param(wide(), None, make_rows_bad, id="rows that make no sense"),
        pytest.param(wide(), None, make_counters_wrong, id="counters that are wrong"),
    ],
)
@pytest.mark.parametrize("jobs", [WINDOW, 2 * WINDOW + 5])
def test_a_job_behind_others_that_cannot_be_placed_is_booked_at_once(
    here: Passes,
    engine: Engine,
    first: JobSpec,
    hosts: HostSpec | None,
    spoil: Callable[[Engine], None] | None,
    jobs: int,
) -> None:
    behind, _ = plant(engine, first, hosts=hosts, jobs=jobs)
    if spoil is not None:
        spoil(engine)
    here.drain()
    assert running(engine, behind) == 2


def make_kinds_differ(connection: Connection) -> None:
    """So that no look at a layer answers for another."""
    connection.execute(
        text(
            "UPDATE layer SET int_mem_min = int_mem_min + numbered.n FROM "
            "(SELECT pk_layer, row_number() OVER () AS n FROM layer) numbered WHERE numbered.pk_layer = layer.pk_layer"
        )
    )


def clusters_of(here: Passes) -> list[Cluster]:
    return [cluster for cluster, _ in here.sweeper.sweep().send]


def test_jobs_that_the_counters_refuse_keep_nobody_behind_them_waiting(here: Passes, engine: Engine) -> None:
    """The snapshot has room for them, but the counters have procs that are gone."""
    behind, _ = plant(engine, wide())
    with engine.connect() as connection:
        ahead = connection.execute(text("SELECT pk_job FROM job_resource WHERE int_priority = 100")).scalars().all()
        connection.execute(text("UPDATE job_resource SET int_max_cores = 500"))
        connection.commit()
    for job in ahead:
        here.client.hset(keys.job(job), "int_cores", 5)

    reports = here.drain()

    assert running(engine, behind) == 2
    refused = [verdict for verdict in reports[0].verdicts if verdict.job_id in ahead]
    assert {verdict.verdict for verdict in refused} == {Verdict.OVER_JOB}
    assert all((verdict.frames, verdict.waiting) == (0, 2) for verdict in refused)
    assert "5 of 5" in refused[0].detail


@pytest.mark.parametrize("others", [0, WINDOW])
def test_a_job_has_the_host_that_one_ahead_has_in_every_plan_and_is_refused(
    here: Passes, engine: Engine, others: int
) -> None:
    """The only host, which the counters keep from the first job: it must not be kept from the second one as well."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=4)
        ahead = farm.job([LayerSpec(frames=2, cores=4)], priority=100, max_cores=5)
        behind = farm.job([LayerSpec(frames=1, cores=4, memory_gb=2)], priority=50)
        farm.jobs([JobSpec([LayerSpec(cores=16)], priority=1) for _ in range(others)])
        cluster = Cluster(farm.facility(), farm.default_show().id, ClusterKind.ALLOC, ("general",))
    assert here.runner.ledger.load_caps is not None
    here.runner.ledger.load_caps([keys.job(ahead.id)])
    here.client.hset(keys.job(ahead.id), "int_cores", 5)
    reports = []
    while not reports or reports[-1].go_on or reports[-1].frames_booked:
        assert len(reports) < 5
        reports.append(here.run([cluster])[0])

    # at once, and then there is nothing to be looked at before the cluster is roused
    assert sum(report.frames_booked for report in reports[:2]) == 1
    assert running(engine, behind.id) == 1
    assert reports[-1].look_again is None


def lock_frames(somebody: Connection, priority: int) -> None:
    somebody.execute(
        text("SELECT FROM frame JOIN job_resource USING (pk_job) WHERE int_priority = :priority FOR UPDATE OF frame"),
        {"priority": priority},
    )


def stop_the_clock_of_losses(here: Passes) -> list[float]:
    """Cooldowns of layers go by the first number of what is returned."""
    now = [0.0]
    here.runner = replace(here.runner, lost=Cooldowns(0.05, 1.0, lambda: now[0], free=1))
    return now


def test_jobs_that_lose_their_frames_to_somebody_come_first_once_more_and_then_let_the_others_have_their_turn(
    here: Passes, engine: Engine
) -> None:
    behind, _ = plant(engine, wide())
    now = stop_the_clock_of_losses(here)
    (cluster,) = [cluster for cluster in clusters_of(here) if "general" in cluster.tags]
    with engine.connect() as somebody, somebody.begin():
        lock_frames(somebody, 100)
        reports = [here.run([cluster])[0] for _ in range(3)]
        assert running(engine, behind) == 2

    assert [report.go_on for report in reports] == [True, True, False]
    assert [report.losses["frame_lost"] for report in reports] == [2 * WINDOW, 2 * WINDOW, 0]
    assert {(it.frames, it.waiting) for it in reports[0].verdicts} == {(0, 2)}
    assert "frame_lost" in reports[0].verdicts[0].detail
    # and then those ahead are first again
    now[0] += 0.06
    assert here.run([cluster])[0].frames_booked == 2 * WINDOW


def test_jobs_that_book_nothing_are_no_reason_to_go_on_for_ever(here: Passes, engine: Engine) -> None:
    over_their_cap = JobSpec(layers=[LayerSpec(frames=2, cores=0)], priority=100, max_cores=8)
    plant(engine, over_their_cap, jobs=3 * WINDOW)
    stop_the_clock_of_losses(here)
    (cluster,) = [cluster for cluster in clusters_of(here) if "general" in cluster.tags]
    with engine.connect() as somebody, somebody.begin():
        lock_frames(somebody, 1)
        reports = [here.run([cluster])[0] for _ in range(3)]

    assert [report.losses["frame_lost"] for report in reports] == [2, 2, 0]
    assert not reports[-1].go_on


def test_hosts_that_change_all_the_time_do_not_bring_those_ahead_back_before_the_others_had_their_turn(
    here: Passes, engine: Engine
) -> None:
    """Every completion is a change of a host."""
    behind, host = plant(engine, wide(cores=16), hosts=HostSpec(cores=16, idle_cores=8))
    clusters = [cluster for cluster, _ in here.sweeper.sweep().send]
    for _ in range(3):
        here.runner.hosts.note([host])
        for cluster in clusters:
            here.run([cluster])[0]
    assert running(engine, behind) == 2


def end_runs(here: Passes, procs: str, **parameters: object) -> None:
    """The procs of that condition are given back, and their frames have rendered."""
    with here.engine.begin() as connection:
        ended = connection.execute(
            text(
                f"WITH gone AS (DELETE FROM proc WHERE {procs} RETURNING *), "  # noqa: S608
                "back AS (UPDATE host SET int_cores_idle = int_cores_idle + cores, int_mem_idle = int_mem_idle + b.mem "
                "  FROM (SELECT pk_host, sum(int_cores_reserved) AS cores, sum(int_mem_reserved) AS mem FROM gone "
                "        GROUP BY pk_host) b WHERE host.pk_host = b.pk_host), "
                "over AS (UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame IN (SELECT pk_frame FROM gone)) "
                "SELECT pk_proc, pk_host FROM gone"
            ),
            parameters,
        ).all()
    here.runner.ledger.release([row.pk_proc for row in ended])
    here.runner.hosts.note({row.pk_host for row in ended})


def test_a_host_that_is_all_idle_goes_to_the_frames_that_wait_for_one_however_often_a_part_of_another_came_free(
    here: Passes, engine: Engine
) -> None:
    # given frames that want a whole host, and hosts full of frames of one core and of one of theirs
    with engine.begin() as connection:
        farm = Farm(connection)
        shared, whole = farm.hosts([HostSpec(cores=16), HostSpec(cores=16)])
        small = farm.job([LayerSpec(frames=16)], priority=500)
        wide_job = farm.job([LayerSpec(frames=3, cores=0)], priority=100)
        farm.run(small.frames, shared)
        farm.run(wide_job.frames[:1], whole, cores=16)
        low = farm.job([LayerSpec(frames=100)], priority=1)
        cluster = Cluster(farm.facility(), wide_job.show.id, ClusterKind.ALLOC, ("general",))

    # when single cores come free time and again, and then a whole host
    for frame in small.frames[:12]:
        end_runs(here, "pk_frame = :frame", frame=frame)
        here.run([cluster])[0]
    assert (running(engine, wide_job.id), running(engine, low.id)) == (1, 12)
    end_runs(here, "pk_host = :whole", whole=whole.id)
    here.run([cluster])[0]

    # then it is theirs
    assert (running(engine, wide_job.id), running(engine, low.id)) == (1, 12)


class OneFrame(PlanSizes):
    """Lets each plan have one frame."""

    def most(self, shard: str, show_ids: Collection[str] = ()) -> int:
        return 1


def test_jobs_for_which_a_plan_has_no_room_any_more_were_not_looked_at_in_vain(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=64, memory_gb=512)
        farm.jobs([JobSpec([LayerSpec()], priority=100 - number) for number in range(WINDOW + 10)])
        cluster = Cluster(farm.facility(), farm.default_show().id, ClusterKind.ALLOC, ("general",))
    here.runner = replace(here.runner, plan_sizes=OneFrame())

    for _ in range(6):
        here.run([cluster])[0]

    with engine.connect() as connection:
        booked = connection.execute(
            text("SELECT int_priority FROM proc JOIN job_resource USING (pk_job) ORDER BY 1 DESC")
        ).scalars()
        assert list(booked) == [100, 99, 98, 97, 96, 95]


def test_one_pass_looks_at_all_that_waits_and_then_the_cluster_sleeps(here: Passes, engine: Engine) -> None:
    # given more jobs than a plan takes frames of, none of which any host can take
    plant(engine, wide(cores=64), jobs=2 * WINDOW)
    with engine.begin() as connection:
        make_kinds_differ(connection)
        connection.execute(
            text(
                "UPDATE job SET b_paused = true WHERE str_name IN (SELECT str_name FROM job j "
                "JOIN job_resource r USING (pk_job) WHERE r.int_priority = 1)"
            )
        )
    sent: list[Enqueued] = []
    postings = here.postings
    renewer = ClaimRenewer(postings, ttl_seconds=3)
    rests: list[float] = []
    dispatcher = Dispatcher(here.settings, postings, renewer, here.runner, "one", sent.append, rests.append)
    try:
        reports = [dispatch(dispatcher, enqueued.uuid, enqueued.ticket) for _, enqueued in here.sweeper.sweep().send]
    finally:
        renewer.stop()

    (report,) = reports
    assert isinstance(report, PassReport)
    assert len({verdict.layer_id for verdict in report.verdicts}) == 2 * WINDOW
    assert {verdict.verdict for verdict in report.verdicts} == {Verdict.NO_FIT}
    assert (report.go_on, sent, len(rests)) == (False, [], 1)
    assert here.client.zcard("cue:board:clusters:delayed") == 1


def test_the_highest_priority_comes_first_again_once_there_is_a_host_for_it(here: Passes, engine: Engine) -> None:
    # given two windows of wide jobs that wait for a whole host
    with engine.begin() as connection:
        farm = Farm(connection)
        (host, *_) = farm.hosts([HostSpec(cores=16, idle_cores=8) for _ in range(2)])
        made = farm.jobs([wide(cores=16) for _ in range(2 * WINDOW)])
        urgent = farm.job([LayerSpec(frames=2, cores=16)], priority=200)
    here.drain()
    assert running(engine, urgent.id) == 0

    # when one becomes idle
    with engine.begin() as connection:
        connection.execute(text("UPDATE host SET int_cores_idle = int_cores WHERE pk_host = :host"), {"host": host.id})
    here.runner.hosts.note([host.id])
    here.drain()

    # then it goes to the most urgent job
    assert running(engine, urgent.id) == 1
    assert sum(running(engine, job.id) for job in made) == 0


def fill(engine: Engine, *, urgent: int, others: int) -> None:
    """A full host, and jobs of single cores that wait for it."""
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=4, memory_gb=64)
        running = farm.job([LayerSpec(frames=4)], name="running")
        for frame in running.frames:
            farm.run([frame], host)
        farm.jobs([JobSpec([LayerSpec(frames=20)], priority=100) for _ in range(urgent)])
        farm.jobs([JobSpec([LayerSpec(frames=20)], priority=1) for _ in range(others)])


def free_a_core(here: Passes) -> None:
    with here.engine.begin() as connection:
        host = connection.execute(
            text(
                "DELETE FROM proc WHERE pk_proc = (SELECT pk_proc FROM proc ORDER BY ts_booked LIMIT 1) "
                "RETURNING pk_host"
            )
        ).scalar_one()
        connection.execute(
            text(
                "UPDATE host SET int_cores_idle = int_cores_idle + 100, int_mem_idle = int_mem_idle + 4194304 "
                "WHERE pk_host = :host"
            ),
            {"host": host},
        )
    here.runner.hosts.note([host])


def test_on_a_full_farm_a_freed_core_costs_few_passes_and_goes_to_the_first_job_however_many_wait(
    here: Passes, engine: Engine
) -> None:
    fill(engine, urgent=WINDOW + 5, others=5 * WINDOW)
    here.drain()
    for _ in range(10):
        free_a_core(here)
        assert len(here.drain()) <= 3
    with engine.connect() as connection:
        booked = connection.execute(
            text(
                "SELECT int_priority, count(*) FROM proc JOIN job_resource USING (pk_job) JOIN job USING (pk_job) "
                "WHERE job.str_name NOT LIKE '%running%' GROUP BY int_priority"
            )
        ).all()
    assert [row.int_priority for row in booked] == [100]


def test_a_job_whose_cap_is_raised_has_its_turn_with_the_next_pass(here: Passes, engine: Engine) -> None:
    # given jobs at their caps
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=16)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=2, cores=0)], max_cores=8) for _ in range(WINDOW + 5)])
    (cluster,) = [cluster for cluster in clusters_of(here) if "general" in cluster.tags]
    report = here.run([cluster])[0]
    assert (report.frames_booked, report.go_on) == (0, False)

    # when the cap of one of them is raised
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE job_resource SET int_max_cores = 1600 WHERE pk_job = :job"), {"job": jobs[-1].id}
        )

    # then it is booked
    assert here.run([cluster])[0].frames_booked == 1
    assert running(engine, jobs[-1].id) == 1
