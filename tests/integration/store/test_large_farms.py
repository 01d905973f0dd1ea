"""What is read of a farm again and again stays cheap where it has tens of thousands of hosts.

The hosts of some buckets are read by their index, whatever other hosts there are; all hosts are summed without a sort;
and what a worker holds of each host is little.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, inspect, text

from opencue_sched.domain.hosts import Host
from opencue_sched.domain.shards import bucket_of, buckets
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.placement.host_cache import FIRST_READ_HOSTS, HostCache
from opencue_sched.settings import HostCacheSettings
from opencue_sched.store.hosts import fetch_buckets, fetch_groups
from opencue_sched.store.insight import host_groups
from tests.kit.databases import Databases
from tests.kit.gathering import reads_by_table
from tests.kit.statements import listening

HOSTS = 40_000
STALENESS = 3600.0
TABLES = ("host", "host_stat", "host_tag")
_OWN = {
    "pk_host": "md5('host' || n)",
    "str_name": "'copy' || n",
    "str_fqdn": "'copy' || n",
    "pk_host_stat": "md5('stat' || n)",
    "ts_ping": "ts_ping - n * interval '1 microsecond'",
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


@pytest.fixture(scope="module")
def large(databases: Databases) -> Iterator[Engine]:
    """A database with HOSTS hosts of one facility, as PostgreSQL knows them."""
    with databases.engine() as engine:
        with engine.begin() as connection:
            # A busy machine takes its time to write so many.
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            copy_host(connection, Farm(connection).host(hostname_tag=False).id, HOSTS - 1)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SET statement_timeout = 0"))
            connection.execute(text("VACUUM ANALYZE"))
            connection.execute(text("RESET statement_timeout"))
        yield engine


def all_ids(connection: Connection) -> list[str]:
    return list(connection.execute(text("SELECT pk_host FROM host")).scalars())


def of(buckets: Collection[int], ids: Collection[str]) -> set[str]:
    return {host_id for host_id in ids if bucket_of(host_id) in buckets}


def test_a_portion_reads_its_hosts_by_an_index_and_no_others(large: Engine) -> None:
    # Given what a process of a fleet of eight reads again together
    with large.connect() as connection:
        farm, ids = Farm(connection).facility(), all_ids(connection)
        assert len(ids) == HOSTS
        portion = sorted(buckets("three", tuple(f"{number}" for number in range(8))))[:2]
        wanted = of(portion, ids)
        # When it is read
        with reads_by_table(connection) as read:
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
    with large.connect() as connection, reads_by_table(connection) as read:
        hosts = fetch_groups(connection, farm, ["general"], STALENESS, most=HOSTS // 100)
    assert len(hosts) == HOSTS // 100
    assert sum(read["host"]) < HOSTS / 10


def steps(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All steps of a plan, as PostgreSQL explains it."""
    yield node
    for step in node.get("Plans", ()):
        yield from steps(step)


def test_all_hosts_are_summed_without_sorting_them(large: Engine) -> None:
    sent: list[str] = []

    def note(_connection: Any, cursor: Any, message: str, parameters: Any, *_: object) -> None:
        sent.append(cursor.mogrify(message, parameters).decode())

    # Given what is asked for the metrics of a farm
    with large.connect() as connection:
        with listening(large, "before_cursor_execute", note):
            groups = host_groups(connection, None, staleness=STALENESS)
        # When PostgreSQL plans it
        (explained,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sent[-1].replace('%', '%%')}").one()
    # Then every host is counted in both ways, and what is sorted are a few groups
    assert sum(group.hosts for group in groups) == 2 * HOSTS
    sorted_rows = [step["Plan Rows"] for step in steps(explained[0]["Plan"]) if "Sort" in step["Node Type"]]
    assert max(sorted_rows, default=0) < HOSTS / 1000


def test_a_worker_holds_two_kilobytes_a_host_at_most(large: Engine) -> None:
    def fetch(facility: str, tags: Sequence[str] | None, of_buckets: Collection[int]) -> list[Host]:
        with large.connect() as connection:
            return fetch_groups(connection, facility, tags or (), STALENESS, of_buckets, most=FIRST_READ_HOSTS)

    with large.connect() as connection:
        farm = Farm(connection).facility()
    cache = HostCache(HostCacheSettings(), fetch)
    tracemalloc.start()
    try:
        cache.refresh(farm, ["general"])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache) == FIRST_READ_HOSTS
    assert kept <= 2048 * FIRST_READ_HOSTS


def test_a_small_farm_is_not_scanned_for_a_portion_either(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        ids = {farm.host(hostname_tag=False).id for _ in range(60)}
        facility = farm.facility()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    portion = range(128)
    with engine.connect() as connection, reads_by_table(connection) as read:
        hosts = fetch_buckets(connection, [facility], STALENESS, portion)
    assert {host.id for host in hosts} == of(portion, ids)
    assert {table: read[table] for table in TABLES} == dict.fromkeys(TABLES, (0, len(hosts)))
