"""The hosts of some buckets are read by their index: what that costs does not depend on how many others there are."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from sqlalchemy import Connection, Engine, inspect, text

from opencue_sched.domain.shards import bucket_of, buckets
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.store.hosts import fetch_buckets, fetch_groups
from tests.kit.gathering import rows_read

HOSTS = 40_000
STALENESS = 3600.0
TABLES = ("host", "host_stat", "host_tag")
_OWN = {
    "pk_host": "md5('host' || n)",
    "str_name": "'copy' || n",
    "str_fqdn": "'copy' || n",
    "pk_host_stat": "md5('stat' || n)",
    "pk_host_tag": "md5('tag' || n)",
}
"""What each copy of a host has for its own, by column."""


def copy_host(connection: Connection, host_id: str, copies: int) -> None:
    """Write so many hosts that are as this one, in three statements."""
    for table in TABLES:
        columns = [column["name"] for column in inspect(connection).get_columns(table)]
        values = ", ".join(_OWN.get(column, column) for column in columns)
        connection.execute(
            text(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table}"  # noqa: S608
                " CROSS JOIN generate_series(1, :copies) AS n WHERE pk_host = :host"
            ),
            {"copies": copies, "host": host_id},
        )


@pytest.fixture
def farm(engine: Engine) -> str:
    """The facility of forty thousand hosts, as PostgreSQL knows them."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))  # a busy machine takes its time to write so many
        farm = Farm(connection)
        copy_host(connection, farm.host(hostname_tag=False).id, HOSTS - 1)
        facility = farm.facility()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("RESET statement_timeout"))
    return facility


def all_ids(connection: Connection) -> list[str]:
    return list(connection.execute(text("SELECT pk_host FROM host")).scalars())


def of(buckets: Collection[int], ids: Collection[str]) -> set[str]:
    return {host_id for host_id in ids if bucket_of(host_id) in buckets}


def test_a_portion_reads_its_hosts_by_an_index_and_no_others(engine: Engine, farm: str) -> None:
    # Given what a process of a fleet of eight reads again together
    with engine.connect() as connection:
        ids = all_ids(connection)
        assert len(ids) == HOSTS
        portion = sorted(buckets("three", tuple(f"{number}" for number in range(8))))[:2]
        wanted = of(portion, ids)
        # When it is read
        with rows_read(connection) as read:
            hosts = fetch_buckets(connection, [farm], STALENESS, portion)
    # Then it is just these hosts, and no table of hosts was scanned for them
    assert {host.id for host in hosts} == wanted
    assert HOSTS / 200 < len(wanted) < HOSTS / 90
    assert {table: read[table] for table in TABLES} == {
        "host": (0, len(wanted)),
        "host_stat": (0, len(wanted)),
        "host_tag": (0, len(wanted)),
    }

    # And the first read of a process reads some hosts of many
    with engine.connect() as connection, rows_read(connection) as read:
        hosts = fetch_groups(connection, farm, ["general"], STALENESS, most=HOSTS // 100)
    assert len(hosts) == HOSTS // 100
    assert sum(read["host"]) < HOSTS / 10


def test_a_small_farm_is_not_scanned_for_a_portion_either(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        ids = {farm.host(hostname_tag=False).id for _ in range(60)}
        facility = farm.facility()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    portion = range(128)
    with engine.connect() as connection, rows_read(connection) as read:
        hosts = fetch_buckets(connection, [facility], STALENESS, portion)
    assert {host.id for host in hosts} == of(portion, ids)
    assert {table: read[table] for table in TABLES} == dict.fromkeys(TABLES, (0, len(hosts)))
