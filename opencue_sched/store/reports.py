"""What host reports make of hosts: their rows, statistics, states, tags and sizes.

Only a boot and the rare reconciliation wait for the host row, which booking needs; everything else writes host_stat.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.states import HardwareState, LockState, TagType

_FIND_HOST = text(
    """
    SELECT host.pk_host, host.str_name, host.str_fqdn, host.str_lock_state, host_stat.str_state, alloc.str_tag,
           int_procs, int_cores, int_mem, int_gpus, int_gpu_mem, b_nimby,
           EXISTS (SELECT FROM proc WHERE proc.pk_host = host.pk_host) AS busy,
           EXISTS (SELECT FROM comments WHERE comments.pk_host = host.pk_host AND str_user = :user
                      AND str_subject = :subject) AS marked
      FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host JOIN alloc ON alloc.pk_alloc = host.pk_alloc
     WHERE host.str_fqdn = :name OR host.str_name = :name OR (host.str_name = :short AND host.str_fqdn IS NULL)
     ORDER BY (host.str_fqdn = :name) DESC NULLS LAST LIMIT 1
    """
)
_TAKEN_BY = text("SELECT str_fqdn FROM host WHERE str_name = :short")
_FIND_ALLOC = text(
    """
    SELECT alloc.pk_alloc, alloc.str_tag, alloc.str_name
      FROM alloc JOIN facility ON facility.pk_facility = alloc.pk_facility
     WHERE coalesce(alloc.b_enabled, true)
       AND ((facility.str_name = :facility AND alloc.str_tag = ANY(CAST(:tags AS varchar[])))
            OR (facility.str_name = :facility AND alloc.str_tag = :default_tag) OR alloc.b_default)
     ORDER BY coalesce(CASE WHEN facility.str_name = :facility
                            THEN array_position(CAST(:tags AS varchar[]), alloc.str_tag) END, 1000000),
              (facility.str_name = :facility AND alloc.str_tag = :default_tag) DESC, alloc.b_default DESC,
              alloc.str_name
     LIMIT 1
    """
)
_INSERT_HOST = text(
    """
    INSERT INTO host (pk_host, pk_alloc, str_name, str_fqdn, b_nimby, str_lock_state, int_thread_mode, int_procs,
                      int_cores, int_cores_idle, int_mem, int_mem_idle, int_gpus, int_gpus_idle, int_gpu_mem,
                      int_gpu_mem_idle)
    VALUES (:id, :alloc, :name, :fqdn, :nimby, 'OPEN', :thread_mode, :procs, :cores, :cores, :memory, :memory, :gpus,
            :gpus, :gpu_memory, :gpu_memory)
    ON CONFLICT DO NOTHING RETURNING pk_host
    """
)
_INSERT_HOST_STAT = text(
    "INSERT INTO host_stat (pk_host_stat, pk_host, str_state) VALUES (:id, :id, :state) ON CONFLICT DO NOTHING"
)
_UPDATE_HOST_STAT = text(
    """
    UPDATE host_stat
       SET int_mem_total = :memory_total, int_mem_free = :memory_free, int_swap_total = :swap_total,
           int_swap_free = :swap_free, int_mcp_total = :temp_total, int_mcp_free = :temp_free,
           int_gpu_mem_total = :gpu_memory_total, int_gpu_mem_free = :gpu_memory_free, int_load = :load,
           ts_booted = to_timestamp(:booted_at), ts_ping = current_timestamp, str_os = :os
     WHERE pk_host = :host
    """
)
_SET_HARDWARE_STATE = text(
    "UPDATE host_stat SET str_state = :new WHERE pk_host = :host AND str_state = :old RETURNING pk_host"
)
_SET_LOCK_STATE = text(
    """
    UPDATE host SET str_lock_state = :new, str_lock_source = :source
     WHERE pk_host = :host AND str_lock_state = :old RETURNING pk_host
    """
)
_LOCK_HOST = text("SELECT int_mem_idle FROM host WHERE pk_host = :host FOR NO KEY UPDATE")
_RESIZE_HOST = text(
    """
    UPDATE host
       SET b_nimby = :nimby, int_procs = :procs, int_cores = :cores, int_cores_idle = :cores, int_mem = :memory,
           int_mem_idle = :memory, int_gpus = :gpus, int_gpus_idle = :gpus, int_gpu_mem = :gpu_memory,
           int_gpu_mem_idle = :gpu_memory
     WHERE pk_host = :host AND NOT EXISTS (SELECT FROM proc WHERE proc.pk_host = host.pk_host)
       AND (b_nimby, int_procs, int_cores, int_cores_idle, int_mem, int_mem_idle, int_gpus, int_gpus_idle, int_gpu_mem,
            int_gpu_mem_idle) IS DISTINCT FROM
           (:nimby, :procs, CAST(:cores AS bigint), CAST(:cores AS bigint), CAST(:memory AS bigint),
            CAST(:memory AS bigint), CAST(:gpus AS bigint), CAST(:gpus AS bigint), CAST(:gpu_memory AS bigint),
            CAST(:gpu_memory AS bigint))
    RETURNING pk_host
    """
)
_RECONCILE_HOST = text(
    """
    UPDATE host
       SET int_cores_idle = greatest(0, int_cores - used.cores), int_mem_idle = greatest(0, int_mem - used.memory),
           int_gpus_idle = greatest(0, int_gpus - used.gpus),
           int_gpu_mem_idle = greatest(0, int_gpu_mem - used.gpu_memory)
      FROM (SELECT coalesce(sum(int_cores_reserved), 0) AS cores, coalesce(sum(int_mem_reserved), 0) AS memory,
                   coalesce(sum(int_gpus_reserved), 0) AS gpus, coalesce(sum(int_gpu_mem_reserved), 0) AS gpu_memory
              FROM proc WHERE pk_host = :host) used
     WHERE pk_host = :host
       AND (int_cores_idle, int_mem_idle, int_gpus_idle, int_gpu_mem_idle) IS DISTINCT FROM
           (greatest(0, int_cores - used.cores), greatest(0, int_mem - used.memory),
            greatest(0, int_gpus - used.gpus), greatest(0, int_gpu_mem - used.gpu_memory))
    RETURNING pk_host
    """
)
_READ_TAGS = text("SELECT str_tag FROM host_tag WHERE pk_host = :host AND str_tag_type = :kind ORDER BY str_tag")
_DELETE_TAGS = text("DELETE FROM host_tag WHERE pk_host = :host AND str_tag_type = :kind")
_INSERT_TAGS = text(
    """
    INSERT INTO host_tag (pk_host_tag, pk_host, str_tag, str_tag_type, b_constant)
    SELECT id, :host, tag, :kind, :constant
      FROM unnest(CAST(:ids AS varchar[]), CAST(:tags AS varchar[])) AS new(id, tag)
    """
)
# Cuebot's recalculate_tags() fails on more than 128 characters, and with it the host; the column is only for display.
_SHOW_TAGS = text(
    """
    UPDATE host SET str_tags = left(tags.joined, 128)
      FROM (SELECT coalesce(string_agg(str_tag, ' ' ORDER BY str_tag_type, str_tag), '') AS joined
              FROM host_tag WHERE pk_host = :host) tags
     WHERE pk_host = :host
    """
)
_ADD_COMMENT = text(
    """
    INSERT INTO comments (pk_comment, pk_host, str_user, str_subject, str_message)
    VALUES (:id, :host, :user, :subject, :message)
    """
)
_DROP_COMMENTS = text("DELETE FROM comments WHERE pk_host = :host AND str_user = :user AND str_subject = :subject")
_FLAG_COMMENT = text(
    """
    UPDATE host SET b_comment = EXISTS (SELECT FROM comments WHERE comments.pk_host = host.pk_host)
     WHERE pk_host = :host
    """
)
_FULL_TEMP_USER, _FULL_TEMP_SUBJECT = "opencue-sched", "temporary directory full"


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host as the database has it. ``busy``: it has procs. ``marked``: it is in REPAIR, because its temporary
    directory was full."""

    id: str
    name: str
    lock_state: LockState
    state: HardwareState
    alloc_tag: str
    size: HostSize
    busy: bool
    marked: bool


@dataclass(frozen=True, slots=True)
class HostSize:
    """What a host offers. Centicores, KB."""

    procs: int
    centicores: int
    memory_kb: int
    gpus: int
    gpu_memory_kb: int
    nimby: bool


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What a host says of itself with every report. KB; ``load`` is load average x 100; ``booted_at`` an epoch."""

    memory_total: int
    memory_free: int
    swap_total: int
    swap_free: int
    temp_total: int
    temp_free: int
    gpu_memory_total: int
    gpu_memory_free: int
    load: int
    booted_at: int
    os: str


def find_host(connection: Connection, name: str, short_name: str) -> HostRow | None:
    """The host that reports under ``name``: by full name, else by name."""
    parameters = {"name": name, "short": short_name, "user": _FULL_TEMP_USER, "subject": _FULL_TEMP_SUBJECT}
    row = connection.execute(_FIND_HOST, parameters).first()
    return None if row is None else _host_row(row)


def name_taken_by(connection: Connection, short_name: str) -> str | None:
    """The full name of the host that already has this short name."""
    return connection.execute(_TAKEN_BY, {"short": short_name}).scalar()


def find_alloc(
    connection: Connection, facility: str, tags: Sequence[str], default_tag: str
) -> tuple[str, str, str] | None:
    """(id, tag, name) of the first tag that names an allocation of the facility, else of the default allocation."""
    parameters = {"facility": facility, "tags": list(tags), "default_tag": default_tag}
    row = connection.execute(_FIND_ALLOC, parameters).first()
    return None if row is None else (row.pk_alloc, row.str_tag, row.str_name)


def insert_host(
    connection: Connection,
    *,
    alloc_id: str,
    name: str,
    fqdn: str,
    thread_mode: int,
    size: HostSize,
    state: HardwareState,
) -> str | None:
    """A new OPEN host, wholly idle; its id, or None when the name is taken."""
    host_id = str(uuid.uuid4())
    parameters = {"id": host_id, "alloc": alloc_id, "name": name, "fqdn": fqdn, "thread_mode": thread_mode}
    if connection.execute(_INSERT_HOST, {**parameters, **_size(size)}).first() is None:
        return None
    connection.execute(_INSERT_HOST_STAT, {"id": host_id, "state": state.value})
    return host_id


def update_status(connection: Connection, host_id: str, status: HostStatus) -> None:
    """Write host_stat; ts_ping becomes now."""
    connection.execute(_UPDATE_HOST_STAT, {"host": host_id, **asdict(status)})


def set_hardware_state(connection: Connection, host_id: str, old: HardwareState, new: HardwareState) -> bool:
    """Change the hardware state if it is still ``old``."""
    return connection.execute(_SET_HARDWARE_STATE, {"host": host_id, "old": old, "new": new}).first() is not None


def set_lock_state(connection: Connection, host_id: str, old: LockState, new: LockState, source: str) -> bool:
    """Change the lock state if it is still ``old``."""
    parameters = {"host": host_id, "old": old, "new": new, "source": source}
    return connection.execute(_SET_LOCK_STATE, parameters).first() is not None


def resize_host(connection: Connection, host_id: str, size: HostSize) -> bool:
    """After a boot, or when the procs left then are gone: new totals, all idle. Only while the host has no proc.
    Returns whether anything changed.

    The row is locked first: a booking that commits meanwhile would otherwise not be seen by the check for procs.
    """
    connection.execute(_LOCK_HOST, {"host": host_id})
    return connection.execute(_RESIZE_HOST, {"host": host_id, **_size(size)}).first() is not None


def reconcile_host(connection: Connection, host_id: str) -> bool:
    """Set idle to total minus the procs (I7), in the order lock, read, write. Returns whether it was wrong."""
    connection.execute(_LOCK_HOST, {"host": host_id})
    return connection.execute(_RECONCILE_HOST, {"host": host_id}).first() is not None


def replace_tags(connection: Connection, host_id: str, kind: TagType, tags: Sequence[str]) -> bool:
    """Make ``tags`` the host's tags of one kind; returns whether they changed."""
    wanted = sorted(set(tags))
    if [row.str_tag for row in connection.execute(_READ_TAGS, {"host": host_id, "kind": kind})] == wanted:
        return False
    connection.execute(_DELETE_TAGS, {"host": host_id, "kind": kind})
    ids = [str(uuid.uuid4()) for _ in wanted]
    constant = kind is TagType.ALLOC
    parameters = {"host": host_id, "kind": kind, "constant": constant, "ids": ids, "tags": wanted}
    connection.execute(_INSERT_TAGS, parameters)
    connection.execute(_SHOW_TAGS, {"host": host_id})
    return True


def mark_full_temp(connection: Connection, host_id: str, message: str) -> None:
    """Note on the host, where Cuebot's tools show it, that its temporary directory is full."""
    parameters = {"id": str(uuid.uuid4()), "host": host_id, "user": _FULL_TEMP_USER, "subject": _FULL_TEMP_SUBJECT}
    connection.execute(_ADD_COMMENT, {**parameters, "message": message[:4000]})
    connection.execute(_FLAG_COMMENT, {"host": host_id})


def unmark_full_temp(connection: Connection, host_id: str) -> None:
    """Remove that note."""
    connection.execute(_DROP_COMMENTS, {"host": host_id, "user": _FULL_TEMP_USER, "subject": _FULL_TEMP_SUBJECT})
    connection.execute(_FLAG_COMMENT, {"host": host_id})


def _size(size: HostSize) -> dict[str, Any]:
    return {
        "procs": size.procs,
        "cores": size.centicores,
        "memory": size.memory_kb,
        "gpus": size.gpus,
        "gpu_memory": size.gpu_memory_kb,
        "nimby": size.nimby,
    }


def _host_row(row: Row[Any]) -> HostRow:
    size = HostSize(row.int_procs, row.int_cores, row.int_mem, row.int_gpus, row.int_gpu_mem, row.b_nimby)
    return HostRow(
        row.pk_host,
        row.str_name,
        LockState(row.str_lock_state),
        HardwareState(row.str_state),
        row.str_tag,
        size,
        row.busy,
        row.marked,
    )
