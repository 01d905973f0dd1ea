"""Tags match without case, as in a Cuebot, wherever two are compared; who looks at one sees it as it is spelled."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.sweep import without_cluster
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.dispatch.waiting_frames import count_waiting_frames
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.settings import Rqd, SchedulerScope, Settings
from opencue_sched.store import frame_memory, reservations
from opencue_sched.store.hosts import fetch_groups, tags_of_hosts
from opencue_sched.store.insight import unreached_layers
from opencue_sched.store.pending import have_a_cluster, waiting_tags
from opencue_sched.store.schema import check_schema
from tests.kit.passes import passes

IN_ANY_CASE = [("GPU", "gpu"), ("gpu", "GPU"), ("Big Mem", "bigMEM"), ("BIGMEM", "linux | big mem")]
"""A tag of a host, and the tags of a layer that runs there."""


def planted(connection: Connection, host_tag: str, layer_tags: str) -> tuple[Farm, Any, Any]:
    """A host with this tag and a job of one frame for hosts of these."""
    farm = Farm(connection)
    host = farm.host(cores=2, memory_gb=8, tags=[host_tag], hostname_tag=False, alloc_tag=False)
    return farm, host, farm.job([LayerSpec(tags=layer_tags, frames=1)])


@pytest.mark.parametrize(("host_tag", "layer_tags"), IN_ANY_CASE)
def test_a_frame_is_booked_on_a_host_whose_tag_is_spelled_otherwise(
    engine: Engine, settings: Settings, host_tag: str, layer_tags: str
) -> None:
    with engine.begin() as connection:
        planted(connection, host_tag, layer_tags)
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as here:
        booked = sum(report.frames_booked for report in here.drain())
    assert booked == 1


@pytest.mark.parametrize(("host_tag", "layer_tags"), IN_ANY_CASE)
def test_whatever_asks_for_a_tag_finds_it_in_any_case(
    engine: Engine, settings: Settings, host_tag: str, layer_tags: str
) -> None:
    with engine.begin() as connection:
        farm, host, job = planted(connection, host_tag, layer_tags)
        layer = job.layers[0].id
        (cluster,) = load_clusters(connection, settings)
        waits = {it for it in waiting_tags(connection, None) if it[2] in cluster.tags}
        staleness = settings.host_cache.host_staleness_threshold

        # clusters, what waits for them, and hosts
        assert len(waits) == 1
        assert without_cluster(frozenset(waits), [cluster], ignored=()) == frozenset()
        assert have_a_cluster(connection, waits)
        assert tags_of_hosts(connection, [host.id]) == set(cluster.tags)
        (found,) = fetch_groups(connection, cluster.facility_id, cluster.tags, staleness)
        assert (found.id, found.tags) == (host.id, set(cluster.tags))
        # reservations of hosts
        assert reservations.fetch_host_kinds(connection, None, cluster.tags, staleness) == {host.id: 1}
        asked = {"layer_id": layer, "facility_id": cluster.facility_id, "tags": cluster.tags}
        asked |= {"alloc_ids": [farm.default_alloc().id], "cores": 1, "memory_kb": 1, "gpus": 0}
        assert reservations.fetch_candidates(connection, [asked], staleness, most=9) == {layer: [host.id]}
        # the largest host that a frame may use
        assert frame_memory.largest_hosts(connection, [layer]) == {layer: 8 * 1024**2}
        # what the farm looks like from outside
        assert list(unreached_layers(connection, [job.id])) == []


def test_a_tag_in_two_spellings_makes_one_cluster(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        facility, show = farm.default_alloc().facility_id, farm.default_show().id
        for tags in (["GPU", "old"], ["gpu"], ["Gpu", "NEW"]):
            farm.host(tags=tags, hostname_tag=False, alloc_tag=False)
        clusters = load_clusters(connection, settings)
    assert clusters == {Cluster(facility, show, ClusterKind.MANUAL, ("gpu", "new", "old"))}


def test_hosts_with_a_tag_are_found_without_reading_all_tags(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts(HostSpec(name=f"Node{number}") for number in range(2_000))
        facility, show = farm.default_alloc().facility_id, farm.default_show().id
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    scans = text("SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'host_tag'")
    with engine.begin() as connection:
        before = connection.execute(scans).scalar_one()
        assert have_a_cluster(connection, [(facility, show, "node7")])
        (host,) = fetch_groups(connection, facility, ["node7"], settings.host_cache.host_staleness_threshold)
        assert host.name == "Node7"
        assert connection.execute(scans).scalar_one() == before


def test_a_tag_to_be_ignored_is_in_any_case(engine: Engine, settings: Settings, redis_client: Any) -> None:
    scoped = settings.model_copy(update={"scheduler": SchedulerScope(ignore_tags=("gPU",))})
    with engine.begin() as connection:
        planted(connection, "GPU", "gpu")
        assert load_clusters(connection, scoped) == frozenset()
        counted = count_waiting_frames(
            connection,
            scoped,
            VerdictLog(redis_client, "cue"),
            check_schema(connection),
            cooled_down=(),
            believed_seconds=60,
        )
    assert not counted, "another scheduler has them"


def test_letters_outside_the_alphabet_are_compared_as_they_are_spelled(engine: Engine, settings: Settings) -> None:
    # In Python and in every database alike: what lower() makes of them depends on the locale.
    with engine.begin() as connection:
        planted(connection, "GRÖßE", "größe")
        (cluster,) = load_clusters(connection, settings)
        assert cluster.tags == ("grÖße",)
        assert {tag for *_, tag in waiting_tags(connection, None)} == {"größe"}
        connection.execute(text("UPDATE layer SET str_tags = 'GrÖße'"))
        assert {tag for *_, tag in waiting_tags(connection, None)} == {"grÖße"}
