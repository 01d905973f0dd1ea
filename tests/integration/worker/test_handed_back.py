"""A show given back to Cuebot: by one that changes the flag alone, or while one still believes that it is ours."""
# ruff: noqa: S608 - the statements are put together from constants of this module only

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis
from celery import Celery
from sqlalchemy import Connection, Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.show_handover import (
    CUEBOT_CACHE_SECONDS,
    follow_handed_back,
    hand_back,
    refresh_handed_back,
)
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store.accounting_tables import refresh_tables
from opencue_sched.worker.process import Process
from tests.kit.listening import eventually_listen
from tests.kit.polling import eventually

RECENT = 20.0

# Rows of the one show that has procs: a schema made by Cuebot comes with another.
OF_SHOW = "SELECT pk_show FROM job"
TABLES = {
    "subscription": f"pk_show IN ({OF_SHOW})",
    "folder_resource": f"pk_folder IN (SELECT pk_folder FROM folder WHERE pk_show IN ({OF_SHOW}))",
    "job_resource": "true",
    "layer_resource": "true",
    "point": f"pk_show IN ({OF_SHOW})",
}


@dataclass
class GivenBack:
    """Three procs of two cores run; the flip is over."""

    engine: Engine
    client: redis.Redis
    show_id: str
    procs: list[str]

    def used(self) -> set[int]:
        """Centicores in use, by the five tables."""
        with self.engine.connect() as connection:
            queries = [f"SELECT sum(int_cores) FROM {table} WHERE {rows}" for table, rows in TABLES.items()]
            return {int(connection.execute(text(query)).scalar_one()) for query in queries}

    def cuebots_know(self) -> None:
        self.client.zincrby(keys.HANDED_BACK, -CUEBOT_CACHE_SECONDS - 1, self.show_id)

    def look_after(self) -> int:
        return refresh_handed_back(self.engine, self.client)


@pytest.fixture
def show(engine: Engine, redis_client: redis.Redis) -> Iterator[GivenBack]:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        procs = farm.run(farm.job([LayerSpec(frames=3)]).frames, farm.host(cores=64), cores=2)
    ledger = make_ledger(engine, redis_client, owner="test", accounting=Accounting())
    ensure_bootstrapped(engine, ledger, wait_age=0)
    hand_back(engine, ledger, show.id, wait_seconds=0, age_seconds=40)
    yield GivenBack(engine, redis_client, show.id, procs)


def delete(connection: Connection, proc_id: str) -> None:
    connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": proc_id})


def decrement(connection: Connection, centicores: int) -> None:
    """What a Cuebot does in the same transaction when it knows that the show is its own."""
    for table, rows in TABLES.items():
        statement = f"UPDATE {table} SET int_cores = int_cores - :cores WHERE {rows}"
        connection.execute(text(statement), {"cores": centicores})


def test_procs_deleted_by_a_cuebot_that_had_not_heard_are_taken_off_afterwards(show: GivenBack):
    assert show.used() == {600}
    with show.engine.begin() as connection:
        delete(connection, show.procs[0])
    assert show.look_after() == 0, "not before every Cuebot knows"
    assert show.used() == {600}
    show.cuebots_know()
    assert show.look_after() == len(TABLES)
    assert show.used() == {400}
    assert show.look_after() == 0
    # and after ten minutes the show is forgotten
    assert show.client.zcard(keys.HANDED_BACK) == 1
    show.client.zincrby(keys.HANDED_BACK, -600, show.show_id)
    show.look_after()
    assert show.client.zcard(keys.HANDED_BACK) == 0


@pytest.mark.parametrize("steps", [(delete, decrement), (decrement, delete)], ids=["proc first", "tables first"])
def test_a_cuebot_in_the_middle_of_a_release_is_not_overwritten(show: GivenBack, steps):
    with show.engine.begin() as connection:
        delete(connection, show.procs[0])
    show.cuebots_know()
    arguments = {delete: show.procs[1], decrement: 200}
    with show.engine.begin() as cuebot:
        steps[0](cuebot, arguments[steps[0]])
        show.look_after()
        steps[1](cuebot, arguments[steps[1]])
    show.look_after()
    assert show.used() == {200}


def test_a_show_that_was_taken_again_is_left_to_its_recompute(show: GivenBack):
    with show.engine.begin() as connection:
        delete(connection, show.procs[0])
        connection.execute(text("UPDATE show SET b_scheduler_managed = true"))
    show.cuebots_know()
    assert show.look_after() == 0
    assert show.used() == {600}


@pytest.mark.parametrize("by_our_command", [True, False])
def test_a_local_proc_that_ends_after_its_show_was_handed_back_leaves_no_cores_behind(
    engine: Engine, redis_client: redis.Redis, by_our_command: bool
) -> None:
    # given a show of ours with a local proc, in tables that a recompute has written
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        (proc,) = farm.run(farm.job([LayerSpec(frames=1)]).frames, farm.host(cores=64), cores=2)
        connection.execute(text("UPDATE proc SET b_local = true"))
    ledger = make_ledger(engine, redis_client, owner="test", accounting=Accounting())
    ensure_bootstrapped(engine, ledger, wait_age=0)
    refresh_tables(engine, [show.id])

    # when it is given back, and a Cuebot ends the proc: it takes local cores off the layer only
    if by_our_command:
        hand_back(engine, ledger, show.id, wait_seconds=0, age_seconds=40)
    else:
        note_imported(redis_client, {show.id: "0"})
        with engine.begin() as connection:
            connection.execute(text("UPDATE show SET b_scheduler_managed = false"))
        follow_handed_back(engine, ledger, age_seconds=40)
    with engine.begin() as connection:
        delete(connection, proc)
        connection.execute(text("UPDATE layer_resource SET int_cores = int_cores - 200"))

    # then nothing is left anywhere
    assert GivenBack(engine, redis_client, show.id, [proc]).used() == {0}


@pytest.fixture
def worker(settings: Settings, engine: Engine, redis_client: redis.Redis) -> Iterator[Process]:
    """It listens and recomputes nothing by itself. Three procs of two cores run, which the tables do not know yet."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        farm.run(farm.job([LayerSpec(frames=3)]).frames, farm.host(cores=64), cores=2)
        for table in TABLES:
            connection.execute(text(f"UPDATE {table} SET int_cores = 0"))
    app = Celery("handed-back", broker="memory://", set_as_current=False)
    short = settings.accounting.model_copy(update={"commit_deadline": 0.5})  # the ledger is filled after four of them
    made = Process(settings.model_copy(update={"accounting": short}), app)
    made.bootstrap(fleet_start=True)
    made.listen()
    eventually_listen(engine)
    yield made
    made.close()
    app.close()


def test_the_tables_of_a_show_that_a_cuebot_gives_back_are_right_before_any_recompute(worker: Process):
    given = GivenBack(worker.engine, worker.client, "", [])
    assert given.used() == {0}
    assert worker.client.hlen(keys.LEDGER) == 3
    with worker.engine.begin() as cuebot:
        cuebot.execute(text("UPDATE show SET b_scheduler_managed = false"))
    eventually(lambda: given.used() == {600}, RECENT, "tables that know what runs")
    eventually(lambda: worker.client.hlen(keys.LEDGER) == 0, RECENT, "a ledger without the show")
    assert worker.client.zcard(keys.HANDED_BACK) == 1, "for what Cuebots do who have not heard yet"
