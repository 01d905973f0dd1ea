"""Caps and bookings as PostgreSQL holds them, for the counters in Redis. Cores are centicores throughout.

Caps: subscription, folder_resource, job_resource, point, limit_record. Bookings: proc.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.limit_types import TERMS
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
# Whether the ledger has what runs of a show: not of one that books elsewhere, nor of a managed one that is not
# imported, or whose row changed since it was.
_IN_LEDGER = """show.b_scheduler_managed AND EXISTS (
    SELECT 1
      FROM unnest(CAST(:imported AS varchar[]), CAST(:versions AS varchar[])) AS note(show, version)
     WHERE note.show = show.pk_show AND note.version = CAST(show.xmin AS text))
"""
# A limit of NULL admits none, as in OpenCue's comparison. int_foreign is what the frames that the ledger does not have
# leave of it, counted as OpenCue counts: running frames. A layer that lists a limit twice takes it once. Of a limit
# that counts machines, other_machines are those on which such frames run, or local ones, which the ledger has late. Of
# a limit that was reported they are those of frames that the report need not show yet, as are foreign_pending; machines
# of older ones hold it, and count no more (past_machines).
_PENDING = "(terms.reported_at IS NULL OR proc.ts_dispatched > terms.reported_at - make_interval(secs => :window))"


def _machines(pending: str) -> str:
    return f"""
           CASE WHEN terms.counts_machines THEN
               ARRAY(SELECT DISTINCT proc.pk_host
                       FROM layer_limit JOIN proc USING (pk_layer) JOIN show USING (pk_show)
                      WHERE layer_limit.pk_limit_record = limit_record.pk_limit_record
                        AND (proc.b_local OR NOT ({_IN_LEDGER})) AND {pending}) END"""


_LIMITS = f"""
    SELECT pk_limit_record, coalesce(int_max_value, 0) AS int_max_value,
           coalesce(CAST(terms.machines AS text), '') AS int_machines,
           coalesce(CAST(terms.frames AS text), '') AS int_frames, terms.terms,
           coalesce(CAST(terms.opens_at AS text), '') AS opens_at,
           CAST(extract(epoch FROM terms.reported_at) AS double precision) AS reported_at,
           coalesce((SELECT sum(layer_stat.int_running_count)
                       FROM (SELECT DISTINCT pk_layer
                               FROM layer_limit
                              WHERE layer_limit.pk_limit_record = limit_record.pk_limit_record) limited
                       JOIN layer_stat USING (pk_layer)
                       JOIN job ON job.pk_job = layer_stat.pk_job JOIN show ON show.pk_show = job.pk_show
                      WHERE layer_stat.int_running_count > 0 AND NOT ({_IN_LEDGER})), 0) AS int_foreign,
           CASE WHEN terms.frames IS NOT NULL THEN
               (SELECT count(*)
                  FROM (SELECT DISTINCT pk_layer
                          FROM layer_limit
                         WHERE layer_limit.pk_limit_record = limit_record.pk_limit_record) limited
                  JOIN proc USING (pk_layer) JOIN show USING (pk_show)
                 WHERE NOT ({_IN_LEDGER}) AND {_PENDING}) END AS foreign_pending,
           {_machines(_PENDING)} AS other_machines, {_machines(f"NOT {_PENDING}")} AS past_machines
      FROM limit_record {TERMS}
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
    settle_window_seconds: float,
    ids: Collection[tuple[str, ...]] | None = None,
    show_ids: Collection[str] = (),
) -> Sequence[Row[Any]]:
    """Rows of ids and caps of vertices of a kind: of these ``ids``, where one that does not exist has no row; or of all
    in these shows, but of FINISHED jobs, and of every limit.

    ``imported``: the shows whose frames the ledger has, each with the version of its row then. What started later than
    ``settle_window_seconds`` before a licence server was asked, its report need not show.
    """
    wanted: dict[str, object] = {}
    if kind == "limit":
        wanted |= {"imported": list(imported), "versions": list(imported.values()), "window": settle_window_seconds}
    if ids is None:
        return connection.execute(_OF_SHOWS[kind], {**wanted, "shows": list(show_ids)}).all()
    pairs = {"first": [id_pair[0] for id_pair in ids], "second": [id_pair[-1] for id_pair in ids]}
    return connection.execute(_BY_ID[kind], {**wanted, **pairs}).all()


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
           coalesce(held.limits, '') AS limits, proc.pk_host,
           CASE WHEN proc.b_local THEN CAST(extract(epoch FROM clock_timestamp()) - extract(epoch FROM proc.ts_booked)
                                            AS double precision) END AS local_seconds
      FROM proc JOIN host USING (pk_host)
      JOIN show ON show.pk_show = proc.pk_show AND show.b_scheduler_managed
      LEFT JOIN job ON job.pk_job = proc.pk_job
      LEFT JOIN (SELECT pk_layer, string_agg(DISTINCT pk_limit_record || mark, ',') AS limits
                   FROM layer_limit
                   JOIN (SELECT pk_limit_record, CASE WHEN counts_machines THEN '@'
                                                        WHEN reported_at IS NOT NULL THEN '~' ELSE '' END AS mark
                           FROM limit_record {TERMS} OFFSET 0) AS each_once USING (pk_limit_record)
                  GROUP BY pk_layer) held ON held.pk_layer = proc.pk_layer
     WHERE (CAST(:shows AS varchar[]) IS NULL OR proc.pk_show = ANY(CAST(:shows AS varchar[])))
       AND (CAST(:ids AS varchar[]) IS NULL OR proc.pk_proc = ANY(CAST(:ids AS varchar[])))
       AND (CAST(:layers AS varchar[]) IS NULL OR proc.pk_layer = ANY(CAST(:layers AS varchar[])))
    """
)
_LAYERS_UNDER = text(
    """
    SELECT DISTINCT pk_layer FROM layer_limit
     WHERE pk_limit_record = ANY(CAST(:limits AS varchar[]))
       AND EXISTS (SELECT FROM proc WHERE proc.pk_layer = layer_limit.pk_layer)
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
    connection: Connection,
    show_ids: Collection[str] | None = None,
    *,
    proc_ids: Collection[str] | None = None,
    layer_ids: Collection[str] | None = None,
) -> Iterator[Row[Any]]:
    """Procs of managed shows, of these shows, ids or layers where such are given, with their vertices: an empty id
    where there is none.

    ``centicores`` and ``gpus`` are what counts of those reserved. ``limits`` are ids joined by commas, in no order,
    with an @ behind each that counts machines, and a ~ behind each of frames that was reported.
    ``local_seconds``: how long ago a local proc was booked; None of any other.
    """
    shows, ids, layers = (None if wanted is None else list(wanted) for wanted in (show_ids, proc_ids, layer_ids))
    rows = connection.execution_options(yield_per=_ROWS_PER_FETCH)
    yield from rows.execute(_PROCS, {"shows": shows, "ids": ids, "layers": layers})


def layers_under(connection: Connection, limit_ids: Collection[str]) -> list[str]:
    """Layers under these limits of which frames run."""
    return list(connection.execute(_LAYERS_UNDER, {"limits": list(limit_ids)}).scalars())


def unfinished_commits(connection: Connection, seconds: float) -> int:
    """How many COMMITs the server has taken so many seconds ago, or more, and not finished: no snapshot has their rows.

    It lets one take as long as it takes, whatever its time-outs: a disk may be slow, a synchronous standby away.
    """
    return int(connection.execute(_UNFINISHED_COMMITS, {"seconds": seconds}).scalar_one())
