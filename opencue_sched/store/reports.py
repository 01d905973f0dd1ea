"""Statements by which the reports of hosts find, make and change rows of hosts, and write their statistics.

Booking locks rows of table host. So a regular report writes only host_stat, for many hosts at once, and leaves out the
rows that are locked; a reconciliation leaves out locked rows, too. Rows of table host are waited for only where a host
is new, has booted, takes another name, or reports another size or other locked cores.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.states import ThreadMode
from opencue_sched.store.arrays import texts
from opencue_sched.store.comments import add_comment, drop_comments
from opencue_sched.store.lookups import AS_WRITTEN, BY_KEYS, prepared, row_of, same_key
from opencue_sched.store.procs import HELD
from opencue_sched.store.shows import insert_row

LOCK_SECONDS = 2
"""How long the report of a host waits for a row that another transaction has locked. Other reports wait behind it."""
# Have statements of this transaction wait for a lock no longer than ``:time``.
_WAIT_BRIEFLY = text("SELECT set_config('lock_timeout', :time, true)")
_REPORTED = (
    "unnest(CAST(:names AS varchar[]), CAST(:shorts AS varchar[])) WITH ORDINALITY AS reported(name, short, place)"
)
# What a report is compared with: the host, its locked cores, whether anything runs there, and whether the host has the
# comment of mark_full_temp. OFFSET 0 has both asked host by host: PostgreSQL might rather read all procs of the farm.
_HOST = f"""
    SELECT found.place, host.pk_host AS id, host.str_name AS name, host.str_lock_state AS lock_state,
           host_stat.str_state AS state, host.str_lock_source AS lock_source,
           coalesce((SELECT locked.centicores FROM opencue_sched_locked_cores locked
                      WHERE locked.pk_host = host.pk_host), 0) AS locked_centicores,
           alloc.str_tag AS alloc_tag, host_stat.ts_ping AS pinged_at,
           EXISTS (SELECT FROM proc WHERE proc.pk_host = host.pk_host OFFSET 0) AS busy,
           EXISTS (SELECT FROM comments WHERE comments.pk_host = host.pk_host AND str_user = :user
                      AND str_subject = :subject OFFSET 0) AS marked,
           int_procs AS procs, int_cores AS centicores, int_mem AS memory_kb, int_gpus AS gpus,
           int_gpu_mem AS gpu_memory_kb, b_nimby AS nimby
      FROM found
      JOIN {row_of("host", "host", "pk_host = found.pk_host")} ON true
      JOIN {row_of("host_stat", "host_stat", "pk_host = host.pk_host")} ON true
      JOIN {row_of("alloc", "alloc", "pk_alloc = host.pk_alloc")} ON true
"""  # noqa: S608 - only our own constants
# The hosts that report under names. The full name is looked for first; else the host's own name, which is the full name
# or, on a host without a full name, the short one. "(str_fqdn IS NULL) IS TRUE" is a condition that no index serves: by
# the index of a plain "str_fqdn IS NULL" PostgreSQL would read all hosts without a full name.
_FIND_HOSTS = prepared(
    f"""
    {BY_KEYS}
    WITH found AS (
        SELECT reported.place, named.pk_host FROM {_REPORTED}
         CROSS JOIN LATERAL (
               SELECT pk_host FROM host
                WHERE str_fqdn = reported.name OR str_name = reported.name
                   OR (str_name = reported.short AND (str_fqdn IS NULL) IS TRUE)
                ORDER BY (str_fqdn = reported.name) DESC NULLS LAST LIMIT 1) named)
    {_HOST}
    """  # noqa: S608 - only our own constants
)
# The hosts that report under names, without regard to case, for which there is no index.
_FIND_HOSTS_IN_ANY_CASE = text(
    f"""
    WITH reported AS MATERIALIZED (
        SELECT place, lower(name) AS name, lower(short) AS short FROM {_REPORTED}),
    found AS (
        SELECT DISTINCT ON (place) place, pk_host FROM (
            SELECT place, pk_host, 1 AS choice, str_name FROM reported JOIN host ON lower(str_fqdn) = reported.name
             UNION ALL
            SELECT place, pk_host, 2, str_name FROM reported JOIN host ON lower(str_name) = reported.name
             UNION ALL
            SELECT place, pk_host, 2, str_name FROM reported JOIN host ON lower(str_name) = reported.short
             WHERE str_fqdn IS NULL) named
         ORDER BY place, choice, str_name)
    {_HOST}
    """  # noqa: S608 - only our own constants
)
# The host that has a short name, in any case, under whatever domain.
_FIND_NAMESAKE = text(
    """
    SELECT str_name AS name, coalesce(str_fqdn, str_name) AS full_name
      FROM host WHERE lower(str_name) = lower(:short) ORDER BY str_name LIMIT 1
    """
)
# A host with that short name, silent for the given time, goes on under another full name.
_TAKE_OVER = text(
    """
    WITH silent AS (
        SELECT host.pk_host, host.str_fqdn FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host
         WHERE lower(host.str_name) = lower(:short)
           AND host_stat.ts_ping < current_timestamp - CAST(:silent AS float8) * interval '1 second'
         ORDER BY (host.str_name = :short) DESC, host.str_name LIMIT 1 FOR NO KEY UPDATE)
    UPDATE host SET str_fqdn = :full_name FROM silent WHERE host.pk_host = silent.pk_host
    RETURNING host.str_name AS name, silent.str_fqdn AS before
    """
)
# The allocation of a new host: one of its facility with one of its tags, the earlier tag first; else the default one.
_FIND_ALLOC = text(
    """
    SELECT alloc.pk_alloc, alloc.str_tag
      FROM alloc JOIN facility ON facility.pk_facility = alloc.pk_facility
     WHERE coalesce(alloc.b_enabled, true)
       AND ((facility.str_name = :facility AND alloc.str_tag = ANY(CAST(:tags AS varchar[]))) OR alloc.b_default)
     ORDER BY CASE WHEN facility.str_name = :facility
                   THEN array_position(CAST(:tags AS varchar[]), alloc.str_tag) END NULLS LAST,
              alloc.b_default DESC, alloc.str_name
     LIMIT 1
    """
)
# A row that another transaction is changing is left to the next report.
_UPDATE_HOST_STATS = prepared(
    f"""
    {BY_KEYS}
    WITH status AS (
        SELECT status.*
          FROM json_to_recordset(CAST(:rows AS json))
                 AS status(host varchar, total_mem bigint, free_mem bigint, total_swap bigint, free_swap bigint,
                           total_mcp bigint, free_mcp bigint, total_gpu_mem bigint, free_gpu_mem bigint, load bigint,
                           boot_time bigint, os varchar)
         CROSS JOIN LATERAL (
               SELECT FROM host_stat WHERE pk_host = status.host FOR NO KEY UPDATE SKIP LOCKED) locked)
    UPDATE host_stat
       SET int_mem_total = total_mem, int_mem_free = free_mem, int_swap_total = total_swap,
           int_swap_free = free_swap, int_mcp_total = total_mcp, int_mcp_free = free_mcp,
           int_gpu_mem_total = total_gpu_mem, int_gpu_mem_free = free_gpu_mem, int_load = load,
           ts_booted = to_timestamp(boot_time), ts_ping = current_timestamp, str_os = os
      FROM status WHERE {same_key("host_stat.pk_host", "status.host")}
    RETURNING host_stat.pk_host
    """  # noqa: S608 - only our own constants
)
# Lock the row of a host.
_LOCK_HOST = text("SELECT pk_host FROM host WHERE pk_host = :host FOR NO KEY UPDATE")
# Lock the rows of these hosts that no transaction has locked.
_LOCK_FREE_HOSTS = text(
    f"""
    {AS_WRITTEN}
    SELECT pk_host FROM host WHERE pk_host = ANY(CAST(:hosts AS varchar[]))
     ORDER BY pk_host FOR NO KEY UPDATE SKIP LOCKED
    """  # noqa: S608 - only our own constant
)
# Give a host the size it reports, unless something runs on it and it has not just booted.
_RESIZE_HOST = text(
    """
    UPDATE host
       SET b_nimby = :nimby, int_procs = :procs, int_cores = :centicores, int_mem = :memory_kb, int_gpus = :gpus,
           int_gpu_mem = :gpu_memory_kb
     WHERE pk_host = :host AND (:boot OR NOT EXISTS (SELECT FROM proc WHERE proc.pk_host = host.pk_host))
    """
)
# Set what hosts have idle to what their procs leave of the totals, and return the hosts where that was another amount.
_RECONCILE_HOSTS = text(
    f"""
    UPDATE host
       SET int_cores_idle = greatest(0, int_cores - used.cores), int_mem_idle = greatest(0, int_mem - used.memory),
           int_gpus_idle = greatest(0, int_gpus - used.gpus),
           int_gpu_mem_idle = greatest(0, int_gpu_mem - used.gpu_memory)
      FROM unnest(CAST(:hosts AS varchar[])) AS wanted(pk_host)
     CROSS JOIN LATERAL (SELECT {HELD} FROM proc WHERE proc.pk_host = wanted.pk_host) used
     WHERE host.pk_host = wanted.pk_host
       AND (int_cores_idle, int_mem_idle, int_gpus_idle, int_gpu_mem_idle) IS DISTINCT FROM
           (greatest(0, int_cores - used.cores), greatest(0, int_mem - used.memory),
            greatest(0, int_gpus - used.gpus), greatest(0, int_gpu_mem - used.gpu_memory))
    RETURNING host.pk_host
    """  # noqa: S608 - only our own constant
)
# Set how many cores of a host are locked: none are no row.
_SET_LOCKED_CORES = (
    text("DELETE FROM opencue_sched_locked_cores WHERE pk_host = :host AND :centicores = 0"),
    text(
        """
        INSERT INTO opencue_sched_locked_cores (pk_host, centicores) SELECT :host, :centicores WHERE :centicores > 0
        ON CONFLICT (pk_host) DO UPDATE SET centicores = excluded.centicores
        """
    ),
)
_FULL_TEMP = {"user": "opencue-sched", "subject": "temporary directory full"}
"""What the comment of mark_full_temp is found by."""


@dataclass(frozen=True, slots=True)
class HostSize:
    """What a host offers. Centicores, KB."""

    procs: int
    """How many processors (sockets) the machine has; no procs in OpenCue's sense."""
    centicores: int
    memory_kb: int
    gpus: int
    gpu_memory_kb: int
    nimby: bool
    """Whether RQD locks the host while a person uses the machine."""


HostRow = Row[Any]
"""A host as the database has it: ``id``, ``name``, ``lock_state``, ``lock_source``, ``state``, ``locked_centicores``,
``alloc_tag`` and the fields of HostSize.

``pinged_at``: when the last report of the host came. ``busy``: whether the host has procs. ``marked``: whether the host
has the comment of `mark_full_temp`. Only a REPAIR with that comment ends by a report."""


def wait_briefly(connection: Connection) -> None:
    """Bound how long each statement of this transaction waits for a locked row: after LOCK_SECONDS the statement raises
    OperationalError."""
    connection.execute(_WAIT_BRIEFLY, {"time": f"{LOCK_SECONDS}s"})


def find_hosts(connection: Connection, names: Sequence[tuple[str, str]]) -> list[HostRow | None]:
    """The hosts that report under these (full name, short name), in their order; None where there is none.

    A host is looked for by its full name, then by the name of its row, and at last by both without regard to case.
    """
    found: dict[int, HostRow] = {}
    for statement in (_FIND_HOSTS, _FIND_HOSTS_IN_ANY_CASE):
        left = [place for place in range(len(names)) if place not in found]
        if left:
            full, short = ([names[place][which] for place in left] for which in (0, 1))
            wanted = {"names": texts(full), "shorts": texts(short), **_FULL_TEMP}
            found |= {left[row.place - 1]: row for row in connection.execute(statement, wanted)}
    return [found.get(place) for place in range(len(names))]


def find_namesake(connection: Connection, short_name: str) -> Row[Any] | None:
    """The ``name`` and ``full_name`` of the host with that short name, in any case; None without such a host."""
    return connection.execute(_FIND_NAMESAKE, {"short": short_name}).one_or_none()


def take_over_host(connection: Connection, short_name: str, full_name: str, *, silent: float) -> Row[Any] | None:
    """Give the row of a host that has not reported for ``silent`` seconds to the machine of the same short name that
    reports now, by its full name. Returns the row's ``name`` and the full name ``before``; None where no row has that
    name, or its host is not silent."""
    wanted = {"short": short_name, "full_name": full_name, "silent": silent}
    return connection.execute(_TAKE_OVER, wanted).one_or_none()


def find_alloc(connection: Connection, facility: str, tags: Sequence[str]) -> Row[Any] | None:
    """The allocation (``pk_alloc``, ``str_tag``) of the facility that the first of these tags names which names any;
    else the default allocation. None without either."""
    return connection.execute(_FIND_ALLOC, {"facility": facility, "tags": list(tags)}).first()


def insert_host(connection: Connection, alloc_id: str, name: str, fqdn: str, *, nimby: bool) -> str | None:
    """Make a host, OPEN and UP, of no size yet. Returns the host's id, or None when the name is taken."""
    mode = ThreadMode.ALL if nimby else ThreadMode.AUTO
    row = {"pk_alloc": alloc_id, "str_name": name, "str_fqdn": fqdn, "str_lock_state": "OPEN"}
    host_id: str | None = insert_row(connection, "host", **row, int_thread_mode=mode.value)
    if host_id is not None:
        insert_row(connection, "host_stat", pk_host=host_id, str_state="UP")
    return host_id


def update_statuses(connection: Connection, statuses: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Write the host_stat rows of hosts (by id), with the present time as ts_ping. Returns the hosts that were written;
    a row that another transaction has locked is left to the next report.

    The keys of a status are the columns of ``status`` in _UPDATE_HOST_STATS but ``host``. Amounts are KB, ``load`` is
    the load average times 100, ``boot_time`` epoch seconds.
    """
    rows = json.dumps([{"host": host_id, **status} for host_id, status in statuses.items()])
    return frozenset(connection.execute(_UPDATE_HOST_STATS, {"rows": rows}).scalars())


def resize_host(connection: Connection, host_id: str, size: HostSize, *, boot: bool) -> None:
    """Set the totals of a host, and as idle what its procs leave of the totals.

    While the host has procs, its totals stay: the first report after their end changes them. After a ``boot`` they are
    set at once. The procs have no process there any more, and others may be booked before all of these are released:
    the host might never be without procs.
    """
    # Locked first: a booking that commits meanwhile would otherwise not be seen by the check for procs.
    connection.execute(_LOCK_HOST, {"host": host_id})
    connection.execute(_RESIZE_HOST, {"host": host_id, "boot": boot, **asdict(size)})
    reconcile_hosts(connection, [host_id])


def lock_free_hosts(connection: Connection, host_ids: Collection[str]) -> list[str]:
    """Lock the rows of these hosts that no other transaction has locked, without waiting. Returns their hosts' ids."""
    return list(connection.execute(_LOCK_FREE_HOSTS, {"hosts": texts(host_ids)}).scalars())


def reconcile_hosts(connection: Connection, host_ids: Collection[str]) -> list[str]:
    """Set what hosts have idle to their totals minus their procs. Returns the ids of the hosts where it was wrong.

    Hosts whose rows another transaction has locked are left out.
    """
    # The procs are read after the lock: until the end of this transaction no booking adds any.
    locked = lock_free_hosts(connection, host_ids)
    return list(connection.execute(_RECONCILE_HOSTS, {"hosts": texts(locked)}).scalars())


def lock_cores(connection: Connection, host_id: str, centicores: int) -> None:
    """Set how many centicores of a host its RQD has locked, which nothing is booked on. A commit of bookings there
    waits for the end of this transaction, and then reads the number."""
    connection.execute(_LOCK_HOST, {"host": host_id})
    for statement in _SET_LOCKED_CORES:
        connection.execute(statement, {"host": host_id, "centicores": centicores})


def mark_full_temp(connection: Connection, host_id: str, message: str | None) -> None:
    """Comment on the host, as Cuebot does, that its temporary directory is full. None removes the comment."""
    if message is None:
        drop_comments(connection, "host", host_id, **_FULL_TEMP)
    else:
        add_comment(connection, "host", [host_id], **_FULL_TEMP, message=message)
