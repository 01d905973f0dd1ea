"""A worker that hears no notification looks for what changed in its backlog more often, and says that it is deaf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.coordination.change_log import BacklogChanges
from opencue_sched.coordination.presence import list_members
from opencue_sched.dispatch.backlog_feed import DEAF_RESYNC_SECONDS, RESYNC_SECONDS, BacklogFeed
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.store.schema import check_schema
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.kit.frozen_clock import Clock
from tests.kit.polling import eventually
from tests.kit.tasks import run_task


@pytest.fixture
def waiting(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=3)], show=farm.show("demo"))


def seconds_to_next_round(feed: BacklogFeed, clock: Clock) -> float:
    """How long after a round of the resync the next one is made, to a second: its age goes on until then."""
    feed.missed()
    feed.resync()
    began = clock.now
    while feed.age_seconds() >= clock.now - began:
        clock.now += 0.5
        feed.resync()
    return clock.now - began


def test_what_nobody_names_is_looked_for_every_five_seconds(
    engine: Engine, settings: Settings, redis_client: redis.Redis, waiting: None
) -> None:
    # given a feed that has read what waits
    with engine.connect() as connection:
        facts = check_schema(connection)
    clock = Clock()
    found = [facts]
    feed = BacklogFeed(engine, settings, lambda: found[-1], BacklogChanges(redis_client, "cue"), clock=clock)
    assert feed.age_seconds() == 0
    feed.follow()
    # then it is compared every ten seconds, and every five while nothing is heard
    assert seconds_to_next_round(feed, clock) == RESYNC_SECONDS
    feed.deaf = True
    assert seconds_to_next_round(feed, clock) == DEAF_RESYNC_SECONDS
    # and so where the triggers that name changes are not there
    feed.deaf = False
    found.append(replace(facts, backlog_is_named=False))
    assert seconds_to_next_round(feed, clock) == DEAF_RESYNC_SECONDS


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("deaf", broker="memory://", set_as_current=False)
    yield made
    made.close()


@pytest.fixture
def process(settings: Settings, redis_client: redis.Redis, app: Celery) -> Iterator[Process]:
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    made = Process(settings, app)
    yield made
    made.close()


def test_a_process_says_that_it_is_deaf_and_how_old_its_backlog_is(
    process: Process, redis_client: redis.Redis, waiting: None
) -> None:
    process.membership.join("w1@here", queues=lambda: ("cue:q:work:type:dispatch",), capacity=4)
    process.watch_backlog()
    process.backlog.follow()
    # when its listener is deaf
    process.handlers.deaf(True)
    process.membership.heartbeat()
    (worker,) = list_members(redis_client, "cue").alive
    assert (process.backlog.deaf, worker.deaf, worker.backlog_age_seconds >= 0) == (True, True, True)
    # and when it hears again
    process.handlers.deaf(False)
    process.membership.heartbeat()
    (worker,) = list_members(redis_client, "cue").alive
    assert (process.backlog.deaf, worker.deaf) == (False, False)


def test_new_work_is_booked_soon_though_nobody_hears_of_it(
    engine: Engine, settings: Settings, redis_client: redis.Redis, app: Celery
) -> None:
    # given a worker that is deaf, and has nothing to do
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        show = farm.default_show()
        note_imported(redis_client, managed_show_versions(connection))
    with closing(Process(settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)}), app)) as deaf:
        deaf.watch_backlog()
        deaf.backlog.follow()
        deaf.waker.start()
        deaf.handlers.deaf(True)

        # when there is work, and it is swept for as ever
        with engine.begin() as connection:
            job = Farm(connection).job([LayerSpec(frames=1)], show=show, os=None)

        def booked() -> bool:
            deaf.sweep()
            for posting in deaf.postings.posted().values():
                run_task(dispatch.dispatch_cluster, deaf, posting)
            with engine.connect() as connection:
                return connection.execute(text("SELECT pk_job FROM proc")).scalars().all() == [job.id]

        # then it is booked with the next round of the resync
        eventually(booked, DEAF_RESYNC_SECONDS, "a booking")
