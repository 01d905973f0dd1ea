"""What a farm looks like at a moment: hosts, jobs, holds and bookings, each in one statement.

Reads only; what may grow with the farm is summed or bounded here. Cores in centicores, memory in KB, ages in seconds.
``facility`` is a name; None is every facility.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

_HOSTS = text(
    """
    SELECT facility.str_name AS facility, alloc.str_name AS allocation, host_stat.str_state AS state,
           host.str_lock_state AS lock_state,
           coalesce(host_stat.ts_ping < clock_timestamp() - CAST(:staleness AS double precision) * interval '1 second',
                    false) AS silent,
           count(host.pk_host) AS hosts,
           CAST(coalesce(sum(host.int_cores), 0) AS double precision) / 100 AS cores,
           CAST(coalesce(sum(host.int_cores_idle), 0) AS double precision) / 100 AS idle_cores,
           CAST(coalesce(sum(host.int_mem), 0) AS bigint) AS memory_kb,
           CAST(coalesce(sum(host.int_mem_idle), 0) AS bigint) AS idle_memory_kb,
           CAST(coalesce(sum(host.int_gpus), 0) AS bigint) AS gpus,
           CAST(coalesce(sum(host.int_gpus_idle), 0) AS bigint) AS idle_gpus
      FROM alloc
      JOIN facility ON facility.pk_facility = alloc.pk_facility
      LEFT JOIN (host JOIN host_stat ON host_stat.pk_host = host.pk_host) ON host.pk_alloc = alloc.pk_alloc
     WHERE coalesce(alloc.b_enabled, true)
       AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
     GROUP BY 1, 2, 3, 4, 5
     ORDER BY 1, 2, 3, 4, 5
    """
)
# The jobs that nothing runs of come first, those that still wait for something next, those that wait longest before
# the others. A layer waits as long as the frame of it that goes first, which an index finds.
_JOBS = text(
    """
    SELECT live.*, CAST(coalesce(used.cores, 0) AS double precision) / 100 AS cores,
           CAST(coalesce(used.gpus, 0) AS bigint) AS gpus,
           CASE WHEN first.eligible IS NOT NULL  -- greatest() passes over what is null
                THEN CAST(greatest(extract(epoch FROM clock_timestamp() - first.eligible), 0) AS double precision)
           END AS waiting_seconds,
           quarantine.reason AS quarantined
      FROM (
          SELECT job.pk_job AS id, job.str_name AS name, show.str_name AS show, facility.str_name AS facility,
                 job.str_user AS user, job.str_state AS state, job.b_paused AS paused, job.b_auto_book AS auto_book,
                 show.b_active AS show_active, show.b_scheduler_managed AS show_managed,
                 show.b_booking_enabled AND show.b_dispatch_enabled AS show_booking, show.b_paused AS show_paused,
                 resource.int_priority AS priority, int_frame_count AS frames, stat.int_waiting_count AS waiting,
                 stat.int_running_count AS running, stat.int_depend_count AS depend, stat.int_dead_count AS dead,
                 stat.int_succeeded_count + stat.int_eaten_count AS done,
                 CAST(extract(epoch FROM clock_timestamp() - job.ts_started) AS double precision) AS age_seconds,
                 count(*) OVER () AS jobs
            FROM job
            JOIN show ON show.pk_show = job.pk_show
            JOIN facility ON facility.pk_facility = job.pk_facility
            JOIN job_stat stat ON stat.pk_job = job.pk_job
            JOIN job_resource resource ON resource.pk_job = job.pk_job
           WHERE job.str_state = 'PENDING'
             AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
             AND (CAST(:show AS varchar) IS NULL OR position(lower(:show) IN lower(show.str_name)) > 0)
             AND (CAST(:part AS varchar) IS NULL OR position(lower(:part) IN lower(job.str_name)) > 0)
           ORDER BY stat.int_waiting_count > 0 AND stat.int_running_count = 0 DESC, stat.int_waiting_count > 0 DESC,
                    stat.int_running_count > 0 DESC, job.ts_started, job.pk_job
           LIMIT :most
      ) live
      LEFT JOIN LATERAL (SELECT sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus
                           FROM proc WHERE proc.pk_job = live.id) used ON true
      LEFT JOIN LATERAL (
          SELECT min(next.ts_eligible) AS eligible
            FROM layer_stat
           CROSS JOIN LATERAL (
               SELECT frame.ts_eligible FROM frame
                WHERE frame.pk_layer = layer_stat.pk_layer AND frame.str_state = 'WAITING'
                ORDER BY frame.int_dispatch_order, frame.int_layer_order LIMIT 1) next
           WHERE layer_stat.pk_job = live.id AND layer_stat.int_waiting_count > 0) first ON true
      LEFT JOIN opencue_sched_quarantine quarantine
             ON quarantine.pk_job = live.id AND quarantine.until > clock_timestamp()
     ORDER BY live.waiting > 0 AND live.running = 0 DESC, live.waiting > 0 DESC, live.running > 0 DESC,
              waiting_seconds DESC NULLS LAST, live.age_seconds DESC, live.id
    """
)
_HOLDS = text(
    """
    SELECT host.str_name AS host, hold.pk_layer AS layer_id, facility.str_name AS facility, job.str_name AS job,
           layer.str_name AS layer, show.str_name AS show,
           CAST(extract(epoch FROM clock_timestamp() - hold.granted_at) AS double precision) AS held_seconds,
           CAST(extract(epoch FROM hold.free_at - clock_timestamp()) AS double precision) AS free_in_seconds,
           count(*) OVER () AS holds
      FROM opencue_sched_hold hold
      JOIN host ON host.pk_host = hold.pk_host
      JOIN alloc ON alloc.pk_alloc = host.pk_alloc
      JOIN facility ON facility.pk_facility = alloc.pk_facility
      JOIN job ON job.pk_job = hold.pk_job
      JOIN layer ON layer.pk_layer = hold.pk_layer
      JOIN show ON show.pk_show = job.pk_show
     WHERE hold.until > clock_timestamp() AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
       AND (CAST(:job AS varchar) IS NULL OR hold.pk_job = :job)
     ORDER BY hold.free_at NULLS LAST, host.str_name LIMIT :most
    """
)
# Where history is off or drained late, the procs that still run are the least there were.
_BOOKINGS = text(
    """
    SELECT greatest(
        (SELECT count(*) FROM frame_history
          WHERE int_ts_started >= CAST(extract(epoch FROM now()) - :seconds AS bigint)),
        (SELECT count(*) FROM proc
          WHERE ts_dispatched >= now() - CAST(:seconds AS double precision) * interval '1 second'))
    """
)


def host_groups(connection: Connection, facility: str | None, *, staleness: float) -> Sequence[Row[Any]]:
    """Hosts summed by facility, allocation, ``state``, ``lock_state`` and whether they are ``silent``: no report for
    ``staleness`` seconds. An allocation without hosts has one row, with None for these and 0 ``hosts``."""
    return connection.execute(_HOSTS, {"facility": facility, "staleness": staleness}).all()


def live_jobs(
    connection: Connection, facility: str | None, *, show: str | None, part: str | None, most: int
) -> Sequence[Row[Any]]:
    """Up to ``most`` of the pending ``jobs``, those of which nothing runs first, by how long they wait.

    ``show`` and ``part`` are parts of the show's and the job's name. A row has what explain.switch_reasons reads.
    """
    wanted = {"facility": facility, "show": show, "part": part, "most": most}
    return connection.execute(_JOBS, wanted).all()


def holds(
    connection: Connection, facility: str | None = None, *, job_id: str | None = None, most: int = 1000
) -> Sequence[Row[Any]]:
    """Up to ``most`` of the ``holds`` on hosts that drain for a wide frame, or for one of this job, the first to be
    free first. ``free_in_seconds`` is None where nobody knows."""
    return connection.execute(_HOLDS, {"facility": facility, "job": job_id, "most": most}).all()


def bookings(connection: Connection, *, seconds: float) -> int:
    """Frames of all facilities that were started in the last ``seconds`` and not taken back."""
    return int(connection.execute(_BOOKINGS, {"seconds": seconds}).scalar_one())
