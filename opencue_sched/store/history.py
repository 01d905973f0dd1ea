"""What ran, from OpenCue's history tables, which outlive jobs. Nothing here writes them; their times are whole seconds
since 1970."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

# A run counts on the day it ended: ``starts`` are the first seconds of days, and each run falls behind one of them.
_RUNS = text(
    """
    SELECT CASE :by WHEN 'show' THEN show.str_name WHEN 'user' THEN job.str_user
                    ELSE CAST(width_bucket(run.int_ts_stopped, CAST(:starts AS int[])) AS text) END AS of,
           count(*) FILTER (WHERE well) AS succeeded, count(*) FILTER (WHERE NOT well) AS failed,
           CAST(coalesce(sum(core_seconds) FILTER (WHERE well), 0) AS float8) AS seconds_succeeded,
           CAST(coalesce(sum(core_seconds) FILTER (WHERE NOT well), 0) AS float8) AS seconds_failed,
           CAST(coalesce(sum(gpu_seconds), 0) AS float8) AS gpu_seconds
      FROM frame_history run
      JOIN job_history job ON job.pk_job = run.pk_job
      JOIN show ON show.pk_show = job.pk_show
     CROSS JOIN LATERAL (
          SELECT run.int_exit_status = 0 AS well, taken.seconds * run.int_cores / 100.0 AS core_seconds,
                 taken.seconds * run.int_gpus AS gpu_seconds
            FROM (SELECT CAST(greatest(0, run.int_ts_stopped - run.int_ts_started) AS bigint) AS seconds) taken) cost
     WHERE run.int_ts_stopped >= :since AND (CAST(:show AS varchar) IS NULL OR job.pk_show = :show)
     GROUP BY 1 ORDER BY 1
    """
)
# Jobs that finished since a moment, the last one first.
_FINISHED = text(
    """
    SELECT job.pk_job AS id, job.str_name AS name, show.str_name AS show, job.str_shot AS shot, job.str_user AS user,
           job.int_frame_count AS frames, job.int_succeeded_count AS succeeded, job.int_eaten_count AS eaten,
           job.int_frame_count - job.int_succeeded_count - job.int_eaten_count AS left_over,
           job.int_core_time_success AS core_seconds_succeeded, job.int_core_time_fail AS core_seconds_failed,
           job.int_max_rss AS max_rss_kb, to_timestamp(job.int_ts_started) AS started,
           to_timestamp(job.int_ts_stopped) AS stopped
      FROM job_history job JOIN show ON show.pk_show = job.pk_show
     WHERE job.int_ts_stopped >= :since AND NOT EXISTS (SELECT FROM job live WHERE live.pk_job = job.pk_job
                                                           AND live.str_state <> 'FINISHED')
       AND (CAST(:show AS varchar) IS NULL OR job.pk_show = :show)
       AND (CAST(:user_name AS varchar) IS NULL OR job.str_user = :user_name)
       AND (CAST(:part AS varchar) IS NULL OR position(lower(:part) IN lower(job.str_name)) > 0)
     ORDER BY job.int_ts_stopped DESC, job.pk_job LIMIT :most
    """
)
# Whether the history is switched off.
_OFF = text("SELECT EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY')")


def is_off(connection: Connection) -> bool:
    """Whether history is switched off (a row DISABLE_HISTORY of OpenCue's table config): nothing new is in it then."""
    return bool(connection.execute(_OFF).scalar())


def runs_by(
    connection: Connection, by: str, starts: Sequence[int], *, show_id: str | None = None
) -> Sequence[Row[Any]]:
    """Frames' runs that ended since the first of ``starts``, the first seconds of days in order, and what they took, by
    ``show`` or ``user`` (``of`` is a name) or by ``day`` (``of`` is the number of a day in ``starts``, from 1)."""
    wanted = {"by": by, "starts": list(starts), "since": starts[0], "show": show_id}
    return connection.execute(_RUNS, wanted).all()


def finished_jobs(
    connection: Connection,
    since: int,
    *,
    show_id: str | None = None,
    user: str | None = None,
    part: str | None = None,
    most: int,
) -> Sequence[Row[Any]]:
    """Jobs that finished at ``since`` (epoch seconds) or later, also those that only the history still has, the last
    one first; at most ``most``, and only those that meet every condition that is given. ``part``: a part of the name.

    A row names the job, its ``show``, ``shot`` and ``user``, and counts its ``frames``: ``succeeded``, ``eaten`` and
    the others (``left_over``). ``core_seconds_succeeded`` and ``core_seconds_failed`` are what its frames took.
    """
    wanted = {"since": since, "show": show_id, "user_name": user, "part": part, "most": most}
    return connection.execute(_FINISHED, wanted).all()
