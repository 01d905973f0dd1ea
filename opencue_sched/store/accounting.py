"""Caps and bookings as PostgreSQL holds them, for the counters in Redis. Cores are centicores throughout.

Caps are read from subscription, folder_resource, job_resource, point and limit_record, bookings from proc.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.limit_types import TERMS
from opencue_sched.store.pending import countable

# ruff: noqa: S608 - the statements are put together from constants of this module only

# The start of the server's process, and a number that is higher the more commits this snapshot sees. Of two snapshots
# of one server, the one that sees more commits has a higher xmax, or the same xmax and fewer transactions in progress
# below it. So the number is xmax times 8192 less the transactions in progress, of which at most 8191 count. A clock
# could not order snapshots: it is not read at the moment at which the snapshot is taken.
_CAPS_VERSION = text(
    """
    SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint) || '|' ||
           (CAST(CAST(pg_snapshot_xmax(seen) AS text) AS bigint) * 8192
            - least(8191, (SELECT count(*) FROM pg_snapshot_xip(seen))))
      FROM pg_current_snapshot() AS seen
    """
)
# The managed shows, and the version of the row of each.
_MANAGED_VERSIONS = text(
    """
    SELECT pk_show, CAST(xmin AS text) AS version FROM show
     WHERE b_scheduler_managed AND (CAST(:shows AS varchar[]) IS NULL OR pk_show = ANY(CAST(:shows AS varchar[])))
    """
)

# A statement for each kind of vertex (accounting.keys.VertexKind): the ids of a vertex, in the order of its key, and
# its caps, by their names in the accounting reference.
_SUBSCRIPTION_CAPS = "SELECT pk_show, pk_alloc, int_size AS size, int_burst AS burst FROM subscription"
_FOLDER_CAPS = """
    SELECT pk_folder, resource.int_min_cores, resource.int_max_cores, resource.int_min_gpus, resource.int_max_gpus,
           folder.pk_show AS show_id
      FROM folder_resource resource JOIN folder USING (pk_folder)
"""
_JOB_CAPS = """
    SELECT pk_job, resource.int_max_cores, resource.int_max_gpus, resource.int_priority
      FROM job_resource resource JOIN job USING (pk_job)
"""
_POINT_CAPS = "SELECT pk_dept, pk_show, int_min_cores, -1 AS int_max_cores FROM point"
# Whether the ledger has the frames of a ``show`` that run: it is managed, was imported, and its row has not changed
# since.
_IN_LEDGER = """show.b_scheduler_managed AND EXISTS (
    SELECT 1
      FROM unnest(CAST(:imported AS varchar[]), CAST(:versions AS varchar[])) AS note(show, version)
     WHERE note.show = show.pk_show AND note.version = CAST(show.xmin AS text))
"""
# Whether a licence server's report of a limit may not show a frame yet: there is none, or the frame started too late
# for it.
_MAY_MISS_IN_REPORT = (
    "(terms.reported_at IS NULL OR proc.ts_dispatched > terms.reported_at - make_interval(secs => :window))"
)


def _machines(condition: str) -> str:
    """SQL for the hosts on which frames hold a limit without the ledger's knowledge, if it is one that counts machines.

    These are frames that the ledger does not have, and local ones, which it has late; of either, those whose ``proc``
    meets the condition.
    """
    return f"""
           CASE WHEN terms.counts_machines THEN
               ARRAY(SELECT DISTINCT proc.pk_host
                       FROM layer_limit JOIN proc USING (pk_layer) JOIN show USING (pk_show)
                      WHERE layer_limit.pk_limit_record = limit_record.pk_limit_record
                        AND (proc.b_local OR NOT ({_IN_LEDGER})) AND {condition}) END"""


# The caps of limits, with what holds each limit by frames that the ledger does not have ("foreign" frames):
# int_max_value    its maximum; a limit of NULL admits none, as in OpenCue's comparison
# int_machines     how many machines may hold it; empty for a limit that counts frames (TERMS)
# int_frames       how many frames may hold it; empty for a limit of machines, and for one that is only a maximum
#                  (TERMS)
# int_foreign      foreign frames that run, counted as OpenCue counts them; a layer that lists the limit twice takes it
#                  once
# foreign_pending  of a limit that int_frames bounds: foreign frames that its licence server's report may not show yet
# other_machines   of a limit that counts machines: those of foreign and local frames that the report may not show yet
# past_machines    likewise, but of frames that the report must show: they hold the limit, and only the report counts
#                  them
_LIMIT_CAPS = f"""
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
                 WHERE NOT ({_IN_LEDGER}) AND {_MAY_MISS_IN_REPORT}) END AS foreign_pending,
           {_machines(_MAY_MISS_IN_REPORT)} AS other_machines,
           {_machines(f"NOT {_MAY_MISS_IN_REPORT}")} AS past_machines
      FROM limit_record {TERMS}
"""
_IN_PAIRS = "IN (SELECT * FROM unnest(CAST(:first AS varchar[]), CAST(:second AS varchar[])))"
# For each kind of vertex: the statement, the condition for rows with one of the ids, and the condition for rows of one
# of the shows.
_CAPS = {
    "sub": (_SUBSCRIPTION_CAPS, f"(pk_show, pk_alloc) {_IN_PAIRS}", "pk_show = ANY(:shows)"),
    "folder": (_FOLDER_CAPS, "pk_folder = ANY(:first)", "folder.pk_show = ANY(:shows)"),
    "job": (_JOB_CAPS, "pk_job = ANY(:first)", "job.pk_show = ANY(:shows) AND job.str_state <> 'FINISHED'"),
    "point": (_POINT_CAPS, f"(pk_dept, pk_show) {_IN_PAIRS}", "pk_show = ANY(:shows)"),
    "limit": (_LIMIT_CAPS, "pk_limit_record = ANY(:first)", "true"),
}
_CAPS_BY_ID = {kind: text(f"{caps} WHERE {with_id}") for kind, (caps, with_id, _) in _CAPS.items()}
_CAPS_OF_SHOWS = {kind: text(f"{caps} WHERE {of_show}") for kind, (caps, _, of_show) in _CAPS.items()}


def caps_version(connection: Connection) -> str:
    """A version for what a REPEATABLE READ transaction sees, as ``server|number``.

    Of two snapshots of one server, the one with more commits has the higher number. ``server`` is the start of the
    server's process: after a fail-over or a restart it is another one, and numbers of the two cannot be compared.
    """
    return str(connection.execute(_CAPS_VERSION).scalar_one())


def managed_show_ids(connection: Connection) -> frozenset[str]:
    """Shows whose bookings this scheduler accounts for (b_scheduler_managed), active or not."""
    return frozenset(managed_show_versions(connection))


def managed_show_versions(connection: Connection, show_ids: Sequence[str] | None = None) -> dict[str, str]:
    """Managed shows, only those of ``show_ids`` where these are given, each with the version of its row.

    Every change of the row gives it another version.
    """
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
    """Rows with the ids and the caps of vertices of one kind.

    With ``ids`` they are those vertices; one that does not exist has no row. Otherwise they are all vertices of
    ``show_ids``, except jobs that are FINISHED; limits belong to no show, so all of them are returned.

    ``imported``: the shows whose frames the ledger has, each with the version of its row when it was imported. A frame
    that started less than ``settle_window_seconds`` before a licence server was asked may be missing in its report.
    """
    for_limits: dict[str, object] = {}
    if kind == "limit":
        for_limits = {"imported": list(imported), "versions": list(imported.values()), "window": settle_window_seconds}
    if ids is None:
        return connection.execute(_CAPS_OF_SHOWS[kind], {**for_limits, "shows": list(show_ids)}).all()
    # A vertex has one id or two; where it has one, its statement reads the first alone.
    pairs = {"first": [vertex_ids[0] for vertex_ids in ids], "second": [vertex_ids[-1] for vertex_ids in ids]}
    return connection.execute(_CAPS_BY_ID[kind], {**for_limits, **pairs}).all()


# The proc table as the ledger should mirror it: the procs of managed shows, what each takes, and the vertices that it
# takes this from.
#
# Every proc of a managed show counts, whether this scheduler booked it or a Cuebot. A local proc takes nothing from a
# subscription: the reference's sums leave it out there, and only there. Folder, department and allocation are those
# that the job and the host have now.

# Procs of managed shows; each condition holds for all where its value is NULL.
_MANAGED_PROCS = text(
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
# The layers with any of these limits of which a frame runs.
_LAYERS_UNDER = text(
    """
    SELECT DISTINCT pk_layer FROM layer_limit
     WHERE pk_limit_record = ANY(CAST(:limits AS varchar[]))
       AND EXISTS (SELECT FROM proc WHERE proc.pk_layer = layer_limit.pk_layer)
    """
)
# How many COMMITs have been at work for some seconds. A synchronous standby or a slow disk may hold one up.
_UNFINISHED_COMMITS = text(
    """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'active' AND query ILIKE 'commit%'
       AND query_start <= clock_timestamp() - make_interval(secs => :seconds)
    """
)
_ROWS_PER_FETCH = 5000
"""How many procs one fetch of the server-side cursor has."""


def procs(
    connection: Connection,
    show_ids: Collection[str] | None = None,
    *,
    proc_ids: Collection[str] | None = None,
    layer_ids: Collection[str] | None = None,
) -> Iterator[Row[Any]]:
    """Procs of managed shows with their vertices; only those that meet every condition that is given.

    A vertex that a proc does not have is an empty id. ``centicores`` and ``gpus`` are as much of what is reserved as
    counts. ``limits`` are ids joined by commas, in no order; an @ follows the id of a limit that counts machines, and a
    ~ that of a limit of frames that a licence server has reported. ``local_seconds`` says how long ago a local proc was
    booked; it is None for all others.
    """
    shows, ids, layers = (None if given is None else list(given) for given in (show_ids, proc_ids, layer_ids))
    rows = connection.execution_options(yield_per=_ROWS_PER_FETCH)
    yield from rows.execute(_MANAGED_PROCS, {"shows": shows, "ids": ids, "layers": layers})


def layers_under(connection: Connection, limit_ids: Collection[str]) -> list[str]:
    """The ids of layers that have one of these limits and of which a frame runs."""
    return list(connection.execute(_LAYERS_UNDER, {"limits": list(limit_ids)}).scalars())


def unfinished_commits(connection: Connection, seconds: float) -> int:
    """How many COMMITs the server got ``seconds`` ago or earlier and has not finished: no snapshot has their rows yet.

    PostgreSQL ends no COMMIT early, whatever its time-outs: a slow disk or an absent synchronous standby may hold one
    up for as long as it likes.
    """
    return int(connection.execute(_UNFINISHED_COMMITS, {"seconds": seconds}).scalar_one())
