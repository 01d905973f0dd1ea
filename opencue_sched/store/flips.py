"""What a flip of a show needs of PostgreSQL besides the flags, and what ShowInterface tells of a show beyond its list.

The lock is one of the session: it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

_LOCK = text("SELECT pg_try_advisory_lock(hashtextextended('opencue-sched flip ' || CAST(:show AS varchar), 0))")
_UNLOCK = text("SELECT pg_advisory_unlock(hashtextextended('opencue-sched flip ' || CAST(:show AS varchar), 0))")
_STILL_THERE = text("SELECT 1")
_DETAILS = text(
    """
    SELECT show.pk_show, coalesce(str_comment_email, ''), int_default_min_gpus, int_default_max_gpus,
           coalesce(int_job_insert_count, 0), coalesce(int_frame_insert_count, 0),
           coalesce(int_frame_success_count, 0), coalesce(int_frame_fail_count, 0), coalesce(work.dead, 0)
      FROM show
      LEFT JOIN show_stats ON show_stats.pk_show = show.pk_show
      LEFT JOIN (SELECT pk_show, CAST(sum(int_dead_count) AS bigint) AS dead
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_show) work ON work.pk_show = show.pk_show
     WHERE CAST(:show AS varchar) IS NULL OR show.pk_show = :show
    """
)


@dataclass(frozen=True, slots=True)
class ShowDetails:
    """A show's defaults and totals that only OpenCue's own tools ask for."""

    id: str
    comment_email: str
    default_min_gpus: int
    default_max_gpus: int
    created_jobs: int
    created_frames: int
    succeeded_frames: int
    failed_frames: int
    dead_frames: int


def lock_flip(connection: Connection, show_id: str) -> bool:
    """Become the only one who flips this show, until unlock_flip() or the session's end; False: somebody else is."""
    return bool(connection.execute(_LOCK, {"show": show_id}).scalar_one())


def keep_flip_lock(connection: Connection) -> None:
    """Raises SQLAlchemy's errors when the session, and with it the lock, is gone."""
    connection.execute(_STILL_THERE)


def unlock_flip(connection: Connection, show_id: str) -> None:
    """Let others flip the show."""
    connection.execute(_UNLOCK, {"show": show_id})


def show_details(connection: Connection, show_id: str | None = None) -> Mapping[str, ShowDetails]:
    """The details of all shows, or of one, by id."""
    rows = (ShowDetails(*row) for row in connection.execute(_DETAILS, {"show": show_id}))
    return {row.id: row for row in rows}
