"""What a person changes about jobs and frames that may be running."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, text

_RUNNING = text(
    """
    SELECT proc.pk_proc, proc.pk_frame, host.str_name FROM proc JOIN host ON host.pk_host = proc.pk_host
     WHERE proc.pk_frame IS NOT NULL AND NOT proc.b_local
       AND (proc.pk_frame = ANY(CAST(:frames AS varchar[])) OR proc.pk_job = ANY(CAST(:jobs AS varchar[])))
     ORDER BY host.str_name, proc.pk_proc
    """
)
_SET_PAUSED = text(
    """
    WITH locked AS (
        SELECT pk_job FROM job
         WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state <> 'FINISHED' AND b_paused <> :paused
         ORDER BY pk_job FOR NO KEY UPDATE)
    UPDATE job SET b_paused = :paused, ts_updated = current_timestamp
      FROM locked WHERE job.pk_job = locked.pk_job RETURNING job.pk_job
    """
)
_REOPEN = text(
    """
    WITH locked AS (
        SELECT pk_job FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state = 'FINISHED'
         ORDER BY pk_job FOR UPDATE)
    UPDATE job
       SET str_state = 'PENDING', ts_stopped = NULL, ts_updated = current_timestamp,
           str_visible_name = CASE WHEN EXISTS (SELECT FROM job named WHERE named.str_visible_name = job.str_name)
                                   THEN NULL ELSE job.str_name END
      FROM locked WHERE job.pk_job = locked.pk_job RETURNING job.pk_job
    """
)


@dataclass(frozen=True, slots=True)
class RunningFrame:
    """A frame with the proc that has it, and where."""

    proc_id: str
    frame_id: str
    host_name: str


def running_frames(
    connection: Connection, *, frame_ids: Collection[str] = (), job_ids: Collection[str] = ()
) -> list[RunningFrame]:
    """Which of these frames, or of these jobs' frames, a proc has. Locally dispatched procs are Cuebot's."""
    rows = connection.execute(_RUNNING, {"frames": list(frame_ids), "jobs": list(job_ids)})
    return [RunningFrame(row.pk_proc, row.pk_frame, row.str_name) for row in rows]


def set_paused(connection: Connection, job_ids: Collection[str], *, paused: bool) -> list[str]:
    """Pause or unpause jobs; returns those that changed. What runs goes on."""
    return [row.pk_job for row in connection.execute(_SET_PAUSED, {"jobs": list(job_ids), "paused": paused})]


def reopen_jobs(connection: Connection, job_ids: Collection[str]) -> list[str]:
    """FINISHED to PENDING, with the name the job had unless another job has it now; returns those that changed."""
    return [row.pk_job for row in connection.execute(_REOPEN, {"jobs": list(job_ids)})]
