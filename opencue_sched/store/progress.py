"""How far a job is."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.states import JobState
from opencue_sched.domain.units import booked_cores

_PROGRESS = text(
    """
    SELECT j.str_state, j.int_frame_count, s.int_waiting_count, s.int_running_count, s.int_dead_count,
           s.int_depend_count, s.int_eaten_count, s.int_succeeded_count,
           (SELECT coalesce(sum(p.int_cores_reserved), 0) FROM proc p WHERE p.pk_job = j.pk_job) AS centicores
    FROM job j JOIN job_stat s ON s.pk_job = j.pk_job
    WHERE j.pk_job = :job
    """
)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Frames by state, and whole cores booked. ``done`` are succeeded or eaten."""

    state: str
    total: int
    waiting: int
    depending: int
    running: int
    done: int
    dead: int
    cores: int

    @property
    def finished(self) -> bool:
        return self.state == JobState.FINISHED


def read_progress(connection: Connection, job_id: str) -> JobProgress:
    """Progress of one job. Raises InvalidInput when there is none of this id."""
    row = connection.execute(_PROGRESS, {"job": job_id}).one_or_none()
    if row is None:
        raise InvalidInput(f"there is no job {job_id}")
    return JobProgress(
        state=row.str_state,
        total=row.int_frame_count,
        waiting=row.int_waiting_count,
        depending=row.int_depend_count,
        running=row.int_running_count,
        done=row.int_succeeded_count + row.int_eaten_count,
        dead=row.int_dead_count,
        cores=booked_cores(int(row.centicores)),
    )
