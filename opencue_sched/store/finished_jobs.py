"""Finished jobs that leave for the history tables, as by OpenCue's own transfer: what ran is there already, and where
a job is deleted, OpenCue's triggers note its last figures and take along what belongs to it.

A job with many frames goes in portions. Its frames go first, and the job with the last of them, so it stays FINISHED
and found until it is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.lost_runs import UpkeepScope, job_in_scope

# Whether jobs may be moved. A Cuebot notes its own transfers in task_lock every hour; the migration that brought our
# own transfer noted the time of the upgrade there.
_MAY_BEGIN = text(
    """
    SELECT NOT EXISTS (SELECT FROM task_lock WHERE str_name = 'LOCK_HISTORICAL_TRANSFER'
                          AND ts_lastrun > localtimestamp - interval '1 day')
    """
)
# The condition that a job may move now.
_MAY_MOVE = f"""
           job.str_state = 'FINISHED' AND job.ts_stopped < current_timestamp - make_interval(secs => :seconds)
       AND {job_in_scope("job.pk_job")}
       AND NOT EXISTS (SELECT FROM proc WHERE proc.pk_job = job.pk_job)
       AND NOT EXISTS (SELECT FROM depend JOIN job waiting ON waiting.pk_job = depend.pk_job_depend_er
                        WHERE depend.pk_job_depend_on = job.pk_job AND depend.b_active
                          AND waiting.str_state <> 'FINISHED')
       AND NOT EXISTS (SELECT FROM job_post WHERE job_post.pk_post_job = job.pk_job)
"""  # noqa: S608 - only our own words
# Reads every finished job.
_DUE = text(
    f"SELECT job.pk_job FROM job WHERE {_MAY_MOVE} ORDER BY job.ts_stopped, job.pk_job LIMIT :most"  # noqa: S608
)
# Locks jobs and their counters: a retry of frames locks the counters before it opens the job again. What another
# transaction has locked is left out.
_LOCK_DUE = text(
    f"""
    SELECT job.pk_job AS id, job.str_name AS name, job.int_frame_count + 10 * job.int_layer_count AS size
      FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
     WHERE job.pk_job = ANY(CAST(:jobs AS varchar[])) AND job_stat.pk_job = ANY(CAST(:jobs AS varchar[]))
       AND {_MAY_MOVE}
     ORDER BY job.ts_stopped, job.pk_job
       FOR UPDATE OF job, job_stat SKIP LOCKED
    """  # noqa: S608 - only our own words
)
# Delete some frames of these jobs, with their dependencies.
_DELETE_FRAMES = text(
    """
    WITH going AS MATERIALIZED (
        SELECT pk_frame FROM frame WHERE pk_job = ANY(CAST(:jobs AS varchar[])) LIMIT :most),
    waiting AS (DELETE FROM depend USING going WHERE depend.pk_frame_depend_er = going.pk_frame),
    waited_for AS (DELETE FROM depend USING going WHERE depend.pk_frame_depend_on = going.pk_frame),
    shown AS (DELETE FROM frame_state_display_overrides shown USING going WHERE shown.pk_frame = going.pk_frame)
    DELETE FROM frame USING going WHERE frame.pk_frame = going.pk_frame
    """
)
# Delete the jobs among these that have no frame left.
_DELETE_JOBS = text(
    """
    DELETE FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))
       AND NOT EXISTS (SELECT FROM frame WHERE frame.pk_job = job.pk_job)
    RETURNING pk_job
    """
)
# For statements on the frames of a job: by old statistics PostgreSQL may take them for many and read the whole table,
# which has hundreds of times more.
_GIVE_WAY = text("SELECT set_config('lock_timeout', :wait, true), set_config('enable_seqscan', 'off', true)")

MOST_JOBS = 50
"""How many jobs one portion has at most. Each costs the triggers some twenty statements."""


def may_begin(connection: Connection) -> bool:
    """Whether a day is over since the upgrade, and since a Cuebot last moved jobs of this database."""
    return bool(connection.execute(_MAY_BEGIN).scalar())


def find_due(connection: Connection, seconds: float, *, scope: UpkeepScope, most: int) -> list[str]:
    """The ids of jobs in ``scope`` that finished ``seconds`` ago or earlier, the first first. It reads all jobs.

    Left out are jobs with procs, which the reaper ends first, those that a job which is not finished waits for, and
    post jobs whose job is still there.
    """
    return list(connection.execute(_DUE, {"seconds": seconds, "most": most, **_bound(scope)}).scalars())


def lock_due(
    connection: Connection, job_ids: Collection[str], seconds: float, *, scope: UpkeepScope
) -> Sequence[Row[Any]]:
    """Lock the jobs of ``job_ids`` that `find_due` would find still, until the transaction ends: ``id``, ``name``,
    ``size`` (its frames, and ten for each layer). A job that another transaction has locked is left out."""
    return connection.execute(_LOCK_DUE, {"jobs": list(job_ids), "seconds": seconds, **_bound(scope)}).all()


def _bound(scope: UpkeepScope) -> dict[str, object]:
    """The scope as parameters of the statements here."""
    return {"facility": scope.facility, "beside_cuebot": scope.beside_cuebot}


def delete_frames(connection: Connection, job_ids: Collection[str], *, most: int) -> int:
    """Delete up to ``most`` frames of these jobs, with the dependencies of each. Returns how many frames went."""
    return connection.execute(_DELETE_FRAMES, {"jobs": list(job_ids), "most": most}).rowcount


def delete_jobs(connection: Connection, job_ids: Collection[str]) -> list[str]:
    """Delete the jobs among these that have no frames any more. Returns the ids of the deleted jobs."""
    return list(connection.execute(_DELETE_JOBS, {"jobs": list(job_ids)}).scalars())


def give_way(connection: Connection, milliseconds: int) -> None:
    """Have this transaction wait no longer than ``milliseconds`` for a lock of others, and use indexes."""
    connection.execute(_GIVE_WAY, {"wait": f"{milliseconds}ms"})
