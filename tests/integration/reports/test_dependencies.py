"""Dependencies of every type, complete layers, finished jobs and the recovery of what a crash left behind."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.recovery import recover_depends
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Release
from tests.kit.runs import FarmView, complete_frame


def run_and_complete(
    engine: Engine, view: FarmView, host: HostIds, frames: list[str], exit_status: int = 0, **policy: Any
) -> None:
    """Start frames on a host and report their end, one transaction each."""
    with view.farm() as farm:
        procs = farm.run(frames, host)
    for proc, frame in zip(procs, frames, strict=True):
        report = CompletedFrame(proc, frame, host.name, exit_status)
        complete_frame(engine, report, **policy)


def depend(farm: Farm, kind: str, er: dict[str, str], on: dict[str, str], frames: tuple[str, ...], **row: Any) -> str:
    """A dependency row of any type, and the counts of the frames that wait for it."""
    depend_id = str(uuid.uuid4())
    columns = {f"pk_{name}_depend_er": value for name, value in er.items()}
    columns |= {f"pk_{name}_depend_on": value for name, value in on.items()}
    farm.insert("depend", [{"pk_depend": depend_id, "str_type": kind, "str_signature": depend_id, **columns, **row}])
    farm.connection.exec_driver_sql(
        "UPDATE frame SET int_depend_count = int_depend_count + 1 WHERE pk_frame = ANY(%s)", (list(frames),)
    )
    return depend_id


def place(job: JobIds, layer: int | None = None, frame: int | None = None) -> dict[str, str]:
    ids = {"job": job.id}
    if layer is not None:
        ids["layer"] = job.layers[layer].id
        if frame is not None:
            ids["frame"] = job.layers[layer].frames[frame]
    return ids


@pytest.fixture
def farm_of_two(view: FarmView) -> tuple[JobIds, JobIds, HostIds]:
    """Two jobs of one show, each of two layers of two frames, and a host."""
    with view.farm() as farm:
        host = farm.host(cores=16, memory_gb=64)
        first, second = (farm.job([LayerSpec(frames=2), LayerSpec(frames=2)]) for _ in range(2))
    return first, second, host


@pytest.mark.parametrize(
    ("kind", "er", "on", "needs"),
    [
        ("FRAME_ON_FRAME", (1, 0), (0, 0), [(0, 0)]),
        ("FRAME_ON_LAYER", (1, 0), (0, None), [(0, 0), (0, 1)]),
        ("FRAME_ON_JOB", (1, 0), (None, None), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("LAYER_ON_FRAME", (1, None), (0, 0), [(0, 0)]),
        ("LAYER_ON_SIM_FRAME", (1, None), (0, 0), [(0, 0)]),
        ("LAYER_ON_LAYER", (1, None), (0, None), [(0, 0), (0, 1)]),
        ("LAYER_ON_JOB", (1, None), (None, None), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("JOB_ON_FRAME", (None, None), (0, 0), [(0, 0)]),
        ("JOB_ON_LAYER", (None, None), (0, None), [(0, 0), (0, 1)]),
        ("JOB_ON_JOB", (None, None), (None, None), [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
def test_each_type_is_met_by_the_last_frame_it_needs_and_not_before(
    engine: Engine,
    view: FarmView,
    farm_of_two: tuple[JobIds, JobIds, HostIds],
    kind: str,
    er: tuple[int | None, int | None],
    on: tuple[int | None, int | None],
    needs: list[tuple[int, int]],
) -> None:
    # given frames of one job that wait for something in another
    first, second, host = farm_of_two
    if er[0] is None:
        waiting = second.frames
    else:
        waiting = second.layers[er[0]].frames if er[1] is None else (second.layers[er[0]].frames[er[1]],)
    with view.farm() as farm:
        depend_id = depend(farm, kind, place(second, *er), place(first, *on), waiting)
    assert set(view.states(waiting)) == {"DEPEND"}

    # when all it needs but one has rendered, then the last
    needed = [first.layers[layer].frames[frame] for layer, frame in needs]
    for frame in needed:
        assert set(view.states(waiting)) == {"DEPEND"}
        run_and_complete(engine, view, host, [frame])

    # then the frames are bookable, and the dependency is over as Cuebot marks it
    assert set(view.states(waiting)) == {"WAITING"}
    row = view.one("SELECT * FROM depend WHERE pk_depend = :id", id=depend_id)
    assert (row.b_active, row.str_signature) == (False, depend_id)
    assert row.ts_satisfied is not None
    view.assert_consistent()


def test_a_dependency_on_any_frame_of_a_layer_is_met_by_the_first(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    first, second, host = farm_of_two
    with view.farm() as farm:
        farm.layer_on_layer((second, 0), (first, 0), any_frame=True)
    run_and_complete(engine, view, host, [first.layers[0].frames[1]])
    assert view.states(second.layers[0].frames) == ["WAITING", "WAITING"]
    view.assert_consistent()


@pytest.mark.parametrize("kind", ["FRAME_BY_FRAME", "PREVIOUS_FRAME"])
def test_a_composite_dependency_goes_frame_by_frame_and_closes_with_its_last_child(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds], kind: str
) -> None:
    # given two layers tied frame by frame
    first, _, host = farm_of_two
    with view.farm() as farm:
        parent = farm.frame_by_frame((first, 1), (first, 0))
        farm.connection.exec_driver_sql("UPDATE depend SET str_type = %s WHERE pk_depend = %s", (kind, parent))

    def active() -> list[bool]:
        return [row.b_active for row in view.rows("SELECT b_active FROM depend WHERE pk_depend = :id", id=parent)]

    # when the second frame renders, only its partner is freed
    run_and_complete(engine, view, host, [first.layers[0].frames[1]])
    assert view.states(first.layers[1].frames) == ["DEPEND", "WAITING"]
    assert active() == [True]

    # when the first renders too, both are and the container is closed
    run_and_complete(engine, view, host, [first.layers[0].frames[0]])
    assert view.states(first.layers[1].frames) == ["WAITING", "WAITING"]
    assert active() == [False]
    view.assert_consistent()


def test_a_frame_with_two_dependencies_waits_for_both(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    first, second, host = farm_of_two
    er = (second, 0, second.layers[0].frames[0])
    with view.farm() as farm:
        for index in (0, 1):
            farm.frame_on_frame(er, (first, 0, first.layers[0].frames[index]))
    run_and_complete(engine, view, host, [first.layers[0].frames[0]])
    assert view.states([er[2]]) == ["DEPEND"]
    run_and_complete(engine, view, host, [first.layers[0].frames[1]])
    assert view.states([er[2]]) == ["WAITING"]


def test_two_dependencies_met_in_one_transaction_count_twice(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    first, second, host = farm_of_two
    er = (second, 0, second.layers[0].frames[0])
    with view.farm() as farm:
        for index in (0, 1):
            farm.frame_on_frame(er, (first, 0, first.layers[0].frames[index]))
        procs = farm.run(first.layers[0].frames, host)
    reports = [
        CompletedFrame(proc, frame, host.name, 0) for proc, frame in zip(procs, first.layers[0].frames, strict=True)
    ]
    Releaser(engine).end(reports)
    assert view.states([er[2]]) == ["WAITING"]
    view.assert_consistent()


@pytest.mark.parametrize(("only_on_success", "freed"), [(True, "DEPEND"), (False, "WAITING")])
def test_an_eaten_frame_meets_dependencies_only_if_the_farm_says_so(
    engine: Engine, view: FarmView, only_on_success: bool, freed: str
) -> None:
    with view.farm() as farm:
        host = farm.host()
        job = farm.job([LayerSpec(), LayerSpec()], autoeat=True)
        farm.layer_on_layer((job, 1), (job, 0))
    run_and_complete(engine, view, host, [job.layers[0].frames[0]], 1, satisfy_only_on_frame_success=only_on_success)
    assert view.states(job.frames) == ["EATEN", freed]


def test_a_chain_of_layers_and_jobs_runs_to_finished_jobs(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    # given layer after layer in one job, another job after it, and a post job
    first, second, host = farm_of_two
    with view.farm() as farm:
        farm.layer_on_layer((first, 1), (first, 0))
        farm.job_on_job(second, first)
        post = farm.job([LayerSpec()])
        farm.insert("job_post", [{"pk_job_post": str(uuid.uuid4()), "pk_job": second.id, "pk_post_job": post.id}])
        farm.connection.exec_driver_sql("UPDATE job SET str_visible_name = str_name")
        farm.connection.exec_driver_sql("UPDATE job SET str_state = 'POSTED' WHERE pk_job = %s", (post.id,))

    # when whatever is bookable renders, until nothing is
    for _ in range(10):
        ready = [
            row.pk_frame
            for row in view.rows(
                "SELECT pk_frame FROM frame JOIN job USING (pk_job)"
                " WHERE frame.str_state = 'WAITING' AND job.str_state = 'PENDING' ORDER BY frame.ts_eligible, pk_frame"
            )
        ]
        run_and_complete(engine, view, host, ready[:3])

    # then every job is finished in order, nameless, and nothing is left
    for job in (first, second, post):
        row = view.one("SELECT * FROM job WHERE pk_job = :job", job=job.id)
        assert (row.str_state, row.str_visible_name) == ("FINISHED", None)
        assert row.ts_stopped is not None
        assert set(view.states(job.frames)) == {"SUCCEEDED"}
    assert view.rows("SELECT * FROM job_post") == []
    assert view.rows("SELECT * FROM depend WHERE b_active") == []
    assert view.procs() == []
    view.assert_consistent()


def test_a_job_with_a_dead_frame_is_not_finished(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    first, _, host = farm_of_two
    view.run_sql("UPDATE job SET int_max_retries = 0")
    run_and_complete(engine, view, host, list(first.frames[:1]), 1)
    run_and_complete(engine, view, host, list(first.frames[1:]))
    assert view.states(first.frames[:1]) == ["DEAD"]
    assert view.job_state(first) == "PENDING"


def test_checkpointed_frames_keep_a_job_but_not_a_layer_open(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    # given a layer after another, of whose two frames one is at its checkpoint
    first, _, host = farm_of_two
    with view.farm() as farm:
        farm.layer_on_layer((first, 1), (first, 0))
    checkpointed = first.layers[0].frames[0]
    view.run_sql("UPDATE frame SET str_state = 'CHECKPOINT' WHERE pk_frame = :f", f=checkpointed)

    # when the other ends, the next layer may begin; when all of that have ended, the job is still open
    run_and_complete(engine, view, host, [first.layers[0].frames[1]])
    assert view.states(first.layers[1].frames) == ["WAITING", "WAITING"]
    run_and_complete(engine, view, host, list(first.layers[1].frames))
    assert view.job_state(first) == "PENDING"


def test_nothing_of_a_job_that_is_still_set_up_is_complete(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    first, _, host = farm_of_two
    with view.farm() as farm:
        farm.layer_on_layer((first, 1), (first, 0))
    view.run_sql("UPDATE job SET str_state = 'STARTUP' WHERE pk_job = :job", job=first.id)
    run_and_complete(engine, view, host, list(first.layers[0].frames))
    assert view.states(first.layers[1].frames) == ["DEPEND", "DEPEND"]
    assert view.job_state(first) == "STARTUP"


def test_recovery_heals_what_a_dead_cuebot_left(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    # given dependencies of each level whose targets are over, although nobody has met them yet
    first, second, _ = farm_of_two
    with view.farm() as farm:
        farm.frame_on_frame((second, 0, second.layers[0].frames[0]), (first, 0, first.layers[0].frames[0]))
        farm.layer_on_layer((second, 0), (first, 0))
        farm.job_on_job(second, first)
    view.run_sql("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_job = :job", job=first.id)
    view.run_sql("UPDATE job SET ts_started = now() - interval '2 minutes'")
    assert set(view.states(second.frames)) == {"DEPEND"}

    # when the recovery runs until it finds nothing more
    first_pass = recover_depends(engine, Release())
    second_pass = recover_depends(engine, Release())

    # then the job is finished, and everything that waited for it is bookable
    assert first_pass["finished_jobs"] == 1
    assert view.job_state(first) == "FINISHED"
    assert set(view.states(second.frames)) == {"WAITING"}
    assert first_pass["depends"] + second_pass["depends"] == 3
    assert recover_depends(engine, Release()) == {"depends": 0, "freed_frames": 0, "finished_jobs": 0}
    view.assert_consistent()


@pytest.mark.parametrize(("only_on_success", "freed"), [(True, "DEPEND"), (False, "WAITING")])
def test_recovery_takes_an_eaten_layer_for_done_only_if_the_farm_says_so(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds], only_on_success: bool, freed: str
) -> None:
    first, second, _ = farm_of_two
    with view.farm() as farm:
        farm.layer_on_layer((second, 0), (first, 0))
    view.run_sql("UPDATE frame SET str_state = 'EATEN' WHERE pk_layer = :layer", layer=first.layers[0].id)
    recover_depends(engine, Release(satisfy_only_on_frame_success=only_on_success))
    assert set(view.states(second.layers[0].frames)) == {freed}


def test_recovery_leaves_alone_what_is_still_waiting_for_something(
    engine: Engine, view: FarmView, farm_of_two: tuple[JobIds, JobIds, HostIds]
) -> None:
    first, second, host = farm_of_two
    with view.farm() as farm:
        farm.layer_on_layer((second, 0), (first, 0))
        farm.frame_by_frame((second, 1), (first, 1))
    run_and_complete(engine, view, host, [first.layers[0].frames[0]])
    assert recover_depends(engine, Release()) == {"depends": 0, "freed_frames": 0, "finished_jobs": 0}
    assert set(view.states(second.frames)) == {"DEPEND"}
