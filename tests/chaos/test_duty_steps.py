"""The duty that grants holds, killed after each single thing it does, and what others find then.

A wide layer is due for a host, another has one that is to be renewed, and a third hold has nobody behind it any more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine

from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.lua_scripts import load_script
from opencue_sched.settings import Settings
from tests.chaos.stepped_pass import COMMIT
from tests.chaos.wire import SCRIPTS
from tests.integration.dispatch.passes import Passes, passes
from tests.integration.dispatch.promised import WideFarm
from tests.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
HOSTS = 8


@dataclass
class Stage:
    farm: WideFarm
    worker: Passes
    forker: subprocess.Popen[str]
    renewed: str
    cluster: Cluster

    def set_up(self) -> None:
        """As it was before the duty, with nothing running on the first host."""
        farm = self.farm
        farm.execute("DELETE FROM opencue_sched_hold")
        farm.execute("DELETE FROM opencue_sched_blocked")
        farm.blocked(300)
        farm.execute(
            """
            INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, until)
            SELECT wanted.host, wanted.layer, wanted.layer, 12, 0, 0, clock_timestamp() + interval '1 minute'
            FROM (VALUES (:kept, :renewed), (:ended, :nobodys)) AS wanted(host, layer)
            """,
            kept=farm.hosts[-1],
            renewed=self.renewed,
            ended=farm.hosts[-2],
            nobodys=farm.narrow,
        )
        farm.execute(
            "UPDATE opencue_sched_hold hold SET pk_job = layer.pk_job FROM layer WHERE layer.pk_layer = hold.pk_layer"
        )

    def dies(self, after: int) -> list[str]:
        print(json.dumps({"die_after": after}), file=self.forker.stdin, flush=True)
        assert self.forker.stdout is not None
        answer = json.loads(self.forker.stdout.readline())
        assert answer["status"] == (-9 if after else 0), answer
        return list(answer["done"])

    def holds(self) -> dict[str, str]:
        return {host: row.pk_layer for host, row in self.farm.holds().items()}


@pytest.fixture
def stage(engine: Engine, settings: Settings, database_url, redis_server, redis_client) -> Iterator[Stage]:
    for name in SCRIPTS.values():
        redis_client.script_load(load_script(name).text)
    farm = WideFarm.made(engine, settings, hosts=HOSTS)
    with engine.begin() as connection:
        made = Farm(connection)
        renewed = made.job([LayerSpec(frames=1, cores=14, name="renewed")], name="renewed").layers[0].id
        show, alloc = made.default_show().id, made.default_alloc().id
        cluster = Cluster(made.facility(), show, ClusterKind.ALLOC, ("general",), alloc)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OPENCUE_SCHED_")}
    environment = {
        **inherited,
        "OPENCUE_SCHED_DATABASE_URL": database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    }
    command = [sys.executable, "-m", "tests.chaos.stepped_duty"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ours = settings.model_copy(update={"rqd": settings.rqd.model_copy(update={"dry_run_mode": True})})
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as forker,
        passes(engine, ours) as worker,
    ):
        yield Stage(farm, worker, forker, renewed, cluster)


def test_holds_are_granted_whole_or_not_at_all_and_kept_by_everybody_wherever_the_duty_dies(stage: Stage) -> None:
    farm = stage.farm
    stage.set_up()
    before = stage.holds()
    done = stage.dies(0)
    after = stage.holds()
    assert done.count(COMMIT) == 1
    # Given what a whole duty does: one hold ended, one renewed, one granted.
    (granted,) = after.keys() - before.keys()
    assert before.keys() - after.keys() == {farm.hosts[-2]}
    assert after[granted] == farm.wide
    assert after[farm.hosts[-1]] == stage.renewed

    for step in range(1, len(done) + 1):
        # when it dies after a step
        stage.set_up()
        did = stage.dies(step)
        assert len(did) == step
        # then either all of that holds or nothing,
        left = stage.holds()
        assert left == (after if COMMIT in did else before), did
        # others can keep the promises as soon as the server has noticed, and it becomes what it would have been,
        assert eventually(lambda: farm.keep().kept)
        assert stage.holds() == after, did
