"""The proc table as the ledger should mirror it: managed shows' procs with what they take and from whom.

Rules: every proc of a managed show counts, whoever booked it; a local proc has no subscription (the reference's sums
exclude it there only); the vertices are those of the job's folder and department and the host's allocation of now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sqlalchemy import Connection, TextClause, text

_PROCS = """
    SELECT proc.pk_proc, proc.pk_show, CASE WHEN proc.b_local THEN '' ELSE host.pk_alloc END AS pk_alloc,
           coalesce(job.pk_folder, ''), coalesce(proc.pk_job, ''), coalesce(proc.pk_layer, ''),
           coalesce(job.pk_dept, ''), proc.int_cores_reserved, proc.int_gpus_reserved, coalesce(held.limits, '')
      FROM proc
      JOIN host USING (pk_host)
      JOIN show ON show.pk_show = proc.pk_show AND show.b_scheduler_managed
      LEFT JOIN job ON job.pk_job = proc.pk_job
      LEFT JOIN (SELECT pk_layer, string_agg(DISTINCT pk_limit_record, ',') AS limits
                   FROM layer_limit JOIN limit_record USING (pk_limit_record)
                  GROUP BY pk_layer) held ON held.pk_layer = proc.pk_layer
"""
_ALL = text(_PROCS)
_OF_SHOWS = text(f"{_PROCS} WHERE proc.pk_show = ANY(:shows)")
_BY_ID = text(f"{_PROCS} WHERE proc.pk_proc = ANY(:ids)")
Owner: TypeAlias = Literal["job", "layer", "folder", "show"]
_ALIVE: Mapping[Owner, TextClause] = {
    "job": text("SELECT pk_job FROM job WHERE pk_job = ANY(:ids) AND str_state <> 'FINISHED'"),
    "layer": text(
        "SELECT pk_layer FROM layer JOIN job USING (pk_job) WHERE pk_layer = ANY(:ids) AND job.str_state <> 'FINISHED'"
    ),
    "folder": text("SELECT pk_folder FROM folder WHERE pk_folder = ANY(:ids)"),
    "show": text("SELECT pk_show FROM show WHERE pk_show = ANY(:ids)"),
}
_UNFINISHED_COMMITS = text(
    """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'active' AND query ILIKE 'commit%'
       AND query_start <= clock_timestamp() - make_interval(secs => :seconds)
    """
)
_ROWS_PER_FETCH = 5000


@dataclass(frozen=True, slots=True)
class ProcRow:
    """A proc and its vertices; an empty id where it has none. ``limit_ids`` are in no order."""

    proc_id: str
    show_id: str
    alloc_id: str
    folder_id: str
    job_id: str
    layer_id: str
    dept_id: str
    centicores: int
    gpus: int
    limit_ids: tuple[str, ...]


def procs(connection: Connection, show_ids: Collection[str] | None = None) -> Iterator[ProcRow]:
    """Procs of all managed shows, or of these among them."""
    if show_ids is None:
        return _rows(connection, _ALL, {})
    return _rows(connection, _OF_SHOWS, {"shows": list(show_ids)})


def procs_by_id(connection: Connection, proc_ids: Collection[str]) -> Iterator[ProcRow]:
    """Those of these procs that exist and belong to a managed show."""
    return _rows(connection, _BY_ID, {"ids": list(proc_ids)})


def alive(connection: Connection, table: Owner, ids: Collection[str]) -> set[str]:
    """Those of these ids that exist; jobs that are not FINISHED, and layers of such jobs."""
    return set(connection.execute(_ALIVE[table], {"ids": list(ids)}).scalars())


def unfinished_commits(connection: Connection, seconds: float) -> int:
    """How many COMMITs the server has taken so many seconds ago, or more, and not finished: no snapshot has their rows.

    It lets one take as long as it takes, whatever its time-outs: a disk may be slow, a synchronous standby away.
    """
    return int(connection.execute(_UNFINISHED_COMMITS, {"seconds": seconds}).scalar_one())


def _rows(connection: Connection, statement: TextClause, parameters: dict[str, object]) -> Iterator[ProcRow]:
    result = connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(statement, parameters)
    for proc, show, alloc, folder, job, layer, dept, centicores, gpus, limits in result:
        held = tuple(limits.split(",")) if limits else ()
        yield ProcRow(proc, show, alloc, folder, job, layer, dept, centicores, gpus, held)
