"""Whatever gives work room wakes its clusters, however long they would have slept: a cap that is raised, a host that is
unlocked, comes up or has more hardware than it had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.kit.listening import eventually_listen
from tests.kit.polling import eventually
from tests.kit.tasks import run_task

RECENT = 20.0


@pytest.fixture
def process(settings: Settings, engine: Engine, redis_client: redis.Redis) -> Iterator[Process]:
    """A worker that listens. Its clusters sleep for longer than any test waits."""
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    with engine.begin() as connection:
        Farm(connection).default_show()
    app = Celery("raised", broker="memory://", set_as_current=False)
    changed = settings.model_copy(
        update={
            "queue": settings.queue.model_copy(update={"cluster_saturated_sleep": 600}),
            "rqd": Rqd(dry_run_mode=True),
        }
    )
    made = Process(changed, app)
    made.listen()
    eventually_listen(engine)
    yield made
    made.close()
    app.close()


def known(process: Process) -> None:
    """Nobody waits until every Cuebot knows whose the shows are, as on a Cuebot's schema."""
    with process.engine.begin() as connection:
        note_imported(process.client, managed_show_versions(connection))


@pytest.mark.parametrize(
    "raised",
    [
        "UPDATE subscription SET int_burst = 800",
        "UPDATE folder_resource SET int_max_cores = 800 WHERE int_max_cores > 0",
        "UPDATE job_resource SET int_max_cores = 800 WHERE int_max_cores > 0",
        "UPDATE limit_record SET int_max_value = 8",
    ],
)
def test_a_cap_that_is_raised_wakes_the_clusters_of_its_work(process: Process, engine: Engine, raised: str) -> None:
    # given a job of which that cap lets no more than one frame run
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show(), farm.default_alloc()
        farm.subscription(show, alloc, size=1 if "subscription" in raised else 100)
        folder = farm.folder(show, "shots", max_cores=1 if "folder" in raised else -1)
        limits = [farm.limit("nuke", 1)] if "limit" in raised else []
        farm.host(hostname_tag=False)
        job = farm.job(
            [LayerSpec(frames=3, limits=limits)],
            show=show,
            folder_id=folder,
            max_cores=1 if "job_resource" in raised else -1,
        )
    known(process)
    process.sweep(wake_shows=[show.id])
    (cluster,) = (it for it in process.sweeper.clusters if it.show_id == show.id)
    posting = eventually(lambda: process.postings.posted().get(cluster.key), RECENT, "a posting")

    def ended() -> object:
        return run_task(dispatch.dispatch_cluster, process, posting)["ended"]

    eventually(lambda: ended() == "booked", RECENT, "a first frame")
    eventually(lambda: ended() == "dropped", RECENT, "a cluster at rest")

    # when somebody raises it
    with engine.begin() as connection:
        connection.execute(text(raised))

    # then the rest of it is booked
    eventually(lambda: ended() == "booked", RECENT, "a cluster that is awake")
    with engine.connect() as connection:
        procs = connection.execute(text("SELECT count(*) FROM proc WHERE pk_job = :job"), {"job": job.id})
        assert procs.scalar_one() == 3


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE host SET str_lock_state = 'OPEN' WHERE str_lock_state = 'LOCKED'",
        "UPDATE host_stat SET str_state = 'UP' WHERE str_state = 'REPAIR'",
        "UPDATE host SET int_cores = 800, int_cores_idle = 800",
    ],
)
def test_a_host_that_may_take_frames_now_wakes_the_clusters_that_can_use_it(
    process: Process, engine: Engine, change: str
) -> None:
    # given work for which the only host has no core, or that may take none
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(
            lock="LOCKED" if "lock_state" in change else "OPEN",
            state="REPAIR" if "host_stat" in change else "UP",
            cores=2 if "int_cores" in change else 8,
            hostname_tag=False,
        )
        # another one is too small, so that the cluster exists as it does on a farm at work
        farm.host(cores=1, hostname_tag=False)
        show = farm.job([LayerSpec(frames=1, cores=4)], show=farm.default_show()).show
    known(process)
    process.sweep(wake_shows=[show.id])
    (cluster,) = (it for it in process.sweeper.clusters if it.show_id == show.id)
    posting = eventually(lambda: process.postings.posted().get(cluster.key), RECENT, "a posting")

    def ended() -> object:
        return run_task(dispatch.dispatch_cluster, process, posting)["ended"]

    eventually(lambda: ended() == "saturated", RECENT, "a cluster without a host")
    eventually(lambda: ended() == "dropped", RECENT, "a cluster at rest")

    # when that changes, whoever does it
    with engine.begin() as connection:
        connection.execute(text(change))

    # then the work is booked
    eventually(lambda: ended() == "booked", RECENT, "a cluster that is awake")


def test_work_for_a_tag_that_no_host_had_gets_the_new_host_that_has_it(process: Process, engine: Engine) -> None:
    # given work that waits for such a tag, in no cluster, and clusters that nobody sweeps by the clock
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        farm.host(cores=1, lock="LOCKED", hostname_tag=False)
        job = farm.job([LayerSpec(frames=1, tags="fast")], show=show)
    known(process)
    assert process.sweep(wake_shows=[show.id]).active == 0

    # when a host with the tag comes, whoever inserts it
    with engine.begin() as connection:
        Farm(connection).host(name="new", cores=1, tags=["fast"], hostname_tag=False)

    # then it renders that work
    def jobs_that_run() -> list[str]:
        for posting in process.postings.posted().values():
            run_task(dispatch.dispatch_cluster, process, posting)
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT pk_job FROM proc")).scalars())

    assert eventually(jobs_that_run, RECENT, "a frame on the new host") == [job.id]
