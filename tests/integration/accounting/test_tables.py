"""The five PostgreSQL tables after a recompute, past the triggers that would refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError

from opencue_sched.accounting.caps import make_ledger, reseed_limits
from opencue_sched.accounting.consistency import vertex_keys
from opencue_sched.accounting.recompute import recompute
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, HostIds, JobIds, LayerSpec, ShowIds
from opencue_sched.settings import Accounting
from opencue_sched.store.accounting_tables import refresh_tables
from tests.kit.counters import Store
from tests.kit.polling import eventually

TABLES = ("layer_resource", "job_resource", "folder_resource", "point", "subscription")


@dataclass
class Books:
    """A show with one job on one host, and its rows of the five tables (cores and GPUs in centicores and units)."""

    engine: Engine
    show: ShowIds
    alloc: AllocIds
    job: JobIds
    host: HostIds

    def run(self, cores: float = 2, gpus: int = 0, frame: int = 0) -> str:
        with self.engine.begin() as connection:
            return Farm(connection).run([self.job.frames[frame]], self.host, cores=cores, gpus=gpus)[0]

    def sql(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def refresh(self) -> dict[str, int]:
        return refresh_tables(self.engine, [self.show.id])

    def read(self, statement: str) -> tuple[int, ...]:
        with self.engine.begin() as connection:
            return tuple(connection.execute(text(statement), {"job": self.job.id, "show": self.show.id}).one())

    def versions(self) -> list[tuple[object, ...]]:
        """What each row of the tables was written by."""
        tables = " UNION ALL ".join(f"SELECT '{table}', ctid::text, xmin::text FROM {table}" for table in TABLES)  # noqa: S608
        with self.engine.begin() as connection:
            return sorted(map(tuple, connection.execute(text(tables))))

    def counts(self) -> dict[str, tuple[int, ...]]:
        return {
            "layer": self.read("SELECT sum(int_cores), sum(int_gpus) FROM layer_resource WHERE pk_job = :job"),
            "job": self.read("SELECT int_cores, int_gpus FROM job_resource WHERE pk_job = :job"),
            "folder": self.read(
                "SELECT sum(int_cores), sum(int_gpus) FROM folder_resource JOIN folder USING (pk_folder)"
                " WHERE pk_show = :show"
            ),
            "point": self.read("SELECT int_cores, int_gpus FROM point WHERE pk_show = :show"),
            "subscription": self.read("SELECT int_cores, int_gpus FROM subscription WHERE pk_show = :show"),
        }


@pytest.fixture
def books(engine: Engine) -> Books:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show(), farm.default_alloc()
        farm.subscription(show, alloc, size=50, burst=100)
        host = farm.host(cores=64, memory_gb=256, gpus=8)
        job = farm.job([LayerSpec(frames=10)], show=show, max_cores=50, max_gpus=4)
    return Books(engine, show, alloc, job, host)


def test_all_five_tables_are_brought_to_the_proc_table(books: Books) -> None:
    books.run(2, 1)
    books.run(0.5, 0, frame=1)
    written = books.refresh()
    assert written == {"layer_resource": 1, "job_resource": 1, "folder_resource": 1, "point": 1, "subscription": 1}
    assert set(books.counts().values()) == {(250, 1)}


def test_rows_that_are_right_are_not_written(books: Books) -> None:
    books.run()
    books.refresh()
    before = books.versions()
    assert set(books.refresh().values()) == {0}
    assert books.versions() == before


def test_drained_rows_go_back_to_zero(books: Books) -> None:
    proc = books.run(2, 1)
    books.refresh()
    books.sql("DELETE FROM proc WHERE pk_proc = :id", id=proc)
    assert set(books.refresh().values()) == {1}
    assert set(books.counts().values()) == {(0, 0)}


def test_unmanaged_shows_are_not_touched(books: Books) -> None:
    books.run()
    books.sql("UPDATE show SET b_scheduler_managed = false")
    assert set(books.refresh().values()) == {0}
    assert set(books.counts().values()) == {(0, 0)}


def test_local_procs_are_left_out_of_the_subscription_only(books: Books) -> None:
    books.run()
    books.sql("UPDATE proc SET b_local = true")
    books.refresh()
    counts = books.counts()
    assert counts["subscription"] == (0, 0)
    assert counts["job"] == counts["layer"] == counts["folder"] == counts["point"] == (200, 0)


@pytest.mark.parametrize(
    ("max_cores", "max_gpus"), [(-1, -1), (0, 0), (5000, -1), (-1, 4), (100, 4), (2147483647, 2147483647)]
)
def test_job_caps_that_the_trigger_refuses_survive_the_write(books: Books, max_cores: int, max_gpus: int) -> None:
    """-1 and 0 raise on any growth, growing cores raise over GPUs of -1, and a cap may lie below what runs."""
    books.run(2, 0)
    books.sql("UPDATE job_resource SET int_max_cores = :cores, int_max_gpus = :gpus", cores=max_cores, gpus=max_gpus)
    books.refresh()
    assert books.counts()["job"] == (200, 0)
    assert books.read("SELECT int_max_cores, int_max_gpus FROM job_resource WHERE pk_job = :job") == (
        max_cores,
        max_gpus,
    )


def test_gpus_that_grow_over_an_unlimited_cap_are_written(books: Books) -> None:
    books.run(2, 2)
    books.sql("UPDATE job_resource SET int_max_gpus = -1")
    books.refresh()
    assert books.counts()["job"] == (200, 2)
    assert books.read("SELECT int_max_cores, int_max_gpus FROM job_resource WHERE pk_job = :job") == (5000, -1)


@pytest.mark.parametrize("burst", [0, 100, 2147483647])
def test_a_burst_lowered_below_what_runs_survives_the_write(books: Books, burst: int) -> None:
    books.run(2)
    books.sql("UPDATE subscription SET int_burst = :burst", burst=burst)
    books.refresh()
    assert books.counts()["subscription"] == (200, 0)
    assert books.read("SELECT int_burst FROM subscription WHERE pk_show = :show") == (burst,)


def test_raising_a_cap_for_the_write_is_not_announced_as_a_change(books: Books) -> None:
    books.run(2)
    books.sql("UPDATE subscription SET int_burst = 0")
    with books.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listener:
        listener.execute(text("LISTEN opencue_sched_caps"))
        books.refresh()
        raw = listener.connection.driver_connection
        raw.poll()  # type: ignore[union-attr]
        assert raw.notifies == []  # type: ignore[union-attr]


def test_a_row_somebody_holds_is_left_for_the_next_pass(books: Books) -> None:
    books.run(2)
    with books.engine.begin() as holder:
        holder.execute(text("SELECT 1 FROM subscription FOR UPDATE"))
        written = books.refresh()
    assert written["subscription"] == 0
    assert written["job_resource"] == 1
    assert books.refresh()["subscription"] == 1


@pytest.mark.parametrize("locked", [True, False], ids=["ours", "naive"])
def test_a_cap_changed_while_it_is_raised_is_never_lost(books: Books, locked: bool) -> None:
    """An admin changes it between its reading and its restoration: he has to wait for the row. Naive, the control, is
    what we send without its locks."""
    books.run(2)
    books.sql("UPDATE subscription SET int_burst = 0")
    if not locked:

        def unlocked(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> Any:
            return statement.partition(" FOR NO KEY UPDATE")[0], parameters

        event.listen(books.engine, "before_cursor_execute", unlocked, retval=True)
    # given a refresh that has read the cap, and is held up before it raises it
    books.sql(
        "CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NULL; END$$;"
        " CREATE TRIGGER hold_up BEFORE UPDATE OF int_burst ON subscription FOR EACH STATEMENT"
        " WHEN (current_setting('opencue_sched.lifts_caps', true) = 'on') EXECUTE FUNCTION hold_up()"
    )
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"
    with ThreadPoolExecutor(1) as threads, books.engine.begin() as other:
        other.execute(text("SELECT pg_advisory_xact_lock(4711)"))
        refreshed = threads.submit(books.refresh)
        eventually(lambda: books.read(waiting) == (1,))
        # when an admin changes the cap
        waits = False
        try:
            books.sql("SET LOCAL lock_timeout = '50ms'; UPDATE subscription SET int_burst = 700")
        except OperationalError:
            waits = True
        other.rollback()
        refreshed.result(60)
    # then the change waits for the refresh, and stays
    assert waits == locked
    if waits:
        books.sql("UPDATE subscription SET int_burst = 700")
    assert books.read("SELECT int_burst, int_cores FROM subscription WHERE pk_show = :show") == (
        700 if locked else 0,
        200,
    )


def test_a_cuebot_that_decrements_the_tables_itself_is_healed(books: Books, store: Store) -> None:
    """... and never confuses the ledger, which does not look at them, not even where its caps are read."""
    books.run(2, 1)
    ledger = make_ledger(books.engine, store.client, owner="test", accounting=Accounting())
    recompute(books.engine, ledger)
    counted = {key: store.client.hmget(key, "int_cores", "int_gpus") for key in vertex_keys(ledger)}
    for table in TABLES:
        books.sql(f"UPDATE {table} SET int_cores = int_cores - 200, int_gpus = 0 WHERE int_cores > 0")  # noqa: S608
    assert set(books.counts().values()) == {(0, 0)}
    reseed_limits(books.engine, ledger, [books.show.id])
    report = recompute(books.engine, ledger)
    assert report.healed == 0
    assert set(books.counts().values()) == {(200, 1)}
    assert counted == {key: store.client.hmget(key, "int_cores", "int_gpus") for key in counted}
    assert len(TABLES) == sum(cores == ["2", "1"] for cores in counted.values()) == 5
