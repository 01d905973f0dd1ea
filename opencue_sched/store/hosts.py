"""Hosts that may take frames now (facts C).

OPEN is the lock gate (a nimby-locked host is not OPEN), UP the hardware gate, and the last report must be fresh. Memory
is the lesser of what no proc reserves and what the machine reports free. Nothing is taken from the subscription here:
upstream adds its lagging counters to every host, and every host of a show looked full or free together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import Connection, Row, text

from opencue_sched.domain.farm import BadRow, Host, TagType, ThreadMode
from opencue_sched.domain.units import MOST_CENTICORES, MOST_GPUS, MOST_KB

OnBadRow = Callable[[BadRow], object]
"""Told each row that makes no sense and is left out."""

log = structlog.get_logger(__name__)

_COLUMNS = """
    SELECT h.pk_host, h.str_name, h.pk_alloc, a.pk_facility, h.int_thread_mode, s.str_os,
           h.int_cores, h.int_cores_idle, h.int_mem, LEAST(h.int_mem_idle, s.int_mem_free) AS mem_idle,
           h.int_gpus, h.int_gpus_idle, h.int_gpu_mem, LEAST(h.int_gpu_mem_idle, s.int_gpu_mem_free) AS gpu_mem_idle,
           ARRAY(SELECT replace(t.str_tag, ' ', '') FROM host_tag t WHERE t.pk_host = h.pk_host) AS tags
    FROM host h
    JOIN host_stat s ON s.pk_host = h.pk_host
    JOIN alloc a ON a.pk_alloc = h.pk_alloc
    WHERE h.str_lock_state = 'OPEN' AND s.str_state = 'UP'
      AND s.ts_ping > clock_timestamp() - CAST(:staleness AS double precision) * interval '1 second'
"""

_OF_TAGS = text(
    f"""{_COLUMNS}
      AND a.pk_facility = :facility_id
      AND h.pk_host IN (
          SELECT t.pk_host FROM host_tag t WHERE replace(t.str_tag, ' ', '') = ANY(CAST(:tags AS varchar[]))
      )
    """  # noqa: S608 - only our own constant
)

_BY_ID = text(_COLUMNS + " AND h.pk_host = ANY(CAST(:ids AS varchar[]))")


def _log_bad(row: BadRow) -> None:
    log.warning("host_skipped", id=row.id, name=row.name, reason=row.reason)


def fetch_groups(
    connection: Connection, facility_id: str, tags: Sequence[str], staleness: float, on_bad: OnBadRow = _log_bad
) -> list[Host]:
    """The hosts of a facility that carry one of the tags, of any allocation, heard of in the last ``staleness``
    seconds. One statement."""
    rows = connection.execute(_OF_TAGS, {"facility_id": facility_id, "tags": list(tags), "staleness": staleness})
    return list(_hosts(rows, on_bad))


def fetch_hosts_by_id(
    connection: Connection, ids: Sequence[str], staleness: float, on_bad: OnBadRow = _log_bad
) -> list[Host]:
    """Those of these hosts that may take frames now. One that is absent from the answer may not."""
    return list(_hosts(connection.execute(_BY_ID, {"ids": list(ids), "staleness": staleness}), on_bad))


def _hosts(rows: Iterable[Row[Any]], on_bad: OnBadRow) -> Iterable[Host]:
    for row in rows:
        try:
            yield _host(row)
        except (TypeError, ValueError) as error:
            on_bad(BadRow("host", row.pk_host, str(error), row.str_name))


def _host(row: Row[Any]) -> Host:
    if row.int_cores <= 0 or row.int_mem <= 0:
        raise ValueError(f"the host has {row.int_cores} centicores and {row.int_mem} KB")
    if row.int_cores > MOST_CENTICORES or max(row.int_mem, row.int_gpu_mem) > MOST_KB or row.int_gpus > MOST_GPUS:
        raise ValueError(f"the host has more than there can be: {row.int_cores} centicores, {row.int_mem} KB")
    return Host(
        id=row.pk_host,
        name=row.str_name,
        facility_id=row.pk_facility,
        alloc_id=row.pk_alloc,
        tags=frozenset(tag for tag in row.tags if tag),
        os_names=tuple(name for part in (row.str_os or "").split(",") if (name := part.strip())),
        thread_mode=ThreadMode(row.int_thread_mode),
        total_centicores=row.int_cores,
        idle_centicores=row.int_cores_idle,
        total_memory_kb=row.int_mem,
        idle_memory_kb=max(0, row.mem_idle),
        total_gpus=row.int_gpus,
        idle_gpus=row.int_gpus_idle,
        total_gpu_memory_kb=row.int_gpu_mem,
        idle_gpu_memory_kb=max(0, row.gpu_mem_idle),
    )


_TAGS_OF_HOSTS = text(
    "SELECT DISTINCT replace(str_tag, ' ', '') FROM host_tag WHERE pk_host = ANY(CAST(:ids AS varchar[]))"
)


def tags_of_hosts(connection: Connection, ids: Collection[str]) -> frozenset[str]:
    """Every tag, without spaces, that one of these hosts carries."""
    return frozenset(connection.execute(_TAGS_OF_HOSTS, {"ids": list(ids)}).scalars())


# Hosts as people look at them, and what they change: locks, tags, allocation (facts A). Centicores, KB.
#
# Every change locks the host rows in id order first, as booking does (which skips locked hosts).

_HOSTS = text(
    """
    SELECT host.pk_host, host.str_name, alloc.str_name AS alloc, facility.str_name AS facility, str_lock_state,
           str_lock_source, host_stat.str_state, b_nimby, int_cores, int_cores_idle, int_mem, int_mem_idle,
           host_stat.int_mem_free, int_gpus, int_gpus_idle, int_gpu_mem, int_gpu_mem_idle, int_load, str_os,
           int_thread_mode, ts_ping, ts_booted, coalesce(running.procs, 0),
           ARRAY(SELECT str_tag FROM host_tag WHERE host_tag.pk_host = host.pk_host
                  ORDER BY upper(str_tag_type), str_tag) AS tags
      FROM host
      JOIN host_stat ON host_stat.pk_host = host.pk_host
      JOIN alloc ON alloc.pk_alloc = host.pk_alloc
      JOIN facility ON facility.pk_facility = alloc.pk_facility
      LEFT JOIN (SELECT pk_host, count(*) AS procs FROM proc GROUP BY pk_host) running
             ON running.pk_host = host.pk_host
     WHERE (CAST(:hosts AS varchar[]) IS NULL OR host.pk_host = ANY(CAST(:hosts AS varchar[])))
       AND (CAST(:alloc AS varchar) IS NULL OR host.pk_alloc = :alloc)
       AND (CAST(:lock AS varchar) IS NULL OR str_lock_state = :lock)
       AND (CAST(:state AS varchar) IS NULL OR host_stat.str_state = :state)
       AND (CAST(:tag AS varchar) IS NULL OR EXISTS (
               SELECT 1 FROM host_tag WHERE host_tag.pk_host = host.pk_host AND replace(str_tag, ' ', '') = :tag))
       AND (CAST(:part AS varchar) IS NULL OR position(lower(:part) IN lower(host.str_name)) > 0)
     ORDER BY host.str_name LIMIT :most
    """
)
_PROCS = text(
    """
    SELECT proc.pk_proc, job.str_name AS job, frame.str_name AS frame, int_cores_reserved, proc.int_mem_reserved,
           proc.int_mem_used, int_gpus_reserved, ts_dispatched, b_local
      FROM proc
      LEFT JOIN job ON job.pk_job = proc.pk_job
      LEFT JOIN frame ON frame.pk_frame = proc.pk_frame
     WHERE proc.pk_host = :host ORDER BY ts_dispatched, proc.pk_proc
    """
)
_LOCKED = """
    WITH locked AS (
        SELECT pk_host FROM host WHERE pk_host = ANY(CAST(:hosts AS varchar[])) ORDER BY pk_host FOR NO KEY UPDATE)
"""
_LOCK = text(f"{_LOCKED} SELECT pk_host FROM locked")  # noqa: S608 - only our own constant
_SET_LOCK = text(
    f"""
    {_LOCKED}
    UPDATE host SET str_lock_state = :new, str_lock_source = :source
      FROM locked WHERE host.pk_host = locked.pk_host AND str_lock_state = ANY(CAST(:old AS varchar[]))
    RETURNING host.pk_host
    """  # noqa: S608 - only our own constant
)
_ADD_TAGS = text(
    """
    INSERT INTO host_tag (pk_host_tag, pk_host, str_tag, str_tag_type, b_constant)
    SELECT new.id, new.host, new.tag, :type, false
      FROM unnest(CAST(:ids AS varchar[]), CAST(:hosts AS varchar[]), CAST(:tags AS varchar[])) AS new(id, host, tag)
     WHERE NOT EXISTS (SELECT 1 FROM host_tag WHERE host_tag.pk_host = new.host AND host_tag.str_tag = new.tag)
    RETURNING pk_host
    """
)
_REMOVE_TAGS = text(
    """
    DELETE FROM host_tag
     WHERE pk_host = ANY(CAST(:hosts AS varchar[])) AND str_tag = ANY(CAST(:tags AS varchar[]))
       AND upper(str_tag_type) = 'MANUAL' AND NOT b_constant
    RETURNING pk_host
    """
)
_TAG_KINDS = text(
    """
    SELECT DISTINCT str_tag, upper(str_tag_type) FROM host_tag
     WHERE pk_host = ANY(CAST(:hosts AS varchar[])) AND str_tag = ANY(CAST(:tags AS varchar[]))
    """
)
RECALCULATE_TAGS = text(
    "SELECT recalculate_tags(pk_host) FROM host WHERE pk_host = ANY(CAST(:hosts AS varchar[])) ORDER BY pk_host"
)
_RUNNING = text("SELECT count(*) FROM proc WHERE pk_host = ANY(CAST(:hosts AS varchar[]))")
_MOVE = text("UPDATE host SET pk_alloc = :alloc WHERE pk_host = ANY(CAST(:hosts AS varchar[])) AND pk_alloc <> :alloc")
_DROP_ALLOC_TAGS = text(
    "DELETE FROM host_tag WHERE pk_host = ANY(CAST(:hosts AS varchar[])) AND upper(str_tag_type) = 'ALLOC'"
)
_ALLOC_TAG = text("SELECT str_tag FROM alloc WHERE pk_alloc = :alloc")
_STATE = text("SELECT str_state FROM host_stat WHERE pk_host = :host")
_DELETE_COMMENTS = text("DELETE FROM comments WHERE pk_host = :host")
_DELETE = text("DELETE FROM host WHERE pk_host = :host")


@dataclass(frozen=True, slots=True)
class HostView:
    """A host. ``free_kb`` is what the machine itself reports free; load in hundredths, as reported."""

    id: str
    name: str
    allocation: str
    facility: str
    lock_state: str
    lock_source: str | None
    state: str
    nimby: bool
    centicores: int
    idle_centicores: int
    memory_kb: int
    idle_memory_kb: int
    free_kb: int
    gpus: int
    idle_gpus: int
    gpu_memory_kb: int
    idle_gpu_memory_kb: int
    load: int
    os: str
    thread_mode: int
    pinged: datetime
    booted: datetime
    procs: int
    tags: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunningProc:
    """What runs on a host. ``frame`` is None while a frame is being taken off its proc."""

    id: str
    job: str | None
    frame: str | None
    centicores: int
    memory_kb: int
    used_kb: int
    gpus: int
    dispatched: datetime
    local: bool


def list_hosts(
    connection: Connection,
    *,
    host_ids: Sequence[str] | None = None,
    alloc_id: str | None = None,
    lock: str | None = None,
    state: str | None = None,
    tag: str | None = None,
    part: str | None = None,
    most: int = 1_000_000,
) -> list[HostView]:
    """Hosts by name; of these ids, an allocation, lock state, hardware state or tag, or with ``part`` in their name."""
    wanted = {"hosts": host_ids, "alloc": alloc_id, "lock": lock, "state": state, "tag": tag, "part": part}
    return [HostView(*row) for row in connection.execute(_HOSTS, {**wanted, "most": most})]


def procs_of(connection: Connection, host_id: str) -> list[RunningProc]:
    """What runs on a host, the oldest first."""
    return [RunningProc(*row) for row in connection.execute(_PROCS, {"host": host_id})]


def set_lock(
    connection: Connection, host_ids: Collection[str], *, old: Collection[str], new: str, source: str
) -> list[str]:
    """Change the lock of hosts that have one of the ``old`` states; the ids of those changed."""
    wanted = {"hosts": list(host_ids), "old": list(old), "new": new, "source": source[:128]}
    return list(connection.execute(_SET_LOCK, wanted).scalars())


def add_tags(
    connection: Connection, host_ids: Sequence[str], tags: Sequence[str], new_ids: Sequence[str]
) -> dict[str, int]:
    """Give hosts manual tags they have not; how many each got. ``new_ids``: one for each host and tag."""
    connection.execute(_LOCK, {"hosts": list(host_ids)})
    pairs = [(host, tag) for host in host_ids for tag in tags]
    rows = {"hosts": [host for host, _ in pairs], "tags": [tag for _, tag in pairs], "ids": list(new_ids)}
    return _retagged(connection, connection.execute(_ADD_TAGS, {**rows, "type": TagType.MANUAL.value}).scalars().all())


def remove_tags(connection: Connection, host_ids: Sequence[str], tags: Sequence[str]) -> dict[str, int]:
    """Take manual tags from hosts; how many each lost."""
    connection.execute(_LOCK, {"hosts": list(host_ids)})
    removed = connection.execute(_REMOVE_TAGS, {"hosts": list(host_ids), "tags": list(tags)}).scalars().all()
    return _retagged(connection, removed)


def kinds_of_tags(connection: Connection, host_ids: Collection[str], tags: Collection[str]) -> dict[str, str]:
    """Of which kind (TagType) those of the tags are that one of the hosts still has."""
    rows = connection.execute(_TAG_KINDS, {"hosts": list(host_ids), "tags": list(tags)})
    return {row[0]: row[1] for row in rows}


def lock_hosts(connection: Connection, host_ids: Collection[str]) -> int:
    """Keep anything from being booked on hosts until this transaction ends; how many procs they have."""
    connection.execute(_LOCK, {"hosts": list(host_ids)})
    return int(connection.execute(_RUNNING, {"hosts": list(host_ids)}).scalar_one())


def move_hosts(connection: Connection, host_ids: Sequence[str], alloc_id: str, new_ids: Sequence[str]) -> int:
    """Put hosts into another allocation, with its tag in place of the old one; how many changed. Lock them first."""
    hosts = {"hosts": list(host_ids)}
    moved = connection.execute(_MOVE, {**hosts, "alloc": alloc_id}).rowcount
    connection.execute(_DROP_ALLOC_TAGS, hosts)
    tag = connection.execute(_ALLOC_TAG, {"alloc": alloc_id}).scalar_one()
    if tag:
        rows = {"ids": list(new_ids), "tags": [tag] * len(host_ids), "type": TagType.ALLOC.value}
        connection.execute(_ADD_TAGS, {**hosts, **rows})
    connection.execute(RECALCULATE_TAGS, hosts)
    return moved


def hardware_state(connection: Connection, host_id: str) -> str:
    """UP, DOWN and so on."""
    return str(connection.execute(_STATE, {"host": host_id}).scalar_one())


def delete_host(connection: Connection, host_id: str) -> None:
    """Delete a host, its tags, statistics and comments. It comes back when its RQD reports again. Lock it first."""
    connection.execute(_DELETE_COMMENTS, {"host": host_id})
    connection.execute(_DELETE, {"host": host_id})


def _retagged(connection: Connection, changed: Sequence[str]) -> dict[str, int]:
    """Rewrite host.str_tags of the hosts named, each as often as its tags changed."""
    counts = {host: changed.count(host) for host in sorted(set(changed))}
    connection.execute(RECALCULATE_TAGS, {"hosts": list(counts)})
    return counts
