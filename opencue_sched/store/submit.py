"""Putting a job in: its rows, and the activation that makes its frames bookable.

Every statement is set-based, so their number does not depend on the job's layers, frames or dependencies. The triggers
of the schema make the counter rows of the job and its layers; frames come in as SETUP, uncounted, and the activation
writes the first counts, as Cuebot does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, text

from opencue_sched.domain.farm import FrameState

_TIMEOUT = text("SELECT set_config('statement_timeout', :milliseconds, true)")

_INSERT_JOB = text(
    """
    INSERT INTO job (pk_job, pk_show, pk_folder, pk_facility, pk_dept, str_name, str_visible_name, str_show, str_shot,
                     str_user, str_state, str_log_dir, str_os, int_uid, b_paused, b_autoeat, int_max_retries)
    VALUES (:job, :show, :folder, :facility, :dept, :name, :name, :show_name, :shot,
            :user_name, 'STARTUP', :log_dir, :os, :uid, :paused, :autoeat, :max_retries)
    ON CONFLICT (str_visible_name) DO NOTHING
    RETURNING pk_job
    """
)
_JOB_RESOURCE = text(
    """
    UPDATE job_resource SET int_priority = :priority, int_min_cores = :min_cores, int_max_cores = :max_cores,
                            int_min_gpus = :min_gpus, int_max_gpus = :max_gpus
     WHERE pk_job = :job
    """
)
# The word "point" is a type of PostgreSQL's too, which an INSERT does not mind.
_POINT = text("INSERT INTO point (pk_point, pk_dept, pk_show) VALUES (:point, :dept, :show) ON CONFLICT DO NOTHING")
_INSERT_JOB_ENV = text(
    """
    INSERT INTO job_env (pk_job_env, pk_job, str_key, str_value)
    SELECT id, :job, key, value
      FROM json_to_recordset(CAST(:rows AS json)) AS env(id varchar, key varchar, value varchar)
    """
)
_INSERT_LAYERS = text(
    """
    INSERT INTO layer (pk_layer, pk_job, str_name, str_cmd, str_range, int_chunk_size, int_dispatch_order,
                       str_tags, str_type, int_cores_min, int_cores_max, b_threadable, int_mem_min, int_gpus_min,
                       int_gpus_max, int_gpu_mem_min, str_services, int_timeout, int_timeout_llu)
    SELECT id, :job, name, command, frame_range, chunk_size, dispatch_order, tags, type, cores_min, cores_max,
           threadable, memory_kb, gpus, gpus, gpu_memory_kb, services, timeout, timeout_llu
      FROM json_to_recordset(CAST(:rows AS json))
           AS row(id varchar, name varchar, command varchar, frame_range varchar, chunk_size bigint,
                  dispatch_order bigint, tags varchar, type varchar, cores_min bigint, cores_max int,
                  threadable boolean, memory_kb bigint, gpus bigint, gpu_memory_kb bigint, services varchar,
                  timeout int, timeout_llu int)
     ORDER BY dispatch_order
    """
)
_INSERT_LAYER_ENV = text(
    """
    INSERT INTO layer_env (pk_layer_env, pk_layer, pk_job, str_key, str_value)
    SELECT id, layer, :job, key, value
      FROM json_to_recordset(CAST(:rows AS json)) AS env(id varchar, layer varchar, key varchar, value varchar)
    """
)
_INSERT_LAYER_LIMITS = text(
    """
    INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record)
    SELECT id, layer, limit_id
      FROM json_to_recordset(CAST(:rows AS json)) AS row(id varchar, layer varchar, limit_id varchar)
    """
)
_INSERT_FRAMES = text(
    """
    INSERT INTO frame (pk_frame, pk_layer, pk_job, str_name, str_state, int_number, int_dispatch_order,
                       int_layer_order, ts_updated, ts_llu)
    SELECT id, layer, :job, name, 'SETUP', number, dispatch_order, layer_order, current_timestamp, current_timestamp
      FROM unnest(CAST(:ids AS varchar[]), CAST(:layers AS varchar[]), CAST(:names AS varchar[]),
                  CAST(:numbers AS bigint[]), CAST(:dispatch_orders AS bigint[]), CAST(:layer_orders AS int[]))
           AS row(id, layer, name, number, dispatch_order, layer_order)
    """
)
_INSERT_DEPENDS = text(
    """
    INSERT INTO depend (pk_depend, pk_parent, pk_job_depend_er, pk_layer_depend_er, pk_frame_depend_er,
                        pk_job_depend_on, pk_layer_depend_on, pk_frame_depend_on, str_type, str_target, b_any,
                        b_active, b_composite, str_signature, ts_satisfied)
    SELECT id, parent, :job, er_layer, er_frame, on_job, on_layer, on_frame, type, target, any_frame, active,
           composite, signature, CASE WHEN NOT active THEN current_timestamp END
      FROM json_to_recordset(CAST(:rows AS json))
           AS row(id varchar, parent varchar, er_layer varchar, er_frame varchar, on_job varchar, on_layer varchar,
                  on_frame varchar, type varchar, target varchar, any_frame boolean, active boolean,
                  composite boolean, signature varchar)
    """
)

# A frame with dependencies ends up in DEPEND: the schema's trigger sees to it.
_ACTIVATE_FRAMES = text(
    """
    UPDATE frame SET str_state = 'WAITING', ts_updated = current_timestamp, int_depend_count = start.waits_for
      FROM unnest(CAST(:frames AS varchar[]), CAST(:waits_for AS bigint[])) AS start(frame, waits_for)
     WHERE frame.pk_frame = start.frame AND frame.str_state = 'SETUP'
    """
)
_COUNT_LAYERS = text(
    """
    UPDATE layer_stat SET int_total_count = counted.total, int_waiting_count = counted.waiting,
                          int_depend_count = counted.depend
      FROM (SELECT pk_layer, count(*) AS total, count(*) FILTER (WHERE str_state = 'WAITING') AS waiting,
                   count(*) FILTER (WHERE str_state = 'DEPEND') AS depend
              FROM frame WHERE pk_job = :job GROUP BY pk_layer) counted
     WHERE layer_stat.pk_layer = counted.pk_layer
    """
)
_COUNT_JOB = text(
    """
    UPDATE job_stat SET int_waiting_count = counted.waiting, int_depend_count = counted.depend
      FROM (SELECT sum(int_waiting_count) AS waiting, sum(int_depend_count) AS depend
              FROM layer_stat WHERE pk_job = :job) counted
     WHERE job_stat.pk_job = :job
    """
)
_ACTIVATE_JOB = text(
    """
    UPDATE job SET str_state = 'PENDING', ts_updated = current_timestamp, int_frame_count = :frames,
                   int_layer_count = :layers
     WHERE pk_job = :job
    """
)
_COUNT_SHOW = text(
    """
    UPDATE show_stats SET int_frame_insert_count = int_frame_insert_count + :frames,
                          int_job_insert_count = int_job_insert_count + 1
     WHERE pk_show = :show
    """
)


@dataclass(frozen=True, slots=True)
class JobRow:
    """The job and its resources. Cores in centicores."""

    id: str
    show_id: str
    show_name: str
    folder_id: str
    facility_id: str
    dept_id: str
    name: str
    shot: str
    user: str
    log_dir: str
    os: str | None
    uid: int | None
    paused: bool
    autoeat: bool
    max_retries: int
    priority: int
    min_cores: int
    max_cores: int
    min_gpus: int
    max_gpus: int


@dataclass(frozen=True, slots=True)
class FrameColumns:
    """The frames of a job as columns of equal length."""

    ids: Sequence[str]
    layers: Sequence[str]
    names: Sequence[str]
    numbers: Sequence[int]
    dispatch_orders: Sequence[int]
    layer_orders: Sequence[int]


@dataclass(frozen=True, slots=True)
class DependRow:
    """One dependency of the new job. Fields that do not apply to its type are None."""

    id: str
    parent: str | None
    type: str
    er_layer: str | None
    er_frame: str | None
    on_job: str
    on_layer: str | None
    on_frame: str | None
    target: str
    any_frame: bool
    active: bool
    composite: bool
    signature: str


_FRAME_COLUMNS = tuple(field.name for field in fields(FrameColumns))


def allow_time(connection: Connection, seconds: float) -> None:
    """How long each statement of this transaction may take: a job of 100,000 frames needs more than a query."""
    connection.execute(_TIMEOUT, {"milliseconds": str(int(seconds * 1000))})


def insert_job(connection: Connection, job: JobRow, *, point_id: str) -> bool:
    """Insert the job in STARTUP, with its resources. False when a live job has its name."""
    row = asdict(job)
    row |= {"job": job.id, "show": job.show_id, "folder": job.folder_id, "facility": job.facility_id}
    row |= {"dept": job.dept_id, "user_name": job.user, "point": point_id}
    if connection.execute(_INSERT_JOB, row).one_or_none() is None:
        return False
    connection.execute(_JOB_RESOURCE, row)
    connection.execute(_POINT, row)
    return True


def insert_layers(connection: Connection, job_id: str, layers: Sequence[Mapping[str, Any]]) -> None:
    """Insert layers; the keys are the names in the statement above. Cores in centicores."""
    connection.execute(_INSERT_LAYERS, {"job": job_id, "rows": json.dumps(layers)})


def insert_environments(
    connection: Connection, job_id: str, of_job: Sequence[Mapping[str, str]], of_layers: Sequence[Mapping[str, str]]
) -> None:
    """Insert variables (id, key, value; a layer's also layer)."""
    connection.execute(_INSERT_JOB_ENV, {"job": job_id, "rows": json.dumps(of_job)})
    connection.execute(_INSERT_LAYER_ENV, {"job": job_id, "rows": json.dumps(of_layers)})


def insert_layer_limits(connection: Connection, rows: Sequence[Mapping[str, str]]) -> None:
    """Put layers under limits (id, layer, limit_id)."""
    connection.execute(_INSERT_LAYER_LIMITS, {"rows": json.dumps(rows)})


def insert_frames(connection: Connection, job_id: str, frames: FrameColumns) -> None:
    """Insert frames in SETUP."""
    connection.execute(
        _INSERT_FRAMES, {"job": job_id, **{name: list(getattr(frames, name)) for name in _FRAME_COLUMNS}}
    )


def insert_depends(connection: Connection, job_id: str, rows: Sequence[DependRow]) -> None:
    """Insert what the job, its layers and its frames wait for."""
    connection.execute(_INSERT_DEPENDS, {"job": job_id, "rows": json.dumps([asdict(row) for row in rows])})


def activate(
    connection: Connection, job: JobRow, *, frames: Sequence[str], waits_for: Sequence[int], layers: int
) -> None:
    """Make the job bookable: frames WAITING, or DEPEND where they wait for something; the first counts; PENDING.

    ``waits_for`` is the number of active dependencies of each frame. show_stats comes last: one row a show is the
    hottest of all.
    """
    connection.execute(_ACTIVATE_FRAMES, {"frames": list(frames), "waits_for": list(waits_for)})
    connection.execute(_COUNT_LAYERS, {"job": job.id})
    connection.execute(_COUNT_JOB, {"job": job.id})
    connection.execute(_ACTIVATE_JOB, {"job": job.id, "frames": len(frames), "layers": layers})
    connection.execute(_COUNT_SHOW, {"show": job.show_id, "frames": len(frames)})


# What a job that is put in refers to: its show and folder, facilities, departments, limits, and jobs it waits for.

_SHOW = text(
    """
    SELECT pk_show, str_name, b_active, b_paused, b_scheduler_managed, int_default_min_cores, int_default_max_cores,
           int_default_max_gpus
      FROM show
     WHERE str_name = :name
        OR pk_show IN (SELECT pk_show FROM show_alias WHERE show_alias.str_name = :name)
     ORDER BY (str_name = :name) DESC, pk_show LIMIT 1
    """
)
_FOLDERS = text(
    """
    SELECT pk_folder, str_name, pk_dept, pk_parent_folder IS NULL AS root, int_job_min_cores, int_job_max_cores,
           int_job_min_gpus, int_job_max_gpus
      FROM folder WHERE pk_show = :show ORDER BY pk_parent_folder IS NULL DESC, b_default DESC, pk_folder
    """
)
_NAMES = text(
    """
    SELECT 'facility' AS kind, pk_facility AS id, str_name AS name, b_default AS is_default FROM facility
    UNION ALL SELECT 'dept', pk_dept, str_name, b_default FROM dept
    UNION ALL SELECT 'limit', pk_limit_record, str_name, false FROM limit_record
    """
)
_JOBS = text(
    """
    SELECT DISTINCT ON (str_name) pk_job, str_name, str_state
      FROM job WHERE str_name = ANY(CAST(:names AS varchar[]))
     ORDER BY str_name, (str_visible_name IS NOT NULL) DESC, ts_started DESC
    """
)
_LAYERS = text(
    """
    SELECT pk_layer, pk_job, str_name, str_range, int_chunk_size FROM layer
     WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job, int_dispatch_order
    """
)
# Whoever ends a frame holds its job_stat row, so after this lock no frame of the jobs ends until we commit.
_LOCK_JOBS = text("SELECT pk_job FROM job_stat WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job FOR SHARE")
_JOB_STATES = text("SELECT pk_job, str_state FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))")
_LAYER_PROGRESS = text(
    """
    SELECT pk_layer, bool_and(str_state = ANY(CAST(:done AS varchar[]))) AS every_frame,
           bool_or(str_state = ANY(CAST(:done AS varchar[]))) AS any_frame
      FROM frame WHERE pk_layer = ANY(CAST(:layers AS varchar[])) GROUP BY pk_layer
    """
)
_FRAMES = text(
    """
    SELECT pk_frame, pk_layer, int_number, str_state FROM frame WHERE pk_layer = ANY(CAST(:layers AS varchar[]))
     ORDER BY pk_layer, int_dispatch_order
    """
)


@dataclass(frozen=True, slots=True)
class ShowRow:
    """The show a job goes to. Cores in centicores."""

    id: str
    name: str
    active: bool
    paused: bool
    managed: bool
    default_min_cores: int
    default_max_cores: int
    default_max_gpus: int


@dataclass(frozen=True, slots=True)
class FolderRow:
    """A folder of a show, the root first. What it says about its jobs is -1 where it says nothing; centicores."""

    id: str
    name: str
    dept_id: str
    root: bool
    job_min_cores: int
    job_max_cores: int
    job_min_gpus: int
    job_max_gpus: int


@dataclass(frozen=True, slots=True)
class Named:
    """A facility, department or limit."""

    id: str
    name: str
    default: bool


@dataclass(frozen=True, slots=True)
class OtherJob:
    """A job that another one is to wait for: the live one of that name, else the last."""

    id: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class OtherLayer:
    """A layer of such a job."""

    id: str
    job_id: str
    name: str
    frame_range: str
    chunk_size: int


@dataclass(frozen=True, slots=True)
class OtherFrame:
    """A frame of such a layer."""

    id: str
    layer_id: str
    number: int
    state: str


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """Whether all, or any, of a layer's frames are over."""

    every_frame: bool
    any_frame: bool


def find_show(connection: Connection, name: str) -> ShowRow | None:
    """The show of this name, or with this alias."""
    row = connection.execute(_SHOW, {"name": name}).one_or_none()
    return None if row is None else ShowRow(*row)


def folders_of(connection: Connection, show_id: str) -> list[FolderRow]:
    """The show's folders, the root first."""
    return [FolderRow(*row) for row in connection.execute(_FOLDERS, {"show": show_id})]


def names(connection: Connection) -> Mapping[str, list[Named]]:
    """All facilities, departments and limits, by kind: ``facility``, ``dept``, ``limit``."""
    found: dict[str, list[Named]] = {"facility": [], "dept": [], "limit": []}
    for row in connection.execute(_NAMES):
        found[row.kind].append(Named(row.id, row.name, row.is_default))
    return found


def find_jobs(connection: Connection, job_names: Collection[str]) -> dict[str, OtherJob]:
    """Jobs by name."""
    rows = connection.execute(_JOBS, {"names": list(job_names)})
    return {row.str_name: OtherJob(row.pk_job, row.str_name, row.str_state) for row in rows}


def layers_of(connection: Connection, job_ids: Collection[str]) -> list[OtherLayer]:
    """All layers of these jobs."""
    return [OtherLayer(*row) for row in connection.execute(_LAYERS, {"jobs": list(job_ids)})]


def frames_of(connection: Connection, layer_ids: Collection[str]) -> list[OtherFrame]:
    """All frames of these layers, in dispatch order."""
    return [OtherFrame(*row) for row in connection.execute(_FRAMES, {"layers": list(layer_ids)})]


def hold_jobs(connection: Connection, job_ids: Collection[str]) -> dict[str, str]:
    """Keep the frames of these jobs from ending until this transaction ends; the jobs' states.

    Without it a frame could end between our look at its state and our commit, and nobody would satisfy the dependency.
    """
    connection.execute(_LOCK_JOBS, {"jobs": list(job_ids)})
    return {row.pk_job: row.str_state for row in connection.execute(_JOB_STATES, {"jobs": list(job_ids)})}


def layer_progress(
    connection: Connection, layer_ids: Collection[str], done: Collection[FrameState]
) -> dict[str, LayerProgress]:
    """How far these layers are; ``done`` are the states that satisfy a dependency."""
    rows = connection.execute(_LAYER_PROGRESS, {"layers": list(layer_ids), "done": [state.value for state in done]})
    return {row.pk_layer: LayerProgress(row.every_frame, row.any_frame) for row in rows}
