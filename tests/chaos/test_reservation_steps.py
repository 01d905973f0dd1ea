"""The reservation task, killed after each single thing it does, and what others find then.

A wide layer is due for a host, another has one that is to be renewed, and no layer needs a third reservation any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from sqlalchemy import Engine

from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.chaos.forker import Forker, forker
from tests.chaos.stepped_pass import COMMIT
from tests.chaos.wire import SCRIPTS
from tests.kit.passes import Passes, passes
from tests.kit.polling import eventually
from tests.kit.wide_farm import WideFarm

HOSTS = 8


@dataclass
class Stage:
    farm: WideFarm
    worker: Passes
    tasks_that_die: Forker
    renewed: str
    cluster: Cluster

    def set_up(self) -> None:
        """As it was before the task, with nothing running on the first host, and every host heard of just now."""
        farm = self.farm
        farm.execute("UPDATE host_stat SET ts_ping = now()")
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
        """What a task had done when it died after so many things; one that has fewer to do goes to its end, as does
        each with 0."""
        answer = self.tasks_that_die.forks(die_after=after)
        done = list(answer["done"])
        died = len(done) == after
        assert answer["status"] == (-9 if died else 0), answer
        return done

    def reservations(self) -> dict[str, str]:
        return {host: row.pk_layer for host, row in self.farm.reservations().items()}


@pytest.fixture
def stage(engine: Engine, settings: Settings, database_url, redis_server, redis_client) -> Iterator[Stage]:
    for name in SCRIPTS.values():
        redis_client.script_load(load_script(name).text)
    farm = WideFarm.made(engine, settings, hosts=HOSTS)
    with engine.begin() as connection:
        made = Farm(connection)
        renewed = made.job([LayerSpec(frames=1, cores=14, name="renewed")], name="renewed").layers[0].id
    (at,) = farm.rows("SELECT pk_show, pk_facility FROM job WHERE pk_job = :job", job=farm.job)
    (alloc,) = farm.rows("SELECT pk_alloc FROM host WHERE pk_host = :host", host=farm.hosts[0])
    cluster = Cluster(at.pk_facility, at.pk_show, ClusterKind.ALLOC, ("general",), alloc.pk_alloc)
    environment = {
        "OPENCUE_SCHED_DATABASE_URL": database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    }
    ours = settings.model_copy(update={"rqd": settings.rqd.model_copy(update={"dry_run_mode": True})})
    with (
        forker("stepped_task", environment) as tasks_that_die,
        passes(engine, ours) as worker,
    ):
        yield Stage(farm, worker, tasks_that_die, renewed, cluster)


def test_hosts_are_reserved_all_or_none_and_respected_wherever_the_task_dies(stage: Stage) -> None:
    farm = stage.farm
    stage.set_up()
    before = stage.reservations()
    done = stage.dies(0)
    after = stage.reservations()
    assert done.count(COMMIT) == 1
    # Given what a whole task does: one reservation ended, one renewed, one granted.
    (granted,) = after.keys() - before.keys()
    assert before.keys() - after.keys() == {farm.hosts[-2]}
    assert after[granted] == farm.wide
    assert after[farm.hosts[-1]] == stage.renewed

    for step in count(1):
        # when it dies after a step, until one has come to its end (not each asks the stores as often as another),
        stage.set_up()
        did = stage.dies(step)
        if len(did) < step:
            assert did.count(COMMIT) == 1
            break
        assert len(did) == step
        # then either all of it is done or nothing,
        left = stage.reservations()
        assert left == (after if COMMIT in did else before), did
        # others can run the task as soon as the server has noticed, and it becomes what it would have been,
        assert eventually(lambda: farm.keep().kept)
        assert stage.reservations() == after, did


def test_what_a_dead_task_granted_is_respected_by_workers_that_nobody_told(stage: Stage) -> None:
    farm = stage.farm
    stage.set_up()
    done = stage.dies(0)
    stage.set_up()
    # Given a worker that has read the hosts, and a task that dies right after its COMMIT, before it could tell
    stage.worker.runner.run([stage.cluster], alive=lambda: True)
    before = stage.reservations()
    stage.dies(done.index(COMMIT) + 1)
    (granted,) = stage.reservations().keys() - before.keys()
    # when some frame of the reserved host ends, and the worker plans it with what the narrow layer needs,
    (ended,) = farm.rows("SELECT pk_proc, pk_frame FROM proc WHERE pk_host = :host LIMIT 1", host=granted)
    farm.execute("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame = :frame", frame=ended.pk_frame)
    farm.execute("DELETE FROM proc WHERE pk_proc = :proc", proc=ended.pk_proc)
    farm.execute(
        "UPDATE host SET int_cores_idle = 400, int_mem_idle = int_mem_idle + 1048576 WHERE pk_host = :host",
        host=granted,
    )
    stage.worker.runner.hosts.note({granted})
    for _ in range(3):
        stage.worker.runner.run([stage.cluster], alive=lambda: True)
    # then it is not booked,
    assert farm.rows("SELECT int_cores_idle FROM host WHERE pk_host = :host", host=granted)[0].int_cores_idle == 400
    # and the owner has it once it has drained.
    farm.drained(granted)
    stage.worker.runner.hosts.note({granted})
    for _ in range(3):
        stage.worker.runner.run([stage.cluster], alive=lambda: True)
    running = farm.rows("SELECT pk_layer FROM proc WHERE pk_host = :host ORDER BY ts_booked", host=granted)
    assert running[0].pk_layer == farm.wide
    assert granted not in stage.reservations()
