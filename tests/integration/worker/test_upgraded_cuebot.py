"""A Cuebot upgraded under a running worker: the worker notices what the database has now."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import WrongSchema
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.store.schema import downgrade
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.kit.polling import eventually
from tests.kit.tasks import run_task


@pytest.fixture
def process(settings: Settings, redis_client: redis.Redis) -> Iterator[Process]:
    """A worker that sweeps and dispatches when it is told to."""
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    app = Celery("upgraded", broker="memory://", set_as_current=False)
    made = Process(settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)}), app)
    yield made
    made.close()
    app.close()


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def dispatched(process: Process, show_id: str) -> int:
    """The frames booked by a pass over each posting of the show's, woken."""
    process.sweep(wake_shows=[show_id])
    for posting in process.postings.posted().values():
        run_task(dispatch.dispatch_cluster, process, posting)
    with process.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM proc")).scalar_one())


def test_start_times_that_an_upgrade_brings_hold_from_the_next_reading_of_the_clusters(
    process: Process, engine: Engine
) -> None:
    # given a worker that has met a Cuebot before V47, whose layers have no start time
    execute(
        engine,
        "DROP TRIGGER IF EXISTS opencue_sched_work_arrived ON layer",
        "ALTER TABLE layer DROP COLUMN IF EXISTS ts_start_after",
    )
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job([LayerSpec(frames=2)])
        note_imported(process.client, managed_show_versions(connection))
    assert not process.facts.has_start_after
    _ = process.dispatcher

    # when its Cuebot is upgraded, and has the layer wait for an hour
    execute(
        engine,
        "ALTER TABLE layer ADD COLUMN ts_start_after timestamptz",
        "UPDATE layer SET ts_start_after = now() + interval '1 h'",
    )
    with capture_logs() as logs:
        process.sweeper.reload()
        booked = dispatched(process, job.show.id)

    # then the layer waits, and the log has said why
    assert booked == 0
    assert [entry["has_start_after"] for entry in logs if entry["event"] == "schema_changed"] == [True]

    # until it may start
    execute(engine, "UPDATE layer SET ts_start_after = NULL")
    eventually(lambda: dispatched(process, job.show.id) == 2, 20.0, "its two frames")


WIDENED = [
    "frame ALTER COLUMN int_version TYPE bigint",
    "frame ALTER COLUMN str_name TYPE varchar(300)",
    "layer ALTER COLUMN str_name TYPE varchar(300)",
    "host ALTER COLUMN str_name TYPE varchar(64)",
]


@pytest.mark.parametrize("widened", WIDENED)
def test_a_column_that_an_upgrade_widens_between_two_passes_costs_no_booking(
    process: Process, engine: Engine, widened: str
) -> None:
    # given a worker whose connections have planned what a pass sends
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=16, memory_gb=64)
        show = farm.job([LayerSpec(frames=2)]).show
        note_imported(process.client, managed_show_versions(connection))
    assert dispatched(process, show.id) == 2

    # when the upgrade gives their answers other types
    execute(engine, f"ALTER TABLE {widened}")
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3)], show=show)
    process.backlog.note(jobs=[job.id])
    with capture_logs() as logs:
        booked = dispatched(process, show.id)

    # then the next pass books all that it planned
    assert booked == 5
    assert {entry["event"] for entry in logs} & {"commit_failed", "bookings_lost"} == set()


def test_a_worker_whose_tables_were_taken_away_says_so_with_the_next_reading_of_the_clusters(
    process: Process, engine: Engine, settings: Settings
) -> None:
    """As before a migration of Cuebot's that would alter a column of our triggers."""
    with engine.begin() as connection:
        Farm(connection).job()
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    process.sweep()
    downgrade(settings.sqlalchemy_url)
    process.sweeper.reload()
    with pytest.raises(WrongSchema, match="`opencue-sched migrate`"):
        process.sweep()
