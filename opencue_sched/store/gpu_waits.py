"""What waits for GPUs, whatever pass would look at it: layers in cooldown and beyond a pass's limit wait, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, TextClause, text

from opencue_sched.store.pending import LEAST_CORES, MAY_BE_BOOKED, QUARANTINED, USED
from opencue_sched.store.schema import SchemaFacts

# Demand that cannot run is no demand: nothing is kept for frames over a limit or a cap of their own. These sums are
# made for layers with GPUs only, of which there are few.
_GPU_WAITS = f"""
    SELECT j.pk_facility, j.pk_show, j.str_os, replace(l.str_tags, ' ', '') AS tags, l.int_cores_min, l.int_cores_max,
           l.int_mem_min, l.int_gpus_min, l.int_gpu_mem_min, l.b_threadable, {LEAST_CORES} AS least_cores,
           CAST(sum(ls.int_waiting_count) AS bigint) AS frames,
           (SELECT jsonb_object_agg(sub.pk_alloc, sub.int_burst)
              FROM subscription sub WHERE sub.pk_show = j.pk_show AND sub.int_burst > 0) AS bursts
    FROM layer_stat ls
    JOIN layer l ON l.pk_layer = ls.pk_layer
    JOIN job j ON j.pk_job = l.pk_job
    JOIN show s ON s.pk_show = j.pk_show
    LEFT JOIN job_resource r ON r.pk_job = j.pk_job
    LEFT JOIN folder_resource f ON f.pk_folder = j.pk_folder
    CROSS JOIN LATERAL (
        SELECT {USED} FROM proc p WHERE p.pk_job = j.pk_job AND (r.int_max_cores > 0 OR r.int_max_gpus > 0)
    ) job_used
    CROSS JOIN LATERAL (
        SELECT {USED}
        FROM job other
        JOIN proc p ON p.pk_job = other.pk_job
        WHERE other.pk_folder = j.pk_folder AND (f.int_max_cores > 0 OR f.int_max_gpus > 0)
    ) folder_used
    WHERE ls.int_waiting_count > 0 AND (l.int_gpus_min > 0 OR l.int_gpu_mem_min > 0)
      AND {MAY_BE_BOOKED} AND NOT {QUARANTINED} {{started}}
      AND (COALESCE(r.int_max_cores, 0) <= 0 OR {LEAST_CORES} <= r.int_max_cores / 100 - job_used.cores)
      AND (COALESCE(r.int_max_gpus, 0) <= 0 OR l.int_gpus_min <= r.int_max_gpus - job_used.gpus)
      AND (COALESCE(f.int_max_cores, 0) <= 0 OR {LEAST_CORES} <= f.int_max_cores / 100 - folder_used.cores)
      AND (COALESCE(f.int_max_gpus, 0) <= 0 OR l.int_gpus_min <= f.int_max_gpus - folder_used.gpus)
      AND NOT EXISTS (
          SELECT 1
          FROM layer_limit ll
          JOIN limit_record lr ON lr.pk_limit_record = ll.pk_limit_record
          WHERE ll.pk_layer = l.pk_layer AND COALESCE(lr.int_max_value, 0) <= (
              SELECT count(DISTINCT p.pk_proc)
              FROM layer_limit under
              JOIN proc p ON p.pk_layer = under.pk_layer
              WHERE under.pk_limit_record = ll.pk_limit_record
          )
      )
    GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
"""  # noqa: S608 - only our own constants


@cache
def _statement(has_start_after: bool) -> TextClause:
    started = "AND (l.ts_start_after IS NULL OR l.ts_start_after <= now())" if has_start_after else ""
    return text(_GPU_WAITS.format(started=started))


def fetch_gpu_waits(connection: Connection, facts: SchemaFacts) -> Sequence[Row[Any]]:
    """Waiting ``frames`` of layers that need GPUs, by facility, show, OS, tags and need; ``least_cores`` is the fewest
    whole cores of one frame, ``bursts`` the show's subscriptions (allocation id -> centicores). One statement."""
    return connection.execute(_statement(facts.has_start_after)).all()
