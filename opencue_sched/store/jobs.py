"""Jobs, layers, frames and dependencies as people look at them, and what people set on jobs and layers.

Memory is KB. Cores are centicores, but for the ``cores`` that a job uses, which are whole. In the names of columns
``er`` is the side of a dependency that waits (depend_er of OpenCue), and ``on`` the side that it waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import IntegrityError, NoResultFound

from opencue_sched.domain.states import FrameState, JobState
from opencue_sched.errors import InvalidInput
from opencue_sched.store.limit_bindings import bind_by_hand
from opencue_sched.store.pending import USED, countable
from opencue_sched.store.shows import set_rows

# Jobs, what they use, and how long they have waited. The jobs to list are chosen first, in the order of ``place``, so
# that use and wait are read for these only; ``then`` is what the list is ordered by within a place. A layer has waited
# as long as its first frame in the order of dispatch. BETWEEN makes PostgreSQL take the index of waiting frames, which
# has that order: with "=" another index of the order may be gone through from its beginning (store/backlog.py).
_JOBS = f"""
    SELECT listed.*, used.centicores, used.cores, used.gpus, quarantine.reason AS quarantined,
           quarantine.until AS quarantined_until,
           CASE WHEN first.eligible IS NOT NULL  -- greatest() passes over what is null
                THEN CAST(greatest(extract(epoch FROM clock_timestamp() - first.eligible), 0) AS double precision)
           END AS waiting_seconds
      FROM (
          SELECT job.pk_job AS id, job.str_name AS name, job.pk_show AS show_id, show.str_name AS show,
                 job.pk_folder AS folder_id, folder.str_name AS folder, job.pk_facility AS facility_id,
                 facility.str_name AS facility, str_shot AS shot, str_user AS user, job.str_state AS state,
                 job.b_paused AS paused, job.b_auto_book AS auto_book, b_autoeat AS autoeat,
                 int_max_retries AS max_retries, str_os AS os, int_uid AS uid, str_log_dir AS log_dir,
                 job.ts_started AS started, job.ts_stopped AS stopped, int_frame_count AS frames,
                 stat.int_waiting_count AS waiting, stat.int_running_count AS running, stat.int_depend_count AS depend,
                 stat.int_dead_count AS dead, stat.int_succeeded_count AS succeeded, stat.int_eaten_count AS eaten,
                 stat.int_succeeded_count + stat.int_eaten_count AS done, resource.int_priority AS priority,
                 resource.int_min_cores AS min_centicores, resource.int_max_cores AS max_centicores,
                 resource.int_max_gpus AS max_gpus, show.b_active AS show_active,
                 show.b_scheduler_managed AS show_managed, show.b_paused AS show_paused,
                 show.b_booking_enabled AND show.b_dispatch_enabled AS show_booking,
                 count(*) OVER () AS jobs, {{place}} AS place
            FROM job JOIN show USING (pk_show) JOIN folder USING (pk_folder) JOIN facility USING (pk_facility)
            JOIN job_stat stat USING (pk_job) JOIN job_resource resource USING (pk_job)
           WHERE (CAST(:jobs AS varchar[]) IS NULL OR job.pk_job = ANY(CAST(:jobs AS varchar[])))
             AND (CAST(:show AS varchar) IS NULL OR job.pk_show = :show)
             AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
             AND (CAST(:user_name AS varchar) IS NULL OR job.str_user = :user_name)
             AND (CAST(:state AS varchar) IS NULL OR job.str_state = :state)
             AND (CAST(:show_part AS varchar) IS NULL OR position(lower(:show_part) IN lower(show.str_name)) > 0)
             AND (CAST(:part AS varchar) IS NULL OR position(lower(:part) IN lower(job.str_name)) > 0)
           ORDER BY place, job.ts_started, job.pk_job LIMIT :most) listed
     CROSS JOIN LATERAL (
          SELECT CAST(coalesce(sum({countable("p.int_cores_reserved")}), 0) AS bigint) AS centicores, {USED}
            FROM proc p WHERE p.pk_job = listed.id) used
     CROSS JOIN LATERAL (
          SELECT min(next.ts_eligible) AS eligible
            FROM layer_stat
           CROSS JOIN LATERAL (
               SELECT frame.ts_eligible FROM frame
                WHERE frame.pk_layer BETWEEN layer_stat.pk_layer AND layer_stat.pk_layer
                  AND frame.str_state = 'WAITING'
                ORDER BY frame.pk_layer, frame.int_dispatch_order, frame.int_layer_order LIMIT 1) next
           WHERE layer_stat.pk_job = listed.id AND layer_stat.int_waiting_count > 0) first
      LEFT JOIN opencue_sched_quarantine quarantine
             ON quarantine.pk_job = listed.id AND quarantine.until > clock_timestamp()
     ORDER BY place, {{then}} started, id
"""  # noqa: S608 - only our own constant
# Jobs, the one of the highest priority first and finished ones last.
_BY_PRIORITY = text(
    _JOBS.format(place="ARRAY[CAST(job.str_state = 'FINISHED' AS int), -resource.int_priority]", then="")
)
# Jobs that wait and run nothing first, the longest wait in front.
_BY_WAIT = text(
    _JOBS.format(
        place="""CASE WHEN stat.int_waiting_count > 0 AND stat.int_running_count = 0 THEN 0
                      WHEN stat.int_waiting_count > 0 THEN 1 WHEN stat.int_running_count > 0 THEN 2 ELSE 3 END""",
        then="waiting_seconds DESC NULLS LAST,",
    )
)
# Layers with their requirements and counts. BETWEEN, for the first waiting frame, as in _JOBS.
_LAYERS = text(
    """
    SELECT layer.pk_layer AS id, layer.str_name AS name, layer.str_type AS type, str_cmd AS command,
           str_range AS range, int_chunk_size AS chunk_size, int_cores_min AS cores_min,
           layer.int_cores_max AS cores_max, b_threadable AS threadable, b_optimize AS optimize,
           int_mem_min AS memory_kb, int_gpus_min AS gpus, int_gpu_mem_min AS gpu_memory_kb, str_tags AS tags,
           str_services AS services, int_timeout AS timeout_minutes, int_timeout_llu AS timeout_llu_minutes,
           CAST(to_jsonb(layer) ->> 'ts_start_after' AS timestamptz) AS start_after,
           to_jsonb(layer) ->> 'str_start_after_reason' AS start_after_reason,
           ARRAY(SELECT DISTINCT limit_record.str_name FROM layer_limit
                   JOIN limit_record ON limit_record.pk_limit_record = layer_limit.pk_limit_record
                  WHERE layer_limit.pk_layer = layer.pk_layer ORDER BY 1) AS limits,
           int_total_count AS total, int_waiting_count AS waiting, int_running_count AS running,
           int_depend_count AS depend, int_dead_count AS dead, int_succeeded_count AS succeeded,
           int_eaten_count AS eaten, int_checkpoint_count AS checkpoint, int_succeeded_count + int_eaten_count AS done,
           (SELECT frame.ts_eligible FROM frame
             WHERE frame.pk_layer BETWEEN layer.pk_layer AND layer.pk_layer AND frame.str_state = 'WAITING'
             ORDER BY frame.pk_layer, frame.int_dispatch_order, frame.int_layer_order LIMIT 1) AS eligible,
           CAST(used.int_clock_time_success AS double precision) / nullif(used.int_frame_success_count, 0)
             AS mean_seconds,
           layer_mem.int_max_rss AS max_rss_kb, asking.frames AS asking_frames, asking.most AS asking_kb,
           asking.raised AS asked_kb,
           job.pk_job AS job_id, job.str_name AS job, job.str_state AS job_state, job.b_paused AS paused
      FROM layer JOIN job USING (pk_job) JOIN layer_stat USING (pk_layer)
      LEFT JOIN layer_usage used USING (pk_layer)
      LEFT JOIN layer_mem USING (pk_layer)
     CROSS JOIN LATERAL (
          SELECT count(*) AS frames, max(memory_kb) AS most,
                 max(memory_kb) FILTER (WHERE memory_kb = layer.int_mem_min) AS raised
            FROM opencue_sched_frame_memory asked WHERE asked.pk_layer = layer.pk_layer) asking
     WHERE layer.pk_job = ANY(CAST(:jobs AS varchar[]))
     ORDER BY array_position(CAST(:jobs AS varchar[]), layer.pk_job), layer.int_dispatch_order, layer.str_name
    """
)
# Frames in the order of dispatch. A condition chooses nothing where its parameter is NULL: all frames pass it.
_FRAMES = text(
    """
    SELECT frame.pk_frame AS id, frame.str_name AS name, frame.pk_layer AS layer_id, layer.str_name AS layer,
           int_number AS number, frame.pk_job AS job_id,
           frame.str_state AS state, str_host AS host, int_cores AS centicores, int_exit_status AS exit_status,
           int_retries AS retries, frame.ts_started AS started, frame.ts_stopped AS stopped, ts_llu AS llu,
           frame.ts_eligible AS eligible, int_depend_count AS depend_count, int_mem_reserved AS memory_reserved_kb,
           int_mem_used AS memory_used_kb, int_mem_max_used AS memory_max_kb,
           job.str_name AS job, job.str_state AS job_state, job.str_log_dir AS log_dir, job.str_loki_url AS loki_url
      FROM frame JOIN layer ON layer.pk_layer = frame.pk_layer JOIN job ON job.pk_job = frame.pk_job
     WHERE (CAST(:job AS varchar) IS NULL OR frame.pk_job = :job)
       AND (CAST(:frames AS varchar[]) IS NULL OR frame.pk_frame = ANY(CAST(:frames AS varchar[])))
       AND (CAST(:named AS varchar) IS NULL OR frame.str_name = :named OR frame.pk_frame = :named)
       AND (CAST(:layers AS varchar[]) IS NULL OR frame.pk_layer = ANY(CAST(:layers AS varchar[])))
       AND (CAST(:numbers AS bigint[]) IS NULL OR frame.int_number = ANY(CAST(:numbers AS bigint[])))
       AND (CAST(:states AS varchar[]) IS NULL OR frame.str_state = ANY(CAST(:states AS varchar[])))
     ORDER BY frame.int_layer_order, frame.int_dispatch_order LIMIT :most
    """
)
# The newest of the dead frames of each layer and exit status, and how many those are.
_DEAD_FRAMES = text(
    """
    SELECT died.*, job.str_name AS job, job.str_log_dir AS log_dir
      FROM (SELECT pk_frame AS id, str_name AS name, pk_layer AS layer_id, pk_job, int_exit_status AS exit_status,
                   str_host AS host, count(*) OVER (PARTITION BY pk_layer, int_exit_status) AS frames,
                   row_number() OVER (PARTITION BY pk_layer, int_exit_status
                                      ORDER BY ts_stopped DESC NULLS LAST, pk_frame) AS place
              FROM frame WHERE pk_job = :job AND str_state = 'DEAD') died
      JOIN job ON job.pk_job = died.pk_job
     WHERE died.place = 1
     ORDER BY died.frames DESC, died.layer_id, died.exit_status
    """
)
# The columns of what people set on layers, by the names that set_layers() has for them.
_LAYER_COLUMNS = {
    "cores": "int_cores_min",
    "max_cores": "int_cores_max",
    "threadable": "b_threadable",
    "memory": "int_mem_min",
    "optimize": "b_optimize",
    "gpus": "int_gpus_min",
    "gpu_memory": "int_gpu_mem_min",
    "tags": "str_tags",
    "timeout": "int_timeout",
    "timeout_llu": "int_timeout_llu",
}
# Take these limits off these layers.
_DROP_LIMITS = text(
    """
    DELETE FROM layer_limit
     WHERE pk_layer = ANY(CAST(:layers AS varchar[])) AND pk_limit_record = ANY(CAST(:limits AS varchar[]))
    """
)

# What a job, its layers and its frames wait for; pairs of frames stay hidden behind the row that groups them.
_DEPENDS = text(
    """
    SELECT depend.pk_depend AS id, depend.str_type AS type, depend.str_target AS target, depend.b_active AS active,
           depend.b_any AS any_frame,
           er_layer.str_name AS er_layer, er_frame.str_name AS er_frame, on_job.str_name AS on_job,
           on_layer.str_name AS on_layer, on_frame.str_name AS on_frame,
           pairs.open AS open_pairs, pairs.total AS pairs
      FROM depend
      JOIN job on_job ON on_job.pk_job = depend.pk_job_depend_on
      LEFT JOIN layer er_layer ON er_layer.pk_layer = depend.pk_layer_depend_er
      LEFT JOIN frame er_frame ON er_frame.pk_frame = depend.pk_frame_depend_er
      LEFT JOIN layer on_layer ON on_layer.pk_layer = depend.pk_layer_depend_on
      LEFT JOIN frame on_frame ON on_frame.pk_frame = depend.pk_frame_depend_on
      LEFT JOIN LATERAL (SELECT count(*) AS total, count(*) FILTER (WHERE child.b_active) AS open
                           FROM depend child WHERE child.pk_parent = depend.pk_depend) pairs
             ON depend.str_type IN ('FRAME_BY_FRAME', 'PREVIOUS_FRAME')
     WHERE depend.pk_job_depend_er = :job AND depend.pk_parent IS NULL AND (depend.b_active OR :met)
     ORDER BY er_layer.int_dispatch_order NULLS FIRST, depend.str_type, depend.ts_created, depend.pk_depend
    """
)
# The ids of the open dependencies of a job, or of those of them that ``depends`` names or groups. A dependency that
# groups pairs of frames is none of them; each of its pairs is.
_OPEN_DEPENDS = text(
    """
    SELECT pk_depend FROM depend
     WHERE pk_job_depend_er = :job AND b_active AND str_type NOT IN ('FRAME_BY_FRAME', 'PREVIOUS_FRAME')
       AND (CAST(:depends AS varchar[]) IS NULL OR pk_depend = ANY(CAST(:depends AS varchar[]))
            OR pk_parent = ANY(CAST(:depends AS varchar[])))
    """
)

# Open dependencies of a job, of the jobs it waits for, and so on. ``near`` is the side on which the job is, ``er`` for
# what it waits for; with ``on`` they are dependencies of others on the job, on the jobs that wait for it, and so on.
_DEPENDS_AROUND = """
    WITH RECURSIVE reached AS (
        SELECT CAST(:job AS varchar) AS pk_job
        UNION
        SELECT depend.pk_job_depend_{far} FROM reached
          JOIN depend ON depend.pk_job_depend_{near} = reached.pk_job AND depend.b_active AND depend.pk_parent IS NULL)
    SELECT depend.pk_depend AS id, depend.str_type AS type, depend.b_any AS any_frame,
           er_job.pk_job AS er_job_id, er_job.str_name AS er_job, er_layer.pk_layer AS er_layer_id,
           er_layer.str_name AS er_layer, er_frame.str_name AS er_frame,
           on_job.pk_job AS on_job_id, on_job.str_name AS on_job, on_layer.pk_layer AS on_layer_id,
           on_layer.str_name AS on_layer, on_frame.str_name AS on_frame
      FROM reached
      JOIN depend ON depend.pk_job_depend_{near} = reached.pk_job AND depend.b_active AND depend.pk_parent IS NULL
      JOIN job er_job ON er_job.pk_job = depend.pk_job_depend_er
      JOIN job on_job ON on_job.pk_job = depend.pk_job_depend_on
      LEFT JOIN layer er_layer ON er_layer.pk_layer = depend.pk_layer_depend_er
      LEFT JOIN frame er_frame ON er_frame.pk_frame = depend.pk_frame_depend_er
      LEFT JOIN layer on_layer ON on_layer.pk_layer = depend.pk_layer_depend_on
      LEFT JOIN frame on_frame ON on_frame.pk_frame = depend.pk_frame_depend_on
     ORDER BY er_job.str_name, er_layer.int_dispatch_order NULLS FIRST, on_job.str_name, depend.ts_created,
              depend.pk_depend
"""
# What the job and the jobs behind it wait for; what waits for the job and for the jobs behind that.
_WAITS_FOR = text(_DEPENDS_AROUND.format(near="er", far="on"))
_WAITED_FOR_BY = text(_DEPENDS_AROUND.format(near="on", far="er"))


JobView = Row[Any]
"""A job with its counts, switches and caps, and what it uses now.

- ``cores`` and ``gpus``: what the job uses, as its caps count; ``centicores``: what its procs have reserved.
- ``waiting_seconds``: how long the job's next frame has waited; None when none waits.
- ``quarantined``: why the job is in quarantine; None when it is not.
- ``jobs``: how many jobs the query would find without ``most``.
"""
LayerView = Row[Any]
"""A layer with its counts, and its job's name and state. ``cores_min`` and ``cores_max`` are centicores.

- ``eligible``: the time since which the next of the layer's waiting frames could run.
- ``mean_seconds``: how long the frames that succeeded took on average.
- ``max_rss_kb``: the most memory that a frame of the layer used.
- ``asking_frames``: how many frames ran out of the layer's memory, and ask for more by themselves; ``asking_kb``: the
  most that one of these frames asks for; ``asked_kb``: the memory of the layer where one of these frames asks for
  exactly that (the layer was raised for them), else None.
- ``start_after``: the time before which no frame may start; None for none, and on a schema without the column (V47).
"""
FrameView = Row[Any]
"""A frame with its layer and job; ``llu`` is the time at which the frame's log last grew."""
DeadFrames = Row[Any]
"""The dead frames of a layer with one exit status: ``frames`` says how many, the other columns are the newest's."""
Depend = Row[Any]
"""A dependency: what a job, a layer or a frame waits for. A dependency that groups pairs of frames has ``pairs`` of
them, of which ``open_pairs`` are not met yet."""


_ANY_JOB = dict.fromkeys(("jobs", "show", "facility", "user_name", "state", "show_part", "part"))
"""The parameters of `_JOBS` that choose jobs, each None: all jobs are chosen. Copied, never changed."""


def list_jobs(
    connection: Connection,
    *,
    job_ids: Collection[str] | None = None,
    show_id: str | None = None,
    user: str | None = None,
    state: str | None = None,
    part: str | None = None,
    most: int = 1_000_000,
) -> Sequence[JobView]:
    """Jobs, live ones first, by priority and age: those of the ids, the show, the user and the state that are given,
    with ``part`` in their name. At most ``most``."""
    ids = None if job_ids is None else list(job_ids)
    wanted = {**_ANY_JOB, "jobs": ids, "show": show_id, "user_name": user, "state": state, "part": part, "most": most}
    return connection.execute(_BY_PRIORITY, wanted).all()


def list_jobs_by_wait(
    connection: Connection, *, facility: str | None, show_part: str, part: str, most: int
) -> Sequence[JobView]:
    """Pending jobs of a facility (by name; None: of all), with ``part`` in their names and ``show_part`` in their
    shows'.

    Jobs that wait and run no frame come first, then other jobs that wait, then jobs that run; in each group those that
    have waited longest.
    """
    wanted = {"facility": facility, "show_part": show_part, "part": part, "state": JobState.PENDING.value}
    return connection.execute(_BY_WAIT, {**_ANY_JOB, **wanted, "most": most}).all()


def job_of(connection: Connection, job_id: str) -> JobView:
    """The job of this id. Raises NoResultFound when there is none."""
    for job in list_jobs(connection, job_ids=[job_id]):
        return job
    raise NoResultFound(job_id)


def layers_of(connection: Connection, *job_ids: str) -> Sequence[LayerView]:
    """The layers of jobs, job by job in the order of the ids, then in the order of dispatch. A job that no longer
    exists has none."""
    return connection.execute(_LAYERS, {"jobs": list(job_ids)}).all()


def frames_of(
    connection: Connection,
    job_id: str | None = None,
    *,
    layer_ids: Collection[str] | None = None,
    numbers: Collection[int] | None = None,
    states: Collection[FrameState] | None = None,
    named: str | None = None,
    most: int = 1_000_000,
) -> Sequence[FrameView]:
    """Frames in dispatch order, at most ``most``. Each argument that is not None chooses: the job, the layers, the
    frame numbers, the states, and ``named``, the name or id of one frame."""
    wanted = {
        "job": job_id,
        "frames": None,
        "named": named,
        "layers": None if layer_ids is None else list(layer_ids),
        "numbers": None if numbers is None else list(numbers),
        "states": None if states is None else [state.value for state in states],
        "most": most,
    }
    return connection.execute(_FRAMES, wanted).all()


def frames_by_id(connection: Connection, frame_ids: Collection[str]) -> Sequence[FrameView]:
    """The frames of these ids in dispatch order. A frame that no longer exists is left out."""
    anything = dict.fromkeys(("job", "named", "layers", "numbers", "states"))
    return connection.execute(_FRAMES, {**anything, "frames": list(frame_ids), "most": len(frame_ids)}).all()


def dead_frames(connection: Connection, job_id: str) -> Sequence[DeadFrames]:
    """The dead frames of a job, one row for each layer and exit status, however many frames are dead; the row with the
    most frames first."""
    return connection.execute(_DEAD_FRAMES, {"job": job_id}).all()


def set_layers(
    connection: Connection,
    layer_ids: Collection[str],
    fields: Mapping[str, Any],
    *,
    add_limits: Collection[str] = (),
    drop_limits: Collection[str] = (),
) -> None:
    """Set fields of layers, by the keys of `_LAYER_COLUMNS`: cores in centicores, memory in KB, time-outs in minutes,
    tags as one text. Limits are added by name and dropped by id."""
    layers = sorted(layer_ids)
    if fields:
        set_rows(connection, "layer", "pk_layer", layers, {_LAYER_COLUMNS[key]: value for key, value in fields.items()})
    bind_by_hand(connection, layers, add_limits)
    connection.execute(_DROP_LIMITS, {"layers": layers, "limits": sorted(drop_limits)})


def depends_of(connection: Connection, job_id: str, *, met: bool = False) -> Sequence[Depend]:
    """The dependencies by which a job waits; with ``met`` also those that are met."""
    return connection.execute(_DEPENDS, {"job": job_id, "met": met}).all()


def depends_around(connection: Connection, job_id: str, *, upwards: bool = False) -> Sequence[Depend]:
    """The open dependencies of a job, of the jobs it waits for, and so on. With ``upwards`` the dependencies of others
    on the job, on the jobs that wait for it, and so on. Each has both sides: ``er_job``, ``er_layer``, ``on_job``,
    ``on_layer`` and their ids."""
    return connection.execute(_WAITED_FOR_BY if upwards else _WAITS_FOR, {"job": job_id}).all()


def open_depends(connection: Connection, job_id: str, depend_ids: Collection[str] | None = None) -> list[str]:
    """The ids of the dependencies that a job still waits for: all of them, or those among ``depend_ids`` and the pairs
    of frames that these group."""
    wanted = {"job": job_id, "depends": None if depend_ids is None else list(depend_ids)}
    return list(connection.execute(_OPEN_DEPENDS, wanted).scalars())


# Make a finished job pending again, under its name.
_REOPEN = text(
    """
    UPDATE job
       SET str_state = 'PENDING', ts_stopped = NULL, ts_updated = current_timestamp, str_visible_name = str_name
     WHERE pk_job = :job AND str_state = 'FINISHED'
    """
)
# The live job that keeps a finished one from having its name back. A Cuebot lets a job that it retries be pending
# beside another of the same name, without a visible name.
_LIVE_NAMESAKE = text(
    """
    SELECT other.pk_job AS id, other.str_name AS name
      FROM job JOIN job other ON other.str_name = job.str_name AND other.pk_job <> job.pk_job
     WHERE job.pk_job = :job AND job.str_state = 'FINISHED'
       AND (other.str_state = 'PENDING' OR other.str_visible_name IS NOT NULL)
     LIMIT 1
    """
)
# Whether a job has all its frames. One that moves to the history loses them first (store/finished_jobs.py).
_HAS_ALL_FRAMES = text(
    """
    SELECT NOT EXISTS (SELECT FROM layer_stat WHERE pk_job = :job AND int_total_count >
                          (SELECT count(*) FROM frame WHERE frame.pk_layer = layer_stat.pk_layer))
    """
)


def reopen_job(connection: Connection, job_id: str) -> None:
    """Make a FINISHED job PENDING again, under the name it had. The caller holds the lock of the job's counters
    (store.release.lock_counters). Raises InvalidInput when another job of that name is live, and for a job that is
    being moved to the history."""
    if not connection.execute(_HAS_ALL_FRAMES, {"job": job_id}).scalar():
        raise InvalidInput(f"job {job_id} cannot be pending again: it is being moved to the history")
    namesake = connection.execute(_LIVE_NAMESAKE, {"job": job_id}).one_or_none()
    if namesake is None:
        try:
            with connection.begin_nested():
                connection.execute(_REOPEN, {"job": job_id})
            return
        except IntegrityError:  # another transaction took the name after we had looked
            namesake = connection.execute(_LIVE_NAMESAKE, {"job": job_id}).one_or_none()
            if namesake is None:
                raise
    raise InvalidInput(
        f"job {job_id} cannot be pending again: {namesake.name!r} is pending as {namesake.id}; end it with "
        f"`opencue-sched job kill {namesake.id}` first"
    )
