"""A frame that died for want of memory asks for more by itself; its layer does once several of its frames did."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from opencue_sched.domain.states import FrameState
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import RunVerdict
from opencue_sched.store.frame_memory import largest_hosts
from opencue_sched.store.procs import lock_and_read_runs
from tests.kit.examples import examples
from tests.kit.runs import FarmView, Running, complete_frame, start
from tests.kit.statements import rows_handled

GB = 1024 * 1024
OUT_OF_MEMORY = {"exit_status": 33, "max_rss_kb": 2 * GB}


def own_memory(view: FarmView) -> dict[str, int]:
    return {row.pk_frame: row.memory_kb for row in view.rows("SELECT * FROM opencue_sched_frame_memory")}


def layer_memory(view: FarmView) -> int:
    return int(view.one("SELECT int_mem_min FROM layer").int_mem_min)


def run_again(view: FarmView, run: Running, index: int, memory_gb: float) -> None:
    """Start the frame once more, with so much memory."""
    with view.farm() as farm:
        (proc,) = farm.run([run.frames[index]], run.host, cores=2, memory_gb=memory_gb)
    run.procs = (*run.procs[:index], proc, *run.procs[index + 1 :])


@pytest.mark.parametrize("ending", [{"exit_status": 33}, {"exit_status": 137}, {"exit_status": 1, "exit_signal": 33}])
def test_a_frame_that_died_for_want_of_memory_asks_for_more_by_itself(
    engine: Engine, view: FarmView, ending: dict[str, int]
) -> None:
    # given three running frames of 2 GB, one of which dies for want of memory
    run = start(view, LayerSpec(frames=4, memory_gb=2), running=3)
    complete_frame(engine, run.report(0, **ending))

    # then that frame asks for 2 GB more, as its service says nothing, and its layer for what it did
    assert own_memory(view) == {run.frames[0]: 4 * GB}
    assert layer_memory(view) == 2 * GB
    assert view.one("SELECT b_optimize FROM layer").b_optimize

    # when it dies again, with what it asked for, then it asks for more than that
    run_again(view, run, 0, 4)
    complete_frame(engine, run.report(0, **ending))
    assert own_memory(view) == {run.frames[0]: 6 * GB}
    assert layer_memory(view) == 2 * GB


def test_a_frame_that_failed_otherwise_asks_for_what_it_did(engine: Engine, view: FarmView) -> None:
    run = start(view, LayerSpec(frames=2, memory_gb=2), running=2)
    complete_frame(engine, run.report(0, exit_status=1))
    complete_frame(engine, run.report(1, exit_status=0))
    assert own_memory(view) == {}


def test_the_third_frame_that_needed_more_raises_the_layer(engine: Engine, view: FarmView) -> None:
    # given a frame that already asks for 8 GB, and one for 4
    run = start(view, LayerSpec(frames=6, memory_gb=2), running=5)
    complete_frame(engine, run.report(0, **OUT_OF_MEMORY))
    run_again(view, run, 0, 6)
    complete_frame(engine, run.report(0, **OUT_OF_MEMORY))
    complete_frame(engine, run.report(1, **OUT_OF_MEMORY))
    assert own_memory(view) == {run.frames[0]: 8 * GB, run.frames[1]: 4 * GB}
    assert layer_memory(view) == 2 * GB

    # when a third one dies for want of memory, then the layer asks for what three of its frames need, not for the most
    complete_frame(engine, run.report(2, **OUT_OF_MEMORY))
    assert layer_memory(view) == 4 * GB
    assert not view.one("SELECT b_optimize FROM layer").b_optimize


def test_three_in_one_transaction_raise_the_layer_too(engine: Engine, view: FarmView) -> None:
    run = start(view, LayerSpec(frames=4, memory_gb=2), running=4)
    answers = Releaser(engine).end([run.report(index, **OUT_OF_MEMORY) for index in range(3)])
    assert {answer.verdict for answer in answers} == {RunVerdict.APPLIED}
    assert layer_memory(view) == 4 * GB


@pytest.mark.parametrize("off", ["the setting", "no show of ours"])
def test_otherwise_the_first_one_raises_the_layer(engine: Engine, view: FarmView, off: str) -> None:
    # given a fleet that is told to raise layers, or a show that somebody else books
    run = start(view, LayerSpec(frames=4, memory_gb=2))
    if off == "no show of ours":
        view.run_sql("UPDATE show SET b_scheduler_managed = false")
    complete_frame(engine, run.report(0, **OUT_OF_MEMORY), frame_memory=off != "the setting")
    assert layer_memory(view) == 4 * GB


def test_a_frame_never_asks_for_more_than_the_largest_host_it_may_use_has(engine: Engine, view: FarmView) -> None:
    # given a frame that had 63 of the 64 GB of the largest host of its show, beside a larger one of another allocation
    run = start(view, LayerSpec(frames=2, memory_gb=2), memory_gb=63)
    with view.farm() as farm:
        farm.host(name="larger", cores=16, memory_gb=512, alloc=farm.alloc("elsewhere"), tags=["general"])
    complete_frame(engine, run.report(0, **OUT_OF_MEMORY))
    largest = view.host(run.host).int_mem
    assert own_memory(view) == {run.frames[0]: largest}


@pytest.mark.parametrize(
    ("max_retries", "memory_gb", "state"),
    [(0, 64, FrameState.DEAD), (3, 64, FrameState.WAITING), (0, 63, FrameState.WAITING)],
)
def test_a_frame_that_had_all_there_is_may_use_up_its_retries(
    engine: Engine, view: FarmView, max_retries: int, memory_gb: int, state: FrameState
) -> None:
    # given a frame that died for want of memory with all, or not all, the memory of the largest host
    run = start(view, LayerSpec(frames=2, memory_gb=2), memory_gb=memory_gb, max_retries=max_retries)
    assert complete_frame(engine, run.report(0, **OUT_OF_MEMORY)).state is state
    view.assert_consistent()


def test_what_frames_asked_for_is_forgotten_with_their_job(engine: Engine, view: FarmView) -> None:
    # given a job with a frame that asks for more, beside another such job
    run = start(view, LayerSpec(frames=1, memory_gb=2))
    with view.farm() as farm:
        job = farm.job([LayerSpec(frames=2, memory_gb=2)], show=run.job.show, name="other")
        procs = farm.run(job.frames[:1], run.host, cores=2, memory_gb=2)
    other = Running(job, run.host, job.frames[:1], tuple(procs))
    Releaser(engine).end([run.report(0, **OUT_OF_MEMORY), other.report(0, **OUT_OF_MEMORY)])

    # when the job finishes
    run_again(view, run, 0, 4)
    complete_frame(engine, run.report(0))
    assert view.job_state(run.job) == "FINISHED"
    assert own_memory(view) == {other.frames[0]: 4 * GB}


def test_whatever_dies_nothing_asks_for_more_than_a_host_has_and_no_layer_for_what_few_frames_needed(
    engine: Engine, view: FarmView
) -> None:
    run = start(view, LayerSpec(frames=6, memory_gb=2), running=5, max_retries=99)
    largest = view.host(run.host).int_mem
    for index in range(5):
        complete_frame(engine, run.report(index, exit_status=1))

    @settings(max_examples=examples(25), deadline=None)
    @given(ends=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64)), max_size=8))
    def whatever_dies(ends: list[tuple[int, int]]) -> None:
        # given frames that die for want of memory in some order, with so much of it each time
        view.run_sql("DELETE FROM opencue_sched_frame_memory")
        view.run_sql("UPDATE layer SET int_mem_min = :memory", memory=2 * GB)
        for index, memory_gb in ends:
            run_again(view, run, index, memory_gb)
            complete_frame(engine, run.report(index, **OUT_OF_MEMORY))

        # then no frame asks for more than the host has, and the layer for no more than three of them
        asked = sorted(own_memory(view).values(), reverse=True)
        assert len(asked) == len({index for index, _ in ends})
        assert all(memory <= largest for memory in asked)
        assert layer_memory(view) == (asked[2] if len(asked) >= 3 else 2 * GB)

    whatever_dies()


def test_what_the_largest_host_costs_grows_with_the_hosts(engine: Engine) -> None:
    rows = []
    with engine.connect() as connection:
        # Given a layer, on a farm of three hundred hosts and then of six hundred, which PostgreSQL knows
        farm = Farm(connection)
        layers = [farm.job().layers[0].id]
        for _ in range(2):
            farm.hosts([HostSpec()] * 300)
            connection.execute(text("ANALYZE"))
            # When a transaction that ends runs looks for the largest
            lock_and_read_runs(connection, [("gone", "gone")])
            with rows_handled(connection, of="") as handled:
                assert len(largest_hosts(connection, layers)) == 1
            (of_the_largest,) = handled
            rows.append(of_the_largest)
    # Then it handles no more than twice as many rows for twice as many hosts
    first, second = rows
    assert 300 < first < second < 2.5 * first
