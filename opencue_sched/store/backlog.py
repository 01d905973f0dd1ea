"""What waits, for the backlog that a process keeps in memory: the layers, their first frames, and row versions.

A layer is listed as long as frames of it wait and its job may run, whether or not a pass could book one of them now:
the backlog in memory (placement/backlog.py) minds the booking switches of its show, a quarantine and a start that lies
ahead. All times are epoch seconds of the database's clock. Each timestamp is turned into seconds by itself, because one
may be infinite.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row

from opencue_sched.domain.caps import check_ids
from opencue_sched.domain.clusters import normalise_tags
from opencue_sched.domain.jobs import BadLayer, Frame, Job, Layer
from opencue_sched.domain.shards import BUCKETS
from opencue_sched.domain.units import INT_MAX, MOST_KB
from opencue_sched.errors import InvalidInput
from opencue_sched.store.arrays import numbers, texts
from opencue_sched.store.hosts import log_bad_row
from opencue_sched.store.lookups import PLANNED_ONCE, prepared, row_of
from opencue_sched.store.pending import DELAY_MAY_COME, DELAYING_STATUSES, JOB_SWITCHED_ON, SHOW_IS_OURS
from opencue_sched.store.schema import SchemaFacts, with_start_after

_MOST = {
    "int_cores_min": INT_MAX,
    "int_mem_min": MOST_KB,
    "int_gpus_min": INT_MAX,
    "int_gpu_mem_min": MOST_KB,
}
"""The most that a frame can ask for, by column of layer: so much fits into every counter. The other columns hold no
more, or are no amounts."""


@dataclass(frozen=True, slots=True)
class WaitingLayer:
    """A layer that has waiting frames, read without its frames."""

    job: Job
    """The job of the layer: one object for all its layers that were read together."""
    layer: Layer
    version: str
    """A text that differs after every change of job or layer, except changes of the count of waiting frames and of the
    mean run time."""


@dataclass(frozen=True, slots=True)
class BacklogRows:
    """What a read of layers found, in no order."""

    layers: list[WaitingLayer]
    bad: list[BadLayer]


class LayerVersion(NamedTuple):
    """The version of a layer, and its count of waiting frames: a layer that has another version is read again."""

    layer_id: str
    job_id: str
    waiting_frames: int
    version: str


@dataclass(frozen=True, slots=True)
class Portion:
    """The first waiting frames of a layer, in dispatch order."""

    layer_id: str
    waiting_frames: int
    """What the layer's counter said in the same snapshot."""
    frames: tuple[Frame, ...]
    back_in: float | None
    """Some frames may be left out because a delay may follow: the seconds until the first of them can be planned. None
    where none is left out for that."""


# The limits of a layer, or NULL where it has none. Few layers have limits: where all layers are read, PostgreSQL makes
# one hash of layer_limit for the EXISTS, and looks for the limits of these few alone.
_LIMIT_IDS = """CASE WHEN EXISTS (SELECT FROM layer_limit ll WHERE ll.pk_layer = l.pk_layer)
                THEN ARRAY(SELECT DISTINCT ll.pk_limit_record
                           FROM layer_limit ll JOIN limit_record USING (pk_limit_record)
                           WHERE ll.pk_layer = l.pk_layer ORDER BY ll.pk_limit_record) END"""
# The version: xmin is another after every UPDATE of a row, by any program. Of job_resource the version has the priority
# in place of xmin, because the row is rewritten whenever frames of the job start or end. A row that is missing, and a
# quarantine, change the text as well.
_JOB_VERSION = "concat(j.xmin, ':', r.int_priority, ':', (f.pk_folder IS NULL), ':', extract(epoch FROM q.until))"
_VERSION = "concat(l.xmin, ':', {job_version}, ':', array_to_string({limits}, ' '))"
# The condition of the partial index of waiting jobs, which has no paused jobs: PostgreSQL uses the index only where a
# statement says the same.
_PENDING_AND_UNPAUSED = "str_state = 'PENDING' AND b_paused = false"
_JOB_MAY_RUN = f"""{JOB_SWITCHED_ON} AND {SHOW_IS_OURS}
      AND (CAST(:facilities AS varchar[]) IS NULL OR j.pk_facility = ANY(CAST(:facilities AS varchar[])))"""
_WAITS = f"WHERE ls.int_waiting_count > 0 AND {_JOB_MAY_RUN}"
# What a layer of the backlog is made of; {limits} and {starts} depend on the schema. The count's version is the xmin of
# layer_stat, which is another after every change of how many frames wait or run.
_COLUMNS = f"""
    SELECT l.pk_layer, l.pk_job, l.str_name, l.int_dispatch_order, l.int_cores_min, l.int_cores_max, l.int_mem_min,
           l.int_gpus_min, l.int_gpu_mem_min, l.str_tags, l.str_services, l.b_threadable, ls.int_waiting_count,
           CAST(CAST(ls.xmin AS text) AS bigint) AS count_version,
           {{limits}} AS limit_ids, {_VERSION.replace("{job_version}", _JOB_VERSION)} AS version,
           CASE WHEN {{starts}} > now() THEN CAST(extract(epoch FROM {{starts}}) AS double precision) END AS starts_at,
           CASE WHEN u.int_frame_success_count > 0
                THEN CAST(u.int_clock_time_success AS double precision) / u.int_frame_success_count END AS run_seconds,
           j.str_name AS job_name, j.pk_show, j.str_show, j.pk_facility, j.pk_folder, j.pk_dept, j.str_os,
           r.int_priority, f.pk_folder IS NOT NULL AS has_folder_caps,
           CAST(extract(epoch FROM j.ts_started) AS double precision) AS started_at,
           CASE WHEN q.until > now() THEN CAST(extract(epoch FROM q.until) AS double precision) END AS quarantined_until
"""  # noqa: S608 - only our own constants

# All layers of the backlog.
_ALL_LAYERS = f"""
    {_COLUMNS}
    FROM layer_stat ls
    JOIN layer l ON l.pk_layer = ls.pk_layer
    JOIN job j ON j.pk_job = l.pk_job
    JOIN show s ON s.pk_show = j.pk_show
    LEFT JOIN job_resource r ON r.pk_job = j.pk_job
    LEFT JOIN folder_resource f ON f.pk_folder = j.pk_folder
    LEFT JOIN opencue_sched_quarantine q ON q.pk_job = j.pk_job
    LEFT JOIN layer_usage u ON u.pk_layer = l.pk_layer
    {_WAITS}
""".replace("{limits}", _LIMIT_IDS)

# The limits of each layer, looked up by their index.
_LIMITS_LOOKED_UP = f"""CROSS JOIN LATERAL (
        SELECT ARRAY(SELECT DISTINCT of_layer.pk_limit_record
                     FROM {row_of("layer_limit", "of_layer", "pk_layer = l.pk_layer")}
                     JOIN {row_of("limit_record", "its", "pk_limit_record = of_layer.pk_limit_record")} ON true
                     ORDER BY 1) AS ids
        OFFSET 0
    ) limits"""  # noqa: S608 - only our own constants

# The layers of the backlog that are named by themselves, by their job or by their show. Whatever the statistics say,
# each is looked up by the index of its key: what one layer costs must not grow with the layers that wait, nor with the
# finished jobs that stay for weeks.
_NAMED_LAYERS = f"""
    {PLANNED_ONCE}
    WITH named AS MATERIALIZED (
        SELECT pk_layer FROM unnest(CAST(:layers AS varchar[])) AS named(pk_layer)
        UNION
        SELECT of_job.pk_layer
        FROM unnest(CAST(:jobs AS varchar[])) AS named(pk_job)
        JOIN {row_of("layer_stat", "of_job", "pk_job = named.pk_job")} ON of_job.int_waiting_count > 0
        UNION
        SELECT of_job.pk_layer
        FROM unnest(CAST(:shows AS varchar[])) AS named(pk_show)
        JOIN {row_of("job", "j", f"pk_show = named.pk_show AND {_PENDING_AND_UNPAUSED}")} ON {JOB_SWITCHED_ON}
        JOIN {row_of("layer_stat", "of_job", "pk_job = j.pk_job")} ON of_job.int_waiting_count > 0
    )
    {_COLUMNS}
    FROM named
    JOIN {row_of("layer_stat", "ls", "pk_layer = named.pk_layer")} ON true
    JOIN {row_of("layer", "l", "pk_layer = ls.pk_layer")} ON true
    JOIN {row_of("job", "j", "pk_job = l.pk_job")} ON true
    JOIN {row_of("show", "s", "pk_show = j.pk_show")} ON true
    LEFT JOIN {row_of("job_resource", "r", "pk_job = j.pk_job")} ON true
    LEFT JOIN {row_of("folder_resource", "f", "pk_folder = j.pk_folder")} ON true
    LEFT JOIN {row_of("opencue_sched_quarantine", "q", "pk_job = j.pk_job")} ON true
    LEFT JOIN {row_of("layer_usage", "u", "pk_layer = l.pk_layer")} ON true
    {_LIMITS_LOOKED_UP}
    {_WAITS}
""".replace("{limits}", "limits.ids")  # noqa: S608 - only our own constants

# The versions of all layers of the backlog whose jobs are in some buckets. A job's bucket is the first byte of the MD5
# of its id.
# The statement goes by way of shows and jobs, so that each worker of a fleet reads the layers of its own buckets alone,
# and no worker those of finished jobs. Every id is above the empty text: with that condition PostgreSQL uses an index.
_VERSIONS = prepared(f"""
    {PLANNED_ONCE}
    WITH of_job AS MATERIALIZED (
        SELECT j.pk_job, {_JOB_VERSION} AS version
        FROM (SELECT * FROM show WHERE pk_show > '' OFFSET 0) s
        JOIN {row_of("job", "j", f"pk_show = s.pk_show AND {_PENDING_AND_UNPAUSED}")} ON true
        LEFT JOIN {row_of("job_resource", "r", "pk_job = j.pk_job")} ON true
        LEFT JOIN {row_of("folder_resource", "f", "pk_folder = j.pk_folder")} ON true
        LEFT JOIN {row_of("opencue_sched_quarantine", "q", "pk_job = j.pk_job")} ON true
        WHERE {_JOB_MAY_RUN}
          AND (CAST(:buckets AS integer[]) IS NULL
               OR get_byte(decode(left(md5(j.pk_job), 2), 'hex'), 0) = ANY(CAST(:buckets AS integer[])))
    )
    SELECT ls.pk_layer, ls.pk_job, ls.int_waiting_count,
           {_VERSION.replace("{job_version}", "of_job.version").replace("{limits}", "limits.ids")}
    FROM of_job
    JOIN {row_of("layer_stat", "ls", "pk_job = of_job.pk_job")} ON ls.int_waiting_count > 0
    JOIN {row_of("layer", "l", "pk_layer = ls.pk_layer")} ON true
    {_LIMITS_LOOKED_UP}
""")  # noqa: S608 - only our own constants

# The first frames of these layers, at most as many as ``:most`` has for each.
#
# A frame waits since the latest of three moments: when it was activated or freed by its last dependency (ts_eligible),
# when it was put back to wait (ts_updated; ts_eligible stays that of the first attempt), and when its layer may start.
#
# The index of waiting frames has the order, so reading stops at the last frame wanted. Left to itself PostgreSQL sorts
# all frames of a layer of 20,000 where most layers have one or two, or where its statistics are old. BETWEEN keeps the
# layer in the order. With "=" the layer drops out of the order, and Cuebot's index of all frames by dispatch order has
# what is left of it: with statistics of a table with one layer PostgreSQL goes through that index from its beginning
# for each layer.
#
# For ``back_in`` the first waiting frames are looked at, as many as are wanted. Where frames that are left out make a
# portion shorter than wanted, at least one of them is among these.
#
# ``{uncounted}`` is an array of exit statuses: _GIVEN, and beside a Cuebot DELAYING_STATUSES as well.
_PORTIONS_OF = f"""
    SELECT set_config('enable_sort', 'off', true), set_config('enable_incremental_sort', 'off', true),
           set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true),
           set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true);
    WITH statuses AS MATERIALIZED (SELECT {{uncounted}} AS uncounted)
    SELECT l.pk_layer, ls.int_waiting_count, waiting.*, held.back_in
    FROM unnest(CAST(:layers AS varchar[]), CAST(:most AS int[])) AS wanted(pk_layer, most)
    JOIN {row_of("layer", "l", "pk_layer = wanted.pk_layer")} ON true
    JOIN {row_of("layer_stat", "ls", "pk_layer = wanted.pk_layer")} ON true
    CROSS JOIN LATERAL (
        SELECT array_agg(f.pk_frame) AS ids, array_agg(f.str_name) AS names, array_agg(f.int_number) AS numbers,
               array_agg(f.int_version) AS versions, array_agg(f.since) AS since,
               array_agg((SELECT asked.memory_kb FROM opencue_sched_frame_memory asked
                          WHERE asked.pk_frame = f.pk_frame)) AS memory,
               array_agg((SELECT string_agg(failed.str_host, ' ') FROM opencue_sched_failed_run failed
                          WHERE failed.pk_frame = f.pk_frame
                            AND failed.int_exit_status <> ALL(CAST((SELECT uncounted FROM statuses) AS bigint[]))))
                   AS failed_on
        FROM (
            SELECT pk_frame, str_name, int_number, int_version,
                   CAST(extract(epoch FROM GREATEST(ts_eligible, ts_updated, {{starts}})) AS double precision) AS since
            FROM frame
            WHERE frame.pk_layer BETWEEN wanted.pk_layer AND wanted.pk_layer AND frame.str_state = 'WAITING'
              AND NOT {DELAY_MAY_COME}
            ORDER BY pk_layer, int_dispatch_order, int_layer_order
            LIMIT wanted.most
        ) f
    ) waiting
    LEFT JOIN LATERAL (
        SELECT CAST(min(extract(epoch FROM frame.ts_updated + interval '2 seconds' - now()))
                    FILTER (WHERE {DELAY_MAY_COME}) AS double precision) AS back_in
        FROM (
            SELECT int_exit_status, ts_updated
            FROM frame
            WHERE cardinality((SELECT uncounted FROM statuses)) > 0
              AND frame.pk_layer BETWEEN wanted.pk_layer AND wanted.pk_layer AND frame.str_state = 'WAITING'
            ORDER BY pk_layer, int_dispatch_order, int_layer_order
            LIMIT wanted.most
        ) frame
    ) held ON true
"""  # noqa: S608 - only our own constants
_GIVEN = "CAST(:uncounted AS bigint[])"
_PORTIONS = _PORTIONS_OF.replace("{uncounted}", _GIVEN)
_PORTIONS_BESIDE_A_CUEBOT = _PORTIONS_OF.replace("{uncounted}", f"{_GIVEN} || {DELAYING_STATUSES}")


def fetch_layers(
    connection: Connection,
    facts: SchemaFacts,
    *,
    facilities: Sequence[str] | None,
    layer_ids: Collection[str] | None = None,
    job_ids: Collection[str] = (),
    show_ids: Collection[str] = (),
) -> BacklogRows:
    """All layers of the backlog in the facilities of these ids, or anywhere. With ``layer_ids``, ``job_ids`` or
    ``show_ids`` the layers of these alone; with empty ``layer_ids`` and neither of the others, none. A layer that was
    asked for and is absent has no waiting frame, or its job may not run.

    A layer whose row makes no sense is listed among ``bad``, as are all layers of a job whose rows make none.
    """
    parameters: dict[str, Any] = {"facilities": facilities}
    if layer_ids is None and not job_ids and not show_ids:
        statement = with_start_after(_ALL_LAYERS, facts.has_start_after)
    elif layer_ids or job_ids or show_ids:
        parameters |= {"layers": texts(layer_ids or ()), "jobs": texts(job_ids), "shows": texts(show_ids)}
        statement = with_start_after(_NAMED_LAYERS, facts.has_start_after, once=True)
    else:
        return BacklogRows([], [])
    return _backlog_rows(connection.execute(statement, parameters))


def fetch_versions(
    connection: Connection, *, facilities: Sequence[str] | None, buckets: Collection[int]
) -> list[LayerVersion]:
    """The versions of all layers that fetch_layers() would list and whose jobs are in these buckets, by the jobs' ids
    (domain/shards.py)."""
    wanted = None if len(buckets) == BUCKETS else numbers(sorted(buckets))
    rows = connection.execute(_VERSIONS, {"facilities": facilities, "buckets": wanted})
    return [LayerVersion(*row) for row in rows]


def fetch_portions(
    connection: Connection, facts: SchemaFacts, wanted: Mapping[str, int], *, uncounted: Collection[int] = ()
) -> list[Portion]:
    """The first waiting frames of layers: ``wanted`` says how many by layer id, and a layer that is gone has no
    portion.

    Later statements of the transaction are planned to use indexes, and to sort only where they must.

    ``uncounted``: exit statuses that cost a frame no retry (queue.uncounted_exit_statuses). Beside a Cuebot those of
    limits which delay layers are added. A frame that ended with one of these statuses is left out for two seconds: the
    delay of its layer may be about to be written. No host counts among ``failed_on`` for such an end.
    """
    if not wanted:
        return []
    template = _PORTIONS_BESIDE_A_CUEBOT if facts.origin == "cuebot" else _PORTIONS
    parameters = {"layers": texts(wanted), "most": numbers(wanted.values()), "uncounted": numbers(uncounted)}
    rows = connection.execute(with_start_after(template, facts.has_start_after, once=True), parameters)
    return [
        Portion(
            row.pk_layer,
            row.int_waiting_count,
            ()
            if row.ids is None
            else tuple(
                map(_frame, row.ids, row.names, row.numbers, row.versions, row.since, row.memory, row.failed_on)
            ),
            row.back_in,
        )
        for row in rows
    ]


def _backlog_rows(rows: Iterable[Row[Any]]) -> BacklogRows:
    """The layers of these rows with their jobs, and the layers whose rows make no sense; layers of one job share it."""
    jobs: dict[str, Job | str] = {}
    found = BacklogRows([], [])
    for row in rows:
        job = jobs.get(row.pk_job)
        if job is None:
            job = jobs[row.pk_job] = _job_or_why(row)
        layer = job if isinstance(job, str) else _layer_or_why(row)
        if isinstance(job, Job) and isinstance(layer, Layer):
            found.layers.append(WaitingLayer(job, layer, row.version))
        else:
            bad = BadLayer(
                job_id=row.pk_job,
                layer_id=row.pk_layer,
                show_id=row.pk_show,
                waiting=row.int_waiting_count,
                why=str(layer),  # why the job or the layer makes no sense
                version=row.version,
                facility_id=row.pk_facility,
                tags=_tags(row.str_tags),
            )
            found.bad.append(bad)
    return found


def _job_or_why(row: Row[Any]) -> Job | str:
    """The job, or why its rows make no sense."""
    try:
        return _job(row)
    except (InvalidInput, TypeError, ValueError, OverflowError) as error:
        log_bad_row("job", row.pk_job, row.job_name, str(error))
        return str(error)


def _layer_or_why(row: Row[Any]) -> Layer | str:
    """The layer, or why its row makes no sense."""
    try:
        return _layer(row)
    except (InvalidInput, TypeError, ValueError, OverflowError) as error:
        log_bad_row("layer", row.pk_layer, row.str_name, str(error))
        return str(error)


def _job(row: Row[Any]) -> Job:
    """The job of a row. Raises InvalidInput where a row of it is missing, or an id cannot be used in Redis."""
    if row.int_priority is None or not row.has_folder_caps:
        raise InvalidInput(f"job {row.pk_job}: its row of job_resource or folder_resource is missing")
    check_ids(row.pk_job, row.pk_folder, row.pk_dept)
    # A job without a finite time of its start ranks as the oldest of its priority.
    return Job(
        id=intern(row.pk_job),
        name=row.job_name,
        show_id=intern(row.pk_show),
        show_name=intern(row.str_show),
        folder_id=intern(row.pk_folder),
        dept_id=intern(row.pk_dept),
        os_name=intern(row.str_os) if row.str_os else None,
        layers=(),
        facility_id=intern(row.pk_facility),
        priority=row.int_priority,
        started_at=_finite(row.started_at) or 0.0,
        quarantined_until=row.quarantined_until,
    )


def _layer(row: Row[Any]) -> Layer:
    """The layer of a row. Raises InvalidInput where it asks for more than there can be, or an id cannot be used in
    Redis."""
    for column, most in _MOST.items():
        if getattr(row, column) > most:
            raise InvalidInput(f"layer {row.pk_layer}: {column} is {getattr(row, column)}, more than there can be")
    limit_ids = tuple(map(intern, row.limit_ids or ()))
    check_ids(row.pk_layer, *limit_ids)
    return Layer(
        id=row.pk_layer,
        name=intern(row.str_name),
        cores_min_centicores=row.int_cores_min,
        cores_max_centicores=row.int_cores_max,
        memory_min_kb=row.int_mem_min,
        gpus_min=row.int_gpus_min,
        gpu_memory_min_kb=row.int_gpu_mem_min,
        tags=_tags(row.str_tags),
        services=_services(row.str_services),
        threadable=row.b_threadable,
        waiting_frames=row.int_waiting_count,
        frames=(),
        limit_ids=limit_ids,
        run_seconds=row.run_seconds,
        dispatch_order=row.int_dispatch_order,
        starts_at=row.starts_at,
        count_version=row.count_version,
    )


def _frame(
    frame_id: str,
    name: str,
    number: int,
    version: int | None,
    since: float | None,
    memory_kb: int | None,
    failed_on: str | None,
) -> Frame:
    """A frame that waits, of columns in the order of the statement: ``since`` in epoch seconds, ``failed_on`` names
    of hosts with blanks between."""
    hosts = tuple(failed_on.split()) if failed_on else ()
    return Frame(frame_id, name, number, version, memory_kb=memory_kb, waiting_since=_finite(since), failed_on=hosts)


def _finite(seconds: float | None) -> float | None:
    """The seconds, or None for those of an infinite timestamp."""
    return None if seconds is None or not math.isfinite(seconds) else seconds


# Few spellings, many layers: each set and tuple is kept once.
@lru_cache(maxsize=10_000)
def _tags(text: str) -> frozenset[str]:
    """The tags of a column; layers that have the same share one set."""
    return frozenset(map(intern, normalise_tags(text)))


@lru_cache(maxsize=10_000)
def _services(text: str) -> tuple[str, ...]:
    """The services of a column, with commas between; layers that have the same share one tuple."""
    return tuple(intern(service) for part in text.split(",") if (service := part.strip()))
