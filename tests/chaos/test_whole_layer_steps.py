"""A pass that has layers to itself, killed after each single thing it does before it books, and who plans them then.

Two planners divide a farm. Each has more idle than one plan takes, so they ask for small layers as wholes
(dispatch/whole_layers.py). One dies, in a process of its own (see stepped_pass.py); the other plans beside that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from sqlalchemy import text

from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.coordination.postings import encode_cluster
from opencue_sched.dispatch.commit import FIRST_PLAN_FRAMES
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.placement.backlog import PORTION_SECONDS
from opencue_sched.placement.policy import MAX_FRAMES
from opencue_sched.settings import Queue, Rqd
from tests.chaos.forker import Forker, forker
from tests.chaos.wire import SCRIPTS
from tests.kit.passes import Passes, passes

DIVISION = DIED, OTHER = "died", "other"
FRAMES_OF_A_LAYER = 4
LAYERS = 2 * FIRST_PLAN_FRAMES // FRAMES_OF_A_LAYER
"""As many as two plans have. The first plan of a process has FIRST_PLAN_FRAMES."""
HOSTS = 40
TAKE, BOOK = "permits_take", "book"
QUEUE = {"max_jobs_per_cluster_pass": 2 * LAYERS, "dispatch_frames_per_layer_limit": 2 * FRAMES_OF_A_LAYER}
PATIENT = {"commit_deadline": 100.0}
"""No machine stands still for so long: what ends meanwhile, a test has ended."""


@dataclass
class Scene:
    """A show of its own with LAYERS jobs of one small layer each, and hosts for far more than these."""

    cluster: Cluster
    frames: dict[str, str]
    """The layer of each frame, by ids."""


@dataclass
class Stage:
    """The farm with the planner that goes on, and who forks the passes that die."""

    other: Passes
    passes_that_die: Forker
    passed: float = 0.0
    """Seconds by which the backlog's clock of the other planner is ahead."""
    scenes: int = 0

    def scene(self) -> Scene:
        """The next scene: none of its frames was planned before."""
        number, self.scenes = self.scenes, self.scenes + 1
        with self.other.engine.begin() as connection:
            farm = Farm(connection)
            show, alloc = farm.show(f"s{number}"), farm.alloc(f"t{number}")
            farm.subscription(show, alloc, size=HOSTS * MAX_FRAMES)
            cores = 10 * MAX_FRAMES // HOSTS
            specs = {"alloc": alloc, "cores": cores, "memory_gb": 4 * cores, "hostname_tag": False}
            farm.hosts(HostSpec(name=f"h{number}-{host}", **specs) for host in range(HOSTS))
            layers = [LayerSpec(frames=FRAMES_OF_A_LAYER, tags=alloc.tag)]
            jobs = farm.jobs([JobSpec(layers, show=show) for _ in range(LAYERS)])
            cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, (alloc.tag,), alloc.id)
        return Scene(cluster, {frame: job.layers[0].id for job in jobs for frame in job.frames})

    def dies(self, scene: Scene, after: int) -> list[str]:
        """What a pass had done when it died after so many things; with 0 it goes to its end."""
        cluster = encode_cluster(replace(scene.cluster, shard=DIED))
        answer = self.passes_that_die.forks(cluster=cluster, die_after=after, launch_last=False, division=DIVISION)
        assert answer["status"] == (-9 if after else 0), answer
        return list(answer["done"])

    def other_plans(self, scene: Scene) -> PassReport:
        """Passes of the other planner until one books nothing; what this one reports."""
        while True:
            (report,) = self.other.run([replace(scene.cluster, shard=OTHER)])
            if not report.frames_booked:
                return report

    def permits(self) -> dict[str, int]:
        """How many seconds each permit still lives, by the id of its frame or layer."""
        return {key.split(":")[2]: self.other.client.ttl(key) for key in self.other.client.scan_iter("cue:permit:*")}

    def permits_run_out(self) -> None:
        """As if the permits had been there for as long as they live."""
        self.passed += PORTION_SECONDS + 1
        for key in self.other.client.scan_iter("cue:permit:*"):
            self.other.client.delete(key)

    def running(self, scene: Scene) -> list[str]:
        """The frame of each proc."""
        with self.other.engine.connect() as connection:
            query = text("SELECT pk_frame FROM proc WHERE pk_show = :show ORDER BY pk_frame")
            return list(connection.execute(query, {"show": scene.cluster.show_id}).scalars())


@pytest.fixture
def stage(engine, settings, database_url, redis_server, redis_client) -> Iterator[Stage]:
    stages: list[Stage] = []
    for name in SCRIPTS.values():
        redis_client.script_load(load_script(name).text)
    ours = {"queue": {**QUEUE, "priority_draw": 0}, "accounting": PATIENT, "rqd": {"dry_run_mode": True}}
    environment = {
        "OPENCUE_SCHED_DATABASE_URL": database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        **{
            f"OPENCUE_SCHED_{part.upper()}__{name.upper()}": json.dumps(value)
            for part, fields in ours.items()
            for name, value in fields.items()
        },
    }
    patient = settings.model_copy(
        update={
            "queue": Queue(**ours["queue"]),
            "accounting": settings.accounting.model_copy(update=PATIENT),
            "rqd": Rqd(dry_run_mode=True),
        }
    )
    with (
        forker("stepped_pass", environment) as passes_that_die,
        passes(
            engine,
            patient,
            OTHER,
            division=DIVISION,
            clock=lambda: time.monotonic() + sum(stage.passed for stage in stages),
        ) as other,
    ):
        stages.append(Stage(other, passes_that_die))
        yield stages[0]


def test_small_layers_of_a_pass_that_dies_are_left_to_it_until_their_permits_end_and_then_booked_by_another(stage):
    # given what a pass does before it books: it takes the permits of layers, then those of frames
    whole = stage.scene()
    done = stage.dies(whole, 0)
    before = done[: done.index(BOOK)]
    assert before.count(TAKE) == 2
    stage.permits_run_out()
    for after in range(before.index(TAKE) + 1, len(before) + 1):
        # when one dies after each of these things
        scene = stage.scene()
        assert stage.dies(scene, after) == before[:after], "each pass does the same"
        # then it leaves permits that end by themselves
        permits, deadline = stage.permits(), stage.other.settings.accounting.commit_deadline
        left = {frame for frame, layer in scene.frames.items() if frame in permits or layer in permits}
        assert len(left) >= FIRST_PLAN_FRAMES
        assert all(0 < seconds <= deadline for seconds in permits.values()), "no permit is there for long"
        # and the other planner has all but what was left, and comes back for that by itself
        report = stage.other_plans(scene)
        assert stage.running(scene) == sorted(scene.frames.keys() - left)
        assert report.look_again
        # and once the permits have ended it has that too, each frame once
        stage.permits_run_out()
        stage.other_plans(scene)
        assert stage.running(scene) == sorted(scene.frames)
    report = run_audit(stage.other.engine, stage.other.client, stage.other.settings)
    assert not report.failed, "\n".join(report.lines())
