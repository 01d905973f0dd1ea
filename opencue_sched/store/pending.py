"""What waits: the jobs, layers and frames of the clusters of a pass, and the headroom under their caps.

What subscriptions have in use comes from the ledger; under folders and jobs that have a cap it is summed live from
``proc``. OpenCue's own columns (subscription.int_cores, job_resource.int_cores, ...) are rewritten only every two
minutes for managed shows, and the view ``vs_waiting`` reads them and hides jobs whose cap is 0 or -1; neither is used.
Procs of a fraction of a core count as one core each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.units import INT_MAX
from opencue_sched.store.schema import SchemaFacts, with_start_after
from opencue_sched.store.tags import compared_tag, compared_tags


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """``rows`` by id, with the version of its row (a layer that has another by now is not meant), and every layer of
    ``kinds``: the columns by which hosts are found for it, as one text."""

    rows: Mapping[str, str] = field(default_factory=dict)
    kinds: Collection[str] = ()


def countable(column: str) -> str:
    """What counts of an amount that a proc has reserved: nothing of one below 0, at most INT_MAX of any other. No host
    has more, and no sum of such amounts passes the largest bigint."""
    return f"LEAST(GREATEST({column}, 0), {INT_MAX})"


USED = f"""CAST(COALESCE(sum(({countable("p.int_cores_reserved")} + 99) / 100), 0) AS bigint) AS cores,
               CAST(COALESCE(sum({countable("p.int_gpus_reserved")}), 0) AS bigint) AS gpus"""
"""What procs take, in whole cores and GPUs."""
# Not as the index of the schema has it: PostgreSQL would, for the layers of each job, first read from the index all
# layers of the farm with these tags (400 entries for each frame booked on 1,553 hosts).
_LAYER_TAGS = f"coalesce({compared_tags('l.str_tags')}, CAST(ARRAY[] AS text[]))"
# xmin is another after every UPDATE of a row, whoever makes it.
_VERSION = "CAST(l.xmin AS text)"
# All that domain.frame_needs.Search is made of. A row as text tells NULL from '' and quotes what it separates by.
_KIND = f"""CAST(ROW(j.str_os, l.int_cores_min, l.int_cores_max, l.int_mem_min, l.int_gpus_min, l.int_gpu_mem_min,
                         l.b_threadable, {compared_tag("l.str_tags")}) AS text)"""
# Neither list is correlated, so PostgreSQL hashes it once.
_NOT_SKIPPED = f"""(c.turn, l.pk_layer, {_VERSION}) NOT IN (
              SELECT skipped.turn, skipped.layer, skipped.version
              FROM unnest(CAST(:skipped_turns AS bigint[]), CAST(:skipped_rows AS varchar[]),
                          CAST(:skipped_versions AS text[])) AS skipped(turn, layer, version)
          )
          AND (c.turn, {_KIND}) NOT IN (
              SELECT skipped.turn, skipped.kind
              FROM unnest(CAST(:kind_turns AS bigint[]), CAST(:skipped_kinds AS text[])) AS skipped(turn, kind)
          )"""  # noqa: S608 - only our own constants
# A Cuebot that delays layers for the exit status of a frame (dispatcher.layer_delay.rules) frees the frame up to a
# second before it writes the delay, and may drop that write: until then nobody knows whether the frame may start. A
# date far off says nothing.
DELAY_MAY_COME = """(frame.int_exit_status = ANY(CAST(:uncounted AS bigint[])) AND COALESCE(frame.ts_updated
                     BETWEEN now() - interval '2 seconds' AND now() + interval '2 seconds', false))"""
_MAY_START = f"""{_NOT_SKIPPED}
          AND (cardinality(CAST(:uncounted AS bigint[])) = 0 OR EXISTS (
              SELECT 1 FROM frame
              WHERE frame.pk_layer = l.pk_layer AND frame.str_state = 'WAITING' AND NOT {DELAY_MAY_COME}
          ))
          AND NOT EXISTS (
              SELECT 1 FROM layer_limit ll
              WHERE ll.pk_layer = l.pk_layer AND ll.pk_limit_record = ANY(CAST(:full_limits AS varchar[]))
          )"""  # noqa: S608 - only our own constants
# The clusters of a pass, each with the draw of its epoch: '' for an epoch that goes by rank.
_CLUSTERS = """(
        SELECT turn, show_id, facility_id, string_to_array(tags, '|') AS tags, shard, draw, headroom
        FROM unnest(CAST(:shows AS varchar[]), CAST(:facilities AS varchar[]), CAST(:tags AS text[]),
                    CAST(:shards AS text[]), CAST(:draws AS text[]), CAST(:least_headroom AS bigint[]))
             WITH ORDINALITY AS it(show_id, facility_id, tags, shard, draw, headroom, turn)
    ) c"""
QUARANTINED = "EXISTS (SELECT 1 FROM opencue_sched_quarantine q WHERE q.pk_job = j.pk_job AND q.until > now())"
JOB_SWITCHED_ON = "j.str_state = 'PENDING' AND j.b_paused = false AND j.b_auto_book"
SHOW_IS_OURS = "s.b_active AND s.b_scheduler_managed"
SHOW_SWITCHED_ON = "s.b_booking_enabled AND s.b_dispatch_enabled AND NOT s.b_paused"
SWITCHED_ON = f"{JOB_SWITCHED_ON} AND {SHOW_IS_OURS} AND {SHOW_SWITCHED_ON}"
MAY_BE_BOOKED = f"""{SWITCHED_ON}
          AND EXISTS (SELECT 1 FROM subscription sub WHERE sub.pk_show = j.pk_show AND sub.int_burst > 0)"""  # noqa: S608
SOME_WORK = f"""EXISTS (SELECT FROM job j JOIN show s USING (pk_show) JOIN layer_stat ls USING (pk_job)
                   WHERE ls.int_waiting_count > 0 AND {MAY_BE_BOOKED})"""
# domain.frame_needs.smallest_need. No sum that could pass the largest bigint: it would fail the pass, not the layer.
LEAST_CORES = """CASE WHEN NOT l.b_threadable OR l.int_cores_min < 100 THEN 1
                        WHEN l.int_cores_max > 0 THEN (LEAST(l.int_cores_min, l.int_cores_max) - 1) / 100 + 1
                        ELSE (l.int_cores_min - 1) / 100 + 1 END"""

_SHARES = text(
    f"""
    SELECT sub.pk_show AS show_id, sub.pk_alloc AS alloc_id, a.pk_facility AS facility_id,
           sub.int_burst AS burst_centicores, sub.int_size AS size_centicores, {SHOW_SWITCHED_ON} AS may_book,
           CAST(extract(epoch FROM clock_timestamp()) AS double precision) AS now
    FROM subscription sub JOIN alloc a USING (pk_alloc)
    JOIN show s ON s.pk_show = sub.pk_show AND {SHOW_IS_OURS}
    WHERE CAST(:shows AS varchar[]) IS NULL OR sub.pk_show = ANY(CAST(:shows AS varchar[]))
    ORDER BY a.str_name
    """  # noqa: S608 - only our own constants
)

# A draw (Efraimidis and Spirakis): key = u^(1/priority), the largest first, of which ln(u)/priority has the order. u is
# a hash, the same for all planners of an epoch. In an epoch that goes by rank the key is NULL, and so is that of the
# shard where there is but one: jobs of equal priority then go by age, and otherwise each shard begins with others.
_ORDER = """CASE WHEN c.draw <> '' THEN
                     ln((CAST(CAST('x' || substr(md5(c.draw || j.pk_job), 1, 13) AS bit(52)) AS bigint) + 1) / 2.0 ^ 52)
                     / GREATEST(COALESCE({priority}, 1), 1) END DESC NULLS LAST,
                 {priority} DESC NULLS LAST,
                 CASE WHEN c.shard <> '' THEN md5(c.shard || j.pk_job) END, j.ts_started, j.pk_job"""
_ORDER_INSIDE, _ORDER_OUTSIDE = _ORDER.format(priority="r.int_priority"), _ORDER.format(priority="j.int_priority")

# The inner query sorts the pending jobs of the cluster; the outer one walks down that order, looks for a layer that may
# start, sums the procs of a job that has one, and stops at the limit. OFFSET 0 keeps PostgreSQL from merging the two;
# the outer ORDER BY costs nothing, because the order is already there. The folder sums are one scan, made only if a
# capped folder is met; which allocations a tag reaches is looked up only if a layer wants more than the fullest of them
# has left. A cluster without such a job has one row, with the seconds until the next of its layers may start, which all
# its rows have; each time is turned into seconds by itself, since it may be infinite.
_PENDING_JOBS = f"""
    WITH folder_use AS MATERIALIZED (
        SELECT j.pk_folder, {USED}
        FROM folder_resource f JOIN job j USING (pk_folder) JOIN proc p USING (pk_job)
        WHERE (f.int_max_cores > 0 OR f.int_max_gpus > 0) AND p.pk_show = ANY(CAST(:shows AS varchar[]))
          -- Asked once: where no folder has a cap, no proc is read.
          AND EXISTS (SELECT 1 FROM folder_resource WHERE int_max_cores > 0 OR int_max_gpus > 0)
        GROUP BY j.pk_folder
    ),
    reach AS MATERIALIZED (
        SELECT headroom.pk_show, {compared_tag("t.str_tag")} AS tag, max(headroom.cores) AS cores
        FROM unnest(CAST(:reach_shows AS varchar[]), CAST(:allocs AS varchar[]), CAST(:headroom AS bigint[]))
             AS headroom(pk_show, pk_alloc, cores)
        JOIN host h USING (pk_alloc) JOIN host_tag t USING (pk_host)
        GROUP BY headroom.pk_show, {compared_tag("t.str_tag")}
    ),
    delayed AS MATERIALIZED (
        SELECT j.pk_show, j.pk_facility, {_LAYER_TAGS} AS tags,
               extract(epoch FROM {{starts}}) - extract(epoch FROM clock_timestamp()) AS seconds
        FROM layer l
        JOIN layer_stat ls ON ls.pk_layer = l.pk_layer AND ls.int_waiting_count > 0
        JOIN job j ON j.pk_job = l.pk_job JOIN show s USING (pk_show)
        WHERE {{starts}} > now() AND j.pk_show = ANY(CAST(:shows AS varchar[])) AND {MAY_BE_BOOKED}
    )
    SELECT c.turn, CAST(next_start.seconds AS double precision) AS starts_in, found.*
    FROM {_CLUSTERS}
    CROSS JOIN LATERAL (
        SELECT min(d.seconds) AS seconds
        FROM delayed d
        WHERE d.pk_show = c.show_id AND d.pk_facility = c.facility_id AND d.tags && c.tags
    ) next_start
    LEFT JOIN LATERAL (
    SELECT j.*, used.cores AS job_cores, used.gpus AS job_gpus,
           COALESCE(folder.cores, 0) AS folder_cores, COALESCE(folder.gpus, 0) AS folder_gpus
    FROM (
        SELECT j.pk_job, j.str_name, j.pk_show, j.str_show, j.pk_facility, j.pk_folder, j.pk_dept, j.str_os,
               j.ts_started,
               r.int_priority, r.int_max_cores, r.int_max_gpus,
               f.int_max_cores AS folder_max_cores, f.int_max_gpus AS folder_max_gpus
        FROM job j JOIN show s USING (pk_show)
        LEFT JOIN job_resource r USING (pk_job) LEFT JOIN folder_resource f USING (pk_folder)
        WHERE j.pk_show = c.show_id AND j.pk_facility = c.facility_id
          AND {MAY_BE_BOOKED} AND NOT {QUARANTINED}
        ORDER BY {_ORDER_INSIDE}
        OFFSET 0
    ) j
    CROSS JOIN LATERAL (
        SELECT l.pk_job
        FROM layer l
        JOIN layer_stat ls ON ls.pk_layer = l.pk_layer AND ls.int_waiting_count > 0
        WHERE l.pk_job = j.pk_job AND {_LAYER_TAGS} && c.tags {{started}}
          AND (:held_back OR {_MAY_START})
        LIMIT 1
    ) waits
    CROSS JOIN LATERAL (
        SELECT {USED}
        FROM proc p
        WHERE p.pk_job = waits.pk_job AND (j.int_max_cores > 0 OR j.int_max_gpus > 0)
    ) used
    LEFT JOIN LATERAL (
        SELECT u.cores, u.gpus
        FROM folder_use u
        WHERE (j.folder_max_cores > 0 OR j.folder_max_gpus > 0) AND u.pk_folder = j.pk_folder
    ) folder ON true
    WHERE :held_back OR EXISTS (
        SELECT 1
        FROM layer l
        JOIN layer_stat ls ON ls.pk_layer = l.pk_layer AND ls.int_waiting_count > 0
        CROSS JOIN LATERAL (
            SELECT {LEAST_CORES} AS cores, GREATEST(l.int_gpus_min, 0) AS gpus
        ) need
        WHERE l.pk_job = j.pk_job AND {_LAYER_TAGS} && c.tags {{started}}
          AND (GREATEST(l.int_cores_min, l.int_gpus_min) > {INT_MAX} OR (
              (COALESCE(j.int_max_cores, 0) <= 0 OR need.cores <= j.int_max_cores / 100 - used.cores)
              AND (COALESCE(j.int_max_gpus, 0) <= 0 OR need.gpus = 0 OR need.gpus <= j.int_max_gpus - used.gpus)
              AND (COALESCE(j.folder_max_cores, 0) <= 0
                   OR need.cores <= j.folder_max_cores / 100 - COALESCE(folder.cores, 0))
              AND (COALESCE(j.folder_max_gpus, 0) <= 0 OR need.gpus = 0
                   OR need.gpus <= j.folder_max_gpus - COALESCE(folder.gpus, 0))
              AND (need.cores <= c.headroom OR EXISTS (
                  SELECT 1 FROM reach
                  WHERE reach.pk_show = c.show_id AND reach.tag = ANY(c.tags) AND reach.tag = ANY({_LAYER_TAGS})
                    AND need.cores <= reach.cores
              ))
          ))
          AND {_MAY_START}
    )
    ORDER BY {_ORDER_OUTSIDE}
    LIMIT :max_jobs
    ) found ON true
    ORDER BY c.turn
"""  # noqa: S608 - only our own constants

# One row a layer, its frames as parallel arrays. A frame is eligible since it was activated, freed by its last
# dependency or put back to wait (ts_updated: the first attempt's ts_eligible stays), and its layer may start. Each
# time is turned into seconds by itself: neither side of this connection can subtract infinite dates.
_WAITING_LAYERS = f"""
    WITH found AS MATERIALIZED (
        SELECT c.turn, wanted.place, l.pk_layer, l.pk_job, l.str_name,
               l.int_dispatch_order, l.int_cores_min, l.int_cores_max, l.int_mem_min, l.int_gpus_min, l.int_gpu_mem_min,
               l.str_tags, l.str_services, l.b_threadable, ls.int_waiting_count, {_VERSION} AS version, {_KIND} AS kind,
               ARRAY(SELECT DISTINCT pk_limit_record FROM layer_limit ll JOIN limit_record USING (pk_limit_record)
                     WHERE ll.pk_layer = l.pk_layer) AS limit_ids {{start_after}}
        FROM unnest(CAST(:job_ids AS varchar[]), CAST(:job_turns AS bigint[]))
             WITH ORDINALITY AS wanted(pk_job, turn, place)
        JOIN {_CLUSTERS} ON c.turn = wanted.turn
        JOIN job j ON j.pk_job = wanted.pk_job
        JOIN layer l ON l.pk_job = j.pk_job
        JOIN layer_stat ls ON ls.pk_layer = l.pk_layer AND ls.int_waiting_count > 0
        WHERE {_LAYER_TAGS} && c.tags {{started}} AND {_NOT_SKIPPED}
    )
    SELECT l.*, waiting.ids, waiting.names, waiting.numbers, waiting.versions, waiting.waited, waiting.memory,
           held.back_in,
           CASE WHEN u.int_frame_success_count > 0
                THEN CAST(u.int_clock_time_success AS double precision) / u.int_frame_success_count END AS run_seconds
    FROM found l
    LEFT JOIN layer_usage u ON u.pk_layer = l.pk_layer
    CROSS JOIN LATERAL (
        SELECT array_agg(f.pk_frame ORDER BY f.turn) AS ids, array_agg(f.str_name ORDER BY f.turn) AS names,
               array_agg(f.int_number ORDER BY f.turn) AS numbers, array_agg(f.int_version ORDER BY f.turn) AS versions,
               array_agg(f.waited ORDER BY f.turn) AS waited, array_agg(asked.memory_kb ORDER BY f.turn) AS memory
        FROM (
            SELECT pk_frame, str_name, int_number, int_version,
                   CAST(extract(epoch FROM clock_timestamp())
                        - extract(epoch FROM GREATEST(ts_eligible, ts_updated{{start_after}})) AS double precision
                   ) AS waited,
                   row_number() OVER (ORDER BY int_dispatch_order, int_layer_order, pk_frame) AS turn
            FROM frame
            WHERE frame.pk_layer = l.pk_layer AND frame.str_state = 'WAITING' AND NOT {DELAY_MAY_COME}
            ORDER BY int_dispatch_order, int_layer_order, pk_frame
            LIMIT (SELECT LEAST(:most_frames, GREATEST(:max_frames, :most_frames / GREATEST(1, count(*)))) FROM found)
        ) f
        LEFT JOIN opencue_sched_frame_memory asked ON asked.pk_frame = f.pk_frame
    ) waiting
    CROSS JOIN LATERAL (
        SELECT CAST(min(extract(epoch FROM frame.ts_updated + interval '2 seconds' - now())) AS float8) AS back_in
        FROM frame
        WHERE cardinality(CAST(:uncounted AS bigint[])) > 0
          AND frame.pk_layer = l.pk_layer AND frame.str_state = 'WAITING' AND {DELAY_MAY_COME}
    ) held
    ORDER BY l.place, l.int_dispatch_order, l.pk_layer
"""  # noqa: S608 - only our own constants

# Limits (licences and the like): how many frames may run at once under a name, and how many do. Cuebots after V47 give
# a limit a type (frames or hosts) and say how strictly it is meant (enforced, advisory, disabled). Here it bounds
# running frames, always: hosts are never more than the frames on them, so that errs on the side of the licence.
#
# Counted from the procs, which are few and live, rather than from the layers sharing a limit, most of which finished
# long ago. A layer listed twice under one limit counts once. A limit without a value or below zero admits nothing, as
# in Cuebot, whose comparison with it is never true.
_LIMIT_USE = """
    SELECT l.*, GREATEST(0, l.max_value - l.running) AS "left"
    FROM (
        SELECT r.pk_limit_record AS id, r.str_name AS name, GREATEST(0, COALESCE(r.int_max_value, 0)) AS max_value,
               CAST(COALESCE(u.running, 0) AS bigint) AS running
        FROM limit_record r
        LEFT JOIN (
            SELECT once.pk_limit_record, sum(once.running) AS running
            FROM (
                SELECT DISTINCT ll.pk_limit_record, p.pk_layer, p.running
                FROM (
                    SELECT pk_layer, count(*) AS running
                    FROM proc
                    WHERE EXISTS (SELECT 1 FROM limit_record)
                    GROUP BY pk_layer
                ) p
                JOIN layer_limit ll ON ll.pk_layer = p.pk_layer
            ) once
            GROUP BY once.pk_limit_record
        ) u ON u.pk_limit_record = r.pk_limit_record
    ) l
"""
_LIMITS = text(_LIMIT_USE)

# All that waits, whether or not passes get that far, by what it needs of a host, in one statement. Once in a while: it
# sums what runs of every job. A layer that a cap of its own keeps waiting could not run wherever there is a host.
_WAITING_WORK = f"""
    WITH used AS MATERIALIZED (SELECT p.pk_job, {USED} FROM proc p GROUP BY p.pk_job),
    folder_used AS MATERIALIZED (
        SELECT j.pk_folder, sum(used.cores) AS cores, sum(used.gpus) AS gpus
        FROM used JOIN job j USING (pk_job)
        GROUP BY j.pk_folder
    ),
    full_limits AS MATERIALIZED (SELECT id FROM ({_LIMIT_USE}) limits WHERE "left" = 0)
    SELECT j.pk_facility, j.pk_show, j.str_os, {compared_tag("l.str_tags")} AS tags,
           l.int_cores_min, l.int_cores_max, l.int_mem_min, l.int_gpus_min, l.int_gpu_mem_min, l.b_threadable,
           need.cores AS least_cores,
           CASE WHEN {QUARANTINED} THEN 'quarantined'
                WHEN r.int_max_cores > 0 AND need.cores > r.int_max_cores / 100 - COALESCE(used.cores, 0)
                THEN 'over_job'
                WHEN f.int_max_cores > 0 AND need.cores > f.int_max_cores / 100 - COALESCE(folder_used.cores, 0)
                THEN 'over_folder'
                WHEN r.int_max_gpus > 0 AND l.int_gpus_min > 0
                     AND l.int_gpus_min > r.int_max_gpus - COALESCE(used.gpus, 0) THEN 'over_job_gpus'
                WHEN f.int_max_gpus > 0 AND l.int_gpus_min > 0
                     AND l.int_gpus_min > f.int_max_gpus - COALESCE(folder_used.gpus, 0) THEN 'over_folder_gpus'
                WHEN l.pk_layer IN (
                    SELECT ll.pk_layer FROM layer_limit ll JOIN full_limits ON full_limits.id = ll.pk_limit_record
                ) THEN 'over_limit'
                ELSE 'behind' END AS why,
           CAST(sum(ls.int_waiting_count) AS bigint) AS frames, array_agg(l.pk_layer) AS layers,
           array_agg(l.pk_job) AS jobs, array_agg(ls.int_waiting_count) AS waiting
    FROM layer_stat ls JOIN layer l USING (pk_layer) JOIN job j ON j.pk_job = ls.pk_job JOIN show s USING (pk_show)
    CROSS JOIN LATERAL (SELECT {LEAST_CORES} AS cores) need
    LEFT JOIN job_resource r ON r.pk_job = j.pk_job LEFT JOIN used ON used.pk_job = j.pk_job
    LEFT JOIN folder_resource f USING (pk_folder) LEFT JOIN folder_used USING (pk_folder)
    WHERE ls.int_waiting_count > 0 AND {MAY_BE_BOOKED} {{started}}
      AND (CAST(:facilities AS varchar[]) IS NULL OR j.pk_facility = ANY(CAST(:facilities AS varchar[])))
      AND (NOT CAST(:gpus AS boolean) OR l.int_gpus_min > 0 OR l.int_gpu_mem_min > 0)
    GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
"""  # noqa: S608 - only our own constants


def fetch_waiting_work(
    connection: Connection, facilities: Sequence[str] | None, facts: SchemaFacts, *, gpus: bool = False
) -> Sequence[Row[Any]]:
    """All work that passes may look at, in ``facilities`` or everywhere, or that of layers that need ``gpus``: by
    facility, show, OS, need (the columns of layer; ``tags`` as they are compared, between bars; ``least_cores`` of one
    frame)
    and ``why`` it waits the ``frames``, and of their ``layers`` the ids, the ``jobs`` and how many are ``waiting``.

    ``why``: quarantined, else over_job, over_folder, over_job_gpus, over_folder_gpus or over_limit where that cap has
    too little headroom for one of them, else behind.
    """
    parameters = {"facilities": facilities, "gpus": gpus}
    return connection.execute(with_start_after(_WAITING_WORK, facts.has_start_after), parameters).all()


def fetch_shares(connection: Connection, show_ids: Collection[str] | None = None) -> Sequence[Row[Any]]:
    """Every subscription of these shows, or of all, that are active and managed, in any facility (``show_id``,
    ``alloc_id``, ``facility_id``, ``burst_centicores``, ``size_centicores``; ``may_book``: the show is neither paused
    nor are its booking or its dispatch switched off), and the database's clock (``now``)."""
    return connection.execute(_SHARES, {"shows": None if show_ids is None else list(show_ids)}).all()


def fetch_pending_jobs(
    connection: Connection,
    clusters: Sequence[Cluster],
    facts: SchemaFacts,
    *,
    draws: Sequence[str],
    headroom: Mapping[tuple[str, str], int],
    full_limits: Sequence[str],
    skipped: Sequence[SkippedLayers],
    max_jobs: int,
    uncounted: Collection[int] = (),
    held_back: bool = False,
) -> tuple[list[Row[Any]], dict[int, float]]:
    """Of each cluster (``turn``, from 1) the first jobs that may book something now, in the order of its draw, or
    priority first, then the oldest, then the id. One statement. ``draws`` and ``skipped`` have one for each cluster.
    ``headroom``: whole cores left of each subscription, by show and allocation id.

    A layer may not if it is skipped, has only frames that ended a moment ago with an exit status among ``uncounted``,
    stands under one of ``full_limits``, or wants more cores than ``headroom`` leaves of the show's subscriptions (those
    of the cluster's facility) wherever its tags reach. A job, or its folder, at its cap by live usage is passed over,
    as is one whose waiting layers all want more than what is left of any cap, unless one wants more than there can be:
    that is a bad row. Caps below one core refuse everything; 0 and below are no cap (of a burst: no headroom).
    ``held_back`` asks for the jobs that only these conditions hold back.

    The second answer has the seconds until the next layer with waiting frames and tags of a cluster may start, by the
    cluster's ``turn``; nothing of a cluster without such a layer.
    """
    least: dict[str, int] = {}
    for (show_id, _), cores in headroom.items():
        least[show_id] = min(least.get(show_id, cores), cores)
    parameters = {
        **_clusters(clusters, draws, [least.get(cluster.show_id, 0) for cluster in clusters]),
        "reach_shows": [show_id for show_id, _ in headroom],
        "allocs": [alloc_id for _, alloc_id in headroom],
        "headroom": list(headroom.values()),
        "held_back": held_back,
        "full_limits": list(full_limits),
        **_skipped(skipped),
        "uncounted": list(uncounted),
        "max_jobs": max_jobs,
    }
    rows = connection.execute(with_start_after(_PENDING_JOBS, facts.has_start_after), parameters).all()
    starts_in = {row.turn: row.starts_in for row in rows if row.starts_in is not None}
    return [row for row in rows if row.pk_job is not None], starts_in


def fetch_waiting_layers(
    connection: Connection,
    clusters: Sequence[Cluster],
    jobs: Sequence[tuple[int, str]],
    facts: SchemaFacts,
    *,
    skipped: Sequence[SkippedLayers],
    max_frames: int,
    most_frames: int,
    uncounted: Collection[int] = (),
) -> Sequence[Row[Any]]:
    """The bookable layers of all these ``jobs`` (the ``turn`` of a cluster, from 1, and the id) in dispatch order, each
    with its first waiting frames: ``max_frames``, or as many more as make ``most_frames`` of all layers together, and
    never more than these. ``run_seconds`` is the mean run time of a layer's frames that succeeded.

    A frame that ended with an exit status among ``uncounted`` is left out for two seconds: the delay of its layer may
    be about to be written. ``back_in``: seconds until the first of these is back, None without any.

    ``ids`` is None for a layer without frames, although its counter says that some wait.
    """
    parameters = {
        **_clusters(clusters, [""] * len(clusters)),
        "job_turns": [turn for turn, _ in jobs],
        "job_ids": [job_id for _, job_id in jobs],
        **_skipped(skipped),
        "max_frames": max_frames,
        "most_frames": most_frames,
        "uncounted": list(uncounted),
    }
    return connection.execute(with_start_after(_WAITING_LAYERS, facts.has_start_after), parameters).all()


def _clusters(clusters: Sequence[Cluster], draws: Sequence[str], headroom: Sequence[int] = ()) -> dict[str, Any]:
    return {
        "shows": [it.show_id for it in clusters],
        "facilities": [it.facility_id for it in clusters],
        "tags": ["|".join(it.tags) for it in clusters],
        "shards": [it.shard for it in clusters],
        "draws": list(draws),
        "least_headroom": list(headroom) or [0] * len(clusters),
    }


def _skipped(skipped: Sequence[SkippedLayers]) -> dict[str, list[Any]]:
    rows = [(turn, row, version) for turn, it in enumerate(skipped, 1) for row, version in it.rows.items()]
    kinds = [(turn, kind) for turn, it in enumerate(skipped, 1) for kind in it.kinds]
    return {
        "skipped_turns": [turn for turn, _, _ in rows],
        "skipped_rows": [row for _, row, _ in rows],
        "skipped_versions": [version for _, _, version in rows],
        "kind_turns": [turn for turn, _ in kinds],
        "skipped_kinds": [kind for _, kind in kinds],
    }


# What clusters are made of: host tags, subscriptions, and which tags have work waiting.
#
# A cluster is a show's right to a tag, so it starts from the tags of hosts and reaches the show through the host's own
# allocation. (Upstream joins allocation tags by their text instead, which gives a show subscribed to one ``general``
# clusters of another allocation that happens to be called the same.)

_FACILITY_IDS = text("SELECT pk_facility FROM facility WHERE str_name = :name ORDER BY pk_facility")

_TAGS_OF_ALLOCATIONS = text(
    f"""
    SELECT DISTINCT a.pk_facility AS facility_id, h.pk_alloc AS alloc_id, upper(t.str_tag_type) AS tag_type,
           {compared_tag("t.str_tag")} AS tag
    FROM host_tag t JOIN host h USING (pk_host) JOIN alloc a USING (pk_alloc)
    WHERE CAST(:facility_ids AS varchar[]) IS NULL OR a.pk_facility = ANY(CAST(:facility_ids AS varchar[]))
    """  # noqa: S608 - only our own constant
)

# No condition that the pending-jobs query has not: it would let work wait unseen. Tags are unnested after DISTINCT:
# many layers, few spellings.
_WAITING_TAGS = text(
    f"""
    SELECT DISTINCT w.pk_facility, w.pk_show, tag
    FROM (
        SELECT DISTINCT j.pk_facility, j.pk_show, l.str_tags
        FROM job j JOIN show s USING (pk_show)
        JOIN layer_stat ls ON ls.pk_job = j.pk_job AND ls.int_waiting_count > 0
        JOIN layer l USING (pk_layer)
        WHERE {MAY_BE_BOOKED}
          AND (CAST(:facility_ids AS varchar[]) IS NULL OR j.pk_facility = ANY(CAST(:facility_ids AS varchar[])))
    ) w
    CROSS JOIN LATERAL unnest({compared_tags("w.str_tags")}) AS tag
    WHERE tag <> ''
    """  # noqa: S608 - only our own constants
)


# By the index of the tags as they are compared.
_TAGS_WITH_A_CLUSTER = text(
    f"""
    SELECT EXISTS (
        SELECT FROM unnest(CAST(:facilities AS varchar[]), CAST(:shows AS varchar[]), CAST(:tags AS varchar[]))
                    AS wanted(pk_facility, pk_show, tag)
        JOIN host_tag t ON {compared_tag("t.str_tag")} = wanted.tag JOIN host h USING (pk_host)
        JOIN alloc a ON a.pk_alloc = h.pk_alloc AND a.pk_facility = wanted.pk_facility
        JOIN subscription sub ON sub.pk_alloc = h.pk_alloc AND sub.pk_show = wanted.pk_show
    )
    """  # noqa: S608 - only our own constant
)

WaitingTag = tuple[str, str, str]
"""The ids of a facility and a show, and a tag, as it is compared, of a layer of theirs with waiting frames."""


def facility_ids(connection: Connection, name: str) -> list[str]:
    """The ids of the facilities of exactly this name; empty when there is none."""
    return list(connection.execute(_FACILITY_IDS, {"name": name}).scalars())


def tags_of_allocations(connection: Connection, facilities: Sequence[str] | None) -> Sequence[Row[Any]]:
    """Every distinct ``tag``, as it is compared, of every allocation's hosts, in ``facilities`` or everywhere, with its
    ``facility_id`` and ``alloc_id``. ``tag_type`` is the name of a ClusterKind, or unknown."""
    return connection.execute(_TAGS_OF_ALLOCATIONS, {"facility_ids": facilities}).all()


def waiting_tags(connection: Connection, facilities: Sequence[str] | None) -> frozenset[WaitingTag]:
    """Where work waits: a superset of what ``store.pending`` can return for any cluster."""
    rows = connection.execute(_WAITING_TAGS, {"facility_ids": facilities})
    return frozenset((row.pk_facility, row.pk_show, row.tag) for row in rows)


def have_a_cluster(connection: Connection, wanted: Collection[WaitingTag]) -> bool:
    """Whether there is a cluster for any of these tags: a host that has one, where the show has a subscription."""
    facilities, shows, tags = (list(column) for column in zip(*wanted, strict=True))
    found = connection.execute(_TAGS_WITH_A_CLUSTER, {"facilities": facilities, "shows": shows, "tags": tags})
    return bool(found.scalar_one())


def fetch_limits(connection: Connection) -> dict[str, Row[Any]]:
    """Every limit by id, in one statement: ``id``, ``name``, ``max_value``, the ``running`` procs of every layer under
    it, of managed and unmanaged shows alike, and how many more may run (``left``)."""
    return {row.id: row for row in connection.execute(_LIMITS)}
