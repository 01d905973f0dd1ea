"""The database of a farm at work is brought to the newest revision while the older program books on it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, text

from opencue_sched.accounting.recompute import recompute
from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Settings
from opencue_sched.store.schema import REVISION, check_schema, upgrade
from tests.kit.passes import passes
from tests.kit.polling import eventually

BASE = "0006"
"""The newest revision of commit be0def9."""

_ROWS = {
    "frame": "SELECT pk_frame, str_state, int_version FROM frame ORDER BY 1",
    "proc": "SELECT pk_proc, pk_frame, pk_host, int_cores_reserved FROM proc ORDER BY 1",
    "job": "SELECT pk_job, str_name, str_state FROM job ORDER BY 1",
    "host": "SELECT pk_host, str_name, int_cores, int_cores_idle FROM host ORDER BY 1",
}


@pytest.fixture
def older(empty_database_url: str, settings: Settings) -> Settings:
    """Settings on a database of the base revision; no RQD is asked."""
    upgrade(empty_database_url, BASE)
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


def test_a_farm_is_upgraded_with_bookings_under_way(older: Settings, older_engine: Engine) -> None:
    engine = older_engine
    # given frames that run, and the program of then in the middle of a booking: frames, hosts and procs are written,
    # and not committed
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = [farm.host(name=f"h{number}", cores=8) for number in range(6)]
        show = farm.default_show()
        first = farm.job([LayerSpec(frames=16)], show=show)
        second = farm.job([LayerSpec(frames=8)], name="second", show=show)
        farm.run(first.frames[:8], hosts[0])
        farm.run(first.frames[8:], hosts[1])
    before = rows(engine)
    assert len(before["proc"]) == 16
    with ThreadPoolExecutor(1) as migrations:
        with engine.begin() as connection:
            Farm(connection).run(second.frames, hosts[2])

            # when the migration comes
            migration: Future[None] = migrations.submit(upgrade, older.sqlalchemy_url)
            eventually(lambda: waits(engine), what="the migration waits for the booking")
        migration.result(timeout=30)

    # then both are done, and every row of before is as it was
    with engine.connect() as connection:
        assert check_schema(connection).revision == REVISION
    after = rows(engine)
    assert len(after["proc"]) == 24
    for table in ("proc", "job"):
        assert set(before[table]) <= set(after[table])
    assert {host[:3] for host in before["host"]} == {host[:3] for host in after["host"]}

    # and the program of now counts what runs, and goes on
    with passes(engine, older) as program:
        recompute(engine, program.runner.ledger, age_seconds=40)
        with engine.begin() as connection:
            Farm(connection).job([LayerSpec(frames=4)], name="third", show=show)
        program.drain()
        report = run_audit(engine, program.client, older)
    assert procs(engine) == 28
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
