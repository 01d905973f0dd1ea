"""Putting a job in: its rows, and the activation that makes its frames bookable.

Every statement is set-based, so their number does not depend on the job's layers, frames or dependencies. The triggers
of the schema make the counter rows of the job and its layers; frames come in as SETUP, uncounted, and the first counts
are written once they are activated, as Cuebot does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.states import FrameState
from opencue_sched.errors import InvalidInput
from opencue_sched.store.schema import knows_start_after
from opencue_sched.store.shows import INSERT_POINT

# Insert a job in STARTUP. Returns no row when a live job has its name.
_INSERT_JOB = text(
    """
    INSERT INTO job (pk_job, pk_show, pk_folder, pk_facility, pk_dept, str_name, str_visible_name, str_show, str_shot,
                     str_user, str_state, str_log_dir, str_os, int_uid, b_paused, b_autoeat, int_max_retries)
    VALUES (:job, :show_id, :folder_id, :facility_id, :dept_id, :full_name, :full_name, :show, :shot,
            :user, 'STARTUP', :log_dir, :os, :uid, :paused, :autoeat, :max_retries)
    ON CONFLICT (str_visible_name) DO NOTHING
    RETURNING pk_job
    """
)
# Set the caps and the priority of a job: the row is there, by a trigger.
_JOB_RESOURCE = text(
    """
    UPDATE job_resource SET int_priority = :priority, int_min_cores = :min_cores, int_max_cores = :max_cores,
                            int_min_gpus = :min_gpus, int_max_gpus = :max_gpus
     WHERE pk_job = :job
    """
)
# Insert the environment of a job.
_INSERT_JOB_ENV = text(
    """
    INSERT INTO job_env (pk_job_env, pk_job, str_key, str_value)
    SELECT CAST(gen_random_uuid() AS varchar), :job, key, value FROM json_each_text(CAST(:env AS json))
    """
)
# Insert the layers of a job.
_INSERT_LAYERS = text(
    """
    INSERT INTO layer (pk_layer, pk_job, str_name, str_cmd, str_range, int_chunk_size, int_dispatch_order,
                       str_tags, str_type, int_cores_min, int_cores_max, b_threadable, int_mem_min, b_optimize,
                       int_gpus_min, int_gpus_max, int_gpu_mem_min, str_services, int_timeout, int_timeout_llu)
    SELECT id, :job, name, command, range, chunk, dispatch_order, tags, type, cores, max_cores, threads, memory,
           optimize, gpus, gpus, gpu_memory, services, timeout, timeout_llu
      FROM json_to_recordset(CAST(:rows AS json))
           AS row(id varchar, name varchar, command varchar, range varchar, chunk bigint, dispatch_order bigint,
                  tags varchar, type varchar, cores bigint, max_cores int, threads boolean, memory bigint,
                  optimize boolean, gpus bigint, gpu_memory bigint, services varchar, timeout int, timeout_llu int)
     ORDER BY dispatch_order
    """
)
# Insert the environments of layers.
_INSERT_LAYER_ENV = text(
    """
    INSERT INTO layer_env (pk_layer_env, pk_layer, pk_job, str_key, str_value)
    SELECT CAST(gen_random_uuid() AS varchar), id, :job, key, value
      FROM json_to_recordset(CAST(:rows AS json)) AS row(id varchar, env json), json_each_text(env)
    """
)
# Bind layers to limits by name, unless they are bound already.
INSERT_LAYER_LIMITS = text(
    """
    INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record)
    SELECT CAST(gen_random_uuid() AS varchar), id, pk_limit_record
      FROM json_to_recordset(CAST(:rows AS json)) AS row(id varchar, limits json)
     CROSS JOIN json_array_elements_text(limits) AS named(name)
      JOIN limit_record ON limit_record.str_name = named.name
     WHERE NOT EXISTS (SELECT FROM layer_limit known
                        WHERE known.pk_layer = id AND known.pk_limit_record = limit_record.pk_limit_record)
    """
)
# Insert frames in SETUP.
_INSERT_FRAMES = text(
    """
    INSERT INTO frame (pk_frame, pk_layer, pk_job, str_name, str_state, int_number, int_dispatch_order,
                       int_layer_order, int_depend_count, ts_updated, ts_llu)
    SELECT id, layer, :job, name, 'SETUP', number, dispatch_order, layer_order, waits_for, current_timestamp,
           current_timestamp
      FROM unnest(CAST(:ids AS varchar[]), CAST(:layers AS varchar[]), CAST(:names AS varchar[]),
                  CAST(:numbers AS bigint[]), CAST(:dispatch_orders AS bigint[]), CAST(:layer_orders AS int[]),
                  CAST(:waits_for AS bigint[]))
           AS row(id, layer, name, number, dispatch_order, layer_order, waits_for)
    """
)
# Insert dependencies of a job.
_INSERT_DEPENDS = text(
    """
    INSERT INTO depend (pk_depend, pk_parent, pk_job_depend_er, pk_layer_depend_er, pk_frame_depend_er,
                        pk_job_depend_on, pk_layer_depend_on, pk_frame_depend_on, str_type, str_target, b_any,
                        b_active, b_composite, str_signature, ts_satisfied)
    SELECT id, parent, :job, er_layer, er_frame, on_job, nullif(on_layer, ''), on_frame, type,
           CASE WHEN on_job = :job THEN 'INTERNAL' ELSE 'EXTERNAL' END, any_frame, active,
           type IN ('FRAME_BY_FRAME', 'PREVIOUS_FRAME'), id, CASE WHEN NOT active THEN current_timestamp END
      FROM json_to_recordset(CAST(:rows AS json))
           AS row(id varchar, parent varchar, er_layer varchar, er_frame varchar, on_job varchar, on_layer varchar,
                  on_frame varchar, type varchar, any_frame boolean, active boolean)
    """
)

_REASON_WIDTH = 255
"""Width of layer.str_start_after_reason."""
# Set when frames of layers may start, and why; NULL for at once.
_SET_START_AFTER = text(
    """
    UPDATE layer SET ts_start_after = wanted.start, str_start_after_reason = CASE WHEN wanted.start IS NOT NULL
                                                                                  THEN CAST(:reason AS varchar) END
      FROM unnest(CAST(:layers AS varchar[]), CAST(:starts AS timestamptz[])) AS wanted(pk_layer, start)
     WHERE layer.pk_layer = wanted.pk_layer
    """
)
# Sets the number of open dependencies of frames that get another one. A frame that runs or has rendered keeps its
# number, because with a dependency the schema's trigger would have it render again. So the number of a frame may be too
# low, and is counted anew here: otherwise the end of a dependency that was not counted would free the frame.
_WAIT_FOR_MORE = text(
    """
    WITH open AS (
        SELECT str_type, pk_layer_depend_er, pk_frame_depend_er FROM depend
         WHERE pk_job_depend_er = :job AND b_active AND NOT b_composite),
    waits AS (
        SELECT pk_frame_depend_er AS pk_frame FROM open WHERE starts_with(str_type, 'FRAME_ON_')
        UNION ALL
        SELECT pk_frame FROM open JOIN frame ON frame.pk_layer = open.pk_layer_depend_er
         WHERE starts_with(str_type, 'LAYER_ON_')
        UNION ALL
        SELECT pk_frame FROM open JOIN frame ON frame.pk_job = :job WHERE starts_with(str_type, 'JOB_ON_'))
    UPDATE frame SET int_depend_count = counted.depends
      FROM (SELECT pk_frame, count(*) AS depends FROM waits
             WHERE pk_frame = ANY(CAST(:frames AS varchar[])) GROUP BY pk_frame) counted
     WHERE frame.pk_frame = counted.pk_frame AND frame.str_state NOT IN ('RUNNING', 'SUCCEEDED')
    RETURNING frame.str_state
    """
)

# Frames are activated; then frames of a layer, layers of a job, frames of a job, jobs of a show are counted, in this
# order. show_stats comes last: one row a show is the hottest of all.
_OPEN_JOBS = (
    # A frame with dependencies ends up in DEPEND: the schema's trigger sees to it.
    text(
        """
        UPDATE frame SET str_state = 'WAITING', ts_updated = current_timestamp
         WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state = 'SETUP'
        """
    ),
    text(
        """
        UPDATE layer_stat SET int_total_count = counted.total, int_waiting_count = counted.waiting,
                              int_depend_count = counted.depend
          FROM (SELECT pk_layer, count(*) AS total, count(*) FILTER (WHERE str_state = 'WAITING') AS waiting,
                       count(*) FILTER (WHERE str_state = 'DEPEND') AS depend
                  FROM frame WHERE pk_job = ANY(CAST(:jobs AS varchar[])) GROUP BY pk_layer) counted
         WHERE layer_stat.pk_layer = counted.pk_layer
        """
    ),
    text(
        """
        WITH counted AS (
            SELECT pk_job, sum(int_waiting_count) AS waiting, sum(int_depend_count) AS depend,
                   sum(int_total_count) AS frames, count(*) AS layers
              FROM layer_stat WHERE pk_job = ANY(CAST(:jobs AS varchar[])) GROUP BY pk_job),
        stat AS (
            UPDATE job_stat SET int_waiting_count = counted.waiting, int_depend_count = counted.depend
              FROM counted WHERE job_stat.pk_job = counted.pk_job)
        UPDATE job SET str_state = 'PENDING', ts_updated = current_timestamp, int_frame_count = counted.frames,
                       int_layer_count = counted.layers
          FROM counted WHERE job.pk_job = counted.pk_job
        """
    ),
    text(
        """
        UPDATE show_stats SET int_frame_insert_count = int_frame_insert_count + counted.frames,
                              int_job_insert_count = int_job_insert_count + counted.jobs
          FROM (SELECT pk_show, sum(int_frame_count) AS frames, count(*) AS jobs
                  FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) GROUP BY pk_show) counted
         WHERE show_stats.pk_show = counted.pk_show
        """
    ),
)


def insert_job(
    connection: Connection,
    job: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    frames: Sequence[tuple[str, str, str, int, int, int, int]],
    depends: Sequence[Mapping[str, Any]],
) -> bool:
    """Put a job in and make its frames bookable. False when a live job has its name.

    The keys of the job, its layers and what they depend on are the names in the statements above: cores in centicores,
    memory in KB, the job's environment as JSON, limits by name. A frame has an id, its layer's id, a name, a number,
    the orders of dispatch of the frame and of its layer, and the number of its active dependencies.
    """
    # Ten minutes for each statement of this transaction: the frames of the largest job go in by one.
    connection.execute(text("SET LOCAL statement_timeout = '600s'"))
    if connection.execute(_INSERT_JOB, job).one_or_none() is None:
        return False
    connection.execute(_JOB_RESOURCE, job)
    connection.execute(INSERT_POINT, {"dept": job["dept_id"], "show": job["show_id"]})
    connection.execute(_INSERT_JOB_ENV, job)
    rows = {"job": job["job"], "rows": json.dumps(layers)}
    for statement in (_INSERT_LAYERS, _INSERT_LAYER_ENV, INSERT_LAYER_LIMITS):
        connection.execute(statement, rows)
    if starts := {layer["id"]: layer["start_after"] for layer in layers if layer["start_after"]}:
        set_start_after(connection, starts, "by its job file")
    parameters = ("ids", "layers", "names", "numbers", "dispatch_orders", "layer_orders", "waits_for")
    columns = dict(zip(parameters, map(list, zip(*frames, strict=True)), strict=True))
    connection.execute(_INSERT_FRAMES, {"job": job["job"], **columns})
    connection.execute(_INSERT_DEPENDS, {"job": job["job"], "rows": json.dumps(depends)})
    open_jobs(connection, [job["job"]])
    return True


def set_start_after(connection: Connection, starts: Mapping[str, str | None], reason: str | None) -> None:
    """Let no frame of these layers start before a moment (ISO 8601 with an offset; None: at once), by layer id. Raises
    InvalidInput on a schema without such a column."""
    if not knows_start_after(connection):
        raise InvalidInput("this database knows no start-after of layers: that comes with OpenCue's schema V47")
    moments = {"layers": list(starts), "starts": list(starts.values())}
    connection.execute(_SET_START_AFTER, {**moments, "reason": reason and reason[:_REASON_WIDTH]})


def add_depends(
    connection: Connection, job_id: str, depends: Sequence[Mapping[str, Any]], frame_ids: Collection[str]
) -> int:
    """Add dependencies to a job that is in the database. ``depends`` are rows as `insert_job` takes them, ``frame_ids``
    the frames that wait for them. Returns how many of the frames are in DEPEND then. The caller has locked the frames
    and their counters."""
    connection.execute(_INSERT_DEPENDS, {"job": job_id, "rows": json.dumps(depends)})
    changed = connection.execute(_WAIT_FOR_MORE, {"job": job_id, "frames": list(frame_ids)})
    return sum(state == FrameState.DEPEND.value for state in changed.scalars())


def open_jobs(connection: Connection, job_ids: Sequence[str]) -> None:
    """Make new jobs bookable: set their frames WAITING or DEPEND, write the first counts, and set the jobs PENDING. The
    rows of the frames are there."""
    for statement in _OPEN_JOBS:
        connection.execute(statement, {"jobs": list(job_ids)})


# What a job that is put in refers to: facilities, departments, limits, and jobs it waits for.

# Facilities, departments and limits by name; the default ones first.
_NAMES = text(
    """
    SELECT 'facility' AS kind, pk_facility AS id, str_name AS name, b_default AS is_default FROM facility
    UNION ALL SELECT 'dept', pk_dept, str_name, b_default FROM dept
    UNION ALL SELECT 'limit', pk_limit_record, str_name, false FROM limit_record
     ORDER BY is_default DESC, name
    """
)
# What ends a frame locks its job_stat row, so after this lock no frame of the jobs ends until we commit.
_LOCK_JOBS = text("SELECT pk_job FROM job_stat WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job FOR SHARE")
# The states of these jobs.
_JOB_STATES = text("SELECT pk_job, str_state FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))")


def names(connection: Connection) -> Mapping[str, list[Row[Any]]]:
    """All facilities, departments and limits, by kind (``facility``, ``dept``, ``limit``), the default first."""
    found: dict[str, list[Row[Any]]] = {"facility": [], "dept": [], "limit": []}
    for row in connection.execute(_NAMES):
        found[row.kind].append(row)
    return found


def hold_jobs(connection: Connection, job_ids: Collection[str]) -> dict[str, str]:
    """Keep the frames of these jobs from ending until this transaction ends, and return the states of the jobs.

    Otherwise a frame could end between our look at its state and our commit, and a dependency on it would stay open.
    """
    connection.execute(_LOCK_JOBS, {"jobs": list(job_ids)})
    return {row.pk_job: row.str_state for row in connection.execute(_JOB_STATES, {"jobs": list(job_ids)})}
