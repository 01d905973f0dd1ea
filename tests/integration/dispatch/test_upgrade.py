"""The database of a farm at work is brought to the newest revision while the older program books on it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, create_engine, event, text

from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.schema import REVISION, SchemaFacts, check_schema, upgrade
from tests.polling import eventually

from . import passes as of_passes
from .passes import passes

BASE = "0006"
"""The newest revision of commit be0def9."""

_ROWS = {
    "frame": "SELECT pk_frame, str_state, int_version FROM frame ORDER BY 1",
    "proc": "SELECT pk_proc, pk_frame, pk_host, int_cores_reserved FROM proc ORDER BY 1",
    "job": "SELECT pk_job, str_name, str_state FROM job ORDER BY 1",
    "host": "SELECT pk_host, str_name, int_cores, int_cores_idle FROM host ORDER BY 1",
}


# The program of then read no tables of later revisions; today's, which stands for it, finds them empty in a schema
# that those of the migration hide.
_LATER = """
    CREATE SCHEMA later;
    CREATE TABLE later.opencue_sched_hold (
        pk_host varchar, pk_layer varchar, pk_job varchar, cores int, memory_kb bigint, gpus int,
        granted_at timestamptz, until timestamptz, free_at timestamptz
    );
    CREATE TABLE later.opencue_sched_frame_memory (pk_frame varchar, pk_layer varchar, memory_kb bigint);
    DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = public, later', current_database()); END $$;
"""


@pytest.fixture
def older(empty_database_url: str, settings: Settings) -> Settings:
    """Settings on a database of the base revision; no RQD is asked."""
    upgrade(empty_database_url, BASE)
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text(_LATER))
    engine.dispose()
    dry = settings.rqd.model_copy(update={"dry_run_mode": True})
    return settings.model_copy(update={"database_url": SecretStr(empty_database_url), "rqd": dry})


@pytest.fixture
def older_engine(older: Settings) -> Iterator[Engine]:
    engine = make_engine(older, application_name="opencue-sched-test")
    yield engine
    engine.dispose()


def rows(engine: Engine) -> dict[str, list[tuple[Any, ...]]]:
    with engine.connect() as connection:
        return {table: [tuple(row) for row in connection.execute(text(sql))] for table, sql in _ROWS.items()}


def procs(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM proc")).scalar_one())


def test_a_farm_is_upgraded_with_bookings_under_way(
    older: Settings, older_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = older_engine
    with engine.begin() as connection:
        farm = Farm(connection)
        for number in range(6):
            farm.host(name=f"h{number}", cores=8)
        show = farm.default_show()
        farm.job([LayerSpec(frames=16)], show=show)

    # given frames that run, booked by the program of then, whose revision this was
    here = SchemaFacts("opencue-sched", BASE, has_start_after=True, has_frame_history_queue=False, limit_columns=())
    monkeypatch.setattr(of_passes, "check_schema", lambda _connection: here)
    with passes(engine, older) as program, ThreadPoolExecutor(1) as migrations:
        program.drain()
        before = rows(engine)
        assert len(before["proc"]) == 16

        # when the migration comes in the middle of a booking: its frames, hosts and procs are written, not committed
        with engine.begin() as connection:
            Farm(connection).job([LayerSpec(frames=8)], name="second", show=show)
        migration: list[Future[None]] = []

        def migrate(connection: Connection) -> None:
            if not migration and connection.execute(text("SELECT count(*) FROM proc")).scalar_one() > 16:
                migration.append(migrations.submit(upgrade, older.sqlalchemy_url))
                eventually(lambda: waits(engine), what="the migration waits for the booking")

        event.listen(engine, "commit", migrate)
        program.drain()
        event.remove(engine, "commit", migrate)
        migration[0].result(timeout=30)

        # then both are done, and every row of before is as it was
        with engine.connect() as connection:
            assert check_schema(connection).revision == REVISION
        after = rows(engine)
        assert len(after["proc"]) == 24
        for table in ("frame", "proc", "job"):
            assert set(before[table]) <= set(after[table])
        assert {host[:3] for host in before["host"]} == {host[:3] for host in after["host"]}
        report = run_audit(engine, program.client, older)
        assert not report.failed, "\n".join(report.lines())

        # and the programs of then and of now book side by side
        with engine.begin() as connection:
            Farm(connection).job([LayerSpec(frames=4)], name="third", show=show)
        program.drain()
        monkeypatch.undo()
        with passes(engine, older, "two") as newer:
            with engine.begin() as connection:
                Farm(connection).job([LayerSpec(frames=4)], name="fourth", show=show)
            newer.clusters = program.clusters
            newer.drain()
            report = run_audit(engine, newer.client, older)
        assert procs(engine) == 32
        assert not report.failed, "\n".join(report.lines())


def waits(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.execute(
                text(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    " AND application_name = 'opencue-sched-migrate' AND datname = current_database())"
                )
            ).scalar_one()
        )
