"""What people are told of a farm: why a job's frames wait, whether all a scheduler needs is there, what it is like now,
and what contradicts.

Reads only; usage is summed from the procs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.store.pending import countable
from opencue_sched.store.procs import HELD
from opencue_sched.store.tags import compared_tag, compared_tags

# Of the jobs of the show and facility that passes look for, the job itself among them.
_RANK = text(
    """
    SELECT show.str_name AS show, my.int_priority AS priority, count(*) AS jobs,
           count(*) FILTER (WHERE (-resource.int_priority, job.ts_started, job.pk_job)
                                  <= (-my.int_priority, mine.ts_started, mine.pk_job)) AS place,
           greatest(my.int_priority, 1) / CAST(sum(greatest(resource.int_priority, 1)) AS float8) AS chance
      FROM job mine JOIN job_resource my USING (pk_job) JOIN show USING (pk_show)
      JOIN job ON job.pk_show = mine.pk_show AND job.pk_facility = mine.pk_facility
      JOIN job_resource resource ON resource.pk_job = job.pk_job
     WHERE mine.pk_job = :job AND job.str_state = 'PENDING' AND NOT job.b_paused AND job.b_auto_book
       AND EXISTS (SELECT 1 FROM layer_stat stat WHERE stat.pk_job = job.pk_job AND stat.int_waiting_count > 0)
     GROUP BY mine.pk_job, my.pk_job_resource, show.pk_show
    HAVING bool_or(job.pk_job = mine.pk_job)
    """
)
_SERVICES = text("SELECT str_name FROM service UNION SELECT str_name FROM show_service WHERE pk_show = :show")


def rank(connection: Connection, job_id: str) -> Row[Any] | None:
    """The job's ``show`` and ``priority``, its ``place`` by rank among the ``jobs`` of its show and facility that have
    frames waiting and are looked for (priority, then age; 1 goes first), and its ``chance`` of coming first in a draw:
    its priority by the sum of all. None of other jobs."""
    return connection.execute(_RANK, {"job": job_id}).one_or_none()


def services(connection: Connection, show_id: str) -> frozenset[str]:
    """The services there are, for all shows or for this one."""
    return frozenset(connection.execute(_SERVICES, {"show": show_id}).scalars())


# What a Cuebot writes where dispatcher.layer_delay.rules name the exit status; a person's reason is any text. By way of
# JSON, for schemas before V47 have no such column.
_DELAYING = text(
    """
    SELECT DISTINCT CAST(found.status AS int) AS status
      FROM job JOIN layer USING (pk_job)
     CROSS JOIN LATERAL substring(to_jsonb(layer) ->> 'str_start_after_reason'
                                  FROM '^Automatic backoff: exit status (-?[0-9]{1,9})$') AS found(status)
     WHERE job.str_state = 'PENDING' AND found.status IS NOT NULL
    """
)


def delaying_exit_statuses(connection: Connection) -> frozenset[int]:
    """The exit statuses for which a Cuebot has delayed layers of pending jobs."""
    return frozenset(connection.execute(_DELAYING).scalars())


_SERVER = text(
    """
    SELECT CAST(current_setting('server_version_num') AS int) AS version, current_setting('application_name') AS client
    """
)
_IN_FORCE = text("SELECT name, current_setting(name) AS value FROM unnest(CAST(:names AS text[])) AS name")


def settings_in_force(connection: Connection, names: Iterable[str]) -> dict[str, str]:
    """The values that the server's parameters of these names have in our session."""
    return {row.name: row.value for row in connection.execute(_IN_FORCE, {"names": list(names)})}


def server(connection: Connection) -> Row[Any]:
    """PostgreSQL's ``version`` (150004), and the name it knows our session by (``client``)."""
    return connection.execute(_SERVER).one()


# What the farm is like now, as top, its page and its metrics show it: summed, or bounded.
# Cores are whole cores with fractions here, memory is in KB, ages in seconds. ``facility`` is a name; None is all.


def _cores_of(what: str, where: str = "true") -> str:
    return f"CAST(coalesce(sum({what}) FILTER (WHERE {where}), 0) AS double precision) / {CENTICORES_PER_CORE}"


_HOST_GROUPS = text(
    f"""
    WITH found AS (
        SELECT facility.str_name AS facility, alloc.str_name AS name, alloc.pk_alloc AS id, alloc.str_tag AS tag,
               alloc.b_default AS default, host.*, ts_ping, host.str_lock_state AS lock_state,
               CASE WHEN host_stat.str_state = 'UP' AND host_stat.ts_ping
                         < clock_timestamp() - CAST(:staleness AS double precision) * interval '1 second'
                    THEN 'SILENT' ELSE host_stat.str_state END AS state
          FROM alloc JOIN facility USING (pk_facility)
          LEFT JOIN (host JOIN host_stat USING (pk_host)) ON host.pk_alloc = alloc.pk_alloc
         WHERE coalesce(alloc.b_enabled, true)
           AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
    )
    SELECT facility, name, state, lock_state, id, tag, "default", count(pk_host) AS hosts,
           CAST(extract(epoch FROM clock_timestamp() - max(ts_ping)) AS double precision) AS report_age,
           count(*) FILTER (WHERE state = 'UP' AND lock_state <> 'OPEN') AS hosts_locked,
           count(*) FILTER (WHERE state <> 'UP') AS hosts_down,
           {_cores_of("int_cores")} AS cores,
           {_cores_of("int_cores - int_cores_idle", "state = 'UP'")} AS booked,
           {_cores_of("int_cores_idle", "state = 'UP' AND lock_state = 'OPEN'")} AS idle,
           {_cores_of("int_cores_idle", "state = 'UP' AND lock_state <> 'OPEN'")} AS locked,
           {_cores_of("int_cores", "state <> 'UP'")} AS down
      FROM found
     GROUP BY GROUPING SETS ((facility, name, id, tag, "default"), (facility, state, lock_state))
     ORDER BY 1, 2, 3, 4
    """  # noqa: S608 - only our own constants
)
_HOLDS = text(
    """
    SELECT facility.str_name AS facility, coalesce(show.str_name, '') AS show,
           CAST(extract(epoch FROM clock_timestamp() - min(hold.granted_at) OVER ()) AS double precision) AS oldest_age
      FROM opencue_sched_hold hold
      JOIN host USING (pk_host) JOIN alloc USING (pk_alloc) JOIN facility USING (pk_facility)
      LEFT JOIN (job JOIN show USING (pk_show)) ON job.pk_job = hold.pk_job
     WHERE hold.until > clock_timestamp() AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
    """
)
_UNREACHED = text(
    f"""
    WITH waiting AS MATERIALIZED (
        SELECT layer.*, int_waiting_count AS frames, tag
          FROM layer_stat JOIN layer USING (pk_layer)
         CROSS JOIN LATERAL unnest({compared_tags("str_tags")}) AS tag
         WHERE layer_stat.pk_job = ANY(CAST(:jobs AS varchar[])) AND int_waiting_count > 0
    ), carried AS (
        SELECT DISTINCT pk_alloc, pk_facility, {compared_tag("host_tag.str_tag")} AS tag
          FROM host_tag JOIN host USING (pk_host) JOIN alloc USING (pk_alloc)
         WHERE {compared_tag("host_tag.str_tag")} IN (SELECT tag FROM waiting)
    )
    SELECT DISTINCT ON (pk_job) pk_job AS job_id, waiting.str_name AS layer, str_tags AS tags,
           count(carried.tag) > 0 AS elsewhere
      FROM waiting JOIN job USING (pk_job) LEFT JOIN carried USING (tag)
      LEFT JOIN subscription sub ON sub.pk_alloc = carried.pk_alloc AND sub.pk_show = job.pk_show
                                AND job.pk_facility = carried.pk_facility
     GROUP BY pk_job, pk_layer, waiting.str_name, str_tags, frames
    HAVING count(sub.pk_subscription) = 0
     ORDER BY pk_job, frames DESC, pk_layer
    """  # noqa: S608 - only our own constants
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
    """Hosts and cores summed by allocation (``name``, ``id``, ``tag``, ``default``), and by ``state`` and
    ``lock_state`` in each facility; in either kind of row what the other is summed by is None. SILENT are hosts that
    are UP without a report for ``staleness`` seconds. Enabled allocations without hosts have a row too, and a row with
    0 ``hosts`` and no state. ``report_age``: seconds since the newest report of any of the hosts."""
    return connection.execute(_HOST_GROUPS, {"facility": facility, "staleness": staleness}).all()


def unreached_layers(connection: Connection, job_ids: Sequence[str]) -> Sequence[Row[Any]]:
    """Of each of these jobs the waiting ``layer``, if any, with the most frames whose ``tags`` are on no host that the
    show has a subscription for; ``elsewhere``: other hosts have one."""
    return connection.execute(_UNREACHED, {"jobs": list(job_ids)}).all()


def holds(connection: Connection, facility: str | None) -> Sequence[Row[Any]]:
    """The hosts that drain for a wide frame. ``oldest_age``: for how many seconds the one has drained that has drained
    longest; ``show`` is empty for a job that is gone."""
    return connection.execute(_HOLDS, {"facility": facility}).all()


def bookings(connection: Connection, *, seconds: float) -> int:
    """Frames of all facilities that were started in the last ``seconds`` and not taken back."""
    return int(connection.execute(_BOOKINGS, {"seconds": seconds}).scalar_one())


# The audit: contradictions, counted and named.

# How long ago these procs were booked.
_PROC_AGES = text(
    """
    SELECT pk_proc, pk_show, CAST(extract(epoch FROM clock_timestamp() - ts_booked) AS float) AS seconds
      FROM proc WHERE pk_proc = ANY(CAST(:procs AS varchar[]))
    """
)


def proc_ages(connection: Connection, proc_ids: Sequence[str]) -> Sequence[Row[Any]]:
    """Show and age in seconds of those of these procs that there are."""
    return connection.execute(_PROC_AGES, {"procs": list(proc_ids)}).all()


OFFENDERS_NAMED = 5

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
        SELECT 'limit', l.str_name, count(*), l.int_max_value, true
        FROM proc p JOIN layer_limit ll USING (pk_layer) JOIN limit_record l USING (pk_limit_record)
        WHERE l.int_max_value IS NOT NULL
        GROUP BY l.pk_limit_record, l.str_name, l.int_max_value
    ) vertices
"""  # noqa: S608 - only our own constant

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

_WRONG_IDLE = f"""
    SELECT str_name || ': idle ' || int_cores_idle || ' of ' || int_cores || ' centicores, procs hold ' || used.cores
               AS detail,
           int_cores_idle <> greatest(0, int_cores - used.cores) OR int_gpus_idle <> greatest(0, int_gpus - used.gpus)
               OR least(int_cores_idle, int_mem_idle, int_gpus_idle, int_gpu_mem_idle) < 0 AS wrong
    FROM host
    CROSS JOIN LATERAL (
        SELECT {HELD} FROM proc WHERE proc.pk_host = host.pk_host
    ) used
"""  # noqa: S608

RULES = {
    "I2": ("vertices with procs within their caps (lowered ones show too)", _OVER_CAP),
    "I6": ("RUNNING frames and procs belong together", _LOST_FRAMES),
    "I6b": ("layers whose counters are what their frames say", _WRONG_COUNTS),
    "I7": ("hosts whose idle is total less procs, none negative", _WRONG_IDLE),
}
"""Invariants that PostgreSQL alone can show: what is looked at, and a statement that judges each row (see judge())."""


def judge(connection: Connection, invariant: str, *, grace_seconds: float = 0.0) -> Row[Any]:
    """Judge all rows by one of RULES, in one statement: ``looked_at`` rows, of which ``wrong`` contradict the rule.

    ``named`` are the first few of these, or None. What was so for less than the grace is not wrong yet (I6).
    """
    statement = f"""
        SELECT count(*) AS looked_at, count(*) FILTER (WHERE wrong) AS wrong,
               (array_agg(detail) FILTER (WHERE wrong))[1:{OFFENDERS_NAMED}] AS named
        FROM ({RULES[invariant][1]}) judged
        """  # noqa: S608 - constants only
    return connection.execute(text(statement), {"grace": grace_seconds}).one()
