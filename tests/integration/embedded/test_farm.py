"""The farm builder leaves the database as Cuebot would."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.embedded.farms.stress_farms import (
    DRAIN,
    SATURATION,
    drain_farm,
    remove_stress_farms,
    saturation_farm,
    stress_farm,
)


def _counters(connection: Connection, table: str, key: str, value: str) -> tuple[int, int, int]:
    row = connection.execute(
        text(f"SELECT int_waiting_count, int_depend_count, int_running_count FROM {table} WHERE {key} = :value"),  # noqa: S608
        {"value": value},
    ).one()
    return row[0], row[1], row[2]


def test_a_job_is_activated_with_counters_and_caps(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=5, cores=0.5), LayerSpec(frames=2, chunk=3)], max_cores=-1, priority=7)
        assert _counters(connection, "job_stat", "pk_job", job.id) == (7, 0, 0)
        assert _counters(connection, "layer_stat", "pk_layer", job.layers[0].id) == (5, 0, 0)
        row = connection.execute(
            text(
                "SELECT str_state, int_frame_count, int_layer_count, int_max_cores, int_priority FROM"
                " (SELECT pk_job, str_state, int_frame_count, int_layer_count FROM job) job"
                " JOIN job_resource USING (pk_job) WHERE pk_job = :job"
            ),
            {"job": job.id},
        ).one()
        assert tuple(row) == ("PENDING", 7, 2, -1, 7)
        numbers = connection.execute(
            text("SELECT int_number FROM frame WHERE pk_layer = :layer ORDER BY int_dispatch_order"),
            {"layer": job.layers[1].id},
        ).scalars()
        assert list(numbers) == [1, 4]


def test_frames_with_dependencies_are_activated_as_depend(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=3), LayerSpec(frames=3), LayerSpec(frames=1)], activate=False)
        farm.frame_by_frame((job, 1), (job, 0))
        farm.layer_on_layer((job, 2), (job, 1))
        farm.activate([job])
        assert _counters(connection, "job_stat", "pk_job", job.id) == (3, 4, 0)
        assert _counters(connection, "layer_stat", "pk_layer", job.layers[1].id) == (0, 3, 0)


def test_a_dependency_added_later_takes_waiting_frames_back(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        first, second = farm.job(), farm.job([LayerSpec(frames=4)])
        farm.job_on_job(second, first)
        assert _counters(connection, "job_stat", "pk_job", second.id) == (0, 4, 0)


def test_running_frames_take_from_their_host(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=8, memory_gb=16, gpus=2, gpu_memory_gb=8, tags=["fast"])
        job = farm.job([LayerSpec(frames=3)])
        procs = farm.run(job.frames[:2], host, cores=2, memory_gb=3, gpus=1, gpu_memory_gb=4)
        row = connection.execute(
            text("SELECT int_cores_idle, int_mem_idle, int_gpus_idle, int_gpu_mem_idle, str_tags FROM host")
        ).one()
        assert tuple(row) == (400, 10 * 1024 * 1024, 0, 0, f"general {host.name} fast")
        assert len(set(procs)) == 2
        assert _counters(connection, "job_stat", "pk_job", job.id) == (1, 0, 2)


def test_a_named_thing_is_made_once(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        assert farm.alloc("general") == Farm(connection).alloc("general")
        first, second = farm.hosts([HostSpec(name="a"), HostSpec(name="b")])
        assert first.alloc_id == second.alloc_id


def test_stress_farms_have_their_published_sizes(engine: Engine) -> None:
    with engine.begin() as connection:
        drain, saturation = drain_farm(connection), saturation_farm(connection)
        assert (len(drain.hosts), len(drain.jobs), drain.frames) == (1200, 300, 6000)
        assert (len(saturation.hosts), len(saturation.jobs), saturation.frames) == (400, 150, 3000)
        assert saturation.burst_cores == 450
        waiting = connection.execute(text("SELECT sum(int_waiting_count) FROM job_stat")).scalar_one()
        assert waiting == 9000
        assert drain.show.name.startswith("stress_d_")
        tagged = connection.execute(
            text("SELECT count(DISTINCT str_tag) FROM host_tag WHERE str_tag_type = 'MANUAL'")
        ).scalar_one()
        assert tagged == 12


def _row_counts(connection: Connection) -> dict[str, int]:
    tables = connection.execute(
        text("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace")
    ).scalars()
    return {table: connection.execute(text(f'SELECT count(*) FROM "{table}"')).scalar_one() for table in tables}  # noqa: S608


def test_stress_farms_leave_nothing_behind_once_removed(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        before = _row_counts(connection)
        for shape in (DRAIN, SATURATION):
            made = stress_farm(connection, shape.scaled(0.01))
            farm.run(made.jobs[0].frames[:2], made.hosts[0])
        assert _row_counts(connection) != before
        remove_stress_farms(connection)
        assert _row_counts(connection) == before
        stress_farm(connection, DRAIN.scaled(0.01))
