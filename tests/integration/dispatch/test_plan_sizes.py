"""Plans get smaller where the server has no time for their commits, and grow again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.dispatch.commit import FIRST_PLAN_FRAMES, PlanSizes, commit_plan
from opencue_sched.dispatch.report import PassReport
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.placement.policy import MAX_FRAMES
from opencue_sched.settings import Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.store.schema import check_schema
from tests.kit.frozen_clock import Clock
from tests.kit.passes import Passes, passes
from tests.kit.plans import plan, reasons, refuse_more_than
from tests.kit.statements import listening

JOBS, FRAMES_OF_A_JOB = 8, 5


@pytest.fixture
def one(engine: Engine, settings: Settings) -> Iterator[Passes]:
    """A process beside a farm on which 40 frames wait and fit."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=64, memory_gb=256)
        farm.jobs([JobSpec([LayerSpec(frames=FRAMES_OF_A_JOB)]) for _ in range(JOBS)])
    dry_run = settings.rqd.model_copy(update={"dry_run_mode": True})
    with passes(engine, settings.model_copy(update={"rqd": dry_run})) as found:
        yield found


def run_passes(one: Passes, count: int) -> list[PassReport]:
    one.clusters = [cluster for cluster, _ in one.sweeper.sweep().send] or one.clusters
    reports = []
    for _ in range(count):
        reports += one.runner.run(one.clusters, alive=lambda: True)
    return reports


def sizes(reports: list[PassReport]) -> list[tuple[int, int]]:
    """What each pass planned, and what it booked of that."""
    return [(0 if report.plan is None else len(report.plan.procs), report.frames_booked) for report in reports]


def test_plans_are_halved_until_the_server_has_time_for_one_and_grow_again(one: Passes, engine: Engine) -> None:
    # Given a server that has no time for more than ten frames at once
    refuse_more_than(engine, 10, "57014")
    # Then the plans shrink to that, and try twice as much after a success
    assert sizes(run_passes(one, 4)) == [(40, 0), (20, 0), (10, 10), (20, 0)]
    # When it is well again, they grow to what waits
    refuse_more_than(engine, MAX_FRAMES, "57014")
    assert sizes(run_passes(one, 2)) == [(10, 10), (20, 20)]


def test_a_lock_that_is_not_granted_halves_nothing(one: Passes, engine: Engine) -> None:
    refuse_more_than(engine, 0, "55P03")
    assert sizes(run_passes(one, 2)) == [(40, 0), (40, 0)]


def test_each_shard_has_its_own_size() -> None:
    plan_sizes = PlanSizes()
    for shard in "abc":
        while plan_sizes.most(shard) < MAX_FRAMES:
            plan_sizes.committed(shard)
    plan_sizes.cancelled("a", 800)
    plan_sizes.cancelled("a", 900)  # planned before the first came to an end
    plan_sizes.cancelled("b", 1)
    assert [plan_sizes.most(shard) for shard in "abc"] == [400, 1, MAX_FRAMES]
    plan_sizes.committed("a")
    plan_sizes.committed("c")
    assert [plan_sizes.most(shard) for shard in "abc"] == [800, 1, MAX_FRAMES]
    plan_sizes.committed("a")
    assert plan_sizes.most("a") == MAX_FRAMES


def test_a_process_begins_with_a_small_plan_and_doubles_with_each_commit(engine: Engine, settings: Settings) -> None:
    # Given an empty farm for which 5,000 frames wait
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts(HostSpec(cores=100, memory_gb=512, hostname_tag=False) for _ in range(50))
        farm.jobs([JobSpec([LayerSpec(frames=100, range="1-100")]) for _ in range(50)])
    queue = settings.queue.model_copy(update={"dispatch_frames_per_layer_limit": 100, "max_jobs_per_cluster_pass": 50})
    fresh = settings.model_copy(update={"rqd": settings.rqd.model_copy(update={"dry_run_mode": True}), "queue": queue})
    with passes(engine, fresh) as one:
        # When a process that has just started passes over them, then its first commit comes soon
        assert [booked for _, booked in sizes(run_passes(one, 4))] == [250, 500, 1000, 1000]
        clusters = one.clusters
    with passes(engine, fresh) as another:
        another.clusters = clusters
        assert [booked for _, booked in sizes(run_passes(another, 1))] == [250]


def test_the_first_plan_after_a_hand_over_is_small(engine: Engine, settings: Settings) -> None:
    # Given a process that has grown its plans
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        farm.hosts(HostSpec(cores=100, memory_gb=512, hostname_tag=False) for _ in range(50))
        farm.jobs([JobSpec([LayerSpec(frames=100, range="1-100")]) for _ in range(50)])
    queue = settings.queue.model_copy(update={"dispatch_frames_per_layer_limit": 100, "max_jobs_per_cluster_pass": 50})
    fresh = settings.model_copy(update={"rqd": settings.rqd.model_copy(update={"dry_run_mode": True}), "queue": queue})
    with passes(engine, fresh) as one:

        def handed_over() -> None:
            with engine.connect() as connection:
                note_imported(one.client, managed_show_versions(connection, [show.id]))

        handed_over()
        imported = ImportedShows(engine, one.runner.ledger, quarantine_seconds=30.0, age_seconds=60.0)
        one.runner = replace(one.runner, imported=imported)
        assert [booked for _, booked in sizes(run_passes(one, 3))] == [250, 500, 1000]
        # When the show goes to a Cuebot and comes back
        for managed in (False, True):
            with engine.begin() as connection:
                connection.execute(text("UPDATE show SET b_scheduler_managed = :managed"), {"managed": managed})
            one.client.hdel(keys.IMPORTED, show.id)
        assert [booked for _, booked in sizes(run_passes(one, 2))] == [0, 0], "a Cuebot may book it still"
        handed_over()
        # Then its first commit comes soon
        assert [booked for _, booked in sizes(run_passes(one, 2))] == [250, 500]


def test_a_show_that_nobody_has_planned_yet_makes_the_next_plan_small() -> None:
    plan_sizes = PlanSizes()
    assert plan_sizes.most("a", ["old"]) == FIRST_PLAN_FRAMES
    for _ in range(9):
        plan_sizes.committed("a")
    assert plan_sizes.most("a", ["old"]) == MAX_FRAMES
    # When a show comes
    assert plan_sizes.most("a", ["old", "new"]) == FIRST_PLAN_FRAMES
    plan_sizes.committed("a")
    assert plan_sizes.most("a", ["old", "new"]) == 2 * FIRST_PLAN_FRAMES
    # and when it is not ours for a while
    plan_sizes.committed("a")
    plan_sizes.forget("new")
    assert [plan_sizes.most("a", shows) for shows in (["old"], ["new"])] == [MAX_FRAMES, FIRST_PLAN_FRAMES]
    # then a plan that was halved stays so
    plan_sizes.cancelled("a", 100)
    assert plan_sizes.most("a", ["newest"]) == 50


def test_a_commit_whose_second_try_comes_too_late_ran_out_of_time_as_well(engine: Engine, settings: Settings) -> None:
    # Given a statement that is cancelled, and no time left after that
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)
    refuse_more_than(engine, 0, "57014")
    clock = Clock(0.0)
    with listening(engine, "handle_error", lambda _: clock.advance(9.0)):
        result = commit_plan(engine, procs, {}, settings, facts=facts, clock=clock)
    assert (result.cancelled, reasons(result)) == (True, ["database_failure"])


@pytest.mark.parametrize(
    ("late_after", "cancelled"),
    [
        # statements that take too long together, though none by itself does
        ("hosts were changed", True),
        # a lock that is not granted, and no time for another try
        ("a lock was refused", False),
        # other commits of this process for which it waits too long before it begins
        ("it asked for its turn", False),
    ],
)
def test_a_commit_that_is_late_by_our_own_clock_ran_out_of_time_unless_it_waited_for_others(
    engine: Engine, settings: Settings, late_after: str, cancelled: bool
) -> None:
    # Given a plan, and a clock by which its time is over once something has happened
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)
        connection.exec_driver_sql("""
            CREATE SEQUENCE changed;
            CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM nextval('changed'); RETURN NULL; END$$;
            CREATE TRIGGER note AFTER UPDATE ON host FOR EACH STATEMENT EXECUTE FUNCTION note()""")
    if late_after == "a lock was refused":
        refuse_more_than(engine, 0, "55P03")
    refused: list[object] = []
    elsewhere = create_engine(engine.url, poolclass=NullPool)

    def clock() -> float:
        with elsewhere.connect() as connection:
            changed = connection.exec_driver_sql("SELECT is_called FROM changed").scalar_one()
        late = late_after == "it asked for its turn" or refused or (changed and late_after == "hosts were changed")
        return 9.0 if late else 0.0

    # When it is committed
    with listening(engine, "handle_error", refused.append):
        result = commit_plan(engine, procs, {}, settings, facts=facts, booked_at=0.0, clock=clock)
    # Then it is lost, and the next is half as large if it was too large for its time
    assert (result.cancelled, reasons(result)) == (cancelled, ["database_failure"])


def test_a_transaction_that_the_server_ends_for_its_time_ran_out_of_it(engine: Engine, settings: Settings) -> None:
    # Given a server that knows how long a transaction may take, and is slow with each statement
    with engine.begin() as connection:
        if int(connection.exec_driver_sql("SHOW server_version_num").scalar_one()) < 170000:
            pytest.skip("this server bounds no transaction")
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)
        connection.exec_driver_sql("""
            CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM pg_sleep(0.55); RETURN NULL; END$$;
            CREATE TRIGGER dawdle AFTER INSERT ON proc EXECUTE FUNCTION dawdle();
            CREATE TRIGGER dawdle AFTER UPDATE OF int_cores_idle ON host EXECUTE FUNCTION dawdle()""")
    accounting = settings.accounting.model_copy(update={"commit_deadline": 2.0})
    late = settings.model_copy(update={"accounting": accounting})
    # When a plan is committed that has half of its time left
    result = commit_plan(engine, procs, {}, late, facts=facts, booked_at=time.monotonic() - 0.9)
    assert (result.cancelled, reasons(result)) == (True, ["database_failure"])


def test_a_statement_that_runs_out_of_time_says_so_in_the_result(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)
        connection.exec_driver_sql("""
            CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM pg_sleep(60); RETURN NULL; END$$;
            CREATE TRIGGER dawdle AFTER UPDATE OF int_cores_idle ON host EXECUTE FUNCTION dawdle()""")
    accounting = settings.accounting.model_copy(update={"commit_deadline": 3.0})
    result = commit_plan(engine, procs, {}, settings.model_copy(update={"accounting": accounting}), facts=facts)
    assert (result.cancelled, reasons(result), result.quarantined) == (True, ["database_failure"], {})
