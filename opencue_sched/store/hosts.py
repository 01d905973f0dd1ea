"""Hosts that may take frames now (facts C).

OPEN is the lock gate (a nimby-locked host is not OPEN), UP the hardware gate, and the last report must be fresh. Memory
is the lesser of what no proc reserves and what the machine reports free. Nothing is taken from the subscription here:
upstream adds its lagging counters to every host, and every host of a show looked full or free together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import Connection, Row, text

from opencue_sched.domain.farm import BadRow, Host
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.units import MOST_CENTICORES, MOST_GPUS, MOST_KB

OnBadRow = Callable[[BadRow], object]
"""Told each row that makes no sense and is left out."""

log = structlog.get_logger(__name__)

_COLUMNS = """
    SELECT h.pk_host, h.str_name, h.pk_alloc, a.pk_facility, h.int_thread_mode, s.str_os,
           h.int_cores, h.int_cores_idle, h.int_mem, LEAST(h.int_mem_idle, s.int_mem_free) AS mem_idle,
           h.int_gpus, h.int_gpus_idle, h.int_gpu_mem, LEAST(h.int_gpu_mem_idle, s.int_gpu_mem_free) AS gpu_mem_idle,
           CAST(extract(epoch FROM clock_timestamp() - s.ts_ping) AS double precision) AS report_age,
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


@dataclass(frozen=True, slots=True)
class FetchedHost:
    """A host and the age of its last report in seconds, both as of the query."""

    host: Host
    report_age: float


def fetch_groups(
    connection: Connection, facility_id: str, tags: Sequence[str], staleness: float, on_bad: OnBadRow = _log_bad
) -> dict[str, list[FetchedHost]]:
    """The hosts of a facility that carry each tag, of any allocation, heard of in the last ``staleness`` seconds: by
    tag, and a tag without hosts has an empty list. One statement."""
    rows = connection.execute(_OF_TAGS, {"facility_id": facility_id, "tags": list(tags), "staleness": staleness})
    groups: dict[str, list[FetchedHost]] = {tag: [] for tag in tags}
    by_tag: defaultdict[str, list[FetchedHost]] = defaultdict(list)
    for fetched in _hosts(rows, on_bad):
        for tag in fetched.host.tags:
            by_tag[tag].append(fetched)
    for tag in groups:
        groups[tag] = by_tag[tag]
    return groups


def fetch_hosts_by_id(
    connection: Connection, ids: Sequence[str], staleness: float, on_bad: OnBadRow = _log_bad
) -> list[FetchedHost]:
    """Those of these hosts that may take frames now. One that is absent from the answer may not."""
    return list(_hosts(connection.execute(_BY_ID, {"ids": list(ids), "staleness": staleness}), on_bad))


def _hosts(rows: Iterable[Row[Any]], on_bad: OnBadRow) -> Iterable[FetchedHost]:
    for row in rows:
        try:
            yield FetchedHost(_host(row), row.report_age)
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
