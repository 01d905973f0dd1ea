"""After PostgreSQL was away nobody heard what happened meanwhile."""

from __future__ import annotations

from contextlib import closing

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.coordination.postings import Claim
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Accounting, Events, Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.kit.listening import eventually_listen, nobody_hears
from tests.kit.polling import eventually
from tests.kit.tasks import run_task

RECENT = 20.0
_END_LISTENERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
    AND application_name = 'opencue-sched-listener'
    """


def test_who_lost_its_connection_wakes_every_managed_show(
    settings: Settings, engine: Engine, redis_client: redis.Redis
) -> None:
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        another = farm.show("another", managed=True)
        farm.subscription(another, farm.default_alloc(), size=10)
        for show in (farm.default_show(), another):
            farm.job([LayerSpec(frames=1)], show=show, name=f"{show.name}-job")
    app = Celery("missed", broker="memory://", set_as_current=False)
    with closing(app), closing(Process(settings, app)) as worker:
        worker.listen()
        eventually_listen(engine, 1)
        # given clusters of two shows that sleep
        postings = [enqueued.uuid for _, enqueued in worker.sweep().send]
        for posting in postings:
            claim = eventually(lambda posting=posting: claimed(worker, posting))
            worker.postings.end(claim, "sleep", delay_seconds=600)
        # when the connection is lost
        with engine.begin() as connection:
            connection.execute(text(_END_LISTENERS))
        # then both are awake
        assert len(postings) == 2
        for posting in postings:
            eventually(lambda posting=posting: claimed(worker, posting), RECENT, "a show of those who heard nothing")


def claimed(worker: Process, posting: str) -> Claim | None:
    claim = worker.postings.claim(posting, "somebody", ttl_seconds=60)
    return claim if isinstance(claim, Claim) else None


def test_what_happened_while_nobody_heard_is_read_again_at_once(
    settings: Settings, engine: Engine, redis_client: redis.Redis
) -> None:
    # given a worker that knows of a run, of the host it fills and of the burst it counts under
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.default_show(), farm.default_alloc()
        host = farm.host(cores=4, alloc=alloc)
        farm.run(farm.job([LayerSpec(frames=1, cores=4)]).frames[:1], host, cores=4)
    app = Celery("missed", broker="memory://", set_as_current=False)
    short = settings.model_copy(update={"accounting": Accounting(commit_deadline=0.025)})
    with closing(app), closing(Process(short, app)) as worker, engine.connect() as connection:
        beside = connection.execution_options(isolation_level="AUTOCOMMIT")
        worker.bootstrap()
        worker.listen()
        eventually_listen(engine, 1)
        cluster = Cluster(alloc.facility_id, show.id, ClusterKind.ALLOC, ("general",), alloc.id)
        worker.hosts.refresh(cluster)
        assert worker.hosts.cache.idle_cores([cluster]) == 0
        assert redis_client.hlen(keys.LEDGER) == 1

        # when the run is released, and the burst changed, while nobody hears of it
        with nobody_hears(beside):
            beside.execute(text("DELETE FROM proc"))
            beside.execute(text("UPDATE host SET int_cores_idle = int_cores"))
            beside.execute(text("UPDATE subscription SET int_burst = 700"))

        # then the worker finds out by itself, long before the next recompute
        subscription = keys.subscription(show.id, alloc.id)
        eventually(lambda: redis_client.hlen(keys.LEDGER) == 0, RECENT, "the release")
        eventually(lambda: redis_client.hget(subscription, "burst") == "7", RECENT, "the burst")
        assert redis_client.hget(subscription, "int_cores") == "0"

        def idle_seen() -> bool:
            worker.hosts.refresh(cluster)
            return worker.hosts.cache.idle_cores([cluster]) == 4

        eventually(idle_seen, RECENT, "the host's idle cores")


@pytest.mark.without_cuebot("it mails what becomes of its jobs itself, and no receiver of events is noted")
def test_a_database_that_knows_of_no_receiver_is_told_of_it(settings: Settings, engine: Engine) -> None:
    """As one that was restored from before there was one: until then no event is written, and beat has none sent."""
    told = settings.model_copy(update={"events": Events(command=("true",))})
    app = Celery("missed", broker="memory://", set_as_current=False)
    with closing(app), closing(Process(told, app)) as worker, engine.connect() as connection:
        beside = connection.execution_options(isolation_level="AUTOCOMMIT")
        worker.bootstrap()
        worker.listen()
        eventually_listen(engine, 1)
        assert beside.execute(text("SELECT FROM opencue_sched_receiver")).all() == []
        beside.execute(text(_END_LISTENERS))
        eventually(lambda: beside.execute(text("SELECT FROM opencue_sched_receiver")).all(), RECENT, "a receiver")


LAYERS, OF_A_JOB = 2_000, 100


def test_dispatch_goes_on_when_postgresql_is_back(
    settings: Settings, engine: Engine, redis_client: redis.Redis
) -> None:
    # given a worker that knows of 2,000 layers, and a full farm
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.default_show(), farm.default_alloc()
        farm.host(cores=4, memory_gb=64, hostname_tag=False)
        layers = [LayerSpec(frames=1, name=f"layer{number}") for number in range(OF_A_JOB)]
        farm.jobs(JobSpec(layers, show=show, os=None) for _ in range(LAYERS // OF_A_JOB))
        note_imported(redis_client, managed_show_versions(connection))
    cluster = Cluster(alloc.facility_id, show.id, ClusterKind.ALLOC, ("general",), alloc.id)
    app = Celery("restarted", broker="memory://", set_as_current=False)
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    with closing(app), closing(Process(dry, app)) as worker, engine.connect() as connection:
        beside = connection.execution_options(isolation_level="AUTOCOMMIT")
        worker.listen()
        eventually_listen(engine, 1)
        worker.sweep(wake_shows=[show.id])
        posting = worker.postings.posted()[cluster.key]

        def books() -> bool:
            run_task(dispatch.dispatch_cluster, worker, posting)
            return bool(beside.execute(text("SELECT count(*) FROM proc")).scalar())

        eventually(books, RECENT, "a booking")
        # when the database was away, and all frames ended meanwhile, then others are booked
        with nobody_hears(beside):
            beside.execute(text("DELETE FROM proc"))
            beside.execute(text("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem"))
        eventually(books, RECENT, "a booking")
