"""Runs that nobody may ever report the end of: on silent hosts, of finished jobs, or without a proc."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import Connection, text


@dataclass(frozen=True, slots=True)
class UpkeepScope:
    """Whose rows a fleet's upkeep may touch. ``facility``: those of the facility of that name, None for all.
    ``beside_cuebot``: those of managed shows; a Cuebot looks after the others, and takes the reports of RQDs.
    """

    facility: str | None = None
    beside_cuebot: bool = False

    def parameters(self) -> dict[str, object]:
        """What ``job_in_scope``, ``SHOW_IN_SCOPE`` and ``HOST_IN_SCOPE`` are bound to."""
        return {"facility": self.facility, "beside_cuebot": self.beside_cuebot}


EVERYTHING = UpkeepScope()

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


_HEARING = text(
    f"""
    SELECT count(*) AS up,
           count(*) FILTER (WHERE ts_ping < current_timestamp - CAST(:after AS float8) * interval '1 second') AS silent,
           CAST(extract(epoch FROM current_timestamp - pg_postmaster_start_time()) AS float8) AS database_age
      FROM host_stat JOIN host ON host.pk_host = host_stat.pk_host WHERE str_state = 'UP' AND {HOST_IN_SCOPE}
    """  # noqa: S608
)
_MARK_DOWN = text(
    f"""
    WITH silent AS (
        SELECT host_stat.pk_host FROM host_stat JOIN host ON host.pk_host = host_stat.pk_host
         WHERE str_state = 'UP' AND ts_ping < current_timestamp - CAST(:after AS float8) * interval '1 second'
           AND {HOST_IN_SCOPE}
         ORDER BY host_stat.pk_host FOR NO KEY UPDATE OF host_stat SKIP LOCKED)
    UPDATE host_stat SET str_state = 'DOWN' FROM silent WHERE host_stat.pk_host = silent.pk_host
    RETURNING host_stat.pk_host
    """  # noqa: S608
)
# In random order, so that runs which cannot be ended now never keep the others out of a bounded batch.
_LOST_PROCS = text(
    f"""
    SELECT proc.pk_proc, proc.pk_frame, proc.ts_ping, host.str_name, host_stat.str_state,
           CAST(extract(epoch FROM current_timestamp - proc.ts_ping) AS float8) AS silent_for,
           host_stat.ts_booted > proc.ts_dispatched + interval '300 seconds' AS rebooted,
           CASE WHEN host_stat.str_state = 'DOWN' THEN 'host_down'
                WHEN job.str_state = 'FINISHED' THEN 'job_finished'
                WHEN proc.pk_frame IS NULL THEN 'no_frame'
                WHEN proc.ts_ping < current_timestamp - CAST(:silent AS float8) * interval '1 second' THEN 'silent'
                ELSE 'unnamed' END AS why
      FROM proc
      JOIN host ON host.pk_host = proc.pk_host
      JOIN host_stat ON host_stat.pk_host = proc.pk_host
      LEFT JOIN show ON show.pk_show = proc.pk_show
      LEFT JOIN job ON job.pk_job = proc.pk_job
     WHERE NOT proc.b_local AND {SHOW_IN_SCOPE} AND {HOST_IN_SCOPE}
       AND (host_stat.str_state = 'DOWN' OR job.str_state = 'FINISHED'
            OR proc.ts_ping < current_timestamp - CAST(:silent AS float8) * interval '1 second'
            OR (proc.pk_frame IS NULL
                AND proc.ts_ping < current_timestamp - CAST(:frameless AS float8) * interval '1 second')
            OR (CAST(:beside_cuebot AS boolean) AND proc.pk_frame IS NOT NULL
                AND proc.ts_ping <= host_stat.ts_ping - CAST(:unnamed AS float8) * interval '1 second'
                AND proc.ts_dispatched < current_timestamp - CAST(:grace AS float8) * interval '1 second'))
       AND proc.pk_proc <> ALL (CAST(:but AS varchar[]))
     ORDER BY random() LIMIT :limit
    """  # noqa: S608
)
_ORPHAN_FRAMES = text(
    f"""
    SELECT frame.pk_frame, frame.str_host, host_stat.str_state,
           CAST(extract(epoch FROM current_timestamp - frame.ts_updated) AS float8) AS silent_for
      FROM frame
      LEFT JOIN host ON host.str_name = frame.str_host
      LEFT JOIN host_stat ON host_stat.pk_host = host.pk_host
     WHERE frame.str_state = 'RUNNING' AND {job_in_scope("frame.pk_job")}
       AND frame.ts_updated < current_timestamp - CAST(:silent AS float8) * interval '1 second'
       AND NOT EXISTS (SELECT FROM proc WHERE proc.pk_frame = frame.pk_frame)
       AND frame.pk_frame <> ALL (CAST(:but AS varchar[]))
     ORDER BY random() LIMIT :limit
    """  # noqa: S608
)


class Why(StrEnum):
    """Why a proc has to go."""

    HOST_DOWN = "host_down"
    JOB_FINISHED = "job_finished"
    NO_FRAME = "no_frame"
    SILENT = "silent"
    UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class Hearing:
    """How many hosts are UP, how many of them have been silent, and how long PostgreSQL has run (seconds)."""

    up: int
    silent: int
    database_age: float


@dataclass(frozen=True, slots=True)
class LostProc:
    """A proc that is to be ended. ``silent_for`` is the seconds since a report last named it; ``rebooted``: its host
    booted more than 300 s after it was dispatched, so its process cannot live."""

    proc_id: str
    frame_id: str | None
    host_name: str
    host_state: str
    pinged_at: datetime
    silent_for: float
    rebooted: bool
    why: Why


@dataclass(frozen=True, slots=True)
class OrphanFrame:
    """A RUNNING frame no proc has. ``host_name`` is where it started; ``host_state`` None: no such host any more."""

    frame_id: str
    host_name: str | None
    host_state: str | None
    silent_for: float


def hearing(connection: Connection, *, silent_after: float, scope: UpkeepScope = EVERYTHING) -> Hearing:
    """Whether it is the hosts that are silent, or we who are deaf."""
    row = connection.execute(_HEARING, {"after": silent_after, **scope.parameters()}).one()
    return Hearing(row.up, row.silent, row.database_age)


def mark_hosts_down(connection: Connection, *, silent_after: float, scope: UpkeepScope = EVERYTHING) -> list[str]:
    """UP hosts silent for that many seconds become DOWN; returns their ids."""
    return [row.pk_host for row in connection.execute(_MARK_DOWN, {"after": silent_after, **scope.parameters()})]


def lost_procs(
    connection: Connection,
    *,
    silent_after: float,
    frameless_after: float,
    unnamed_after: float,
    grace: float,
    limit: int,
    but: Collection[str] = (),
    scope: UpkeepScope = EVERYTHING,
) -> list[LostProc]:
    """Procs on DOWN hosts, of finished jobs, silent, without a frame, or, beside a Cuebot, dispatched ``grace`` seconds
    ago or more and last named ``unnamed_after`` seconds before the host's last report; at most ``limit`` of them, at
    random, and none of ``but``."""
    parameters = {
        "silent": silent_after,
        "frameless": frameless_after,
        "unnamed": unnamed_after,
        "grace": grace,
        "limit": limit,
        "but": list(but),
    }
    rows = connection.execute(_LOST_PROCS, parameters | scope.parameters())
    return [
        LostProc(
            row.pk_proc,
            row.pk_frame,
            row.str_name,
            row.str_state,
            row.ts_ping,
            row.silent_for,
            row.rebooted,
            Why(row.why),
        )
        for row in rows
    ]


def orphan_frames(
    connection: Connection,
    *,
    silent_after: float,
    limit: int,
    but: Collection[str] = (),
    scope: UpkeepScope = EVERYTHING,
) -> list[OrphanFrame]:
    """Frames that have been RUNNING without a proc for that many seconds; at most ``limit`` of them, at random, and
    none of ``but``."""
    parameters = {"silent": silent_after, "limit": limit, "but": list(but)}
    rows = connection.execute(_ORPHAN_FRAMES, parameters | scope.parameters())
    return [OrphanFrame(row.pk_frame, row.str_host, row.str_state, row.silent_for) for row in rows]
