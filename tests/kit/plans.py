"""Plans without a planner: one proc a frame, hosts in turn."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import cycle

from sqlalchemy import Connection, Engine, text

from opencue_sched.accounting.keys import VertexCaps
from opencue_sched.dispatch.commit import CommitResult, commit_plan
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import fetch_hosts_by_id
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import waiting_jobs

KB_PER_GB = 1024 * 1024


def hosts_of(connection: Connection, *, staleness: float = 3600) -> list[Host]:
    """Every host that may take frames, by name."""
    ids = connection.execute(text("SELECT pk_host FROM host")).scalars().all()
    return sorted(fetch_hosts_by_id(connection, ids, staleness), key=lambda host: host.name)


def plan(
    farm: Farm, settings: Settings, *, cores: int = 1, memory_kb: int = KB_PER_GB, gpus: int = 0, gpu_memory_kb: int = 0
) -> list[PlannedProc]:
    """One proc for each frame that waits, on all hosts in turn."""
    hosts = cycle(hosts_of(farm.connection))
    taken = Resources(cores, memory_kb, gpus, gpu_memory_kb)
    return [
        proc_of(job, layer, index, next(hosts), taken)
        for job in waiting_jobs(farm.connection)
        for layer in job.layers
        for index in range(len(layer.frames))
    ]


def proc_of(job: Job, layer: Layer, index: int, host: Host, taken: Resources) -> PlannedProc:
    vertices = Vertices(job.show_id, host.alloc_id, job.folder_id, job.id, layer.id, job.dept_id, layer.limit_ids)
    return PlannedProc(str(uuid.uuid4()), job, layer, layer.frames[index], host, taken, vertices)


def commit(
    engine: Engine, procs: Sequence[PlannedProc], settings: Settings, caps: dict[str, VertexCaps] | None = None
) -> CommitResult:
    with engine.connect() as connection:
        facts = check_schema(connection)
    return commit_plan(engine, procs, caps or {}, settings, facts=facts)


def reasons(result: CommitResult) -> list[str]:
    """Why procs were lost."""
    return [error.reason for _, error in result.lost]


def refuse_more_than(engine: Engine, procs: int, sqlstate: str) -> None:
    """From now on the server refuses to insert more procs at once, with this SQLSTATE."""
    trigger = f"""
        DROP TRIGGER IF EXISTS refuse ON proc;
        CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            IF (SELECT count(*) FROM inserted) > {procs} THEN
                RAISE EXCEPTION 'too many' USING ERRCODE = '{sqlstate}';
            END IF;
            RETURN NULL;
        END$$;
        CREATE TRIGGER refuse AFTER INSERT ON proc REFERENCING NEW TABLE AS inserted
        FOR EACH STATEMENT EXECUTE FUNCTION refuse()"""  # noqa: S608 - a number and a code of the test
    with engine.begin() as connection:
        connection.exec_driver_sql(trigger)


def assert_consistent(engine: Engine) -> None:
    """Hosts have what their procs left, frames run exactly where a proc is, and counters count them."""
    checks = {
        "host idle is total less procs": """
            SELECT h.str_name FROM host h LEFT JOIN proc p ON p.pk_host = h.pk_host GROUP BY h.pk_host
            HAVING h.int_cores - h.int_cores_idle <> COALESCE(sum(p.int_cores_reserved), 0)
                OR h.int_mem - h.int_mem_idle <> COALESCE(sum(p.int_mem_reserved), 0)
                OR h.int_gpus - h.int_gpus_idle <> COALESCE(sum(p.int_gpus_reserved), 0)
                OR h.int_gpu_mem - h.int_gpu_mem_idle <> COALESCE(sum(p.int_gpu_mem_reserved), 0)""",
        "running frames have a proc": """
            SELECT f.str_name FROM frame f LEFT JOIN proc p ON p.pk_frame = f.pk_frame
            WHERE (f.str_state = 'RUNNING') <> (p.pk_proc IS NOT NULL)""",
        "layer_stat counts frames": """
            SELECT s.pk_layer FROM layer_stat s JOIN frame f ON f.pk_layer = s.pk_layer GROUP BY s.pk_layer_stat
            HAVING s.int_waiting_count <> count(*) FILTER (WHERE f.str_state = 'WAITING')
                OR s.int_running_count <> count(*) FILTER (WHERE f.str_state = 'RUNNING')""",
        "job_stat counts frames": """
            SELECT s.pk_job FROM job_stat s JOIN frame f ON f.pk_job = s.pk_job GROUP BY s.pk_job_stat
            HAVING s.int_waiting_count <> count(*) FILTER (WHERE f.str_state = 'WAITING')
                OR s.int_running_count <> count(*) FILTER (WHERE f.str_state = 'RUNNING')""",
    }
    with engine.connect() as connection:
        for check, statement in checks.items():
            assert connection.execute(text(statement)).scalars().all() == [], check
