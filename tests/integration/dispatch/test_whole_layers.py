"""Planners of a divided farm, each with more idle than a plan takes: small layers go to one of them as wholes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.commit import FIRST_PLAN_FRAMES
from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.whole_layers import FEWEST_LAYERS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.placement.policy import MAX_FRAMES
from opencue_sched.settings import Queue, Rqd, Settings
from tests.kit.passes import Passes, passes

TWO = ("one", "two")
FRAMES_OF_A_LAYER = 4
LAYERS = FIRST_PLAN_FRAMES // FRAMES_OF_A_LAYER
"""As many as the first plan of a planner has whole."""


@dataclass
class Planner:
    """A worker of the farm, with the hosts of its own shard."""

    here: Passes
    instance: str

    def plan(self, *, alive: Callable[[], bool] = lambda: True) -> PassReport:
        """One pass over the only cluster."""
        self.here.sweeper.sweep()
        (cluster,) = self.here.sweeper.clusters
        return self.here.runner.run([replace(cluster, shard=self.instance)], alive=alive)[0]


@pytest.fixture
def planners(engine: Engine, settings: Settings) -> Iterator[Sequence[Planner]]:
    queue = Queue(max_jobs_per_cluster_pass=10 * LAYERS, dispatch_frames_per_layer_limit=2 * FRAMES_OF_A_LAYER)
    with ExitStack() as stack:
        found = []
        for name in TWO:
            own = settings.model_copy(
                update={"instance": name, "rqd": Rqd(dry_run_mode=True), "queue": queue},
            )
            here = stack.enter_context(passes(engine, own, name, division=TWO))
            found.append(Planner(here, name))
        yield found


def add_farm(engine: Engine, *, cores: int, layers: int = LAYERS, frames: int = FRAMES_OF_A_LAYER) -> None:
    """A farm of 40 hosts, and jobs of one layer each."""
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        farm.hosts(HostSpec(cores=cores, memory_gb=4 * cores, hostname_tag=False) for _ in range(40))
        farm.jobs([JobSpec([LayerSpec(frames=frames)], show=show) for _ in range(layers)])


def layers_tried(report: PassReport) -> set[str]:
    """The layers that a pass had a host for."""
    assert report.plan is not None
    return set(report.plan.attempts)


def running(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM proc")).scalar_one())


def test_a_planner_with_much_idle_leaves_a_layer_to_the_one_that_came_first(
    engine: Engine, planners: Sequence[Planner]
) -> None:
    # given two planners, each with more idle than a plan takes, and work for more than two plans
    one, two = planners
    add_farm(engine, cores=MAX_FRAMES // 10, layers=3 * LAYERS)
    reports = []

    def plans_meanwhile() -> bool:
        if not reports:
            reports.append(two.plan())
        return True

    # when the second plans before the first has asked for a permit of a frame
    first = one.plan(alive=plans_meanwhile)

    # then both have a full plan, and no layer was planned by both
    assert [first.frames_booked, reports[0].frames_booked] == [FIRST_PLAN_FRAMES] * 2
    assert layers_tried(first).isdisjoint(layers_tried(reports[0]))


def test_a_layer_that_a_plan_leaves_unfinished_is_planned_by_another(
    engine: Engine, planners: Sequence[Planner]
) -> None:
    # given a planner whose plan ends within the last layer, before it books
    one, two = planners
    add_farm(engine, cores=MAX_FRAMES // 10, layers=LAYERS + 1)
    left = []

    def plans_after_the_permits() -> bool:
        left.append(None)
        if len(left) == 2:
            two.plan()
        return True

    # when the other plans meanwhile
    one.plan(alive=plans_after_the_permits)

    # then nothing waits any more
    assert running(engine) == (LAYERS + 1) * FRAMES_OF_A_LAYER


def test_the_layers_of_a_plan_that_is_not_booked_are_free_for_others(
    engine: Engine, planners: Sequence[Planner]
) -> None:
    # given a planner that loses its claims when it has all permits
    one, two = planners
    add_farm(engine, cores=MAX_FRAMES // 10)
    held = iter([True])
    one.plan(alive=lambda: next(held, False))
    assert running(engine) == 0

    # when the other plans, then it has all layers
    two.plan()
    assert running(engine) == LAYERS * FRAMES_OF_A_LAYER


def test_no_layer_is_left_to_a_planner_that_died_for_longer_than_a_commit_may_take(
    engine: Engine, planners: Sequence[Planner]
) -> None:
    # given a planner that has layers, before it asked for a permit of a frame
    one, _ = planners
    add_farm(engine, cores=MAX_FRAMES // 10)
    lives: list[int] = []

    def looks_at_its_permits() -> bool:
        lives.extend(one.here.client.ttl(key) for key in one.here.client.scan_iter("cue:permit:*"))
        return False

    one.plan(alive=looks_at_its_permits)

    # then each permit of a layer ends by itself
    deadline = one.here.settings.accounting.commit_deadline
    assert len(lives) == LAYERS
    assert all(0 < seconds <= deadline for seconds in lives)


def test_frames_that_are_tried_again_are_free_for_others(engine: Engine, planners: Sequence[Planner]) -> None:
    # given a planner that has booked whole layers
    one, two = planners
    add_farm(engine, cores=MAX_FRAMES // 10)
    assert one.plan().frames_booked == LAYERS * FRAMES_OF_A_LAYER

    # when their frames wait once more
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc"))
        connection.execute(text("UPDATE frame SET str_state = 'WAITING', int_version = int_version + 1"))
        connection.execute(
            text("UPDATE layer_stat SET int_waiting_count = :frames, int_running_count = 0"),
            {"frames": FRAMES_OF_A_LAYER},
        )

    # then another planner has them
    assert two.plan().frames_booked == LAYERS * FRAMES_OF_A_LAYER


def test_few_layers_are_planned_by_all(engine: Engine, planners: Sequence[Planner]) -> None:
    # given two planners with much idle, and a few small layers
    one, two = planners
    add_farm(engine, cores=MAX_FRAMES // 10, layers=FEWEST_LAYERS - 1)
    reports = []

    def plans_meanwhile() -> bool:
        if not reports:
            reports.append(two.plan())
        return True

    # when both plan at the same time, then they share layers, and all is booked
    first = one.plan(alive=plans_meanwhile)
    assert layers_tried(first) & layers_tried(reports[0])
    assert running(engine) == (FEWEST_LAYERS - 1) * FRAMES_OF_A_LAYER


def test_planners_with_little_idle_serve_one_layer_side_by_side(engine: Engine, planners: Sequence[Planner]) -> None:
    # given two planners with a few cores each, and a small layer at the head of the order
    one, two = planners
    add_farm(engine, cores=1, layers=1, frames=2 * FRAMES_OF_A_LAYER)
    reports = []

    def plans_meanwhile() -> bool:
        if not reports:
            reports.append(two.plan())
        return True

    # when both plan at the same time, then both look at it
    first = one.plan(alive=plans_meanwhile)
    assert layers_tried(first) == layers_tried(reports[0]) != set()
