"""Which hosts may take frames, and what they have."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from structlog.testing import capture_logs

from opencue_sched.domain.hosts import Host
from opencue_sched.domain.shards import buckets, shard_of
from opencue_sched.domain.states import ThreadMode
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.errors import RqdFailure
from opencue_sched.store.hosts import count_hosts, fetch_groups, fetch_hosts_by_id, full_names
from tests.kit.gathering import counted_statements, reads_by_table

KB_PER_GB = 1024 * 1024
STALENESS = 120.0


def hosts_tagged(connection: Connection, farm: Farm, tag: str) -> list[Host]:
    return fetch_groups(connection, farm.facility(), [tag], STALENESS)


def test_a_host_arrives_with_everything_placement_wants(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        spec = {"cores": 16, "idle_cores": 10.5, "memory_gb": 64, "idle_memory_gb": 40, "free_memory_gb": 50}
        ids = farm.host(
            name="node1", tags=["gpu", "big one"], gpus=4, gpu_memory_gb=24, os="rocky9, linux", thread_mode=2, **spec
        )

        (host,) = hosts_tagged(connection, farm, "general")

    assert (host.id, host.name, host.alloc_id, host.facility_id) == (
        *(ids.id, "node1", ids.alloc_id),
        farm.default_alloc().facility_id,
    )
    assert host.tags == {"general", "node1", "gpu", "bigone"}
    assert host.os_names == ("rocky9", "linux")
    assert host.thread_mode is ThreadMode.VARIABLE
    assert (host.total_centicores, host.idle_centicores, host.idle_cores) == (1600, 1050, 10)
    assert (host.total_memory_kb, host.idle_memory_kb) == (64 * KB_PER_GB, 40 * KB_PER_GB)
    assert (host.total_gpus, host.idle_gpus) == (4, 4)
    assert (host.total_gpu_memory_kb, host.idle_gpu_memory_kb) == (24 * KB_PER_GB, 24 * KB_PER_GB)


def test_memory_is_the_lesser_of_unreserved_and_free(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        ids = farm.host(memory_gb=64, idle_memory_gb=40, free_memory_gb=10)
        connection.execute(text("UPDATE host SET int_gpu_mem = 100, int_gpu_mem_idle = 80"))
        connection.execute(text("UPDATE host_stat SET int_gpu_mem_free = -5"))

        (host,) = fetch_hosts_by_id(connection, [ids.id], STALENESS)

    assert host.idle_memory_kb == 10 * KB_PER_GB
    assert host.idle_gpu_memory_kb == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"lock": "LOCKED"},
        {"lock": "NIMBY_LOCKED"},
        {"state": "DOWN"},
        {"state": "REPAIR"},
        {"state": "REBOOT_WHEN_IDLE"},
        {"ping_age": STALENESS + 1},
    ],
)
def test_a_host_that_may_not_take_frames_is_not_fetched(engine: Engine, spec: dict[str, object]) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        unfit, fit = farm.host(**spec), farm.host()

        group = hosts_tagged(connection, farm, "general")
        by_id = fetch_hosts_by_id(connection, [unfit.id, fit.id], STALENESS)

    assert [fetched.id for fetched in group] == [fit.id]
    assert [fetched.id for fetched in by_id] == [fit.id]


def test_a_group_is_one_facility_and_every_allocation_with_the_tag(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        here = farm.host(tags=["fast"])
        other_alloc = farm.host(alloc=farm.alloc("desktop"), tags=["fa st"])
        farm.host(alloc=farm.alloc("general", facility="lax"), tags=["fast"])
        farm.host()

        group = hosts_tagged(connection, farm, "fast")

    assert {fetched.id for fetched in group} == {here.id, other_alloc.id}


def test_a_shard_of_a_group_is_what_its_buckets_say_and_all_shards_are_all_of_it(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        every = {farm.host().id for _ in range(40)}
        division = ("one", "two", "three")
        shards = {
            shard: fetch_groups(connection, farm.facility(), ["general"], STALENESS, buckets(shard, division))
            for shard in division
        }

    assert {shard: {host.id for host in hosts} for shard, hosts in shards.items()} == {
        shard: {host_id for host_id in every if shard_of(host_id, division) == shard} for shard in division
    }


def test_hosts_are_counted_in_the_facilities_asked(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        before = count_hosts(connection, [farm.facility()], most=100)
        for number in range(3):
            farm.host(state=("UP", "DOWN")[number % 2])
        farm.host(alloc=farm.alloc("general", facility="lax"))

        assert count_hosts(connection, [farm.facility()], most=100) == before + 3
        assert count_hosts(connection, None, most=100) == before + 4
        assert count_hosts(connection, None, most=2) == 2
        assert count_hosts(connection, [], most=100) == 0


def test_several_groups_are_one_statement_however_many_hosts(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = [farm.host(tags=[f"t{number % 3}", "all"]) for number in range(12)]
        facility = farm.facility()

        with counted_statements(engine) as statements:
            found = fetch_groups(connection, facility, ["t0", "t1", "all", "none"], STALENESS)

    assert len(statements) == 1
    assert sorted(host.id for host in found) == sorted(host.id for host in hosts)
    assert {tag: sum(tag in host.tags for host in found) for tag in ("t0", "t1", "none")} == {
        "t0": 4,
        "t1": 4,
        "none": 0,
    }


def test_upstream_bug_lagging_subscription_columns_hide_no_host(engine: Engine) -> None:
    """Upstream read what is left of the subscription with the host, from columns two minutes old."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        host = farm.host()
        connection.execute(text("UPDATE subscription SET int_burst = 100, int_cores = 100"))

        group = hosts_tagged(connection, farm, "general")

    assert [fetched.id for fetched in group] == [host.id]


def test_as_many_hosts_are_read_as_were_asked_for_though_rows_of_others_make_no_sense(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        bad = [farm.host().id for _ in range(3)]
        good = {farm.host().id for _ in range(7)}
        connection.execute(
            text("UPDATE host SET int_cores = 0, int_cores_idle = 0 WHERE pk_host = ANY(:h)"), {"h": bad}
        )

        found = [
            {host.id for host in fetch_groups(connection, farm.facility(), ["general"], STALENESS, most=most)}
            for most in (5, 7, 8)
        ]

    # Then fewer are found only where there are no more
    assert [len(ids) for ids in found] == [5, 7, 7]
    assert found[0] < found[1] == found[2] == good


def test_a_host_whose_rows_make_no_sense_is_skipped_and_named(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        mode, cores, good, huge = farm.host(), farm.host(), farm.host(), farm.host()
        connection.execute(text("UPDATE host SET int_cores = 9e18 WHERE pk_host = :h"), {"h": huge.id})
        connection.execute(text("UPDATE host SET int_thread_mode = 9 WHERE pk_host = :h"), {"h": mode.id})
        connection.execute(
            text("UPDATE host SET int_cores = 0, int_cores_idle = 0 WHERE pk_host = :h"), {"h": cores.id}
        )

        with capture_logs() as logs:
            group = fetch_groups(connection, farm.facility(), ["general"], STALENESS)

    assert [fetched.id for fetched in group] == [good.id]
    assert {(it["event"], it["id"]) for it in logs} == {("host_skipped", it.id) for it in (mode, cores, huge)}


def test_a_host_says_what_runs_on_it(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        busy, idle = farm.host(cores=8), farm.host()
        job = farm.job([LayerSpec(frames=3), LayerSpec(frames=2)])
        first, second = job.layers
        farm.run(first.frames[:2], busy)
        farm.run(second.frames[:1], busy)

        hosts = fetch_hosts_by_id(connection, [busy.id, idle.id], STALENESS)

    assert {host.id: host.running for host in hosts} == {busy.id: {first.id: 2, second.id: 1}, idle.id: {}}


def test_of_a_full_host_and_an_idle_one_no_proc_is_read(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        full, idle, busy = farm.host(cores=2), farm.host(), farm.host(cores=8)
        (layer,) = farm.job([LayerSpec(frames=4)]).layers
        farm.run(layer.frames[:2], full)
        farm.run(layer.frames[2:], busy)

        with reads_by_table(connection) as read:
            hosts = fetch_hosts_by_id(connection, [full.id, idle.id], STALENESS)
        assert read["proc"] == (0, 0)
        assert {host.id: (host.idle_cores, host.running) for host in hosts} == {full.id: (0, {}), idle.id: (8, {})}
        (host,) = fetch_hosts_by_id(connection, [busy.id], STALENESS)
        assert host.running == {layer.id: 2}


def test_the_full_name_of_a_host_is_the_one_it_reports_under(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        for name in ("pod1", "pod2"):
            farm.host(name=name)
        connection.execute(text("UPDATE host SET str_fqdn = 'pod1.rqd.svc.cluster.local' WHERE str_name = 'pod1'"))
        connection.execute(text("UPDATE host SET str_fqdn = NULL WHERE str_name = 'pod2'"))
    full_name = full_names(engine)
    assert [full_name(name) for name in ("pod1", "pod2", "gone")] == ["pod1.rqd.svc.cluster.local", "pod2", "gone"]


def test_a_full_name_that_postgresql_does_not_tell_is_a_failure_to_reach_the_host() -> None:
    with pytest.raises(RqdFailure, match="OperationalError"):
        full_names(create_engine("postgresql+psycopg2://nobody@127.0.0.1:1/farm"))("pod1")


def test_cores_that_are_locked_on_the_rqd_are_not_there_for_frames(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        ids = farm.host(cores=8, idle_cores=6)
        for locked, (total, idle) in ((300, (500, 300)), (700, (100, 0))):
            connection.execute(text("DELETE FROM opencue_sched_locked_cores"))
            row = {"host": ids.id, "locked": locked}
            connection.execute(text("INSERT INTO opencue_sched_locked_cores VALUES (:host, :locked)"), row)
            (host,) = hosts_tagged(connection, farm, "general")
            assert (host.total_centicores, host.idle_centicores) == (total, idle)


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "as filled"])
def test_hosts_named_by_id_cost_no_more_the_more_there_are(engine: Engine, analyzed: bool) -> None:
    with engine.begin() as connection:
        ids = [host.id for host in Farm(connection).hosts([HostSpec()] * 600)]
    if analyzed:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))

    with engine.begin() as connection, reads_by_table(connection) as read:
        hosts = fetch_hosts_by_id(connection, ids[:100], STALENESS)

    assert len(hosts) == 100
    for table in ("host", "host_stat", "host_tag"):
        scans, rows = read[table]
        assert scans == 0, table
        assert rows <= 300, table
