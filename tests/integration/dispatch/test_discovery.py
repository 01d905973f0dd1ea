"""Clusters and the awake gate on a real database."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.dispatch.sweep import with_work
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Queue, SchedulerScope, Settings
from opencue_sched.store.pending import waiting_tags


def with_settings(settings: Settings, **sections: Any) -> Settings:
    return settings.model_copy(update=sections)


def tags_of(clusters: frozenset[Cluster], kind: ClusterKind) -> set[tuple[str, ...]]:
    return {cluster.tags for cluster in clusters if cluster.kind is kind}


def test_every_kind_of_tag_becomes_a_cluster(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        farm.host(name="node1", tags=["m2", "m1"], hardware_tags=["linux", "avx"])
        farm.host(name="node2", tags=["m3"])

        clusters = load_clusters(connection, with_settings(settings, queue=Queue(manual_tags_chunk_size=2)))

    facility, alloc = farm.default_alloc().facility_id, farm.default_alloc().id
    assert clusters == {
        Cluster(facility, show.id, ClusterKind.ALLOC, ("general",), alloc),
        Cluster(facility, show.id, ClusterKind.MANUAL, ("m1", "m2")),
        Cluster(facility, show.id, ClusterKind.MANUAL, ("m3",)),
        Cluster(facility, show.id, ClusterKind.HOSTNAME, ("node1", "node2")),
        Cluster(facility, show.id, ClusterKind.HARDWARE, ("avx", "linux")),
    }


def test_only_active_managed_shows_have_clusters(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        shows = [farm.show("ours"), farm.show("cuebots", managed=False), farm.show("gone", active=False)]
        for show in shows:
            farm.subscription(show, farm.default_alloc())
        farm.host()

        clusters = load_clusters(connection, settings)

    assert {cluster.show_id for cluster in clusters} == {shows[0].id}


def test_upstream_bug_an_allocation_of_the_same_tag_elsewhere_is_another_cluster(
    engine: Engine, settings: Settings
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        here, there = farm.alloc("general", facility="a"), farm.alloc("general", facility="b")
        show = farm.show("ours")
        farm.subscription(show, here)
        farm.host(alloc=here, hostname_tag=False)
        farm.host(alloc=there, hostname_tag=False)

        clusters = load_clusters(connection, settings)

    assert clusters == {Cluster(here.facility_id, show.id, ClusterKind.ALLOC, ("general",), here.id)}


def test_a_facility_scopes_by_its_exact_name(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("ours")
        allocs = [farm.alloc("general", facility=name) for name in ("spi", "SPI", "lax")]
        for alloc in allocs:
            farm.subscription(show, alloc)
            farm.host(alloc=alloc, hostname_tag=False)
        scoped = with_settings(settings, scheduler=SchedulerScope(facility="spi"))

        clusters = load_clusters(connection, scoped)

        assert {cluster.facility_id for cluster in clusters} == {allocs[0].facility_id}
        assert scoped_facilities(connection, scoped) == [allocs[0].facility_id]
        assert len(load_clusters(connection, settings)) == 3


def test_an_unknown_facility_is_refused_by_name(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        Farm(connection).facility("spi")

        with pytest.raises(InvalidInput, match=r"scheduler\.facility.*'Spi'"):
            load_clusters(connection, with_settings(settings, scheduler=SchedulerScope(facility="Spi")))


def test_ignored_tags_form_no_cluster(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        farm.host(name="node1", tags=["old", "new"])
        ignoring = with_settings(settings, scheduler=SchedulerScope(ignore_tags=("old", "general", "node1")))

        clusters = load_clusters(connection, ignoring)

    assert {cluster.tags for cluster in clusters} == {("new",)}


def test_chunks_do_not_depend_on_the_order_of_rows(engine: Engine, settings: Settings) -> None:
    chunked = with_settings(settings, queue=Queue(manual_tags_chunk_size=3, hostname_tags_chunk_size=4))
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        for number in range(10):
            farm.host(tags=[f"m{(number * 7) % 10}"])

        first = load_clusters(connection, chunked)
        connection.execute(text("UPDATE host_tag SET str_tag = str_tag WHERE pk_host_tag < '8'"))
        again = load_clusters(connection, chunked)

    assert again == first
    assert sorted(map(len, tags_of(first, ClusterKind.MANUAL))) == [1, 3, 3, 3]
    assert sorted(map(len, tags_of(first, ClusterKind.HOSTNAME))) == [2, 4, 4]


def test_a_shared_tag_keeps_its_clusters_when_hosts_come_and_go(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        farm.host(name="node1", tags=["m1"])
        before = load_clusters(connection, settings)
        farm.host(name="node2", tags=["m1"], hostname_tag=False)

        assert load_clusters(connection, settings) == before


def test_statements_are_constant(engine: Engine, settings: Settings) -> None:
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts[-1] += 1

    event.listen(engine, "before_cursor_execute", count)
    with engine.begin() as connection:
        farm = Farm(connection)
        for shows in (1, 5):
            counts.append(0)
            for number in range(shows):
                farm.subscription(farm.show(f"s{shows}{number}"), farm.default_alloc())
                farm.host(tags=[f"m{number}"])
            counts.append(0)
            load_clusters(connection, settings)
            counts.append(0)
            waiting_tags(connection, None)
    event.remove(engine, "before_cursor_execute", count)

    assert counts[1:3] == counts[4:6] == [2, 1]


def test_the_gate_opens_for_waiting_work_only(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        farm.host(name="node1", tags=["m1", "m2"])
        queue = Queue(manual_tags_chunk_size=1)
        clusters = load_clusters(connection, with_settings(settings, queue=queue))
        farm.jobs(
            [
                JobSpec([LayerSpec(tags="m1 | m9")]),
                JobSpec([LayerSpec(tags="m2")], paused=True),
                JobSpec([LayerSpec(tags="m2")], activate=False),
                JobSpec([LayerSpec(tags="general")], facility_id=farm.facility("elsewhere")),
            ]
        )

        awake = waiting_tags(connection, None)

    assert {cluster.tags for cluster in with_work(awake, clusters)} == {("m1",)}
    assert len(awake) == 3


def test_the_scan_keeps_to_its_facilities(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.jobs([JobSpec([LayerSpec()]), JobSpec([LayerSpec()], facility_id=farm.facility("elsewhere"))])

        assert len(waiting_tags(connection, None)) == 2
        assert len(waiting_tags(connection, [farm.facility("elsewhere")])) == 1
        assert len(waiting_tags(connection, [])) == 0
