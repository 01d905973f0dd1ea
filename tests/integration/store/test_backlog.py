"""What waits: which layers are listed, what is kept of them, when it counts as changed, and their first frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, JobSpec, LayerSpec
from opencue_sched.store.backlog import (
    BacklogRows,
    Portion,
    fetch_layers,
    fetch_portions,
    fetch_versions,
)
from opencue_sched.store.pending import fetch_shares
from opencue_sched.store.schema import check_schema
from tests.kit.databases import Databases
from tests.kit.gathering import counted_statements, reads_by_table, with_start_times
from tests.kit.limits import has_types
from tests.kit.statements import counted_rows
from tests.kit.wording import lacks

_READ_FOR_PLANS = 16
"""PostgreSQL looks at the ends of an index while it plans: so many rows of a table at most."""


def listed(connection: Connection, **named: Any) -> BacklogRows:
    return fetch_layers(connection, check_schema(connection), **{"facilities": None, **named})


def layer_ids(rows: BacklogRows) -> set[str]:
    return {waiting.layer.id for waiting in rows.layers}


def version_of(connection: Connection, layer_id: str) -> str:
    (waiting,) = listed(connection, layer_ids=[layer_id]).layers
    return waiting.version


def portions_of(connection: Connection, wanted: dict[str, int], **more: Any) -> dict[str, Portion]:
    return {found.layer_id: found for found in fetch_portions(connection, check_schema(connection), wanted, **more)}


def database_time(connection: Connection) -> float:
    return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def test_what_decides_placement_arrives_where_it_belongs(engine: Engine) -> None:
    # Given a layer of every kind of requirement
    with engine.begin() as connection:
        farm = Farm(connection)
        nuke, arnold = sorted(farm.limit(name, 10) for name in ("nuke", "arnold"))
        spec = LayerSpec(
            frames=2,
            cores=2.5,
            cores_max=8,
            memory_gb=3,
            gpus=1,
            gpu_memory_gb=2,
            tags="general | fast",
            services="nuke, shell",
            threadable=False,
            limits=[arnold, nuke],
            name="beauty",
        )
        ids = farm.job([LayerSpec(), spec], os="rocky9", priority=7)
        job_row = connection.execute(
            text("SELECT pk_dept, pk_facility, extract(epoch FROM ts_started) AS started FROM job")
        ).one()
        connection.execute(
            text("UPDATE layer_usage SET int_frame_success_count = 4, int_clock_time_success = 90 WHERE pk_layer = :l"),
            {"l": ids.layers[1].id},
        )
        # When it is read
        (waiting,) = listed(connection, layer_ids=[ids.layers[1].id]).layers
    # Then the job has
    assert waiting.job == replace(
        waiting.job,
        id=ids.id,
        name=ids.name,
        show_id=ids.show.id,
        show_name=ids.show.name,
        facility_id=job_row.pk_facility,
        folder_id=ids.folder_id,
        dept_id=job_row.pk_dept,
        os_name="rocky9",
        priority=7,
        started_at=pytest.approx(float(job_row.started), abs=1e-3),
        quarantined_until=None,
        layers=(),
    )
    # And the layer
    assert waiting.layer == replace(
        waiting.layer,
        id=ids.layers[1].id,
        name="beauty",
        cores_min_centicores=250,
        cores_max_centicores=800,
        memory_min_kb=3 * 1024 * 1024,
        gpus_min=1,
        gpu_memory_min_kb=2 * 1024 * 1024,
        tags=frozenset({"general", "fast"}),
        services=("nuke", "shell"),
        threadable=False,
        dispatch_order=2,
        waiting_frames=2,
        limit_ids=(nuke, arnold),
        run_seconds=22.5,
        starts_at=None,
        frames=(),
    )


def test_the_layers_of_a_job_share_it(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.jobs([JobSpec([LayerSpec(), LayerSpec(tags="general|fast"), LayerSpec(tags="general|fast")])] * 2)

        found = listed(connection).layers

    assert len(found) == 6
    assert len({id(waiting.job) for waiting in found}) == len({waiting.job.id for waiting in found}) == 2
    assert len({id(waiting.layer.tags) for waiting in found}) == 2


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE job SET b_paused = true",
        "UPDATE job SET b_auto_book = false",
        "UPDATE job SET str_state = 'FINISHED'",
        "UPDATE show SET b_active = false",
        "UPDATE show SET b_scheduler_managed = false",
        "UPDATE layer_stat SET int_waiting_count = 0",
    ],
)
def test_a_layer_that_cannot_run_until_somebody_acts_is_not_listed(engine: Engine, change: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job()
        assert layer_ids(listed(connection)) == {job.layers[0].id}

        connection.execute(text(change))

        named: list[dict[str, Any]] = [
            {},
            {"layer_ids": [job.layers[0].id]},
            {"job_ids": [job.id]},
            {"show_ids": [job.show.id]},
        ]
        assert [listed(connection, **which) for which in named] == [BacklogRows([], [])] * 4
        assert fetch_versions(connection, facilities=None, buckets=ALL_BUCKETS) == []


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE show SET b_paused = true",
        "UPDATE show SET b_booking_enabled = false",
        "UPDATE show SET b_dispatch_enabled = false",
        "DELETE FROM subscription",
        "INSERT INTO opencue_sched_quarantine (pk_job, reason, until) SELECT pk_job, 'odd', now() + interval '60 s'"
        " FROM job",
    ],
)
def test_a_layer_that_only_has_to_wait_is_listed(engine: Engine, change: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job()
        connection.execute(text(change))

        assert layer_ids(listed(connection)) == {job.layers[0].id}


def test_only_work_of_the_facilities_asked_for_is_listed(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        there = farm.facility("there")
        here, away = farm.jobs([JobSpec([LayerSpec()]), JobSpec([LayerSpec()], facility_id=there)])

        for facilities, jobs in (([there], [away]), ([farm.facility()], [here]), (None, [here, away])):
            wanted = {job.layers[0].id for job in jobs}
            assert layer_ids(listed(connection, facilities=facilities)) == wanted
            assert layer_ids(listed(connection, facilities=facilities, job_ids=[here.id, away.id])) == wanted
            versions = fetch_versions(connection, facilities=facilities, buckets=ALL_BUCKETS)
            assert {version.layer_id for version in versions} == wanted


def test_layers_jobs_and_shows_may_be_named_together(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        other = farm.show("other")
        layers, job, _ = farm.jobs([JobSpec([LayerSpec()] * 3) for _ in range(3)])
        of_show = farm.jobs([JobSpec([LayerSpec()], show=other) for _ in range(2)])

        found = listed(
            connection,
            layer_ids=[layers.layers[1].id, job.layers[0].id, "gone"],
            job_ids=[job.id, "gone"],
            show_ids=[other.id, "gone"],
        )

    wanted = [layers.layers[1], *job.layers, *(job.layers[0] for job in of_show)]
    assert sorted(waiting.layer.id for waiting in found.layers) == sorted(layer.id for layer in wanted)


def test_nothing_named_reads_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        Farm(connection).job()
        facts = check_schema(connection)
        with counted_statements(engine) as statements:
            assert fetch_layers(connection, facts, facilities=None, layer_ids=[]) == BacklogRows([], [])
            assert fetch_portions(connection, facts, {}) == []

    assert statements == []


def test_what_has_to_wait_comes_with_its_time(engine: Engine) -> None:
    with_start_times(engine)
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec() for _ in range(5)])
        starts = ["now() + interval '60 s'", "now() - interval '60 s'", "'infinity'", "'-infinity'", "NULL"]
        for layer, start in zip(job.layers, starts, strict=True):
            connection.execute(
                text(f"UPDATE layer SET ts_start_after = {start} WHERE pk_layer = :l"),  # noqa: S608 - times of ours
                {"l": layer.id},
            )
        connection.execute(
            text(
                "INSERT INTO opencue_sched_quarantine (pk_job, reason, until)"
                " VALUES (:job, 'odd', now() + interval '90 s')"
            ),
            {"job": job.id},
        )
        now = database_time(connection)

        found = {waiting.layer.id: waiting for waiting in listed(connection).layers}

        ahead, past, never, always, none = (found[layer.id].layer.starts_at for layer in job.layers)
        assert ahead == pytest.approx(now + 60, abs=30)
        assert (past, never, always, none) == (None, inf, None, None)
        assert found[job.layers[0].id].job.quarantined_until == pytest.approx(now + 90, abs=30)

        connection.execute(text("UPDATE opencue_sched_quarantine SET until = now() - interval '1 s'"))
        assert {waiting.job.quarantined_until for waiting in listed(connection).layers} == {None}


@pytest.mark.parametrize("date", ["infinity", "-infinity"])
def test_a_job_started_at_no_time_is_as_old_as_can_be(engine: Engine, date: str) -> None:
    with engine.begin() as connection:
        Farm(connection).job()
        connection.execute(text("UPDATE job SET ts_started = CAST(:date AS timestamptz)"), {"date": date})

        (waiting,) = listed(connection).layers

    assert waiting.job.started_at == 0.0


def test_a_database_without_start_times_has_none(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=2)])
        facts = replace(check_schema(connection), has_start_after=False)

        (waiting,) = fetch_layers(connection, facts, facilities=None).layers
        (version,) = fetch_versions(connection, facilities=None, buckets=ALL_BUCKETS)
        (portion,) = fetch_portions(connection, facts, {job.layers[0].id: 5})

    assert waiting.layer.starts_at is None
    assert version.version == waiting.version
    assert len(portion.frames) == 2


CHANGES = {
    "requirements": "UPDATE layer SET int_mem_min = int_mem_min - 1 WHERE pk_layer = :layer",
    "pause": "UPDATE job SET b_paused = b_paused WHERE pk_job = :job",
    "priority": "UPDATE job_resource SET int_priority = int_priority + 1 WHERE pk_job = :job",
    "quarantine": "INSERT INTO opencue_sched_quarantine (pk_job, reason, until) VALUES (:job, 'odd', now())",
    "limit": "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record)"
    " SELECT 'new', :layer, pk_limit_record FROM limit_record WHERE str_name = 'arnold'",
    "limit gone": "DELETE FROM layer_limit WHERE pk_layer = :layer",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_version_is_another_when_something_kept_changed(engine: Engine, change: str) -> None:
    # Given two layers, committed: a row that a transaction wrote itself has the same xmin afterwards
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.limit("arnold", 1)
        changed, other = farm.jobs([JobSpec([LayerSpec(limits=[farm.limit(name, 1)])]) for name in ("nuke", "hou")])
    with engine.begin() as connection:
        before = {job.id: version_of(connection, job.layers[0].id) for job in (changed, other)}
    # When something of one changes
    with engine.begin() as connection:
        ids = {"layer": changed.layers[0].id, "job": changed.id}
        connection.execute(text(CHANGES[change]), {key: ids[key] for key in ids if f":{key}" in CHANGES[change]})
    # Then its version is another, and the same to both readers
    with engine.begin() as connection:
        after = {job.id: version_of(connection, job.layers[0].id) for job in (changed, other)}
        versions = fetch_versions(connection, facilities=None, buckets=ALL_BUCKETS)
    assert after[changed.id] != before[changed.id]
    assert after[other.id] == before[other.id]
    assert {version.layer_id: version.version for version in versions} == {
        job.layers[0].id: after[job.id] for job in (changed, other)
    }


def test_what_passes_change_all_the_time_leaves_the_version_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3)])
        layer = job.layers[0].id
    with engine.begin() as connection:
        before = version_of(connection, layer)

        connection.execute(text("UPDATE layer_stat SET int_waiting_count = 2"))
        connection.execute(text("UPDATE job_resource SET int_cores = 300"))
        connection.execute(text("UPDATE layer_usage SET int_frame_success_count = 1, int_clock_time_success = 5"))

        assert version_of(connection, layer) == before
        found = fetch_versions(connection, facilities=None, buckets=ALL_BUCKETS)
    assert [tuple(version) for version in found] == [(layer, job.id, 2, before)]


def test_versions_come_by_the_bucket_of_the_job(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        jobs = farm.jobs([JobSpec([LayerSpec()] * 5)] * 8)
        job_of = {layer.id: job.id for job in jobs for layer in job.layers}
        some = {bucket_of(job.id) for job in jobs[:2]}

        found = [
            {version.layer_id for version in fetch_versions(connection, facilities=None, buckets=frozenset(buckets))}
            for buckets in (some, ALL_BUCKETS - some, ALL_BUCKETS, ())
        ]

    of_some = {layer_id for layer_id, job_id in job_of.items() if bucket_of(job_id) in some}
    assert found == [of_some, job_of.keys() - of_some, job_of.keys(), set()]


def test_versions_of_some_buckets_cost_no_more_than_their_layers(engine: Engine) -> None:
    # Given twenty jobs of ten layers, a quarter of which is one worker's, and a job whose layers are done
    with engine.begin() as connection:
        farm = Farm(connection)
        jobs = farm.jobs([JobSpec([LayerSpec()] * 10)] * 20)
        done = farm.job([LayerSpec()] * 200)
        finish = text("UPDATE job SET str_state = 'FINISHED' WHERE pk_job = :job")
        connection.execute(finish, {"job": done.id})
    quarter = {bucket_of(job.id) for job in jobs[:5]}
    layers = 10 * sum(bucket_of(job.id) in quarter for job in jobs)
    # When the versions of no job, of those, and of all are read
    rows = []
    for buckets in (frozenset(), quarter, ALL_BUCKETS):
        with engine.begin() as connection:
            before = counted_rows(connection)
            fetch_versions(connection, facilities=None, buckets=buckets)
            rows.append(counted_rows(connection) - before)
    # Then each layer costs the same few rows, and no other layer any
    jobs_alone, of_quarter, of_all = rows
    assert jobs_alone < 200 < of_all - jobs_alone < 4 * 200
    assert of_quarter - jobs_alone == pytest.approx((of_all - jobs_alone) * layers / 200, rel=0.2)


# Rows that make no sense


@pytest.mark.parametrize("column", ["int_cores_min", "int_mem_min", "int_gpus_min", "int_gpu_mem_min"])
def test_a_bad_layer_costs_itself_alone(engine: Engine, column: str) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3), LayerSpec()])
        odd, good = job.layers
        connection.execute(
            text(f"UPDATE layer SET {column} = :value WHERE pk_layer = :layer"),  # noqa: S608 - our own constants
            {"value": 2**55, "layer": odd.id},
        )

        found = listed(connection)

    assert layer_ids(found) == {good.id}
    (bad,) = found.bad
    assert (bad.job_id, bad.layer_id, bad.show_id, bad.waiting) == (job.id, odd.id, job.show.id, 3)
    assert (bad.facility_id, bad.tags) == (found.layers[0].job.facility_id, found.layers[0].layer.tags)
    assert not lacks(bad.why, odd.id, column, str(2**55))


@pytest.mark.parametrize("table", ["job_resource", "folder_resource"])
def test_a_job_without_a_row_of_caps_costs_its_layers_until_it_is_mended(engine: Engine, table: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        folder = farm.folder(farm.default_show(), "shots")
        odd, good = farm.jobs([JobSpec([LayerSpec(), LayerSpec()], folder_id=folder), JobSpec([LayerSpec()])])
        key, value = ("pk_job", odd.id) if table == "job_resource" else ("pk_folder", folder)
        connection.execute(text(f"CREATE TEMP TABLE kept AS SELECT * FROM {table} WHERE {key} = '{value}'"))  # noqa: S608
        connection.execute(text(f"DELETE FROM {table} WHERE {key} = '{value}'"))  # noqa: S608 - our own names

        found = listed(connection)
        connection.execute(text(f"INSERT INTO {table} SELECT * FROM kept"))  # noqa: S608
        mended = {waiting.layer.id: waiting.version for waiting in listed(connection).layers}

    assert layer_ids(found) == {good.layers[0].id}
    assert {bad.layer_id for bad in found.bad} == {layer.id for layer in odd.layers}
    assert {f"job {odd.id}" in bad.why for bad in found.bad} == {True}
    assert mended.keys() == {layer.id for job in (odd, good) for layer in job.layers}
    assert not {bad.version for bad in found.bad} & set(mended.values())


IDS_OF = {
    "job": [(table, "pk_job") for table in ("job", "job_resource", "job_stat", "layer", "layer_stat", "frame")],
    "layer": [(table, "pk_layer") for table in ("layer", "layer_stat", "layer_limit", "frame")],
    "folder": [(table, "pk_folder") for table in ("job", "folder", "folder_resource")],
    "limit_record": [(table, "pk_limit_record") for table in ("limit_record", "layer_limit")],
}


@pytest.mark.parametrize("table", ["job", "layer", "folder", "limit_record"])
def test_an_id_that_cannot_stand_in_the_ledger_is_a_bad_row(engine: Engine, table: str) -> None:
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

        found = listed(connection)

    assert layer_ids(found) == {good.layers[0].id}
    assert ["'a|b'" in bad.why for bad in found.bad] == [True]


# Portions


def test_a_portion_is_the_first_waiting_frames_in_dispatch_order(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=6), LayerSpec(frames=2, chunk=5, name="beauty"), LayerSpec(frames=1)])
        first, second, third = job.layers
        farm.run([first.frames[5], third.frames[0]], farm.host())
        for place, (order, in_layer) in enumerate(((2, 1), (1, 9), (1, 2), (3, 0), (1, 1), (0, 0))):
            connection.execute(
                text("UPDATE frame SET int_dispatch_order = :o, int_layer_order = :i WHERE pk_frame = :f"),
                {"o": order, "i": in_layer, "f": first.frames[place]},
            )

        found = portions_of(connection, {first.id: 4, second.id: 200, third.id: 3, "gone": 1})

    assert found.keys() == {first.id, second.id, third.id}
    assert [frame.id for frame in found[first.id].frames] == [first.frames[place] for place in (4, 2, 1, 0)]
    assert [(frame.name, frame.number) for frame in found[second.id].frames] == [("0001-beauty", 1), ("0006-beauty", 6)]
    assert found[third.id].frames == ()
    assert [found[layer.id].waiting_frames for layer in job.layers] == [5, 2, 0]
    assert {portion.back_in for portion in found.values()} == {None}


def test_a_frame_waits_since_it_last_became_eligible(engine: Engine) -> None:
    """Activated 1000 s ago: one waits since then, one was put back after a try, the third's layer starts late."""
    with_start_times(engine)
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=2), LayerSpec(frames=1)])
        connection.execute(
            text("UPDATE frame SET ts_eligible = now() - interval '1000 s', ts_updated = now() - interval '1000 s'")
        )
        connection.execute(text("UPDATE frame SET ts_updated = now() - interval '100 s' WHERE int_number = 2"))
        connection.execute(
            text("UPDATE layer SET ts_start_after = now() - interval '10 s' WHERE int_dispatch_order = 2")
        )
        now = float(connection.execute(text("SELECT extract(epoch FROM now())")).scalar_one())

        found = portions_of(connection, {layer.id: 10 for layer in job.layers})

    since = [frame.waiting_since for layer in job.layers for frame in found[layer.id].frames]
    assert since == [pytest.approx(now - ago, abs=0.01) for ago in (1000, 100, 10)]


def test_null_versions_and_dates_beyond_python_are_no_reason_to_fail(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3)])
        connection.execute(text("UPDATE frame SET int_version = NULL"))
        for number, date in ((1, "infinity"), (2, "29999-01-01"), (3, None)):
            connection.execute(
                text("UPDATE frame SET ts_updated = NULL, ts_eligible = CAST(:d AS timestamptz) WHERE int_number = :n"),
                {"d": date, "n": number},
            )

        frames = portions_of(connection, {job.layers[0].id: 3})[job.layers[0].id].frames

    late = datetime(2999, 1, 1, tzinfo=UTC).timestamp()
    assert [(frame.version, (frame.waiting_since or 0.0) > late) for frame in frames] == [
        (None, False),
        (None, True),
        (None, False),
    ]
    assert [frame.waiting_since is None for frame in frames] == [True, False, True]


def test_a_frame_that_needed_more_memory_says_so(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3)])
        connection.execute(
            text("INSERT INTO opencue_sched_frame_memory (pk_frame, pk_layer, memory_kb) VALUES (:f, :l, 77)"),
            {"f": job.frames[1], "l": job.layers[0].id},
        )

        frames = portions_of(connection, {job.layers[0].id: 3})[job.layers[0].id].frames

    assert [(frame.id, frame.memory_kb) for frame in frames] == [
        (frame_id, 77 if place == 1 else None) for place, frame_id in enumerate(job.frames)
    ]


def ended(connection: Connection, frames: Sequence[str], *, status: int, ago: float) -> None:
    connection.execute(
        text(
            "UPDATE frame SET int_exit_status = :status, ts_updated = now() - make_interval(secs => :ago)"
            " WHERE pk_frame = ANY(:frames)"
        ),
        {"status": status, "ago": ago, "frames": list(frames)},
    )


def test_frames_whose_layer_may_be_about_to_wait_are_left_out_for_two_seconds(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=5)])
        layer = job.layers[0].id
        ended(connection, job.frames[:1], status=7, ago=0.5)
        ended(connection, job.frames[1:2], status=7, ago=1.5)
        ended(connection, job.frames[2:3], status=7, ago=30)
        ended(connection, job.frames[3:4], status=8, ago=0.5)

        all_of_it = portions_of(connection, {layer: 3})[layer]
        without = portions_of(connection, {layer: 3}, uncounted=[7])[layer]

    assert ([frame.id for frame in all_of_it.frames], all_of_it.back_in) == (list(job.frames[:3]), None)
    assert [frame.id for frame in without.frames] == list(job.frames[2:])
    assert without.back_in == pytest.approx(0.5, abs=0.01)
    assert without.waiting_frames == 5


def test_a_layer_whose_frames_all_wait_for_its_delay_says_when_they_are_back(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=5)])
        ended(connection, job.frames, status=7, ago=0.5)

        found = portions_of(connection, {job.layers[0].id: 2}, uncounted=[7])[job.layers[0].id]

    assert (found.frames, found.waiting_frames) == ((), 5)
    assert found.back_in == pytest.approx(1.5, abs=0.01)


def test_frames_that_got_no_licence_are_left_out_for_two_seconds(engine: Engine) -> None:
    """A Cuebot of V49 writes the delay of their layer after it has freed them."""
    with engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("limits have no exit status before V49")
        farm = Farm(connection)
        farm.limit("nuke", 5)
        connection.execute(text("UPDATE limit_record SET int_exit_status = 330, int_delay_minutes = 5"))
        job = farm.job([LayerSpec(frames=3)])
        ended(connection, job.frames[:1], status=330, ago=0.5)
        facts = replace(check_schema(connection), origin="cuebot")
        (found,) = fetch_portions(connection, facts, {job.layers[0].id: 3})

    assert [frame.id for frame in found.frames] == list(job.frames[1:])
    assert found.back_in == pytest.approx(1.5, abs=0.01)


# What a read costs


@pytest.fixture(scope="module", params=["all", "nothing", "one layer"])
def filled(databases: Databases, request: pytest.FixtureRequest) -> Iterator[Filled]:
    """Farms that no test changes: writing one takes longer than all that is read of it."""
    with databases.engine() as engine:
        yield Filled(engine, fill(engine, statistics_of=request.param))


@dataclass(frozen=True)
class Filled:
    """A database in which work waits."""

    engine: Engine
    jobs: list[JobIds]


def fill(engine: Engine, *, statistics_of: str) -> list[JobIds]:
    """A hundred jobs that wait and three hundred that finished, four layers each, and one layer of 20,000 frames, with
    statistics of all this, of nothing, or of the one layer that there was before. Returns those that wait."""
    if statistics_of == "one layer":
        with engine.begin() as connection:
            Farm(connection).job([LayerSpec(frames=1_000)], name="first")
        analyze(engine)
    with engine.begin() as connection:
        farm = Farm(connection)
        specs = [JobSpec([LayerSpec(frames=2, limits=[farm.limit("nuke", 9)])] * 4)] * 400
        jobs = farm.jobs(specs)
        done = [job.id for job in jobs[100:]]
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in (
            "UPDATE job SET str_state = 'FINISHED' WHERE pk_job = ANY(:done)",
            "UPDATE layer_stat SET int_waiting_count = 0 WHERE pk_job = ANY(:done)",
            "UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_job = ANY(:done)",
        ):
            connection.execute(text(statement), {"done": done})
        connection.execute(
            text(
                "INSERT INTO frame (pk_frame, pk_layer, pk_job, str_name, str_state, int_number, int_dispatch_order,"
                " int_layer_order, ts_updated) SELECT gen_random_uuid(), :layer, :job, 'more' || number, 'WAITING',"
                " number, number, number, now() FROM generate_series(10, 20000) AS number"
            ),
            {"layer": jobs[0].layers[0].id, "job": jobs[0].id},
        )
    if statistics_of == "all":
        analyze(engine)
    return jobs[:100]


def analyze(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))


@pytest.mark.parametrize("uncounted", [(), (7,)])
def test_a_portion_costs_its_frames_however_many_wait(filled: Filled, uncounted: tuple[int, ...]) -> None:
    wanted = {layer.id: 20 for job in filled.jobs[:50] for layer in job.layers}
    with filled.engine.begin() as connection, reads_by_table(connection) as read:
        found = portions_of(connection, wanted, uncounted=uncounted)

    assert len(found) == 200
    assert len(found[filled.jobs[0].layers[0].id].frames) == 20
    scans, frames = read["frame"]
    assert scans == 0
    assert frames <= sum(len(portion.frames) + 1 for portion in found.values()) * (2 if uncounted else 1)


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("by", ["layer", "job", "show"])
def test_what_is_named_costs_no_more_the_more_waits(filled: Filled, by: str, count: int) -> None:
    with filled.engine.begin() as connection, reads_by_table(connection) as read:
        if by == "layer":
            found = listed(connection, layer_ids=[layer.id for job in filled.jobs for layer in job.layers][:count])
        elif by == "job":
            found = listed(connection, job_ids=[job.id for job in filled.jobs[: max(1, count // 4)]])
        else:
            found = listed(connection, show_ids=[filled.jobs[0].show.id])

    layers = {"layer": count, "job": max(4, count), "show": 400}[by]
    assert len(found.layers) == layers
    # All jobs here are of one show, and PostgreSQL may read them all for it.
    for table in (
        "layer",
        "layer_stat",
        "job_resource",
        "layer_usage",
        "layer_limit",
        *(["job"] if by != "show" else []),
    ):
        scans, rows = read[table]
        assert scans == 0, table
        assert rows <= 2 * layers + _READ_FOR_PLANS, table
    assert "frame" not in read or read["frame"] == (0, 0)


# Shows


@pytest.mark.parametrize("column", ["b_paused", "b_booking_enabled", "b_dispatch_enabled"])
def test_a_show_that_is_switched_off_has_shares_and_may_not_book(engine: Engine, column: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        off, on = farm.show("off"), farm.show("on")
        for show in (off, on):
            farm.subscription(show, farm.default_alloc())
        connection.execute(
            text(f"UPDATE show SET {column} = NOT {column} WHERE pk_show = :show"),  # noqa: S608 - names of columns
            {"show": off.id},
        )

        shares = fetch_shares(connection, [off.id, on.id])

    assert {share.show_id: share.may_book for share in shares} == {off.id: False, on.id: True}
