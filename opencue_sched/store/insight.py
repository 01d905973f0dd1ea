"""Reads for what people are told of a farm: why a job's frames wait, what the server has, what hosts and cores do now.

Usage is summed from the procs. A reservation of a host is a row of ``opencue_sched_hold``, and ``hold`` in names here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.store.tags import compared_tag, compared_tags

# Where a job stands among the jobs of its show and facility for which passes look.
_RANK = text(
    """
    SELECT show.str_name AS show, my.int_priority AS priority, count(*) AS jobs,
           count(*) FILTER (WHERE (-resource.int_priority, job.ts_started, job.pk_job)
                                  <= (-my.int_priority, mine.ts_started, mine.pk_job)) AS place,
           CAST(coalesce(sum(waiting.layers)
                         FILTER (WHERE (-resource.int_priority, job.ts_started, job.pk_job)
                                       < (-my.int_priority, mine.ts_started, mine.pk_job)), 0) AS int) AS layers_ahead,
           greatest(my.int_priority, 1) / CAST(sum(greatest(resource.int_priority, 1)) AS float8) AS chance
      FROM job mine JOIN job_resource my USING (pk_job) JOIN show USING (pk_show)
      JOIN job ON job.pk_show = mine.pk_show AND job.pk_facility = mine.pk_facility
      JOIN job_resource resource ON resource.pk_job = job.pk_job
     CROSS JOIN LATERAL (SELECT count(*) AS layers FROM layer_stat stat
                          WHERE stat.pk_job = job.pk_job AND stat.int_waiting_count > 0) waiting
     WHERE mine.pk_job = :job AND job.str_state = 'PENDING' AND NOT job.b_paused AND job.b_auto_book
       AND waiting.layers > 0
     GROUP BY mine.pk_job, my.pk_job_resource, show.pk_show
    HAVING bool_or(job.pk_job = mine.pk_job)
    """
)
# The names of all services that a show may use.
_SERVICES = text("SELECT str_name FROM service UNION SELECT str_name FROM show_service WHERE pk_show = :show")


def rank(connection: Connection, job_id: str) -> Row[Any] | None:
    """The place of a job among the jobs of its show and facility that have frames waiting and may be booked; None for a
    job that is none of these.

    - ``show`` and ``priority``: the job's own.
    - ``jobs``: how many such jobs there are; ``place``: the job's place by rank among them (priority, then age; 1 goes
      first).
    - ``layers_ahead``: how many waiting layers the jobs before it have.
    - ``chance``: its chance of coming first in a draw, its priority by the sum of all.
    """
    return connection.execute(_RANK, {"job": job_id}).one_or_none()


def services(connection: Connection, show_id: str) -> frozenset[str]:
    """The names of the services that a show may use: those of all shows and its own."""
    return frozenset(connection.execute(_SERVICES, {"show": show_id}).scalars())


# The exit statuses in reasons that a Cuebot wrote for a delay (dispatcher.layer_delay.rules); a person's reason is any
# text. The column is read by way of JSON, because schemas before V47 do not have it.
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


# PostgreSQL's version, and the name by which it knows this connection.
_SERVER = text(
    """
    SELECT CAST(current_setting('server_version_num') AS int) AS version, current_setting('application_name') AS client
    """
)
# The values of settings of PostgreSQL that are in force for this connection.
_IN_FORCE = text("SELECT name, current_setting(name) AS value FROM unnest(CAST(:names AS text[])) AS name")


def settings_in_force(connection: Connection, names: Iterable[str]) -> dict[str, str]:
    """The values of the server's parameters of these names in our session, by name."""
    return {row.name: row.value for row in connection.execute(_IN_FORCE, {"names": list(names)})}


def server(connection: Connection) -> Row[Any]:
    """PostgreSQL's ``version`` (such as 150004), and the name by which it knows our session (``client``)."""
    return connection.execute(_SERVER).one()


# The farm as it is now, for top, the page and the metrics: summed, or bounded.
# Cores are whole cores with fractions here, memory is in KB, ages in seconds. ``facility`` is a name; None is all.


def _cores_of(what: str, where: str = "true") -> str:
    """SQL for the sum of an amount in centicores, as cores, over the rows for which ``where`` holds."""
    return f"CAST(coalesce(sum({what}) FILTER (WHERE {where}), 0) AS double precision) / {CENTICORES_PER_CORE}"


def _hosts(where: str = "true") -> str:
    """SQL for the number of hosts in the groups for which ``where`` holds."""
    return f"CAST(coalesce(sum(hosts) FILTER (WHERE {where}), 0) AS bigint)"


# Hosts by facility, allocation, state and lock: how many there are, and what they have. Hosts are summed before they
# are joined with their allocations, or all would be sorted twice with all their columns. Whether a host is late is a
# group of its own, because PostgreSQL knows that it is true or false: a state computed from the time of its report
# would make it expect as many groups as there are times, and sort all hosts.
_HOST_GROUPS = text(
    f"""
    WITH summed AS (
        SELECT pk_alloc, host.str_lock_state AS lock_state, host_stat.str_state AS reported,
               ts_ping < (SELECT clock_timestamp() - CAST(:staleness AS double precision) * interval '1 second')
                   AS is_late,
               count(*) AS hosts, max(ts_ping) AS ts_ping, sum(int_cores) AS int_cores,
               sum(int_cores_idle) AS int_cores_idle
          FROM host JOIN host_stat USING (pk_host)
         GROUP BY pk_alloc, lock_state, reported, is_late
    ), found AS (
        SELECT facility.str_name AS facility, alloc.str_name AS name, pk_alloc AS id, alloc.str_tag AS tag,
               alloc.b_default AS default, summed.*,
               CASE WHEN reported = 'UP' AND is_late THEN 'SILENT' ELSE reported END AS state
          FROM alloc JOIN facility USING (pk_facility) LEFT JOIN summed USING (pk_alloc)
         WHERE coalesce(alloc.b_enabled, true)
           AND (CAST(:facility AS varchar) IS NULL OR facility.str_name = :facility)
    )
    SELECT facility, name, state, lock_state, id, tag, "default", {_hosts()} AS hosts,
           CAST(extract(epoch FROM clock_timestamp() - max(ts_ping)) AS double precision) AS report_age,
           {_hosts("state = 'UP' AND lock_state <> 'OPEN'")} AS hosts_locked,
           {_hosts("state <> 'UP'")} AS hosts_down,
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
# Reservations of hosts, by facility and show.
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
# For each of these jobs, a layer whose tags no host of an allocation the show subscribes to carries.
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
# How many frames were started lately. Where history is off, or drained late, the procs that still run are counted:
# there were at least as many.
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
    """Hosts and cores, summed in two ways.

    A row with a ``name`` is of an allocation (``name``, ``id``, ``tag``, ``default``), also of an enabled one without
    hosts. Any other row is of a ``state`` and ``lock_state`` in a facility; without hosts the two are None. A host is
    SILENT that is UP and has not reported for ``staleness`` seconds. ``report_age``: seconds since the newest report of
    any of the hosts.
    """
    return connection.execute(_HOST_GROUPS, {"facility": facility, "staleness": staleness}).all()


def unreached_layers(connection: Connection, job_ids: Sequence[str]) -> Sequence[Row[Any]]:
    """The largest waiting layer of each job for whose tags the show's subscriptions have no host.

    ``layer`` is the one with the most waiting frames; a job without such a layer has no row. ``elsewhere`` says whether
    hosts outside the subscriptions have one of the layer's ``tags``.
    """
    return connection.execute(_UNREACHED, {"jobs": list(job_ids)}).all()


def holds(connection: Connection, facility: str | None) -> Sequence[Row[Any]]:
    """The hosts that drain for a wide frame, a row each, with their ``facility`` and the ``show`` of the frame, empty
    for a job that is gone. ``oldest_age`` is the age of the oldest reservation, in seconds, in each row."""
    return connection.execute(_HOLDS, {"facility": facility}).all()


def bookings(connection: Connection, *, seconds: float) -> int:
    """Frames of all facilities that were started in the last ``seconds`` and not taken back."""
    return int(connection.execute(_BOOKINGS, {"seconds": seconds}).scalar_one())
