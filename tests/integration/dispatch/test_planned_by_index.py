"""How PostgreSQL plans statements without sequential scans: nothing in them has to scan a table all the same.

A scan that cannot be avoided gets so high a cost that a server with a just-in-time compiler compiles the statement each
time, and has no index where the planner expected one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.pool import NullPool

from opencue_sched.clients.postgres import make_engine
from opencue_sched.dispatch.commit import by_vertex
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, HostSpec, JobIds, JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store import booking
from opencue_sched.store.backlog import fetch_layers, fetch_portions, fetch_versions
from opencue_sched.store.hosts import fetch_buckets, fetch_hosts_by_id
from opencue_sched.store.schema import check_schema, upgrade
from tests.kit.gathering import reads_by_table
from tests.kit.plans import plan
from tests.kit.statements import assert_reads_grow_with_what_is_named, counted_rows, rows_read
from tests.kit.wide_farm import run_reservation_task, with_queue

_DISABLED_COST = 1e10
"""What PostgreSQL before 18 adds to the cost of a node that is switched off; 18 says so of the node."""


@pytest.fixture
def procs(engine: Engine, settings: Settings) -> list[PlannedProc]:
    """A plan of 600 frames, with limits, on a farm of 200 hosts where a wide layer waits as well."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=64, memory_gb=256) for _ in range(200)])
        licence = farm.limit("licence", 10_000)
        farm.jobs([JobSpec([LayerSpec(frames=10, limits=(licence,))] * 3) for _ in range(20)])
        procs = plan(farm, settings)
        farm.job([LayerSpec(frames=10, cores=60)])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    assert len(procs) == 600
    return procs


def book(connection: Connection, procs: Sequence[PlannedProc]) -> None:
    """All that a commit may send, also after waits that were too long."""
    hosts = {proc.host.id for proc in procs}
    booking.set_timeouts(connection, statement=60, lock=60, idle=60, whole=60)
    booking.lock_frames(connection, procs, check_schema(connection))
    booking.lock_hosts(connection, hosts, wait_seconds=60)
    booking.lock_free_hosts(connection, hosts)
    booking.read_caps(connection, by_vertex(procs))
    booking.insert_procs(connection, procs)
    booking.take_back_writes(connection)
    booking.lock_free_stats(connection, {proc.layer.id for proc in procs}, {proc.job.id for proc in procs})
    facts = check_schema(connection)
    for set_based in (False, True):
        booking.take_back_writes(connection)
        assert len(booking.insert_procs(connection, procs)) == len(procs)
        booking.take_from_hosts(connection, procs)
        booking.start_frames(connection, procs, (), replace(facts, set_based_frames=set_based))


def read(connection: Connection, procs: Sequence[PlannedProc]) -> None:
    """What passes read, and the resync of the backlog."""
    facts, layers, jobs = check_schema(connection), {proc.layer.id for proc in procs}, {proc.job.id for proc in procs}
    fetch_hosts_by_id(connection, sorted({proc.host.id for proc in procs}), 3600, planned_once=True)
    fetch_buckets(connection, {proc.host.facility_id for proc in procs}, 3600, range(20))
    fetch_layers(connection, facts, facilities=None, layer_ids=layers, job_ids={*jobs, "gone"})
    booking.fetch_launch_details(connection, jobs, layers)
    fetch_versions(connection, facilities=None, buckets=range(20))
    fetch_portions(connection, facts, dict.fromkeys({*layers, "gone"}, 20), uncounted=[1])


def book_and_read(connection: Connection, procs: Sequence[PlannedProc]) -> None:
    """All that passes send."""
    book(connection, procs)
    read(connection, procs)


def reserve(connection: Connection, hosts: Sequence[HostIds], job: JobIds) -> None:
    """Have the hosts reserved for the first layer of the job."""
    connection.execute(
        text(
            "INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, until)"
            " SELECT unnest(CAST(:hosts AS varchar[])), :layer, :job, 1, 1, 0, now() + interval '1 hour'"
        ),
        {"hosts": [host.id for host in hosts], "layer": job.layers[0].id, "job": job.id},
    )


@contextmanager
def sent_without_scans(engine: Engine) -> Iterator[list[str]]:
    """The statements sent meanwhile in transactions that do without sequential scans, parameters filled in."""
    sent: list[str] = []

    def note(connection: Connection, cursor: Any, message: str, parameters: Any, *_: object) -> None:
        with connection.connection.cursor() as other:
            other.execute("SELECT current_setting('enable_seqscan')")
            if other.fetchone() == ("off",):
                sent.extend(cursor.mogrify(message, parameters).decode().split(";"))

    event.listen(engine, "after_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "after_cursor_execute", note)


def scans_in_spite(connection: Connection, statements: Sequence[str]) -> list[str]:
    """What of these statements is planned although it is switched off: node and table."""
    found: list[str] = []
    with connection.connection.cursor() as cursor:
        for statement in statements:
            if not re.match(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b", statement):
                continue  # savepoints
            cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}")
            found += _switched_off(cursor.fetchone()[0][0]["Plan"])
            if re.match(r"\s*SELECT set_config", statement):
                cursor.execute(statement)  # later ones are planned by it
    return found


def _switched_off(node: Mapping[str, Any]) -> list[str]:
    below = [name for child in node.get("Plans", ()) for name in _switched_off(child)]
    off = node.get("Disabled", node["Total Cost"] >= _DISABLED_COST)
    name = f"{node['Node Type']} on {node.get('Relation Name', '-')}"
    return below or ([name] if off else [])


def test_no_statement_without_sequential_scans_needs_one(
    engine: Engine, settings: Settings, procs: list[PlannedProc], empty_database_url: str
) -> None:
    # Given what a commit, the reading of single hosts and the granting of reservations send
    with sent_without_scans(engine) as statements:
        with engine.begin() as connection:
            book(connection, procs)
        with engine.begin() as connection:
            fetch_hosts_by_id(connection, sorted({proc.host.id for proc in procs}), 3600)
        run_reservation_task(engine, with_queue(settings, reservation_block_time=1e-6))
        run_reservation_task(engine, with_queue(settings, reservation_block_time=1e-6))
    # When it is explained where it was sent, on a full farm and on one without a row
    assert len(statements) > 20
    upgrade(empty_database_url)
    empty = create_engine(empty_database_url, poolclass=NullPool)
    for database in (engine, empty):
        with database.connect() as connection:
            booking.set_timeouts(connection, statement=60, lock=60, idle=60, whole=60)
            scans = scans_in_spite(connection, statements)
        database.dispose()
        # Then an index serves each of them
        assert scans == []


@pytest.mark.parametrize("full", [True, False], ids=["a full farm", "no row"])
def test_no_plan_that_is_kept_needs_a_sequential_scan(
    engine: Engine, settings: Settings, procs: list[PlannedProc], empty_database_url: str, full: bool
) -> None:
    # Given a connection that has prepared what passes send, on a full farm or on one without a row
    upgrade(empty_database_url)
    of_empty = make_engine(settings.model_copy(update={"database_url": SecretStr(empty_database_url)}))
    with (engine if full else of_empty).connect() as connection:
        book(connection, procs if full else [])
        read(connection, procs if full else [])
        # When each is explained as it is planned for whatever is asked
        kept = connection.execute(text("SELECT name, cardinality(parameter_types) FROM pg_prepared_statements")).all()
        scans = []
        for name, parameters in kept:
            given = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
            (explained,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) EXECUTE {name}{given}").one()
            scans += _switched_off(explained[0]["Plan"])
        connection.rollback()
    of_empty.dispose()
    # Then an index serves each of them
    assert len(kept) > 20
    assert scans == []


def test_plans_made_on_an_empty_farm_read_no_more_of_a_full_one(engine: Engine, settings: Settings) -> None:
    # Given a connection that has planned what passes send where there was nothing, as PostgreSQL knew
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    with engine.connect() as early, make_engine(settings).connect() as late:
        book_and_read(early, [])
        early.rollback()
        # When there is much all at once, also reserved hosts
        with engine.begin() as connection:
            farm = Farm(connection)
            hosts = farm.hosts([HostSpec(cores=64, memory_gb=256) for _ in range(60)])
            licences = [farm.limit(f"licence{number}", 10_000) for number in range(3)]
            jobs = farm.jobs([JobSpec([LayerSpec(frames=4, limits=licences)] * 5) for _ in range(20)])
            procs = plan(farm, settings)
            reserve(connection, hosts, jobs[0])
        # Then that connection reads no more than one that plans now, and no more than grows with how many there are
        assert_reads_grow_with_what_is_named(early, late, book_and_read, procs)


def test_triggers_of_a_booking_scan_no_table(engine: Engine, procs: list[PlannedProc]) -> None:
    engine.dispose()  # sessions keep the plans they made for functions while scans were allowed
    with engine.begin() as connection, reads_by_table(connection) as read:
        book(connection, procs)
    assert [table for table, (scans, _) in sorted(read.items()) if scans] == []


def test_locking_frames_reads_no_more_than_these_and_their_layers(engine: Engine, settings: Settings) -> None:
    # Given a thousand layers with a frame each, and hosts for a fifth of them
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=64, memory_gb=256) for _ in range(40)])
        farm.jobs([JobSpec([LayerSpec(frames=1)] * 10) for _ in range(100)])
        procs = plan(farm, settings)[:200]
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    # When so many are locked, each of another layer
    with rows_read(engine) as rows, engine.begin() as connection:
        booking.set_timeouts(connection, statement=60, lock=60, idle=60, whole=60)
        frames, layers = booking.lock_frames(connection, procs, check_schema(connection))
    # Then nothing else is read but what says whether they may start
    assert (len(frames), len(layers)) == (200, 200)
    assert rows[0] < 5 * 200


def test_locking_hosts_reads_no_more_than_their_own_reservations(engine: Engine) -> None:
    # Given three hundred hosts that are reserved
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = farm.hosts([HostSpec(hostname_tag=False)] * 300)
        job = farm.job([LayerSpec()])
        reserve(connection, hosts, job)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    # When three of them are locked
    with engine.begin() as connection:
        booking.set_timeouts(connection, statement=60, lock=60, idle=60, whole=60)
        before = counted_rows(connection)
        locked = booking.lock_hosts(connection, [host.id for host in hosts[:3]], wait_seconds=60)
        read = counted_rows(connection) - before
    # Then the others are not looked at
    assert [row.hold_layer for row in locked.values()] == [job.layers[0].id] * 3
    assert read < 30
