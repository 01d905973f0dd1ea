"""Hosts: those that may take frames now, for passes; and all of them with their procs, for people who look and change.

A host may take frames while it is OPEN (one that NIMBY has locked is not), UP, and its last report is fresh. Its idle
memory is the lesser of what no proc reserves and what the machine reports free. Amounts are centicores and KB.

What a subscription leaves to a show is not taken off here. Upstream took its lagging counters off every host, so all
hosts of a show looked full, or free, together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from sys import intern
from typing import Any

from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.domain.clusters import ClusterKind, normalise_tag
from opencue_sched.domain.hosts import Host
from opencue_sched.domain.names import os_names
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.domain.states import HardwareState, ThreadMode
from opencue_sched.domain.units import CENTICORES_PER_CORE, INT_MAX, MOST_KB
from opencue_sched.errors import RqdFailure
from opencue_sched.store.arrays import booleans, numbers, texts
from opencue_sched.store.lookups import PLANNED_ONCE, prepared, row_of
from opencue_sched.store.procs import lock_hosts
from opencue_sched.store.reservations import HELD, HOLD_COLUMNS, LOCKED_CENTICORES, MAY_TAKE_FRAMES, reservation_of
from opencue_sched.store.shows import delete_rows, set_rows
from opencue_sched.store.tags import compared_tag


def bucket(host_id: str) -> str:
    """An SQL expression for the bucket (domain/shards.py) of the host whose id is in the column ``host_id``.

    The index of revision 0018 has the same expression: PostgreSQL uses it only while the two agree.
    """
    return f"get_byte(decode(left(md5({host_id}), 2), 'hex'), 0)"


# What a Host is made of, for a host ``h`` with its statistics ``s`` and allocation ``a``. The layers that run on a host
# are read only where a frame could still go beside them and the condition {wanted} holds: on a full farm that is so of
# few hosts, and each host has many procs.
_COLUMNS = f"""
    h.pk_host, h.str_name, h.pk_alloc, a.pk_facility, h.int_thread_mode, s.str_os,
           h.int_cores, h.int_cores_idle, {LOCKED_CENTICORES} AS locked_centicores,
           h.int_mem, LEAST(h.int_mem_idle, s.int_mem_free) AS mem_idle,
           h.int_gpus, h.int_gpus_idle, h.int_gpu_mem, LEAST(h.int_gpu_mem_idle, s.int_gpu_mem_free) AS gpu_mem_idle,
           ARRAY(SELECT {compared_tag("t.str_tag")} FROM host_tag t WHERE t.pk_host = h.pk_host) AS tags,
           CASE WHEN h.int_cores_idle < h.int_cores
                     AND h.int_cores_idle - {LOCKED_CENTICORES} >= {CENTICORES_PER_CORE} AND {{wanted}} THEN
               ARRAY(SELECT p.pk_layer FROM proc p WHERE p.pk_host = h.pk_host AND p.pk_layer IS NOT NULL)
           ELSE '{{{{}}}}' END AS running,
           {HOLD_COLUMNS}
"""  # noqa: S608 - only our own constants

# The hosts of a facility that carry any of some tags, in any bucket or in some; at most ``:most`` of them.
_HOSTS_WITH_TAGS = text(
    f"""
    SELECT {_COLUMNS.format(wanted="true")}
    FROM host h JOIN host_stat s USING (pk_host) JOIN alloc a USING (pk_alloc)
    LEFT JOIN {HELD} ON true
    WHERE {MAY_TAKE_FRAMES}
      AND a.pk_facility = :facility_id
      AND h.pk_host IN (
          SELECT t.pk_host FROM host_tag t WHERE {compared_tag("t.str_tag")} = ANY(CAST(:tags AS varchar[]))
      )
      AND (CAST(:buckets AS integer[]) IS NULL OR {bucket("h.pk_host")} = ANY(CAST(:buckets AS integer[])))
    LIMIT :most
    """  # noqa: S608 - only our own constant
)

# The hosts in some buckets, found by the index of buckets. OFFSET 0 keeps the subquery apart: on a small farm
# PostgreSQL would rather read all hosts and compute the bucket of each.
_HOSTS_IN_BUCKETS = prepared(
    f"""
    {PLANNED_ONCE}
    SELECT {_COLUMNS.format(wanted="true")}
    FROM (SELECT * FROM host WHERE {bucket("pk_host")} = ANY(CAST(:buckets AS integer[])) OFFSET 0) h
    JOIN {row_of("host_stat", "s", "pk_host = h.pk_host")} ON true
    JOIN {row_of("alloc", "a", "pk_alloc = h.pk_alloc")} ON true
    LEFT JOIN {HELD} ON true
    WHERE {MAY_TAKE_FRAMES} AND a.pk_facility = ANY(CAST(:facilities AS varchar[]))
    """  # noqa: S608 - only our own constants
)

# The hosts with these ids, and for each whether to read what runs on it.
_HOSTS_BY_ID = f"""
    SELECT {_COLUMNS.format(wanted="named.running")}
    FROM unnest(CAST(:ids AS varchar[]), CAST(:running AS boolean[])) AS named(pk_host, running)
    JOIN {row_of("host", "h", "pk_host = named.pk_host")} ON true
    JOIN {row_of("host_stat", "s", "pk_host = h.pk_host")} ON true
    JOIN {row_of("alloc", "a", "pk_alloc = h.pk_alloc")} ON true
    LEFT JOIN {HELD} ON true
    WHERE {MAY_TAKE_FRAMES}
"""  # noqa: S608 - only our own constants
# The same statement in two ways: prepared, or with a plan of its own that leaves other statements as they are.
_HOSTS_BY_ID_PREPARED = prepared(PLANNED_ONCE + _HOSTS_BY_ID)
_HOSTS_BY_ID_UNPREPARED = text(_HOSTS_BY_ID)


def fetch_groups(
    connection: Connection,
    facility_id: str,
    tags: Sequence[str],
    staleness: float,
    buckets: Collection[int] = ALL_BUCKETS,
    *,
    most: int | None = None,
) -> list[Host]:
    """The hosts of a facility that carry one of the tags and are in one of these buckets (domain/shards.py).

    They may be of any allocation. Their last report is at most ``staleness`` seconds old. With ``most``, at
    most that many are returned, whichever these are, and fewer only where there are no more.
    """
    some_buckets = None if len(buckets) == len(ALL_BUCKETS) else sorted(buckets)
    parameters = {"facility_id": facility_id, "tags": list(tags), "staleness": staleness, "buckets": some_buckets}
    # Bad rows are skipped, so a limited read that met any may return too few hosts: it is then made again with a higher
    # limit.
    limit = most
    while True:
        rows = connection.execute(_HOSTS_WITH_TAGS, {**parameters, "most": limit}).all()
        hosts = _hosts(rows)
        if most is None or limit is None or len(rows) < limit or len(hosts) >= most:
            return hosts[:most]
        limit = most + 2 * (limit - len(hosts))


def fetch_buckets(
    connection: Connection, facility_ids: Collection[str], staleness: float, buckets: Collection[int]
) -> list[Host]:
    """The hosts of the facilities that are in these buckets, whatever tags they carry.

    Their last report is at most ``staleness`` seconds old. The cost is that of these hosts, however many others there
    are. The planner settings of the statement stay on for the rest of the transaction (PLANNED_ONCE).
    """
    parameters = {"facilities": texts(facility_ids), "staleness": staleness, "buckets": numbers(sorted(buckets))}
    return _hosts(connection.execute(_HOSTS_IN_BUCKETS, parameters))


def fetch_hosts_by_id(
    connection: Connection,
    ids: Sequence[str],
    staleness: float,
    *,
    but_running: Collection[str] = (),
    planned_once: bool = False,
) -> list[Host]:
    """The hosts of ``ids`` that may take frames now; a host that is absent from the answer may not.

    Their last report is at most ``staleness`` seconds old. What runs on the hosts ``but_running`` is not read: the
    caller knows. ``planned_once`` uses a prepared statement, whose planner settings stay on for the rest of the
    transaction (PLANNED_ONCE).
    """
    statement = _HOSTS_BY_ID_PREPARED if planned_once else _HOSTS_BY_ID_UNPREPARED
    running = booleans(host_id not in but_running for host_id in ids)
    return _hosts(connection.execute(statement, {"ids": texts(ids), "running": running, "staleness": staleness}))


@lru_cache(maxsize=10_000)
def log_bad_row(table: str, row_id: str, name: str, reason: str) -> None:
    """Log that a row makes no sense and is skipped: once in this process, as long as it is among the latest 10,000."""
    import structlog  # here: commands that only read hosts start faster without it

    structlog.get_logger(__name__).warning(f"{table}_skipped", id=row_id, name=name, reason=reason)


def _hosts(rows: Iterable[Row[Any]]) -> list[Host]:
    """The hosts in rows with _COLUMNS. A row that makes no sense is logged and left out: it must stop no other."""
    hosts = []
    for row in rows:
        try:
            hosts.append(_host(row))
        except (TypeError, ValueError) as error:
            log_bad_row("host", row.pk_host, row.str_name, str(error))
    return hosts


def _host(row: Row[Any]) -> Host:
    """The host of a row. Raises ValueError for amounts that no host has; cores that are locked on its RQD are left
    out."""
    if row.int_cores <= 0 or row.int_mem <= 0:
        raise ValueError(f"the host has {row.int_cores} centicores and {row.int_mem} KB")
    if max(row.int_cores, row.int_gpus) > INT_MAX or max(row.int_mem, row.int_gpu_mem) > MOST_KB:
        raise ValueError(f"the host has more than there can be: {row.int_cores} centicores, {row.int_mem} KB")
    return Host(
        id=row.pk_host,
        name=row.str_name,
        facility_id=intern(row.pk_facility),
        alloc_id=intern(row.pk_alloc),
        tags=_tags(*row.tags),
        os_names=_os_names(row.str_os),
        thread_mode=ThreadMode(row.int_thread_mode),
        total_centicores=max(0, row.int_cores - row.locked_centicores),
        idle_centicores=max(0, row.int_cores_idle - row.locked_centicores),
        total_memory_kb=row.int_mem,
        idle_memory_kb=max(0, row.mem_idle),
        total_gpus=row.int_gpus,
        idle_gpus=row.int_gpus_idle,
        total_gpu_memory_kb=row.int_gpu_mem,
        idle_gpu_memory_kb=max(0, row.gpu_mem_idle),
        reservation=reservation_of(row),
        running=dict(Counter(map(intern, row.running))) if row.running else _NOTHING,
    )


# What many hosts have in common is one object for all of them: ids, tags, operating systems.
_NOTHING: Mapping[str, int] = {}
_os_names = lru_cache(maxsize=1_000)(os_names)


@lru_cache(maxsize=10_000)
def _tags(*tags: str | None) -> frozenset[str]:
    """The tags that are there; hosts that have the same share one set."""
    return frozenset(intern(tag) for tag in tags if tag)


# The tags of these hosts, looked up host by host: for a hundred hosts PostgreSQL would otherwise read the tags of all.
_TAGS_OF_HOSTS = prepared(
    f"""
    {PLANNED_ONCE}
    SELECT DISTINCT {compared_tag("t.str_tag")}
    FROM unnest(CAST(:ids AS varchar[])) AS wanted(pk_host)
    JOIN {row_of("host_tag", "t", "pk_host = wanted.pk_host")} ON true
    """  # noqa: S608 - only our own constants
)


# How many hosts there are in some facilities, or in all; counting stops at :most.
_COUNT_HOSTS = text(
    """
    SELECT count(*) FROM (
        SELECT FROM host JOIN alloc ON alloc.pk_alloc = host.pk_alloc
         WHERE CAST(:facilities AS varchar[]) IS NULL OR alloc.pk_facility = ANY(CAST(:facilities AS varchar[]))
         LIMIT :most
    ) counted
    """
)


def count_hosts(connection: Connection, facilities: Sequence[str] | None, *, most: int) -> int:
    """How many hosts there are in these facilities (None: all), up or not; no more than ``most`` are counted."""
    return int(connection.execute(_COUNT_HOSTS, {"facilities": facilities, "most": most}).scalar_one())


# Names of hosts that differ in case alone: each group of them sorted.
_NAMES_IN_TWO_CASES = text(
    """
    SELECT array_agg(str_name ORDER BY str_name) FROM host
     GROUP BY lower(str_name) HAVING count(*) > 1 ORDER BY lower(str_name)
    """
)


def names_in_two_cases(connection: Connection) -> Sequence[list[str]]:
    """The names of hosts that differ in case alone, group by group."""
    return connection.execute(_NAMES_IN_TWO_CASES).scalars().all()


# The name with domain of a host, or its short name where none was reported.
_FULL_NAME = text("SELECT coalesce(str_fqdn, str_name) FROM host WHERE str_name = :name")


def full_names(engine: Engine) -> Callable[[str], str]:
    """A function for RqdChannels that returns the name, with domain, under which a host reports.

    It raises RqdFailure when PostgreSQL does not answer.
    """

    def look_up(name: str) -> str:
        try:
            with engine.connect() as connection:
                return str(connection.execute(_FULL_NAME, {"name": name}).scalar() or name)
        except SQLAlchemyError as error:
            raise RqdFailure(f"PostgreSQL did not tell its full name ({type(error).__name__})") from error

    return look_up


def tags_of_hosts(connection: Connection, ids: Collection[str]) -> frozenset[str]:
    """The tags that at least one of these hosts carries, in the form in which tags are compared (store.tags)."""
    return frozenset(connection.execute(_TAGS_OF_HOSTS, {"ids": texts(ids)}).scalars())


# Hosts as people look at them, and what people change: locks, tags, allocation.
#
# Every change locks the host rows in id order first, as a booking does (which skips locked hosts): so no two wait for
# each other.

# Hosts with their allocation, facility, tags and number of procs; each condition holds for all where its value is NULL.
_LIST_HOSTS = text(
    f"""
    SELECT host.pk_host AS id, host.str_name AS host, alloc.pk_alloc AS alloc_id, alloc.str_name AS allocation,
           alloc.pk_facility AS facility_id, facility.str_name AS facility, str_lock_state AS lock,
           str_lock_source AS lock_source, host_stat.str_state AS state, b_nimby AS nimby,
           int_cores AS centicores, int_cores_idle AS idle_centicores,
           coalesce(locked.centicores, 0) AS locked_centicores, int_mem AS memory_kb,
           int_mem_idle AS idle_memory_kb, host_stat.int_mem_free AS free_memory_kb, int_gpus AS gpus,
           int_gpus_idle AS idle_gpus, int_gpu_mem AS gpu_memory_kb, int_gpu_mem_idle AS idle_gpu_memory_kb,
           int_load AS load, str_os AS os, int_thread_mode AS thread_mode, ts_ping AS pinged, ts_booted AS booted,
           CAST(extract(epoch FROM clock_timestamp() - ts_ping) AS double precision) AS report_age,
           coalesce(running.procs, 0) AS frames,
           ARRAY(SELECT replace(str_tag, ' ', '') FROM host_tag WHERE host_tag.pk_host = host.pk_host
                  ORDER BY upper(str_tag_type), str_tag) AS tags
      FROM host JOIN host_stat USING (pk_host) JOIN alloc USING (pk_alloc) JOIN facility USING (pk_facility)
      LEFT JOIN (SELECT pk_host, count(*) AS procs FROM proc GROUP BY pk_host) running USING (pk_host)
      LEFT JOIN opencue_sched_locked_cores locked USING (pk_host)
     WHERE (CAST(:hosts AS varchar[]) IS NULL OR host.pk_host = ANY(CAST(:hosts AS varchar[])))
       AND (CAST(:alloc AS varchar) IS NULL OR host.pk_alloc = :alloc)
       AND (CAST(:lock AS varchar) IS NULL OR str_lock_state = :lock)
       AND (CAST(:state AS varchar) IS NULL OR host_stat.str_state = :state)
       AND (CAST(:tags AS varchar[]) IS NULL OR host.pk_host IN (
               SELECT pk_host FROM host_tag WHERE {compared_tag("str_tag")} = ANY(CAST(:tags AS varchar[]))))
       AND (CAST(:part AS varchar) IS NULL OR position(lower(:part) IN lower(host.str_name)) > 0)
     ORDER BY host.str_name LIMIT :most
    """  # noqa: S608 - only our own constant
)
# Procs with the names of their job, layer, frame and host; each condition holds for all where its value is NULL.
_LIST_PROCS = text(
    """
    SELECT proc.pk_proc AS id, job.str_name AS job, frame.str_name AS frame, int_cores_reserved AS centicores,
           proc.int_mem_reserved AS memory_kb, proc.int_mem_used AS used_memory_kb, int_gpus_reserved AS gpus,
           ts_dispatched AS dispatched, b_local AS local, host.str_name AS host, show.str_name AS show,
           layer.str_name AS layer, proc.pk_frame AS frame_id, proc.pk_job AS job_id, proc.pk_host AS host_id,
           proc.ts_ping AS pinged
      FROM proc JOIN host USING (pk_host)
      LEFT JOIN show USING (pk_show) LEFT JOIN job USING (pk_job)
      LEFT JOIN layer USING (pk_layer) LEFT JOIN frame USING (pk_frame)
     WHERE (CAST(:procs AS varchar[]) IS NULL OR proc.pk_proc = ANY(CAST(:procs AS varchar[])))
       AND (CAST(:frames AS varchar[]) IS NULL OR proc.pk_frame = ANY(CAST(:frames AS varchar[])))
       AND (CAST(:host AS varchar) IS NULL OR proc.pk_host = :host)
       AND (CAST(:job AS varchar) IS NULL OR proc.pk_job = :job)
       AND (CAST(:show AS varchar) IS NULL OR proc.pk_show = :show)
       AND (CAST(:alloc AS varchar) IS NULL OR host.pk_alloc = :alloc)
     ORDER BY ts_dispatched, proc.pk_proc LIMIT :most
    """
)
# Set the lock of hosts whose lock, and its source, are still what the caller expects; the ids of those changed.
_SET_LOCK = text(
    """
    UPDATE host SET str_lock_state = :new, str_lock_source = :source
     WHERE pk_host = ANY(CAST(:hosts AS varchar[])) AND str_lock_state = ANY(CAST(:old AS varchar[]))
       AND (str_lock_source IS NOT DISTINCT FROM :old_source OR CAST(:old_source AS varchar) IS NULL)
    RETURNING pk_host
    """
)
# Set the hardware state of a host that has one of the expected ones.
_SET_STATE = text(
    "UPDATE host_stat SET str_state = :new WHERE pk_host = :host AND str_state = ANY(CAST(:old AS varchar[]))"
)
# Three statements, one after the other: take tags of a kind away, add others, and write ``host.str_tags`` anew. That
# column is only for display and is cut at 128 characters: Cuebot's recalculate_tags() fails on more, and with it the
# host.
_SET_TAGS = (
    text(
        f"""
        DELETE FROM host_tag
         WHERE pk_host = ANY(CAST(:hosts AS varchar[])) AND upper(str_tag_type) = :kind
           AND CASE WHEN CAST(:drop AS varchar[]) IS NULL THEN str_tag <> ALL(CAST(:add AS varchar[]))
                    ELSE {compared_tag("str_tag")} = ANY(CAST(:drop AS varchar[])) END
        """  # noqa: S608 - only our own constant
    ),
    text(
        f"""
        INSERT INTO host_tag (pk_host_tag, pk_host, str_tag, str_tag_type, b_constant)
        SELECT CAST(gen_random_uuid() AS varchar), new_host, new_tag, :kind, :kind = 'ALLOC'
          FROM unnest(CAST(:hosts AS varchar[])) AS new_host CROSS JOIN unnest(CAST(:add AS varchar[])) AS new_tag
         WHERE NOT EXISTS (SELECT FROM host_tag
                            WHERE pk_host = new_host AND {compared_tag("str_tag")} = {compared_tag("new_tag")}
                              AND (upper(str_tag_type) = :kind OR :kind = 'MANUAL'))
        """  # noqa: S608 - only our own constants
    ),
    text(
        """
        UPDATE host SET str_tags = left(tags.joined, 128)
          FROM host tagged CROSS JOIN LATERAL (
               SELECT coalesce(string_agg(str_tag, ' ' ORDER BY str_tag_type, str_tag), '') AS joined
                 FROM host_tag WHERE host_tag.pk_host = tagged.pk_host) tags
         WHERE tagged.pk_host = ANY(CAST(:hosts AS varchar[])) AND host.pk_host = tagged.pk_host
        """
    ),
)


def list_hosts(
    connection: Connection,
    *,
    host_ids: Sequence[str] | None = None,
    alloc_id: str | None = None,
    lock: str | None = None,
    state: str | None = None,
    tags: Collection[str] | None = None,
    part: str | None = None,
    most: int = 1_000_000,
) -> Sequence[Row[Any]]:
    """Hosts in the order of their names; only those that meet every condition that is given.

    The conditions are: one of the ids, the allocation, lock state or hardware state, any of ``tags``, and ``part`` in
    the name. In a row ``locked_centicores`` are locked on the host's RQD, ``free_memory_kb`` is what the machine itself
    reports free, ``load`` is in hundredths, as reported, and ``report_age`` is in seconds since the last report.
    """
    any_tag = None if tags is None else list(map(normalise_tag, tags))
    conditions = {"hosts": host_ids, "alloc": alloc_id, "lock": lock, "state": state, "tags": any_tag, "part": part}
    return connection.execute(_LIST_HOSTS, {**conditions, "most": most}).all()


def list_procs(
    connection: Connection,
    *,
    proc_ids: Collection[str] | None = None,
    frame_ids: Collection[str] | None = None,
    host_id: str | None = None,
    job_id: str | None = None,
    show_id: str | None = None,
    alloc_id: str | None = None,
    most: int = 1_000_000,
) -> Sequence[Row[Any]]:
    """Procs, the one that was dispatched first in front; only those that meet every condition that is given.

    ``frame`` and ``frame_id`` are None when the frame was taken off its proc.
    """
    procs, frames = (None if ids is None else list(ids) for ids in (proc_ids, frame_ids))
    conditions = {"procs": procs, "frames": frames, "host": host_id, "job": job_id, "show": show_id, "alloc": alloc_id}
    return connection.execute(_LIST_PROCS, {**conditions, "most": most}).all()


RQD_LOCK_SOURCE = "RQD"
"""host.str_lock_source of a host that is LOCKED because all its cores are locked on its RQD."""


def set_lock(
    connection: Connection,
    host_ids: Collection[str],
    *,
    old: Collection[str],
    old_source: str | None = None,
    new: str,
    source: str,
) -> list[str]:
    """Change the lock of those hosts that are in one of the ``old`` states; returns the ids of the hosts changed.

    With ``old_source``, only a lock that this source has set is changed.
    """
    lock_hosts(connection, host_ids)
    change = {"hosts": list(host_ids), "old": list(old), "old_source": old_source, "new": new, "source": source[:128]}
    return list(connection.execute(_SET_LOCK, change).scalars())


def set_state(connection: Connection, host_id: str, *, old: Collection[HardwareState], new: HardwareState) -> bool:
    """Change the hardware state of a host that is in one of the ``old`` states; returns whether it was."""
    lock_hosts(connection, [host_id])
    return connection.execute(_SET_STATE, {"host": host_id, "old": list(old), "new": new}).rowcount > 0


def set_tags(
    connection: Connection,
    host_ids: Collection[str],
    kind: ClusterKind,
    *,
    add: Collection[str] = (),
    drop: Collection[str] | None = None,
) -> None:
    """Give hosts the tags to ``add``, of one kind, and take from them the tags to ``drop`` of that kind.

    Without ``drop`` they lose all other tags of that kind, and a tag that they have in another case gets the new
    spelling. Tags that differ in case alone are the same tag. The caller locks the hosts first where they are several.
    """
    dropped = None if drop is None else list(map(normalise_tag, drop))
    for statement in _SET_TAGS:
        connection.execute(
            statement, {"hosts": list(host_ids), "kind": kind.name, "add": sorted(set(add)), "drop": dropped}
        )


def move_hosts(connection: Connection, host_ids: Sequence[str], alloc_id: str) -> None:
    """Put hosts into another allocation, with its tag in place of the old one. The caller locks them first."""
    set_rows(connection, "host", "pk_host", host_ids, {"pk_alloc": alloc_id})
    tag = connection.execute(text("SELECT str_tag FROM alloc WHERE pk_alloc = :alloc"), {"alloc": alloc_id}).scalar()
    set_tags(connection, host_ids, ClusterKind.ALLOC, add=[tag] if tag else [])


def delete_host(connection: Connection, host_id: str) -> None:
    """Delete a host with its tags, statistics and comments. The caller locks it first.

    The host comes back when its RQD reports again.
    """
    for name in ("comments", "opencue_sched_locked_cores", "host"):
        delete_rows(connection, name, "pk_host", host_id)
