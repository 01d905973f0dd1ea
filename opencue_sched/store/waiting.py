"""What the database alone says about why a job's frames wait. Reads only; usage is summed from the procs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.pending import USED

_SITUATION = text(
    f"""
    SELECT job.str_name AS name, job.str_state AS state, job.b_paused AS paused, job.b_auto_book AS auto_book,
           job.str_os AS os, job.pk_show AS show_id, show.str_name AS show, show.b_active AS show_active,
           show.b_scheduler_managed AS show_managed, show.b_booking_enabled AND show.b_dispatch_enabled AS show_booking,
           show.b_paused AS show_paused, job.pk_facility AS facility_id, facility.str_name AS facility,
           coalesce(resource.int_max_cores, 0) AS max_centicores, coalesce(resource.int_max_gpus, 0) AS max_gpus,
           used.cores, used.gpus, folder.str_name AS folder, coalesce(caps.int_max_cores, 0) AS folder_max_centicores,
           coalesce(caps.int_max_gpus, 0) AS folder_max_gpus, folder_used.cores AS folder_cores,
           folder_used.gpus AS folder_gpus, current_timestamp AS now
      FROM job
      JOIN show ON show.pk_show = job.pk_show
      JOIN facility ON facility.pk_facility = job.pk_facility
      JOIN folder ON folder.pk_folder = job.pk_folder
      LEFT JOIN job_resource resource ON resource.pk_job = job.pk_job
      LEFT JOIN folder_resource caps ON caps.pk_folder = job.pk_folder
      CROSS JOIN LATERAL (
          SELECT {USED} FROM proc p WHERE p.pk_job = job.pk_job) used
      CROSS JOIN LATERAL (
          SELECT {USED}
            FROM proc p JOIN job other ON other.pk_job = p.pk_job WHERE other.pk_folder = job.pk_folder) folder_used
     WHERE job.pk_job = :job
    """  # noqa: S608 - only our own constant
)
_AHEAD = text(
    """
    SELECT count(*)
      FROM job
      JOIN job_resource resource ON resource.pk_job = job.pk_job
      JOIN job mine ON mine.pk_job = :job AND mine.pk_show = job.pk_show AND mine.pk_facility = job.pk_facility
      JOIN job_resource my ON my.pk_job = mine.pk_job
     WHERE job.str_state = 'PENDING' AND NOT job.b_paused AND job.b_auto_book
       AND (-resource.int_priority, job.ts_started, job.pk_job) < (-my.int_priority, mine.ts_started, mine.pk_job)
       AND EXISTS (SELECT 1 FROM layer_stat stat WHERE stat.pk_job = job.pk_job AND stat.int_waiting_count > 0)
    """
)
_HOSTS = text(
    """
    SELECT host.pk_host AS id, alloc.pk_alloc AS alloc_id, alloc.str_name AS allocation,
           alloc.pk_facility AS facility_id, facility.str_name AS facility, host.str_lock_state AS lock_state,
           host_stat.str_state AS state, host_stat.str_os AS os,
           CAST(extract(epoch FROM clock_timestamp() - host_stat.ts_ping) AS double precision) AS report_age,
           array_agg(DISTINCT replace(host_tag.str_tag, ' ', '')) AS tags
      FROM host_tag
      JOIN host ON host.pk_host = host_tag.pk_host
      JOIN host_stat ON host_stat.pk_host = host.pk_host
      JOIN alloc ON alloc.pk_alloc = host.pk_alloc
      JOIN facility ON facility.pk_facility = alloc.pk_facility
     WHERE replace(host_tag.str_tag, ' ', '') = ANY(CAST(:tags AS varchar[]))
     GROUP BY host.pk_host, host_stat.pk_host_stat, alloc.pk_alloc, facility.pk_facility
    """
)
_TAGS = text("SELECT DISTINCT replace(str_tag, ' ', '') FROM host_tag")


def situation(connection: Connection, job_id: str) -> Row[Any]:
    """A job that exists, its show, its caps and what is used under them. Caps in centicores, use in whole cores as
    booked."""
    return connection.execute(_SITUATION, {"job": job_id}).one()


def jobs_ahead(connection: Connection, job_id: str) -> int:
    """How many pending jobs of its show and facility with waiting frames are served before the job."""
    return int(connection.execute(_AHEAD, {"job": job_id}).scalar_one())


def tagged_hosts(connection: Connection, tags: Collection[str]) -> Sequence[Row[Any]]:
    """All hosts, of any facility and in any state, with any of these tags, which they carry as ``tags``.

    ``report_age``: seconds since a host's last report.
    """
    return connection.execute(_HOSTS, {"tags": list(tags)}).all()


def all_tags(connection: Connection) -> list[str]:
    """Every tag a host carries."""
    return list(connection.execute(_TAGS).scalars())


# Figures about a farm as a whole, for somebody who asks whether it can work at all. Reads only.

_SERVER = text(
    """
    SELECT CAST(current_setting('server_version_num') AS int) AS version, clock_timestamp() AS now,
           current_setting('application_name') AS client
    """
)
_GUARD = text(
    """
    SELECT count(*) = 2 FROM pg_trigger
     WHERE tgrelid = to_regclass('proc') AND tgenabled <> 'D'
       AND tgname IN ('opencue_sched_guard_insert', 'opencue_sched_guard_update')
    """
)
_SHOWS = text(
    """
    SELECT show.str_name AS name, coalesce(max(subscription.int_burst), 0) AS largest_burst,
           show.b_active AND show.b_booking_enabled AND show.b_dispatch_enabled AND NOT show.b_paused AS bookable
      FROM show LEFT JOIN subscription ON subscription.pk_show = show.pk_show
     WHERE show.b_scheduler_managed GROUP BY show.pk_show ORDER BY show.str_name
    """
)
_FARM_HOSTS = text(
    """
    SELECT count(*) AS total, count(*) FILTER (WHERE str_state = 'UP') AS up,
           count(*) FILTER (WHERE str_state = 'UP' AND str_lock_state = 'OPEN') AS open,
           count(*) FILTER (WHERE str_state = 'UP' AND str_lock_state = 'OPEN'
                              AND ts_ping > clock_timestamp() - CAST(:staleness AS double precision) * interval '1 s')
               AS fresh,
           (SELECT count(*) FROM alloc WHERE coalesce(b_enabled, true)) AS allocations
      FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host
    """
)
_NEWEST_REPORT = text(
    """
    SELECT CAST(extract(epoch FROM clock_timestamp() - max(ts_ping)) AS double precision)
      FROM host_stat JOIN host ON host.pk_host = host_stat.pk_host JOIN alloc ON alloc.pk_alloc = host.pk_alloc
     WHERE CAST(:facilities AS varchar[]) IS NULL OR alloc.pk_facility = ANY(CAST(:facilities AS varchar[]))
    """
)
_RECENT_HOSTS = text(
    """
    SELECT str_name FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host
     WHERE str_state = 'UP' ORDER BY ts_ping DESC, str_name LIMIT :most
    """
)
_UNKNOWN_HOSTS = text(
    """
    SELECT name FROM unnest(CAST(:names AS varchar[])) AS given(name)
     WHERE NOT EXISTS (SELECT 1 FROM host WHERE str_name = name) ORDER BY name
    """
)


def server(connection: Connection) -> Row[Any]:
    """PostgreSQL's ``version`` (150004) and clock (``now``), and the name it knows our session by (``client``)."""
    return connection.execute(_SERVER).one()


def guard_stands(connection: Connection) -> bool:
    """Whether our triggers on proc are enabled that let nobody else assign frames of managed shows."""
    return bool(connection.execute(_GUARD).scalar_one())


def managed_shows(connection: Connection) -> Sequence[Row[Any]]:
    """All shows managed by this scheduler: whether frames may be booked at all, and the largest burst in centicores."""
    return connection.execute(_SHOWS).all()


def hosts(connection: Connection, *, staleness: float) -> Row[Any]:
    """Counts of hosts by what keeps them from being used, and of allocations; ``staleness``: seconds after which a
    report is too old."""
    return connection.execute(_FARM_HOSTS, {"staleness": staleness}).one()


def newest_report_age(connection: Connection, facilities: Sequence[str] | None) -> float | None:
    """Seconds since any host of ``facilities``, or of all, last reported; None when there is no host."""
    asked = {"facilities": None if facilities is None else list(facilities)}
    age: float | None = connection.execute(_NEWEST_REPORT, asked).scalar_one()
    return age


def recent_hosts(connection: Connection, most: int) -> list[str]:
    """Names of hosts that are up, those that reported last first."""
    return list(connection.execute(_RECENT_HOSTS, {"most": most}).scalars())


def unknown_hosts(connection: Connection, names: list[str]) -> list[str]:
    """Those of these names that no host has."""
    return list(connection.execute(_UNKNOWN_HOSTS, {"names": names}).scalars())
