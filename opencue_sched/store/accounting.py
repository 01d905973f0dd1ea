"""Caps and bookings as PostgreSQL holds them, for the counters in Redis. Cores are centicores throughout.

Caps: subscription, folder_resource, job_resource, point, limit_record. Bookings: proc.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, TextClause, text

from opencue_sched.domain.units import INT_MAX
from opencue_sched.store.pending import countable

# ruff: noqa: S608 - the statements are put together from constants of this module only

# Of two snapshots of one server the one that sees more commits has a higher xmax, or the same and fewer transactions in
# progress below it. A clock cannot tell: it is read before its snapshot is taken, or after.
_CAPS_VERSION = text(
    """
    SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint) || '|' ||
           (CAST(CAST(pg_snapshot_xmax(seen) AS text) AS bigint) * 8192
            - least(8191, (SELECT count(*) FROM pg_snapshot_xip(seen))))
      FROM pg_current_snapshot() AS seen
    """
)
_MANAGED_VERSIONS = text(
    """
    SELECT pk_show, CAST(xmin AS text) AS version FROM show
     WHERE b_scheduler_managed AND (CAST(:shows AS varchar[]) IS NULL OR pk_show = ANY(CAST(:shows AS varchar[])))
    """
)

# Of each kind of vertex (accounting.keys.VertexKind): its ids, in the order of its key, then its caps by their names in
# the accounting reference.
_SUBSCRIPTIONS = "SELECT pk_show, pk_alloc, int_size AS size, int_burst AS burst FROM subscription"
_FOLDERS = """
    SELECT pk_folder, resource.int_min_cores, resource.int_max_cores, resource.int_min_gpus, resource.int_max_gpus,
           folder.pk_show AS show_id
      FROM folder_resource resource JOIN folder USING (pk_folder)
"""
_JOBS = """
    SELECT pk_job, resource.int_max_cores, resource.int_max_gpus, resource.int_priority
      FROM job_resource resource JOIN job USING (pk_job)
"""
_POINTS = "SELECT pk_dept, pk_show, int_min_cores, -1 AS int_max_cores FROM point"
# A limit of NULL admits none, as in OpenCue's comparison. int_foreign is what the frames that the ledger does not have
# leave of it, counted as OpenCue counts: running frames. They are of shows that book elsewhere, and of managed ones
# that are not imported, or whose row changed since they were.
_LIMITS = """
    SELECT pk_limit_record, coalesce(int_max_value, 0) AS int_max_value,
           coalesce((SELECT sum(layer_stat.int_running_count)
                       FROM layer_limit JOIN layer_stat USING (pk_layer)
                       JOIN job ON job.pk_job = layer_stat.pk_job JOIN show ON show.pk_show = job.pk_show
                      WHERE layer_limit.pk_limit_record = limit_record.pk_limit_record
                        AND layer_stat.int_running_count > 0
                        AND NOT (show.b_scheduler_managed AND EXISTS (
                            SELECT 1
                              FROM unnest(CAST(:imported AS varchar[]), CAST(:versions AS varchar[]))
                                   AS note(show, version)
                             WHERE note.show = show.pk_show AND note.version = CAST(show.xmin AS text)
                        ))), 0) AS int_foreign
      FROM limit_record
"""
_PAIRS = "IN (SELECT * FROM unnest(CAST(:first AS varchar[]), CAST(:second AS varchar[])))"
# Of each kind: the statement, which rows have one of the ids, and which belong to one of the shows.
_CAPS = {
    "sub": (_SUBSCRIPTIONS, f"(pk_show, pk_alloc) {_PAIRS}", "pk_show = ANY(:shows)"),
    "folder": (_FOLDERS, "pk_folder = ANY(:first)", "folder.pk_show = ANY(:shows)"),
    "job": (_JOBS, "pk_job = ANY(:first)", "job.pk_show = ANY(:shows) AND job.str_state <> 'FINISHED'"),
    "point": (_POINTS, f"(pk_dept, pk_show) {_PAIRS}", "pk_show = ANY(:shows)"),
    "limit": (_LIMITS, "pk_limit_record = ANY(:first)", "true"),
}
_BY_ID = {kind: text(f"{caps} WHERE {with_id}") for kind, (caps, with_id, _) in _CAPS.items()}
_OF_SHOWS = {kind: text(f"{caps} WHERE {of_show}") for kind, (caps, _, of_show) in _CAPS.items()}


def caps_version(connection: Connection) -> str:
    """What a REPEATABLE READ transaction sees, as ``server|number``: a snapshot with more commits has a higher number.

    ``server`` is the start of the server's process: another one, after a fail-over or a restart, begins anew.
    """
    return str(connection.execute(_CAPS_VERSION).scalar_one())


def managed_show_ids(connection: Connection) -> frozenset[str]:
    """Shows whose bookings this scheduler accounts for (b_scheduler_managed), active or not."""
    return frozenset(managed_show_versions(connection))


def managed_show_versions(connection: Connection, show_ids: Sequence[str] | None = None) -> dict[str, str]:
    """The same, or those of ``show_ids``, each with the version of its row: another one after every change."""
    return {row.pk_show: row.version for row in connection.execute(_MANAGED_VERSIONS, {"shows": show_ids})}


def fetch_caps(
    connection: Connection,
    kind: str,
    imported: Mapping[str, str],
    *,
    ids: Collection[tuple[str, ...]] | None = None,
    show_ids: Collection[str] = (),
) -> Sequence[Row[Any]]:
    """Rows of ids and caps of vertices of a kind: of these ``ids``, where one that does not exist has no row; or of all
    in these shows, but of FINISHED jobs, and of every limit.

    ``imported``: the shows whose frames the ledger has, each with the version of its row then.
    """
    wanted = {"imported": list(imported), "versions": list(imported.values())}
    if ids is None:
        return connection.execute(_OF_SHOWS[kind], {**wanted, "shows": list(show_ids)}).all()
    pairs = {"first": [it[0] for it in ids], "second": [it[-1] for it in ids]}
    return connection.execute(_BY_ID[kind], {**wanted, **pairs}).all()


# The five accounting tables of OpenCue, brought to what the proc table says (managed shows, only rows that differ).
#
# Each table is done in one transaction of its own, in three steps: find the rows that differ, lock them in id order (a
# row that is locked is left for the next pass), sum again under the locks and write. Two triggers of the schema
# stand in the way: job_resource raises when cores or GPUs grow past either maximum (it has no unlimited: -1 always
# raises, and growing cores raise over GPUs), subscription when cores grow past the burst. So a row gets its caps raised
# together with the count and put back by a second statement; they are read under the lock, so nobody's change of them
# can be lost.

_ROWS_PER_TRANSACTION = 500
_WANTED = (
    "unnest(CAST(:ids AS varchar[]), CAST(:cores AS bigint[]), CAST(:gpus AS bigint[])) AS wanted(id, cores, gpus)"
)
# Our triggers on caps would announce the raise and the restoration as changes, and keep bookings from these vertices.
_QUIET = text("SET LOCAL opencue_sched.quiet_caps = 'on'; SET LOCAL opencue_sched.lifts_caps = 'on'")
# Any value other than the present one keeps the trigger from comparing.
_RAISED = "CASE WHEN {cap} = 2147483647 THEN 2147483646 ELSE 2147483647 END"


@dataclass(frozen=True, slots=True)
class _Table:
    """A table and its key; the joins from a row to its show; the procs, and the expression of them that is the key.

    ``caps`` are the columns the triggers compare cores, and GPUs, with. ``local``: whether local procs count in a show
    of ours, and in one of Cuebot's, which takes no more off when such a proc ends.
    """

    name: str
    key: str
    summed_by: str
    owner: str = "JOIN show USING (pk_show)"
    summed_from: str = "proc"
    caps: tuple[str, ...] = ()
    local: tuple[bool, bool] = (True, False)

    def sums(self, condition: str) -> str:
        cores, gpus = (
            f"CAST(LEAST(sum({countable(column)}), {INT_MAX}) AS bigint)"  # what each of the tables can hold
            for column in ("proc.int_cores_reserved", "proc.int_gpus_reserved")
        )
        return f"""SELECT {self.summed_by} AS id, {cores} AS cores, {gpus} AS gpus
                     FROM {self.summed_from} WHERE {condition} AND (:local OR NOT proc.b_local)
                    GROUP BY {self.summed_by}"""

    def differing(self) -> TextClause:
        return text(
            f"""SELECT counted.{self.key} FROM {self.name} counted {self.owner}
                  LEFT JOIN ({self.sums("proc.pk_show = ANY(:shows)")}) used ON used.id = counted.{self.key}
                 WHERE show.pk_show = ANY(:shows) AND (show.b_scheduler_managed OR :as_cuebot)
                   AND (counted.int_cores <> coalesce(used.cores, 0) OR counted.int_gpus <> coalesce(used.gpus, 0))
                 ORDER BY counted.{self.key}"""
        )

    def lock(self) -> TextClause:
        columns = ", ".join((self.key, "int_cores", "int_gpus", *self.caps))
        return text(
            f"""SELECT {columns} FROM {self.name} WHERE {self.key} = ANY(:ids)
                 ORDER BY {self.key} FOR NO KEY UPDATE SKIP LOCKED"""
        )

    def update(self, *changes: str) -> TextClause:
        return text(f"UPDATE {self.name} SET {', '.join(changes)} FROM {_WANTED} WHERE {self.key} = wanted.id")


def refresh_tables(engine: Engine, show_ids: Collection[str], *, as_cuebot: bool = False) -> dict[str, int]:
    """Refresh the five tables for those of ``show_ids`` that are managed; returns the rows written per table.

    ``as_cuebot``: also for those that are not (any more), and with local procs as Cuebot counts them. That is right
    beside a Cuebot that keeps their books, because it changes proc and tables in one transaction, and rows are summed
    under their locks.
    """
    written = dict.fromkeys((table.name for table in _TABLES), 0)
    for table in _TABLES:
        local = table.local[as_cuebot]
        with engine.begin() as connection:
            wanted = {"shows": list(show_ids), "as_cuebot": as_cuebot, "local": local}
            differing = connection.execute(table.differing(), wanted).scalars().all()
        for start in range(0, len(differing), _ROWS_PER_TRANSACTION):
            with engine.begin() as connection:
                rows = differing[start : start + _ROWS_PER_TRANSACTION]
                written[table.name] += _write(connection, table, rows, local)
    return written


def _write(connection: Connection, table: _Table, ids: Sequence[str], local: bool) -> int:
    locked = {row[0]: row for row in connection.execute(table.lock(), {"ids": ids})}
    sums = connection.execute(text(table.sums(f"{table.summed_by} = ANY(:ids)")), {"ids": list(locked), "local": local})
    used = dict.fromkeys(locked, (0, 0)) | {row.id: (row.cores, row.gpus) for row in sums}
    changed = {row_id: count for row_id, count in used.items() if count != tuple(locked[row_id][1:3])}
    if changed:
        raised = (f"{cap} = {_RAISED.format(cap=cap)}" for cap in table.caps)
        connection.execute(_QUIET)
        connection.execute(
            table.update("int_cores = wanted.cores", "int_gpus = wanted.gpus", *raised), _wanted(changed)
        )
    if changed and table.caps:
        restored = (f"{cap} = wanted.{unit}" for cap, unit in zip(table.caps, ("cores", "gpus"), strict=False))
        caps = {row_id: (*locked[row_id][3:], 0) for row_id in changed}
        connection.execute(table.update(*restored), _wanted(caps))
    return len(changed)


def _wanted(amounts: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    cores, gpus, *_ = zip(*amounts.values(), strict=True)
    return {"ids": list(amounts), "cores": list(cores), "gpus": list(gpus)}


_TABLES = (
    _Table(
        "layer_resource",
        "pk_layer",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_by="proc.pk_layer",
        local=(True, True),
    ),
    _Table(
        "job_resource",
        "pk_job",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_by="proc.pk_job",
        caps=("int_max_cores", "int_max_gpus"),
    ),
    _Table(
        "folder_resource",
        "pk_folder",
        owner="JOIN folder USING (pk_folder) JOIN show USING (pk_show)",
        summed_from="proc JOIN job USING (pk_job)",
        summed_by="job.pk_folder",
    ),
    _Table(
        "point",
        "pk_point",
        summed_from=(
            "proc JOIN job USING (pk_job) JOIN point ON point.pk_dept = job.pk_dept AND point.pk_show = job.pk_show"
        ),
        summed_by="point.pk_point",
    ),
    _Table(
        "subscription",
        "pk_subscription",
        summed_from=(
            "proc JOIN host USING (pk_host)"
            " JOIN subscription ON subscription.pk_alloc = host.pk_alloc AND subscription.pk_show = proc.pk_show"
        ),
        summed_by="subscription.pk_subscription",
        caps=("int_burst",),
        local=(False, False),
    ),
)


# The proc table as the ledger should mirror it: managed shows' procs with what they take and from whom.
#
# Rules: every proc of a managed show counts, whoever booked it; a local proc has no subscription (the reference's sums
# exclude it there only); the vertices are those of the job's folder and department and the host's allocation of now.

_PROCS = text(
    f"""
    SELECT proc.pk_proc, proc.pk_show, CASE WHEN proc.b_local THEN '' ELSE host.pk_alloc END AS pk_alloc,
           coalesce(job.pk_folder, '') AS pk_folder, coalesce(proc.pk_job, '') AS pk_job,
           coalesce(proc.pk_layer, '') AS pk_layer, coalesce(job.pk_dept, '') AS pk_dept,
           {countable("proc.int_cores_reserved")} AS centicores, {countable("proc.int_gpus_reserved")} AS gpus,
           proc.int_cores_reserved AS reserved_centicores, proc.int_gpus_reserved AS reserved_gpus,
           coalesce(held.limits, '') AS limits,
           CASE WHEN proc.b_local THEN CAST(extract(epoch FROM clock_timestamp()) - extract(epoch FROM proc.ts_booked)
                                            AS double precision) END AS local_seconds
      FROM proc JOIN host USING (pk_host)
      JOIN show ON show.pk_show = proc.pk_show AND show.b_scheduler_managed
      LEFT JOIN job ON job.pk_job = proc.pk_job
      LEFT JOIN (SELECT pk_layer, string_agg(DISTINCT pk_limit_record, ',') AS limits
                   FROM layer_limit JOIN limit_record USING (pk_limit_record)
                  GROUP BY pk_layer) held ON held.pk_layer = proc.pk_layer
     WHERE (CAST(:shows AS varchar[]) IS NULL OR proc.pk_show = ANY(CAST(:shows AS varchar[])))
       AND (CAST(:ids AS varchar[]) IS NULL OR proc.pk_proc = ANY(CAST(:ids AS varchar[])))
    """
)
_UNFINISHED_COMMITS = text(
    """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'active' AND query ILIKE 'commit%'
       AND query_start <= clock_timestamp() - make_interval(secs => :seconds)
    """
)
_ROWS_PER_FETCH = 5000


def procs(
    connection: Connection, show_ids: Collection[str] | None = None, *, proc_ids: Collection[str] | None = None
) -> Iterator[Row[Any]]:
    """Procs of managed shows, of these shows or ids where such are given, with their vertices: an empty id where there
    is none.

    ``centicores`` and ``gpus`` are what counts of those reserved. ``limits`` are ids joined by commas, in no order.
    ``local_seconds``: how long ago a local proc was booked; None of any other.
    """
    shows, ids = (None if wanted is None else list(wanted) for wanted in (show_ids, proc_ids))
    rows = connection.execution_options(yield_per=_ROWS_PER_FETCH)
    yield from rows.execute(_PROCS, {"shows": shows, "ids": ids})


def unfinished_commits(connection: Connection, seconds: float) -> int:
    """How many COMMITs the server has taken so many seconds ago, or more, and not finished: no snapshot has their rows.

    It lets one take as long as it takes, whatever its time-outs: a disk may be slow, a synchronous standby away.
    """
    return int(connection.execute(_UNFINISHED_COMMITS, {"seconds": seconds}).scalar_one())
