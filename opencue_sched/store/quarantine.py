"""Jobs whose rows made a booking fail, left alone for a while (our table ``opencue_sched_quarantine``)."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, text

# Adds jobs, or replaces their rows. Rows whose time is over are deleted on this occasion: nobody reads them.
_QUARANTINE = text(
    """
    DELETE FROM opencue_sched_quarantine
     WHERE pk_job IN (SELECT pk_job FROM opencue_sched_quarantine WHERE until <= clock_timestamp()
                         FOR UPDATE SKIP LOCKED);
    INSERT INTO opencue_sched_quarantine (pk_job, reason, ts, until)
    SELECT job, reason, clock_timestamp(),
           clock_timestamp() + CAST(:seconds AS double precision) * interval '1 second'
    FROM unnest(CAST(:jobs AS varchar[]), CAST(:reasons AS text[])) AS bad(job, reason)
    ON CONFLICT (pk_job) DO UPDATE SET reason = excluded.reason, ts = excluded.ts, until = excluded.until
    """
)


def quarantine_jobs(connection: Connection, reasons: Mapping[str, str], seconds: float) -> None:
    """Leave these jobs (id -> reason) alone for ``seconds`` from now."""
    jobs = sorted(reasons)
    parameters = {"jobs": jobs, "reasons": [reasons[job] for job in jobs], "seconds": seconds}
    connection.execute(_QUARANTINE, parameters)
