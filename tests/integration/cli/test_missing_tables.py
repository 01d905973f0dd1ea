"""What is said where a table is missing, and where the server has no connection left."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Settings
from opencue_sched.store.privileges import CHANGED, READ
from opencue_sched.store.schema import check_schema
from tests.kit.command import Cli
from tests.kit.refusing_postgres import refusing_postgres
from tests.kit.wording import lacks


def drop(engine: Engine, table: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {table} CASCADE"))


def test_a_missing_table_of_ours_is_a_matter_for_migrate(cli: Cli, engine: Engine) -> None:
    # given a table that somebody dropped
    with engine.begin() as connection:
        name = Farm(connection).job(name="show-s-u_job").name
    drop(engine, "opencue_sched_quarantine")
    for words in (("doctor",), ("explain", name)):
        ran = cli(*words)
        told = ran.out + ran.err
        assert ran.status != 0
        assert "`opencue-sched migrate`" in told
        assert "OPENCUE_SCHED_DATABASE_URL" not in told


def test_migrate_does_not_say_up_to_date_where_a_table_of_ours_is_missing(cli: Cli, engine: Engine) -> None:
    # when the tables are of the right revision, but for one
    drop(engine, "opencue_sched_quarantine")
    ran = cli("migrate")
    assert (ran.status, ran.out) == (1, "")
    assert "opencue_sched_quarantine" in ran.err
    # then the way that migrate names works, on a database made by Cuebot
    with engine.begin() as connection:
        if check_schema(connection).origin == "opencue-sched":
            connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    assert "`opencue-sched migrate --down`" in ran.err
    assert cli("migrate", "--down", "--yes").status == 0
    assert cli("migrate").status == 0


def test_a_missing_table_of_opencue_is_a_matter_for_the_url(cli: Cli, engine: Engine) -> None:
    drop(engine, "alloc")
    ran = cli("alloc", "list")
    assert ran.status != 0
    assert not lacks(ran.err, "alloc", "OPENCUE_SCHED_DATABASE_URL")


@pytest.mark.parametrize(
    ("refusal", "limit"),
    [
        (b"sorry, too many clients already", ["max_connections"]),
        (b"remaining connection slots are reserved for roles with the SUPERUSER attribute", ["max_connections"]),
        (b'too many connections for role "cuebot"', ["CONNECTION LIMIT", "role"]),
        (b'too many connections for database "cuebot"', ["CONNECTION LIMIT", "database"]),
        (b"no more connections allowed (max_client_conn)", ["PgBouncer", "max_client_conn"]),
    ],
)
@pytest.mark.parametrize("words", [("doctor",), ("show", "list")])
def test_a_server_without_a_connection_left_is_told_with_its_limit_and_what_we_take(
    cli: Cli,
    environment: pytest.MonkeyPatch,
    settings: Settings,
    refusal: bytes,
    limit: list[str],
    words: tuple[str, ...],
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE__POOL_SIZE", "7")
    with refusing_postgres(settings, refusal, state=b"53300") as elsewhere:
        environment.setenv("OPENCUE_SCHED_DATABASE_URL", elsewhere.sqlalchemy_url)
        ran = cli(*words)
    told = ran.out + ran.err
    assert ran.status == 1
    assert not lacks(told, *limit)
    assert not lacks(told, "worker", " 8", "OPENCUE_SCHED_DATABASE__POOL_SIZE")
    assert "OPENCUE_SCHED_DATABASE_URL" not in told


def test_every_table_of_ours_is_known_to_doctor(engine: Engine) -> None:
    with engine.connect() as connection:
        named = "SELECT relname FROM pg_class WHERE relkind = 'r' AND starts_with(relname, 'opencue_sched_')"
        there = set(connection.execute(text(named)).scalars())
    assert there == {name for name in (*READ, *CHANGED) if name.startswith("opencue_sched_")}
