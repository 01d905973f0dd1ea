"""What a committed plan writes, and what of it is lost to others."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.commit import commit_plan
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import counted_statements
from tests.kit.limits import has_types
from tests.kit.plans import KB_PER_GB, assert_consistent, commit, plan, reasons


def test_a_plan_becomes_running_frames_with_procs(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=8, memory_gb=32, gpus=2, gpu_memory_gb=8)
        job = farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings, cores=3, memory_kb=5 * KB_PER_GB, gpus=1, gpu_memory_kb=KB_PER_GB)

    result = commit(engine, procs, settings)

    assert [c.proc_id for c in result.committed] == [p.proc_id for p in procs]
    assert result.lost == result.unknown == []
    with engine.connect() as connection:
        frames = connection.execute(text("SELECT * FROM frame ORDER BY int_number")).all()
        rows = connection.execute(text("SELECT * FROM proc")).all()
        idle = connection.execute(text("SELECT * FROM host")).one()
    assert [frame.int_version for frame in frames] == [c.frame.version for c in result.committed]
    for frame in frames:
        assert (frame.str_state, frame.str_host, frame.int_cores) == ("RUNNING", host.name, 300)
        assert (frame.int_mem_reserved, frame.int_gpus, frame.int_gpu_mem_reserved) == (5 * KB_PER_GB, 1, KB_PER_GB)
        assert frame.ts_started == frame.ts_updated
        assert frame.ts_stopped is None
    by_frame = {row.pk_frame: row for row in rows}
    for proc in procs:
        row = by_frame[proc.frame.id]
        assert (row.pk_proc, row.pk_host, row.pk_job, row.pk_layer) == (
            *(proc.proc_id, host.id, job.id),
            job.layers[0].id,
        )
        assert (row.pk_show, row.int_cores_reserved, row.int_mem_reserved) == (job.show.id, 300, 5 * KB_PER_GB)
        assert (row.int_mem_pre_reserved, row.int_mem_used, row.b_local) == (5 * KB_PER_GB, 262_144, False)
        assert (row.int_gpus_reserved, row.int_gpu_mem_reserved, row.int_gpu_mem_pre_reserved) == (
            *(1, KB_PER_GB),
            KB_PER_GB,
        )
    assert (idle.int_cores_idle, idle.int_mem_idle, idle.int_gpus_idle) == (200, 22 * KB_PER_GB, 0)
    assert_consistent(engine)


def test_statements_do_not_grow_with_the_plan(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        for _ in range(12):
            farm.host(cores=64, memory_gb=256)
        farm.jobs([JobSpec([LayerSpec(frames=10)] * 4) for _ in range(5)])
        procs = plan(farm, settings)
        facts = check_schema(connection)
    assert len(procs) == 200

    counts = []
    for part in (procs[:1], procs[1:]):
        with counted_statements(engine) as statements:
            result = commit_plan(engine, part, {}, settings, facts=facts)
        assert len(result.committed) == len(part)
        counts.append(len(statements))

    assert counts == [7, 7]
    assert_consistent(engine)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE frame SET str_state = 'RUNNING' WHERE int_number = 2",
        "UPDATE frame SET str_state = 'EATEN' WHERE int_number = 2",
        "UPDATE frame SET int_version = int_version + 1 WHERE int_number = 2",
        "UPDATE frame SET int_depend_count = 1 WHERE int_number = 2",
    ],
)
def test_a_frame_that_changed_since_it_was_gathered_is_lost(engine: Engine, settings: Settings, statement: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=3)])
        procs = plan(farm, settings)
        connection.execute(text(statement))

    result = commit(engine, procs, settings)

    assert [c.frame.number for c in result.committed] == [1, 3]
    assert [(proc.frame.number, error.reason, error.retriable) for proc, error in result.lost] == [
        (2, "frame_lost", False)
    ]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT int_cores_idle FROM host")) == 600
        assert connection.scalar(text("SELECT count(*) FROM proc")) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET b_paused = true",
        "UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL",
        "UPDATE show SET b_scheduler_managed = false",
        "UPDATE show SET b_booking_enabled = false",
        "UPDATE show SET b_active = false",
    ],
)
def test_what_may_no_longer_run_is_lost(engine: Engine, settings: Settings, statement: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings)
        connection.execute(text(statement))

    result = commit(engine, procs, settings)

    assert result.committed == []
    assert reasons(result) == ["frame_lost", "frame_lost"]
    assert_consistent(engine)


def test_a_layer_that_is_delayed_meanwhile_is_lost(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        if not check_schema(connection).has_start_after:
            connection.execute(text("ALTER TABLE layer ADD COLUMN ts_start_after timestamptz"))
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(), LayerSpec()])
        procs = plan(farm, settings)
        delay = text("UPDATE layer SET ts_start_after = :t WHERE pk_layer = :l")
        connection.execute(delay, {"t": datetime.now(UTC) + timedelta(hours=1), "l": procs[0].layer.id})

    result = commit(engine, procs, settings)

    assert [c.layer.id for c in result.committed] == [procs[1].layer.id]
    assert reasons(result) == ["frame_lost"]


def test_a_frame_that_still_has_a_proc_is_lost_and_its_host_share_not_taken(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host()
        job = farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings, cores=2)
        farm.run(job.frames[:1], host, cores=1)
        connection.execute(
            text("UPDATE frame SET str_state = 'WAITING', int_version = :v WHERE pk_frame = :f"),
            {"v": procs[0].frame.version, "f": job.frames[0]},
        )

    result = commit(engine, procs, settings)

    assert [c.frame.id for c in result.committed] == [job.frames[1]]
    assert reasons(result) == ["frame_lost"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT int_cores_idle FROM host")) == 800 - 100 - 200


def test_a_version_that_is_null_is_a_version_like_any_other(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=2)])
        connection.execute(text("UPDATE frame SET int_version = NULL"))
        procs = plan(farm, settings)
        connection.execute(text("UPDATE frame SET int_version = 0 WHERE int_number = 2"))

    result = commit(engine, procs, settings)

    assert [(c.frame.number, c.frame.version) for c in result.committed] == [(1, 1)]
    assert reasons(result) == ["frame_lost"]


def test_the_version_is_the_one_the_triggers_left(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        connection.execute(
            text(
                "CREATE FUNCTION bump() RETURNS trigger LANGUAGE plpgsql AS"
                " 'BEGIN NEW.int_version := NEW.int_version + 5; RETURN NEW; END'"
            )
        )
        connection.execute(text("CREATE TRIGGER zz BEFORE UPDATE ON frame FOR EACH ROW EXECUTE FUNCTION bump()"))

    (committed,) = commit(engine, procs, settings).committed

    assert procs[0].frame.version is not None
    assert committed.frame.version == procs[0].frame.version + 6


@pytest.mark.parametrize(
    ("exit_status", "retries"), [(-1, 0), (256, 0), (286, 0), (299, 0), (301, 0), (302, 0), (399, 0), (0, 1), (1, 1)]
)
def test_only_a_real_failure_counts_as_a_retry(
    engine: Engine, settings: Settings, exit_status: int, retries: int
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        connection.execute(text("UPDATE frame SET int_exit_status = :e"), {"e": exit_status})
        procs = plan(farm, settings)

    commit(engine, procs, settings)

    with engine.connect() as connection:
        assert connection.scalar(text("SELECT int_retries FROM frame")) == retries


@pytest.mark.parametrize(("exit_status", "retries"), [(200, 0), (-7, 0), (256, 0), (201, 1)])
def test_an_end_that_the_cuebot_exempts_is_no_retry(
    engine: Engine, settings: Settings, exit_status: int, retries: int
) -> None:
    # given the statuses of which a Cuebot's rules delay the layer
    settings = settings.model_copy(
        update={"queue": settings.queue.model_copy(update={"uncounted_exit_statuses": (200, -7)})}
    )
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        connection.execute(text("UPDATE frame SET int_exit_status = :e"), {"e": exit_status})
        procs = plan(farm, settings)
    # when a frame that ended with one of them starts again
    commit(engine, procs, settings)
    # then it keeps its retries
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT int_retries FROM frame")) == retries


@pytest.mark.parametrize(("delay", "retries"), [(5, 0), (0, 1)])
def test_a_frame_whose_layer_waited_for_a_licence_uses_no_retry(
    engine: Engine, settings: Settings, delay: int, retries: int
) -> None:
    # given a limit whose shortage frames tell by their exit status, and after which their layer waits, or does not
    with engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("limits have no exit status before V49")
        farm = Farm(connection)
        farm.host()
        farm.job()
        farm.limit("nuke", 5)
        terms = "UPDATE limit_record SET int_exit_status = 330, int_delay_minutes = :delay"
        connection.execute(text(terms), {"delay": delay})
        connection.execute(text("UPDATE frame SET int_exit_status = 330"))
        procs = plan(farm, settings)
    # when a frame that ended with it starts again
    commit(engine, procs, settings)
    # then it keeps its retries where the layer waited
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT int_retries FROM frame")) == retries


def test_a_frame_planned_twice_runs_once(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        (proc,) = plan(farm, settings)
    again = replace(proc, proc_id="again")

    result = commit(engine, [proc, again], settings)

    assert [c.proc_id for c in result.committed] == [proc.proc_id]
    assert [(lost.proc_id, error.reason) for lost, error in result.lost] == [("again", "frame_lost")]
    assert_consistent(engine)


def test_an_empty_plan_asks_nothing_of_the_database(engine: Engine, settings: Settings) -> None:
    with counted_statements(engine) as statements:
        result = commit_plan(engine, [], {}, settings, facts=NO_COLUMNS)

    assert statements == []
    assert result.committed == result.lost == []


class _NoColumns:
    has_start_after = False


NO_COLUMNS = _NoColumns()
