"""What waits, by what it needs of a host and under which cap; which clusters have work; the bursts of subscriptions.

A pass plans from the layers that ``store.backlog`` reads; the queries here are those of sweeps, of the reservation
task, of metrics and of ``doctor``. What runs under folders and jobs that have a cap is summed live from ``proc``.
OpenCue's own columns (subscription.int_cores, job_resource.int_cores, ...) are rewritten only every two minutes for
managed shows, and the view ``vs_waiting`` reads them and hides jobs whose cap is 0 or -1; neither is used. Each proc
counts with its cores rounded up, as in the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.units import INT_MAX
from opencue_sched.store.arrays import texts
from opencue_sched.store.limit_types import MOST, TERMS
from opencue_sched.store.limits import limit_use
from opencue_sched.store.schema import SchemaFacts, with_start_after
from opencue_sched.store.tags import compared_tag, compared_tags

# Conditions and columns that statements of other modules of store/ have in common with those here. They name the tables
# ``proc p``, ``job j``, ``show s``, ``layer l`` and ``frame`` by these aliases.


def countable(column: str) -> str:
    """SQL for an amount that a proc has reserved, as it counts: at least 0 and at most INT_MAX. No host has more, and
    no sum of such amounts passes the largest bigint."""
    return f"LEAST(GREATEST({column}, 0), {INT_MAX})"


# Cores are rounded up, for each proc: (centicores + 99) / 100 in whole numbers.
USED = f"""CAST(COALESCE(sum(({countable("p.int_cores_reserved")} + 99) / 100), 0) AS bigint) AS cores,
               CAST(COALESCE(sum({countable("p.int_gpus_reserved")}), 0) AS bigint) AS gpus"""
"""Two columns: what procs ``p`` take together, in whole cores and GPUs."""
# The columns are read from the row as JSON, because a schema before Cuebot's V49 does not have them. Every id is above
# the empty text: with that condition PostgreSQL uses an index also in commits, which do without sequential scans.
DELAYING_STATUSES = """ARRAY(
        SELECT CAST(stored.columns ->> 'int_exit_status' AS bigint)
          FROM limit_record CROSS JOIN LATERAL (SELECT to_jsonb(limit_record) AS columns) stored
         WHERE limit_record.pk_limit_record > '' AND CAST(stored.columns ->> 'int_delay_minutes' AS int) > 0
           AND stored.columns ->> 'int_exit_status' IS NOT NULL)"""
"""An array of exit statuses: those by which frames say that they got no licence of a limit, and after which Cuebot has
their layer wait."""
# A Cuebot delays a layer for the exit status of a frame: by its dispatcher.layer_delay.rules, or because the status is
# that of a limit. It frees the frame up to a second before it writes the delay, and may drop that write. So for two
# seconds nobody knows whether the frame may start. A ts_updated that is further ahead comes from a wrong clock.
DELAY_MAY_COME = """(frame.int_exit_status = ANY(CAST((SELECT uncounted FROM statuses) AS bigint[]))
                     AND COALESCE(frame.ts_updated
                                  BETWEEN now() - interval '2 seconds' AND now() + interval '2 seconds', false))"""
"""Whether ``frame`` ended a moment ago with one of the exit statuses in ``statuses.uncounted``, so that a delay may
follow. The statement has ``statuses`` in its WITH."""
QUARANTINED = "EXISTS (SELECT 1 FROM opencue_sched_quarantine q WHERE q.pk_job = j.pk_job AND q.until > now())"
"""Whether job ``j`` is in quarantine (store.quarantine)."""
JOB_SWITCHED_ON = "j.str_state = 'PENDING' AND j.b_paused = false AND j.b_auto_book"
"""Whether no switch of job ``j`` keeps it from being booked."""
SHOW_IS_OURS = "s.b_active AND s.b_scheduler_managed"
"""Whether show ``s`` is active and managed."""
SHOW_SWITCHED_ON = "s.b_booking_enabled AND s.b_dispatch_enabled AND NOT s.b_paused"
"""Whether no switch of show ``s`` keeps it from being booked."""
SWITCHED_ON = f"{JOB_SWITCHED_ON} AND {SHOW_IS_OURS} AND {SHOW_SWITCHED_ON}"
"""Whether no switch keeps job ``j`` of show ``s`` from being booked by us."""
MAY_BE_BOOKED = f"""{SWITCHED_ON}
          AND EXISTS (SELECT 1 FROM subscription sub WHERE sub.pk_show = j.pk_show AND sub.int_burst > 0)"""  # noqa: S608
"""SWITCHED_ON, where the show has a subscription that lets it book anything."""
SOME_WORK = f"""EXISTS (SELECT FROM job j JOIN show s USING (pk_show) JOIN layer_stat ls USING (pk_job)
                   WHERE ls.int_waiting_count > 0 AND {MAY_BE_BOOKED})"""
"""Whether any job on the farm that may be booked has frames that wait."""
# Rounded up as (centicores - 1) / 100 + 1: centicores + 99 may pass the largest bigint, which would fail the statement
# for all layers where one layer has a number that makes no sense.
LEAST_CORES = """CASE WHEN NOT l.b_threadable OR l.int_cores_min < 100 THEN 1
                        WHEN l.int_cores_max > 0 THEN (LEAST(l.int_cores_min, l.int_cores_max) - 1) / 100 + 1
                        ELSE (l.int_cores_min - 1) / 100 + 1 END"""
"""The least whole cores that a frame of layer ``l`` takes on any host, as domain.frame_needs.fewest_cores_anywhere."""

# The subscriptions of our shows, with size and burst, and whether the show may book.
_SHARES = text(
    f"""
    SELECT sub.pk_show AS show_id, s.str_name AS show_name, sub.pk_alloc AS alloc_id, a.pk_facility AS facility_id,
           sub.int_burst AS burst_centicores, sub.int_size AS size_centicores, {SHOW_SWITCHED_ON} AS may_book,
           CAST(extract(epoch FROM clock_timestamp()) AS double precision) AS now
    FROM subscription sub JOIN alloc a USING (pk_alloc)
    JOIN show s ON s.pk_show = sub.pk_show AND {SHOW_IS_OURS}
    WHERE CAST(:shows AS varchar[]) IS NULL OR sub.pk_show = ANY(CAST(:shows AS varchar[]))
    ORDER BY a.str_name
    """  # noqa: S608 - only our own constants
)

# All that waits, by what it needs of a host and why it waits, whether or not a pass has come to it yet. The reason
# belongs to it because a layer that a cap keeps waiting could not run even where there is a host. Asked once in a
# while: it sums what runs of every job, or of those in ``:jobs``; with ``:use`` false it sums nothing. Caps are rounded
# down to whole cores. _waiting_work fills in {limit_use} and {started}, which depend on the schema.
_WAITING_WORK = f"""
    WITH used AS MATERIALIZED (
        SELECT p.pk_job, {USED}
        FROM proc p
        WHERE CAST(:use AS boolean)
          AND (CAST(:jobs AS varchar[]) IS NULL OR p.pk_job = ANY(CAST(:jobs AS varchar[])))
        GROUP BY p.pk_job
    ),
    folder_used AS MATERIALIZED (
        SELECT j.pk_folder, sum(used.cores) AS cores, sum(used.gpus) AS gpus
        FROM used JOIN job j USING (pk_job)
        GROUP BY j.pk_folder
    ),
    full_limits AS MATERIALIZED (
        SELECT id FROM ({{limit_use}}) used WHERE "left" = 0
    )
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
                WHEN CAST(:use AS boolean) AND l.pk_layer IN (
                    SELECT ll.pk_layer FROM layer_limit ll JOIN full_limits ON full_limits.id = ll.pk_limit_record
                ) THEN 'over_limit'
                ELSE 'behind' END AS why,
           bool_or(COALESCE(f.int_max_cores > 0 OR f.int_max_gpus > 0, false)) AS in_capped_folder,
           CAST(sum(ls.int_waiting_count) AS bigint) AS frames, array_agg(l.pk_layer) AS layers,
           array_agg(l.pk_job) AS jobs, array_agg(ls.int_waiting_count) AS waiting
    FROM layer_stat ls JOIN layer l USING (pk_layer) JOIN job j ON j.pk_job = ls.pk_job JOIN show s USING (pk_show)
    CROSS JOIN LATERAL (SELECT {LEAST_CORES} AS cores) need
    LEFT JOIN job_resource r ON r.pk_job = j.pk_job LEFT JOIN used ON used.pk_job = j.pk_job
    LEFT JOIN folder_resource f USING (pk_folder) LEFT JOIN folder_used USING (pk_folder)
    WHERE ls.int_waiting_count > 0 AND {MAY_BE_BOOKED} {{started}}
      AND (CAST(:facilities AS varchar[]) IS NULL OR j.pk_facility = ANY(CAST(:facilities AS varchar[])))
      AND (CAST(:layers AS varchar[]) IS NULL OR ls.pk_layer = ANY(CAST(:layers AS varchar[])))
    GROUP BY j.pk_facility, j.pk_show, j.str_os, tags, l.int_cores_min, l.int_cores_max, l.int_mem_min, l.int_gpus_min,
             l.int_gpu_mem_min, l.b_threadable, least_cores, why
"""  # noqa: S608 - only our own constants


def fetch_waiting_work(
    connection: Connection,
    facilities: Sequence[str] | None,
    facts: SchemaFacts,
    *,
    settle_window_seconds: float,
    layer_ids: Collection[str] | None = None,
    job_ids: Collection[str] | None = None,
) -> Sequence[Row[Any]]:
    """The work that passes may look at, in the facilities of these ids or everywhere; only that of ``layer_ids`` where
    these are given.

    A row stands for all layers of one facility, show and OS that have the same requirements and wait for the same
    reason:

    - The requirements are columns of layer; ``tags``, with bars between them, in the form in which tags are compared
      (store.tags); and ``least_cores``, what one frame takes at least.
    - ``why``: quarantined, else over_job, over_folder, over_job_gpus, over_folder_gpus or over_limit where that cap has
      too little headroom for one frame, else behind. A limit that counts machines is no reason, even with all seats
      taken: the machines that hold it take more frames, so passes look at such layers.
    - ``frames``: how many frames wait; ``in_capped_folder``: whether any job of the row is in a folder with a cap.
    - ``layers``, ``jobs``, ``waiting``: for each layer its id, its job's id, and how many of its frames wait.

    ``settle_window_seconds`` is accounting.limit_settle_window_seconds (store.limits). With ``job_ids`` only what runs
    for these jobs is summed. Then they must be all jobs of the layers and, where a folder of one of them has a cap, all
    jobs of that folder: of a job that is left out, the caps look unused.
    """
    wanted = {
        "use": True,
        "jobs": None if job_ids is None else texts(job_ids),
        "layers": None if layer_ids is None else texts(layer_ids),
        "settle_window": settle_window_seconds,
    }
    return _waiting_work(connection, facilities, facts, wanted)


def fetch_requirements(
    connection: Connection, facilities: Sequence[str] | None, facts: SchemaFacts
) -> Sequence[Row[Any]]:
    """The rows of `fetch_waiting_work` for all work, as if nothing ran: no proc is read, so a cap is a reason to wait
    only where it is too small for a single frame."""
    return _waiting_work(
        connection, facilities, facts, {"use": False, "jobs": None, "layers": None, "settle_window": 0}
    )


def _waiting_work(
    connection: Connection, facilities: Sequence[str] | None, facts: SchemaFacts, wanted: Mapping[str, object]
) -> Sequence[Row[Any]]:
    """The rows of _WAITING_WORK, as this schema can answer it. ``wanted``: its other parameters."""
    # First, because with_start_after formats the template, which fails for a name that it does not know.
    template = _WAITING_WORK.replace("{limit_use}", limit_use(has_holders=facts.has_limit_holders))
    statement = with_start_after(template, facts.has_start_after)
    return connection.execute(statement, {"facilities": facilities, **wanted}).all()


def fetch_shares(connection: Connection, show_ids: Collection[str] | None = None) -> Sequence[Row[Any]]:
    """Every subscription of the active, managed shows, in any facility; only of ``show_ids`` where these are given.

    A row has ``show_id``, ``alloc_id``, ``facility_id``, ``burst_centicores`` and ``size_centicores``; ``may_book``:
    whether no switch of the show keeps it from being booked; and ``now``: the database's clock, in epoch seconds.
    """
    return connection.execute(_SHARES, {"shows": None if show_ids is None else list(show_ids)}).all()


# What clusters are made of: tags of hosts, subscriptions, and the tags for which work waits.
#
# A show has a cluster for each tag of a host in an allocation to which it subscribes. So statements go from the tag to
# the host, to the host's own allocation, and to the shows that subscribe to it. (OpenCue's Rust scheduler joins the
# tags of allocations with those of hosts by their text: a show that subscribes to one allocation with the tag
# ``general`` gets clusters of any other allocation with such a tag.)

# The facilities of this name.
_FACILITY_IDS = text("SELECT pk_facility FROM facility WHERE str_name = :name ORDER BY pk_facility")

# Every distinct tag of the hosts of each allocation.
_TAGS_OF_ALLOCATIONS = text(
    f"""
    SELECT DISTINCT a.pk_facility AS facility_id, h.pk_alloc AS alloc_id, upper(t.str_tag_type) AS tag_type,
           {compared_tag("t.str_tag")} AS tag
    FROM host_tag t JOIN host h USING (pk_host) JOIN alloc a USING (pk_alloc)
    WHERE CAST(:facility_ids AS varchar[]) IS NULL OR a.pk_facility = ANY(CAST(:facility_ids AS varchar[]))
    """  # noqa: S608 - only our own constant
)

# The tags of all layers with waiting frames. Every layer that a pass may plan (store.backlog) must meet the conditions
# here, or its work would wait unseen. DISTINCT comes before the tags are taken apart: layers are many, and differently
# written lists of tags are few.
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


# Whether any of the wanted tags is one of a host in an allocation to which the show subscribes. The index of host_tag
# by the form in which tags are compared finds the hosts.
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
"""The id of a facility, the id of a show, and a tag of one of the show's layers there that has waiting frames, in the
form in which tags are compared (store.tags)."""


def facility_ids(connection: Connection, name: str) -> list[str]:
    """The ids of the facilities of exactly this name; empty when there is none."""
    return list(connection.execute(_FACILITY_IDS, {"name": name}).scalars())


def tags_of_allocations(connection: Connection, facilities: Sequence[str] | None) -> Sequence[Row[Any]]:
    """Every distinct ``tag`` of every allocation's hosts, in the facilities of these ids or everywhere, with its
    ``facility_id`` and ``alloc_id``. The tag is in the form in which tags are compared (store.tags). ``tag_type`` is
    the name of a member of ClusterKind, or another text that somebody wrote into the column."""
    return connection.execute(_TAGS_OF_ALLOCATIONS, {"facility_ids": facilities}).all()


def waiting_tags(connection: Connection, facilities: Sequence[str] | None) -> frozenset[WaitingTag]:
    """The facilities, shows and tags for which work waits, in the facilities of these ids or everywhere: those of every
    frame that a pass can book, and perhaps of more."""
    rows = connection.execute(_WAITING_TAGS, {"facility_ids": facilities})
    return frozenset((row.pk_facility, row.pk_show, row.tag) for row in rows)


def have_a_cluster(connection: Connection, wanted: Collection[WaitingTag]) -> bool:
    """Whether any of these tags, at least one, has a cluster: a host with the tag, in an allocation to which the show
    subscribes."""
    facilities, shows, tags = (list(column) for column in zip(*wanted, strict=True))
    found = connection.execute(_TAGS_WITH_A_CLUSTER, {"facilities": facilities, "shows": shows, "tags": tags})
    return bool(found.scalar_one())


# Each limit with what it counts, frames or machines, and how many of them it admits.
_LIMIT_CAPS = text(
    f"""
    SELECT pk_limit_record AS id, str_name AS name, {MOST} AS max_value, terms.counts_machines,
           terms.frames
    FROM limit_record {TERMS}
    """  # noqa: S608 - only our own constants
)


def fetch_limit_caps(connection: Connection) -> dict[str, Row[Any]]:
    """Every limit by id, without what runs under it: ``id``, ``name``, ``max_value``, ``counts_machines`` (whether it
    counts machines, otherwise frames), and ``frames``.

    ``frames`` says how many frames may run under a limit of frames that a licence server reports or that is not
    enforced; -1 is any number. It is None for a limit that counts machines, and for one of frames that has nothing but
    its ``max_value``.
    """
    return {row.id: row for row in connection.execute(_LIMIT_CAPS)}
