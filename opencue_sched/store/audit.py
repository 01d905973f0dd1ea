"""The statements of the audit: each counts and names the rows that contradict a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.invariants import Invariant
from opencue_sched.store.limit_types import TERMS
from opencue_sched.store.pending import countable
from opencue_sched.store.procs import HELD

# The show of each of these procs, and how long ago the proc was booked.
_PROC_AGES = text(
    """
    SELECT pk_proc, pk_show, CAST(extract(epoch FROM clock_timestamp() - ts_booked) AS float) AS seconds
      FROM proc WHERE pk_proc = ANY(CAST(:procs AS varchar[]))
    """
)


def proc_ages(connection: Connection, proc_ids: Sequence[str]) -> Sequence[Row[Any]]:
    """Id, show and age (``seconds``) of these procs. A proc that is gone has no row."""
    return connection.execute(_PROC_AGES, {"procs": list(proc_ids)}).all()


OFFENDERS_NAMED = 5
"""How many rows that contradict a rule are named."""

# What is booked under each cap, and whether that is too much. Under a limit that was reported only frames started since
# the report count: older ones may have given their licence back. One machine more than the limit's maximum may run such
# frames, because an older frame let it hold the limit.
_OVER_CAP = f"""
    SELECT what || ' ' || name || ': ' || used || ' > ' || cap AS detail, used > cap AND (always OR cap > 0) AS wrong
    FROM (
        SELECT what, name, sum(used) AS used, cap, always
        FROM proc p
        JOIN show s ON s.pk_show = p.pk_show AND s.b_scheduler_managed
        JOIN host h USING (pk_host) JOIN job j USING (pk_job)
        LEFT JOIN folder_resource f USING (pk_folder) LEFT JOIN job_resource r USING (pk_job)
        LEFT JOIN subscription sub ON sub.pk_show = p.pk_show AND sub.pk_alloc = h.pk_alloc AND NOT p.b_local
        CROSS JOIN LATERAL (VALUES (
            ({countable("p.int_cores_reserved")} + 99) / 100, {countable("p.int_gpus_reserved")}
        )) booked (cores, gpus)
        CROSS JOIN LATERAL (VALUES
            ('subscription', sub.pk_show || ' in ' || sub.pk_alloc, booked.cores, sub.int_burst / 100::float8, true),
            ('folder cores', f.pk_folder, booked.cores, f.int_max_cores / 100::float8, false),
            ('folder gpus', f.pk_folder, booked.gpus, f.int_max_gpus, false),
            ('job cores', p.pk_job, booked.cores, r.int_max_cores / 100::float8, false),
            ('job gpus', p.pk_job, booked.gpus, r.int_max_gpus, false)
        ) capped (what, name, used, cap, always)
        WHERE cap IS NOT NULL
        GROUP BY what, name, cap, always
        UNION ALL
        SELECT 'limit', limit_record.str_name,
               CASE WHEN terms.counts_machines THEN count(DISTINCT p.pk_host) ELSE count(*) END,
               int_max_value + CASE WHEN terms.counts_machines AND terms.reported_at IS NOT NULL THEN 1 ELSE 0 END, true
        FROM proc p JOIN (SELECT DISTINCT pk_layer, pk_limit_record FROM layer_limit) ll USING (pk_layer)
        JOIN limit_record USING (pk_limit_record) {TERMS}
        WHERE int_max_value IS NOT NULL AND coalesce(terms.machines, terms.frames) IS DISTINCT FROM -1
          AND (terms.reported_at IS NULL OR p.ts_dispatched > terms.reported_at)
        GROUP BY pk_limit_record, limit_record.str_name, int_max_value, terms.counts_machines, terms.reported_at
    ) vertices
"""  # noqa: S608 - only our own constant

# Running frames without a proc, and procs whose frame does not run, for longer than a grace of some seconds.
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

# Layers whose layer_stat differs from their frames; a layer with frames in SETUP is not judged.
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

# Hosts whose idle amounts are not what their procs leave, or are below zero.
_WRONG_IDLE = f"""
    SELECT str_name || ': idle ' || int_cores_idle || ' of ' || int_cores || ' centicores, procs hold ' || used.cores
               AS detail,
           int_cores_idle <> greatest(0, int_cores - used.cores) OR int_gpus_idle <> greatest(0, int_gpus - used.gpus)
               OR least(int_cores_idle, int_mem_idle, int_gpus_idle, int_gpu_mem_idle) < 0 AS wrong
    FROM host
    CROSS JOIN LATERAL (
        SELECT {HELD} FROM proc WHERE proc.pk_host = host.pk_host
    ) used
"""  # noqa: S608 - only our own constants

RULES = {
    Invariant.WITHIN_CAPS: _OVER_CAP,
    Invariant.RUNNING_FRAMES_HAVE_PROCS: _LOST_FRAMES,
    Invariant.LAYER_COUNTERS_MATCH_FRAMES: _WRONG_COUNTS,
    Invariant.HOST_IDLE_MATCHES_PROCS: _WRONG_IDLE,
}
"""Invariants that PostgreSQL alone can show, each with the statement that judges the rows concerned."""


def judge(connection: Connection, invariant: Invariant, *, grace_seconds: float = 0.0) -> Row[Any]:
    """Judge all rows by one of RULES, in one statement. Returns how many rows were ``looked_at``, how many contradict
    the rule (``wrong``), and words on the first few of those (``named``, or None).

    A frame without a proc, or a proc without a frame, is not wrong before it has been so for ``grace_seconds``.
    """
    statement = f"""
        SELECT count(*) AS looked_at, count(*) FILTER (WHERE wrong) AS wrong,
               (array_agg(detail) FILTER (WHERE wrong))[1:{OFFENDERS_NAMED}] AS named
        FROM ({RULES[invariant]}) judged
        """  # noqa: S608 - constants only
    return connection.execute(text(statement), {"grace": grace_seconds}).one()
