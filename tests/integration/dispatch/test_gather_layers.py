"""Layers and frames: in dispatch order, so many of each, and what one bad row costs."""

from __future__ import annotations

import pytest
import structlog
from sqlalchemy import Engine, text

from opencue_sched.domain.jobs import Layer
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.pending import fetch_waiting_work
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import cluster_of, counted_statements, gather_one, gathered, job_ids, with_start_times


def test_upstream_bug_unordered_layers_keep_their_dispatch_order(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=3) for _ in range(6)])
        wanted = [job.layers[index].id for index in (3, 0, 5, 1, 4, 2)]
        for order, layer in enumerate(wanted):
            connection.execute(
                text("UPDATE layer SET int_dispatch_order = :o WHERE pk_layer = :l"), {"o": order, "l": layer}
            )
            connection.execute(
                text("UPDATE frame SET int_dispatch_order = 10 - int_dispatch_order WHERE pk_layer = :l"), {"l": layer}
            )

        layers = gathered(connection, cluster_of(farm), settings).snapshot.work[0].jobs[0].layers

    frames_of = {layer.id: layer.frames for layer in job.layers}
    assert [layer.id for layer in layers] == wanted
    assert all([f.id for f in layer.frames] == list(reversed(frames_of[layer.id])) for layer in layers)


def test_frames_with_equal_dispatch_order_come_by_layer_order(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=4)])
        for order, frame in enumerate((2, 0, 3, 1)):
            connection.execute(
                text("UPDATE frame SET int_dispatch_order = 7, int_layer_order = :o WHERE pk_frame = :f"),
                {"o": order, "f": job.frames[frame]},
            )

        frames = gathered(connection, cluster_of(farm), settings).snapshot.work[0].jobs[0].layers[0].frames

    assert [frame.id for frame in frames] == [job.frames[index] for index in (2, 0, 3, 1)]


def test_a_layer_shows_so_many_frames_and_counts_them_all(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=30), LayerSpec(frames=2)])

        layers = (
            gathered(connection, cluster_of(farm), settings, dispatch_frames_per_layer_limit=20)
            .snapshot.work[0]
            .jobs[0]
            .layers
        )

    assert [len(layer.frames) for layer in layers] == [20, 2]
    assert [layer.waiting_frames for layer in layers] == [30, 2]
    assert [frame.id for frame in layers[0].frames] == list(job.layers[0].frames[:20])


def test_upstream_bug_cap_sums_beyond_the_rank_limit_hide_no_later_layer(engine: Engine, settings: Settings) -> None:
    """Upstream summed the whole job's frames against its cap before cutting each layer to the limit."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=10), LayerSpec(frames=10)], max_cores=5)

        layers = (
            gathered(connection, cluster_of(farm), settings, dispatch_frames_per_layer_limit=2)
            .snapshot.work[0]
            .jobs[0]
            .layers
        )

    assert [len(layer.frames) for layer in layers] == [2, 2]


def test_only_waiting_frames_and_matching_layers_come(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        job = farm.job([LayerSpec(frames=3), LayerSpec(tags="elsewhere"), LayerSpec(frames=1)])
        farm.run([job.layers[0].frames[0], job.layers[2].frames[0]], host)

        layers = gathered(connection, cluster_of(farm), settings).snapshot.work[0].jobs[0].layers

    assert [layer.id for layer in layers] == [job.layers[0].id]
    assert [frame.id for frame in layers[0].frames] == list(job.layers[0].frames[1:])


def test_every_column_arrives_where_it_belongs(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 10)
        spec = LayerSpec(
            frames=2,
            chunk=5,
            cores=2.5,
            cores_max=8,
            memory_gb=3,
            gpus=1,
            gpu_memory_gb=2,
            tags="general | fast",
            services="nuke, shell",
            threadable=False,
            limits=[limit, limit],
            name="beauty",
        )
        ids = farm.job([spec], os="rocky9", priority=7)

        found = gathered(connection, cluster_of(farm), settings)

    job = found.snapshot.work[0].jobs[0]
    expected = (ids.id, ids.name, ids.show.name, "rocky9", ids.folder_id)
    assert expected == (job.id, job.name, job.show_name, job.os_name, job.folder_id)
    (layer,) = job.layers
    assert layer == Layer(
        id=ids.layers[0].id,
        name="beauty",
        cores_min_centicores=250,
        cores_max_centicores=800,
        memory_min_kb=3 * 1024 * 1024,
        gpus_min=1,
        gpu_memory_min_kb=2 * 1024 * 1024,
        tags=frozenset({"general", "fast"}),
        services=("nuke", "shell"),
        threadable=False,
        waiting_frames=2,
        frames=layer.frames,
        limit_ids=(limit,),
        kind=layer.kind,
    )
    assert layer.kind
    assert [(frame.name, frame.number) for frame in layer.frames] == [("0001-beauty", 1), ("0006-beauty", 6)]
    assert all(frame.version is not None and frame.waited_seconds is not None for frame in layer.frames)


def test_null_versions_and_dates_beyond_python_are_no_reason_to_fail(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=3)])
        connection.execute(text("UPDATE frame SET int_version = NULL"))
        for number, date in ((1, "infinity"), (2, "29999-01-01"), (3, None)):
            connection.execute(
                text("UPDATE frame SET ts_updated = NULL, ts_eligible = CAST(:d AS timestamptz) WHERE int_number = :n"),
                {"d": date, "n": number},
            )

        frames = gathered(connection, cluster_of(farm), settings).snapshot.work[0].jobs[0].layers[0].frames

    assert [(frame.version, frame.waited_seconds) for frame in frames] == [(None, None), (None, 0), (None, None)]


def test_a_frame_waits_since_it_last_became_eligible(engine: Engine, settings: Settings) -> None:
    """Activated 1000 s ago: one waits since then, one was put back after a try, the third's layer starts late."""
    with_start_times(engine)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=2), LayerSpec(frames=1)])
        connection.execute(
            text("UPDATE frame SET ts_eligible = now() - interval '1000 s', ts_updated = now() - interval '1000 s'")
        )
        connection.execute(text("UPDATE frame SET ts_updated = now() - interval '100 s' WHERE int_number = 2"))
        connection.execute(
            text("UPDATE layer SET ts_start_after = now() - interval '10 s' WHERE int_dispatch_order = 2")
        )

        first, second = gathered(connection, cluster_of(farm), settings).snapshot.work[0].jobs[0].layers

    waited = [frame.waited_seconds for frame in (*first.frames, *second.frames)]
    assert [round(seconds or 0, -1) for seconds in waited] == [1000, 100, 10]


def test_a_job_with_a_bad_row_is_skipped_and_named_and_the_others_go_on(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        memory, caps, good = farm.jobs([JobSpec([LayerSpec(), LayerSpec()]) for _ in range(3)])
        connection.execute(
            text("UPDATE layer SET int_mem_min = :m WHERE pk_layer = :l"), {"m": 2**55, "l": memory.layers[1].id}
        )
        connection.execute(text("DELETE FROM job_resource WHERE pk_job = :j"), {"j": caps.id})

        found = gathered(connection, cluster_of(farm), settings)

    reasons = {bad.job_id: bad.detail for bad in found.bad_layers}
    assert job_ids(found) == [good.id]
    assert reasons.keys() == {memory.id, caps.id}
    assert memory.layers[1].id in reasons[memory.id]
    assert f"int_mem_min is {2**55}" in reasons[memory.id]
    assert "job_resource" in reasons[caps.id]
    assert found.snapshot.caps.keys() == {good.id}


@pytest.mark.parametrize("column", ["int_cores_min", "int_mem_min", "int_gpus_min", "int_gpu_mem_min"])
@pytest.mark.parametrize("value", [2**63 - 1, 2**55])
def test_a_layer_that_asks_for_more_than_there_can_be_is_one_bad_row(
    engine: Engine, settings: Settings, column: str, value: int
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        odd, good = farm.job(), farm.job()
        connection.execute(
            text(f"UPDATE layer SET {column} = :value WHERE pk_layer = :layer"),  # noqa: S608 - our own constants
            {"value": value, "layer": odd.layers[0].id},
        )

        found = gathered(connection, cluster_of(farm), settings)
        counted = fetch_waiting_work(connection, None, check_schema(connection))

    assert job_ids(found) == [good.id]
    (bad,) = found.bad_layers
    assert bad.job_id == odd.id
    assert bad.detail == f"layer {odd.layers[0].id}: {column} is {value}, more than there can be"
    assert sum(it.frames for it in counted) == 2


IDS_OF = {
    "job": [(table, "pk_job") for table in ("job", "job_resource", "job_stat", "layer", "layer_stat", "frame")],
    "layer": [(table, "pk_layer") for table in ("layer", "layer_stat", "layer_limit", "frame")],
    "folder": [(table, "pk_folder") for table in ("job", "folder", "folder_resource")],
    "limit_record": [(table, "pk_limit_record") for table in ("limit_record", "layer_limit")],
}


@pytest.mark.parametrize("table", ["job", "layer", "folder", "limit_record"])
def test_a_job_of_an_id_that_cannot_stand_in_the_ledger_is_a_bad_row_and_the_others_go_on(
    engine: Engine, settings: Settings, table: str
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 5)
        folder = farm.folder(farm.default_show(), "shots")
        odd, good = farm.job([LayerSpec(limits=[limit])], folder_id=folder), farm.job()
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for named, column in IDS_OF[table]:
            connection.execute(
                text(f"UPDATE {named} SET {column} = 'a|b' WHERE {column} = :id"),  # noqa: S608 - names of this module
                {"id": {"job": odd.id, "layer": odd.layers[0].id, "folder": folder, "limit_record": limit}[table]},
            )
        found = gathered(connection, cluster_of(farm), settings)
    assert job_ids(found) == [good.id]
    assert ["'a|b'" in bad.detail for bad in found.bad_layers] == [True]


def test_a_bad_job_is_logged_once_however_often_it_is_met(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection, structlog.testing.capture_logs() as logs:
        farm = Farm(connection)
        job = farm.job()
        connection.execute(text("UPDATE layer SET int_mem_min = :m"), {"m": 2**55})
        cluster, facts = cluster_of(farm), check_schema(connection)

        found = [gather_one(connection, cluster, settings, facts) for _ in range(3)]

    assert [len(each.bad_layers) for each in found] == [1, 1, 1]
    assert [entry["id"] for entry in logs if entry["event"] == "job_skipped"] == [job.id]


def test_statements_do_not_grow_with_jobs_layers_frames_or_hosts(engine: Engine, settings: Settings) -> None:
    counts = []
    with engine.begin() as connection:
        farm = Farm(connection)
        facts = check_schema(connection)
        for jobs, layers, frames, hosts in ((1, 1, 1, 1), (40, 5, 8, 30)):
            farm.jobs([JobSpec([LayerSpec(frames=frames)] * layers) for _ in range(jobs)])
            for _ in range(hosts):
                farm.host()
            cluster = cluster_of(farm)
            with counted_statements(engine) as statements:
                found = gather_one(connection, cluster, settings, facts)
            counts.append(len(statements))

    assert counts == [4, 4]
    assert len(found.snapshot.work[0].jobs) == settings.queue.max_jobs_per_cluster_pass
