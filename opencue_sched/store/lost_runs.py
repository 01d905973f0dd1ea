"""Runs that nobody may ever report the end of: on silent hosts, of finished jobs, or without a proc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, text


@dataclass(frozen=True, slots=True)
class UpkeepScope:
    """The rows that a fleet's upkeep may touch. The fields are parameters of statements with ``job_in_scope``,
    ``SHOW_IN_SCOPE`` or ``HOST_IN_SCOPE``."""

    facility: str | None = None
    """The name of the facility whose rows are in scope; None: those of all facilities."""
    beside_cuebot: bool = False
    """Whether only rows of managed shows are in scope: a Cuebot looks after the others, and takes the reports of
    RQDs."""


EVERYTHING = UpkeepScope()

DEAF_FACTOR = 3.0
"""How many times as long silent hosts are waited for when most went silent at once: then it is probably this process
that did not hear them. With less, an outage of the report service may end runs that go on; with more, the frames of a
farm that lost its power wait longer."""

GIVE_UP_SECONDS = 1200.0
"""A silent proc whose host can be reached but does not confirm, or cannot be reached and is not DOWN: its frame is
DEAD after this long."""

SHOW_IN_SCOPE = "(show.b_scheduler_managed OR NOT CAST(:beside_cuebot AS boolean))"
_OF_FACILITY = """(CAST(:facility AS varchar) IS NULL OR EXISTS (
              SELECT FROM facility WHERE facility.pk_facility = {}.pk_facility AND facility.str_name = :facility))"""
HOST_IN_SCOPE = f"""EXISTS (
           SELECT FROM alloc WHERE alloc.pk_alloc = host.pk_alloc AND {_OF_FACILITY.format("alloc")})"""


def job_in_scope(column: str) -> str:
    """The condition that the job named by ``column`` is in the scope."""
    return f"""EXISTS (
           SELECT FROM job scoped JOIN show ON show.pk_show = scoped.pk_show
            WHERE scoped.pk_job = {column} AND {SHOW_IN_SCOPE} AND {_OF_FACILITY.format("scoped")})"""


# How many hosts are up, how many of these are silent, and for how many seconds the server has run.
_HEARING = text(
    f"""
    SELECT count(*) AS up,
           count(*) FILTER (WHERE ts_ping < current_timestamp - CAST(:after AS float8) * interval '1 second') AS silent,
           CAST(extract(epoch FROM current_timestamp - pg_postmaster_start_time()) AS float8) AS database_age
      FROM host_stat JOIN host ON host.pk_host = host_stat.pk_host WHERE str_state = 'UP' AND {HOST_IN_SCOPE}
    """  # noqa: S608 - only our own constants
)
# Mark silent hosts DOWN; hosts that another transaction has locked are left to the next time.
_MARK_DOWN = text(
    f"""
    WITH silent AS (
        SELECT host_stat.pk_host FROM host_stat JOIN host ON host.pk_host = host_stat.pk_host
         WHERE str_state = 'UP' AND ts_ping < current_timestamp - CAST(:after AS float8) * interval '1 second'
           AND {HOST_IN_SCOPE}
         ORDER BY host_stat.pk_host FOR NO KEY UPDATE OF host_stat SKIP LOCKED)
    UPDATE host_stat SET str_state = 'DOWN' FROM silent WHERE host_stat.pk_host = silent.pk_host
    RETURNING host_stat.pk_host
    """  # noqa: S608 - only our own constants
)
# Two reports of its host in a row have not named the proc: silence alone may mean that the service that takes the
# reports was away.
_UNNAMED = "proc.ts_ping <= host_stat.ts_ping - CAST(:unnamed AS float8) * interval '1 second'"
_SILENT = "proc.ts_ping < current_timestamp - CAST(:silent AS float8) * interval '1 second'"
# At random, so that runs which cannot be ended now never keep the others out of a bounded batch. A silent host that is
# neither UP nor DOWN is never marked DOWN: its RQD is asked about its procs, as about those that are not named.
_LOST_RUNS = text(
    f"""
    SELECT * FROM (
    SELECT proc.pk_proc AS proc_id, coalesce(proc.pk_frame, '') AS frame_id, host.str_name AS host_name,
           host_stat.str_state AS host_state, proc.ts_ping AS pinged_at,
           CAST(extract(epoch FROM current_timestamp - proc.ts_ping) AS float8) AS silent_for,
           CASE WHEN host_stat.str_state = 'DOWN' THEN 'host_down'
                WHEN job.str_state = 'FINISHED' THEN 'job_finished'
                WHEN proc.pk_frame IS NULL THEN 'no_frame'
                ELSE 'unnamed' END AS why
      FROM proc JOIN host USING (pk_host) JOIN host_stat USING (pk_host)
      LEFT JOIN show USING (pk_show) LEFT JOIN job USING (pk_job)
     WHERE NOT proc.b_local AND {SHOW_IN_SCOPE} AND {HOST_IN_SCOPE}
       AND (host_stat.str_state = 'DOWN' OR job.str_state = 'FINISHED'
            OR (proc.pk_frame IS NULL
                AND proc.ts_ping < current_timestamp - CAST(:frameless AS float8) * interval '1 second')
            OR (proc.pk_frame IS NOT NULL AND ({_UNNAMED} OR ({_SILENT} AND host_stat.str_state <> 'UP'))))
     UNION ALL
    SELECT '', frame.pk_frame, coalesce(frame.str_host, ''), coalesce(host_stat.str_state, 'DOWN'), NULL,
           CAST(extract(epoch FROM current_timestamp - frame.ts_updated) AS float8), 'no_proc'
      FROM frame LEFT JOIN host ON host.str_name = frame.str_host LEFT JOIN host_stat USING (pk_host)
     WHERE frame.str_state = 'RUNNING' AND {job_in_scope("frame.pk_job")}
       AND frame.ts_updated < current_timestamp - CAST(:silent AS float8) * interval '1 second'
       AND NOT EXISTS (SELECT FROM proc WHERE proc.pk_frame = frame.pk_frame)
    ) lost ORDER BY random() LIMIT :limit
    """  # noqa: S608 - only our own constants
)


class Why(StrEnum):
    """Why a run has to be ended: of a proc, or of a frame that no proc has."""

    HOST_DOWN = "host_down"
    JOB_FINISHED = "job_finished"
    NO_FRAME = "no_frame"
    UNNAMED = "unnamed"
    NO_PROC = "no_proc"


LostRow = Row[Any]
"""A run that is to be ended: a proc with its frame, if it has one, or a RUNNING frame without a proc (no proc id).

``host_name`` is where it was started, if that is known; a host that is no more counts as DOWN. ``silent_for`` is the
seconds since a report last named it, at ``pinged_at``. ``why`` is a Why.
"""


def hearing(connection: Connection, *, silent_after: float, scope: UpkeepScope) -> tuple[int, int, float]:
    """What tells silent hosts from a program that hears none: how many hosts are UP, how many of them have been silent
    for ``silent_after`` seconds, and how long PostgreSQL has run (seconds)."""
    up, silent, age = connection.execute(_HEARING, {"after": silent_after, **asdict(scope)}).one()
    return up, silent, age


def mark_hosts_down(connection: Connection, *, silent_after: float, scope: UpkeepScope) -> list[str]:
    """Mark UP hosts DOWN that have been silent for ``silent_after`` seconds. Returns their ids."""
    return [row.pk_host for row in connection.execute(_MARK_DOWN, {"after": silent_after, **asdict(scope)})]


def lost_runs(connection: Connection, scope: UpkeepScope, *, limit: int, **seconds: float) -> Sequence[LostRow]:
    """Procs whose run is lost, and frames RUNNING without a proc; at most ``limit`` of all these, at random.

    A run is lost where its host is DOWN or its job FINISHED; where the proc has no frame, and no report has named the
    proc for ``frameless`` seconds; where the host's last report came ``unnamed`` seconds after the last that named the
    proc (or after its dispatch); and, on a host that is not UP, where no report has named the proc for ``silent``
    seconds. A frame counts as without a proc once it has been RUNNING so for ``silent`` seconds.
    """
    return connection.execute(_LOST_RUNS, {**seconds, "limit": limit, **asdict(scope)}).all()
