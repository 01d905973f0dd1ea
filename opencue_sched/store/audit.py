"""What the audit reads from PostgreSQL: contradictions, counted and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.units import CENTICORES_PER_CORE

OFFENDERS_NAMED = 5

_CORES = f"((p.int_cores_reserved + {CENTICORES_PER_CORE - 1}) / {CENTICORES_PER_CORE})"

_OVER_CAP = f"""
    WITH booked AS (
        SELECT p.pk_show, h.pk_alloc, j.pk_folder, p.pk_job, p.b_local,
               {_CORES} * {CENTICORES_PER_CORE} AS centicores, p.int_gpus_reserved AS gpus
        FROM proc p
        JOIN show s ON s.pk_show = p.pk_show AND s.b_scheduler_managed
        JOIN host h ON h.pk_host = p.pk_host
        JOIN job j ON j.pk_job = p.pk_job
    ), used AS (
        SELECT 'subscription' AS what, s.pk_show || ' in ' || s.pk_alloc AS name,
               sum(b.centicores) AS used, s.int_burst AS cap, true AS always
        FROM booked b JOIN subscription s ON s.pk_show = b.pk_show AND s.pk_alloc = b.pk_alloc
        WHERE NOT b.b_local GROUP BY s.pk_show, s.pk_alloc, s.int_burst
        UNION ALL
        SELECT 'folder cores', b.pk_folder, sum(b.centicores), f.int_max_cores, false
        FROM booked b JOIN folder_resource f ON f.pk_folder = b.pk_folder GROUP BY b.pk_folder, f.int_max_cores
        UNION ALL
        SELECT 'folder gpus', b.pk_folder, sum(b.gpus), f.int_max_gpus, false
        FROM booked b JOIN folder_resource f ON f.pk_folder = b.pk_folder GROUP BY b.pk_folder, f.int_max_gpus
        UNION ALL
        SELECT 'job cores', b.pk_job, sum(b.centicores), r.int_max_cores, false
        FROM booked b JOIN job_resource r ON r.pk_job = b.pk_job GROUP BY b.pk_job, r.int_max_cores
        UNION ALL
        SELECT 'job gpus', b.pk_job, sum(b.gpus), r.int_max_gpus, false
        FROM booked b JOIN job_resource r ON r.pk_job = b.pk_job GROUP BY b.pk_job, r.int_max_gpus
        UNION ALL
        SELECT 'limit', l.str_name, count(*), l.int_max_value, true
        FROM proc p
        JOIN layer_limit ll ON ll.pk_layer = p.pk_layer
        JOIN limit_record l ON l.pk_limit_record = ll.pk_limit_record
        WHERE l.int_max_value IS NOT NULL
        GROUP BY l.pk_limit_record, l.str_name, l.int_max_value
    )
    SELECT what || ' ' || name || ': ' || used || ' > ' || cap AS detail, used > cap AND (always OR cap > 0) AS wrong
    FROM used
"""  # noqa: S608 - constants only

_LOST_FRAMES = """
    SELECT f.pk_frame || ' RUNNING without a proc' AS detail,
           p.pk_proc IS NULL AND f.ts_updated < now() - make_interval(secs => :grace) AS wrong
    FROM frame f LEFT JOIN proc p ON p.pk_frame = f.pk_frame
    WHERE f.str_state = 'RUNNING'
    UNION ALL
    SELECT p.pk_proc || ' owns a frame that is ' || coalesce(f.str_state, 'gone'),
           coalesce(f.str_state, '') <> 'RUNNING' AND p.ts_dispatched < now() - make_interval(secs => :grace)
    FROM proc p LEFT JOIN frame f ON f.pk_frame = p.pk_frame
"""

_WRONG_COUNTS = """
    SELECT c.pk_layer || ': layer_stat says ' || s.int_waiting_count || '/' || s.int_running_count || '/'
           || s.int_succeeded_count || ' waiting/running/succeeded, its frames ' || c.waiting || '/' || c.running
           || '/' || c.succeeded AS detail,
           c.setup = 0 AND (s.int_waiting_count, s.int_running_count, s.int_succeeded_count, s.int_depend_count)
           IS DISTINCT FROM (c.waiting, c.running, c.succeeded, c.depending) AS wrong
    FROM (
        SELECT f.pk_layer, count(*) FILTER (WHERE f.str_state = 'WAITING') AS waiting,
               count(*) FILTER (WHERE f.str_state = 'RUNNING') AS running,
               count(*) FILTER (WHERE f.str_state = 'SUCCEEDED') AS succeeded,
               count(*) FILTER (WHERE f.str_state = 'DEPEND') AS depending,
               count(*) FILTER (WHERE f.str_state = 'SETUP') AS setup
        FROM frame f GROUP BY f.pk_layer
    ) c JOIN layer_stat s ON s.pk_layer = c.pk_layer
"""

_WRONG_IDLE = """
    SELECT str_name || ': idle ' || int_cores_idle || ' of ' || int_cores || ' centicores, procs hold ' || used.cores
               AS detail,
           int_cores_idle <> int_cores - used.cores OR int_gpus_idle <> int_gpus - used.gpus
               OR least(int_cores_idle, int_mem_idle, int_gpus_idle, int_gpu_mem_idle) < 0 AS wrong
    FROM host
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(int_cores_reserved), 0) AS cores, coalesce(sum(int_gpus_reserved), 0) AS gpus
        FROM proc WHERE proc.pk_host = host.pk_host
    ) used
"""

RULES = {
    "I2": ("vertices with procs within their caps (lowered ones show too)", _OVER_CAP),
    "I6": ("RUNNING frames and procs belong together", _LOST_FRAMES),
    "I6b": ("layers whose counters are what their frames say", _WRONG_COUNTS),
    "I7": ("hosts whose idle is total less procs, none negative", _WRONG_IDLE),
}
"""Invariants that PostgreSQL alone can show: what is looked at, and a statement that judges each row (see judge())."""

_MANAGED_PROCS = text(
    f"""
    SELECT p.pk_proc, {_CORES} AS cores, p.int_gpus_reserved AS gpus
    FROM proc p JOIN show s ON s.pk_show = p.pk_show AND s.b_scheduler_managed
    WHERE CAST(:ids AS varchar[]) IS NULL OR p.pk_proc = ANY(CAST(:ids AS varchar[]))
    """  # noqa: S608 - constants only
)


def judge(connection: Connection, invariant: str, *, grace_seconds: float = 0.0) -> Row[Any]:
    """Judge all rows by one of RULES, in one statement: ``looked_at`` rows, of which ``wrong`` contradict the rule.

    ``named`` are the first few of these, or None. What was so for less than the grace is not wrong yet (I6).
    """
    statement = f"""
        SELECT count(*) AS looked_at, count(*) FILTER (WHERE wrong) AS wrong,
               (array_agg(detail) FILTER (WHERE wrong))[1:{OFFENDERS_NAMED}] AS named
        FROM ({RULES[invariant][1]}) judged
        """  # noqa: S608 - constants only
    return connection.execute(text(statement), {"grace": grace_seconds} if ":grace" in statement else {}).one()


def managed_procs(connection: Connection, proc_ids: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
    """pk_proc -> (whole cores, GPUs) of every proc of a managed show, or of those among ``proc_ids``."""
    ids = None if proc_ids is None else list(proc_ids)
    return {row.pk_proc: (int(row.cores), int(row.gpus)) for row in connection.execute(_MANAGED_PROCS, {"ids": ids})}
