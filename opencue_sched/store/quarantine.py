"""Jobs whose rows made a booking fail, left alone for a while (our table ``opencue_sched_quarantine``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

_MAX_REASON = 1000

_QUARANTINE = text(
    """
    INSERT INTO opencue_sched_quarantine (pk_job, reason, ts, until)
    SELECT job, reason, clock_timestamp(),
           clock_timestamp() + CAST(:seconds AS double precision) * interval '1 second'
    FROM unnest(CAST(:jobs AS varchar[]), CAST(:reasons AS text[])) AS bad(job, reason)
    ON CONFLICT (pk_job) DO UPDATE SET reason = excluded.reason, ts = excluded.ts, until = excluded.until
    """
)
_LIST = text(
    """
    SELECT q.pk_job, j.str_name, q.reason, q.ts, q.until
    FROM opencue_sched_quarantine q
    LEFT JOIN job j ON j.pk_job = q.pk_job
    WHERE q.until > clock_timestamp()
    ORDER BY q.until, q.pk_job
    """
)
_FORGET_ENDED = text(
    """
    DELETE FROM opencue_sched_quarantine
     WHERE pk_job IN (SELECT pk_job FROM opencue_sched_quarantine WHERE until <= clock_timestamp()
                         FOR UPDATE SKIP LOCKED)
    """
)


@dataclass(frozen=True, slots=True)
class QuarantinedJob:
    """``job_name`` is empty for a job that was deleted meanwhile."""

    job_id: str
    job_name: str
    reason: str
    since: datetime
    until: datetime


def quarantine_jobs(connection: Connection, reasons: Mapping[str, str], seconds: float) -> None:
    """Leave these jobs (id -> reason) alone for ``seconds`` from now."""
    jobs = sorted(reasons)
    parameters = {"jobs": jobs, "reasons": [reasons[job][:_MAX_REASON] for job in jobs], "seconds": seconds}
    connection.execute(_QUARANTINE, parameters)


def quarantined_jobs(connection: Connection) -> list[QuarantinedJob]:
    """Who is left alone now, the first to come back first."""
    return [
        QuarantinedJob(row.pk_job, row.str_name or "", row.reason, row.ts, row.until)
        for row in connection.execute(_LIST)
    ]


def forget_ended_quarantines(connection: Connection) -> None:
    """Delete rows whose time is over."""
    connection.execute(_FORGET_ENDED)
