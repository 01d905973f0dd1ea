"""Hosts reserved for wide frames (``opencue_sched_hold``), and for how long layers have been blocked
(``opencue_sched_blocked``).

One transaction of the reservation task (dispatch/reservations.py) reads and writes all of it, under an advisory lock of
its own. Hosts and reservations whose rows others have locked are left to the next run. A host is reserved under the
lock on its row, which a booking has, too, so a booking either is there before the reservation or knows it.

``facilities`` are ids of facilities everywhere here, and None stands for all. ``staleness`` is the number of seconds
after which a host that has not reported takes no frames (host_cache.host_staleness_threshold).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.hosts import Reservation
from opencue_sched.store.lookups import row_of
from opencue_sched.store.pending import SOME_WORK
from opencue_sched.store.tags import compared_tag

_LOCK_KEY = 0x6F63732D686F6C64
"""Advisory lock of the task: the bytes of ``ocs-hold``."""

MAY_TAKE_FRAMES = """h.str_lock_state = 'OPEN' AND s.str_state = 'UP'
      AND s.ts_ping > clock_timestamp() - CAST(:staleness AS double precision) * interval '1 second'"""
"""The condition that a host ``h`` with its statistics ``s`` is open, up, and has reported within ``:staleness``
seconds."""
LOCKED_CENTICORES = """coalesce((
        SELECT locked.centicores FROM opencue_sched_locked_cores locked WHERE locked.pk_host = h.pk_host), 0)"""
"""The centicores of a host ``h`` that are locked on its RQD, which frames cannot have."""
HELD = f"""LATERAL (
        SELECT hold.pk_layer, json_build_array(
                   hold.pk_layer, hold.pk_job, hold.cores, hold.memory_kb, hold.gpus,
                   CAST(extract(epoch FROM hold.until) AS double precision),
                   CAST(extract(epoch FROM hold.free_at) AS double precision),
                   job.str_name || '/' || layer.str_name) AS hold
        FROM opencue_sched_hold hold
        JOIN {row_of("layer", "layer", "pk_layer = hold.pk_layer")} ON true
        JOIN {row_of("job", "job", "pk_job = hold.pk_job")} ON true
        WHERE hold.pk_host = h.pk_host AND hold.until > clock_timestamp()
        OFFSET 0) held"""  # noqa: S608 - only our own constants
"""A lateral join, behind a table ``h`` of hosts, for the reservation of each host that has not run out. Its column
``hold`` has the fields of Reservation. PostgreSQL looks the reservations up host by host: statements ask for a few of
the reserved hosts."""
HOLD_COLUMNS = "held.pk_layer AS hold_layer, held.hold"
"""The columns that reservation_of reads, where HELD is joined as ``held``."""


def reservation_of(row: Row[Any]) -> Reservation | None:
    """The reservation in a row with HOLD_COLUMNS."""
    return None if row.hold is None else Reservation(*row.hold)


# Set up the transaction of the task. The server bounds how long it lasts: a process that is stopped in the middle would
# keep the advisory lock, for which no other process waits, and nothing would be reserved on the farm until it goes on.
_BEGIN = text(
    f"""
    SELECT set_config('statement_timeout', '20s', true), set_config('lock_timeout', '1s', true),
           set_config('idle_in_transaction_session_timeout', '10s', true);
    SELECT pg_try_advisory_xact_lock(:key) AS mine,
           CAST(extract(epoch FROM clock_timestamp()) AS double precision) AS now,
           (SELECT fence FROM opencue_sched_fence WHERE name = :role) AS fence,
           EXISTS (SELECT FROM opencue_sched_hold) OR EXISTS (SELECT FROM opencue_sched_blocked)
               OR {SOME_WORK} AS needed
    """  # noqa: S608 - only our own constant
)


def begin_task(connection: Connection, role: str) -> Row[Any] | None:
    """Begin the task's transaction; None when another process is in one.

    The row has the database's clock in epoch seconds (``now``), the ``fence`` of the leader elected last of this
    ``role``, as fences.py names it, if any, and whether there is anything to do (``needed``): in any facility a host is
    reserved, a layer has blocked seconds, or a frame waits that may be booked.
    """
    row = connection.execute(_BEGIN, {"key": _LOCK_KEY, "role": role}).one()
    return row if row.mine else None


# Hosts that take frames now and have one of these tags, grouped by what they offer when idle: the id of one host of
# each group, and the number of its hosts.
_HOST_KINDS = text(
    f"""
    SELECT min(h.pk_host) AS pk_host, count(*) AS hosts
    FROM host h JOIN host_stat s USING (pk_host) JOIN alloc a USING (pk_alloc) JOIN (
        SELECT t.pk_host, array_agg(DISTINCT {compared_tag("t.str_tag")}) AS tags
        FROM host_tag t
        WHERE {compared_tag("t.str_tag")} = ANY(CAST(:tags AS varchar[]))
        GROUP BY t.pk_host
    ) tagged USING (pk_host) LEFT JOIN opencue_sched_locked_cores locked USING (pk_host)
    WHERE {MAY_TAKE_FRAMES}
      AND (CAST(:facilities AS varchar[]) IS NULL OR a.pk_facility = ANY(CAST(:facilities AS varchar[])))
    GROUP BY a.pk_facility, h.pk_alloc, h.int_thread_mode, s.str_os, h.int_cores, h.int_mem, h.int_gpus, h.int_gpu_mem,
             locked.centicores, tagged.tags
    """  # noqa: S608 - only our own constant
)

# Which of these layers wait, for how long each has been blocked, and whether a frame of it was placed since that was
# written.
_LAYERS = text(
    """
    SELECT l.pk_layer, l.pk_job, l.str_name, ls.int_waiting_count AS waiting,
           coalesce(r.int_priority, 0) AS priority, coalesce(blocked.seconds, 0) AS blocked_seconds,
           CAST(extract(epoch FROM clock_timestamp() - coalesce(blocked.seen, clock_timestamp())) AS double precision)
               AS elapsed,
           blocked.waiting > ls.int_waiting_count
               OR EXISTS (SELECT FROM proc p WHERE p.pk_layer = l.pk_layer AND p.ts_booked >= blocked.seen) AS placed
    FROM layer l JOIN layer_stat ls USING (pk_layer)
    LEFT JOIN job_resource r ON r.pk_job = l.pk_job LEFT JOIN opencue_sched_blocked blocked USING (pk_layer)
    WHERE l.pk_layer = ANY(CAST(:layers AS varchar[])) AND ls.int_waiting_count > 0
    """
)

# Hosts that are not reserved and could take a layer's frames when idle, at most ``:most`` for each layer. Where there
# are more, a hash of host and layer draws a sample for each layer: its best host is about as good as the best of all.
_CANDIDATES = text(
    f"""
    SELECT asked.layer_id, host.pk_host
    FROM json_to_recordset(CAST(:asked AS json))
         AS asked(layer_id varchar, facility_id varchar, tags text[], alloc_ids text[], cores bigint, memory_kb bigint,
                  gpus int)
    CROSS JOIN LATERAL (
        SELECT h.pk_host
        FROM host h JOIN host_stat s USING (pk_host) JOIN alloc a USING (pk_alloc)
        WHERE {MAY_TAKE_FRAMES}
          AND a.pk_facility = asked.facility_id AND h.pk_alloc = ANY(asked.alloc_ids)
          AND h.int_cores - {LOCKED_CENTICORES} >= asked.cores * 100
          AND h.int_mem >= asked.memory_kb AND h.int_gpus >= asked.gpus
          AND EXISTS (SELECT FROM host_tag t WHERE t.pk_host = h.pk_host
                      AND {compared_tag("t.str_tag")} = ANY(asked.tags))
          AND NOT EXISTS (SELECT FROM opencue_sched_hold hold WHERE hold.pk_host = h.pk_host)
        ORDER BY md5(h.pk_host || asked.layer_id)
        LIMIT :most
    ) host
    """  # noqa: S608 - only our own constant
)

# What runs on these hosts, and when it ends if it takes its layer's mean run time.
_RUNS = text(
    """
    SELECT p.pk_host, p.int_cores_reserved AS centicores, p.int_mem_reserved AS memory_kb, p.int_gpus_reserved AS gpus,
           CAST(extract(epoch FROM coalesce(f.ts_started, p.ts_dispatched)) AS double precision)
               + CAST(u.int_clock_time_success AS double precision) / u.int_frame_success_count AS ends_at
    FROM proc p LEFT JOIN frame f USING (pk_frame)
    LEFT JOIN layer_usage u ON u.pk_layer = p.pk_layer AND u.int_frame_success_count > 0
    WHERE p.pk_host = ANY(CAST(:hosts AS varchar[]))
    """
)

# The hosts with a row of a reservation, also where the reservation has run out or the host was deleted.
_HOLDS = text(
    """
    SELECT hold.pk_host
    FROM opencue_sched_hold hold LEFT JOIN host h USING (pk_host) LEFT JOIN alloc a USING (pk_alloc)
    WHERE CAST(:facilities AS varchar[]) IS NULL OR a.pk_facility IS NULL
       OR a.pk_facility = ANY(CAST(:facilities AS varchar[]))
    """
)

# What the task writes.

# Write for how long layers have been blocked.
_WRITE_BLOCKED = text(
    """
    INSERT INTO opencue_sched_blocked AS blocked (pk_layer, seconds, waiting, seen)
    SELECT found.pk_layer, found.seconds, found.waiting, clock_timestamp()
    FROM unnest(CAST(:layers AS varchar[]), CAST(:seconds AS double precision[]), CAST(:waiting AS int[]))
         AS found(pk_layer, seconds, waiting)
    ON CONFLICT (pk_layer) DO UPDATE
    SET seconds = excluded.seconds, waiting = excluded.waiting, seen = excluded.seen
    """
)
# Forget all other layers, in these facilities or everywhere.
_FORGET_BLOCKED = text(
    """
    DELETE FROM opencue_sched_blocked blocked
    WHERE blocked.pk_layer <> ALL(CAST(:layers AS varchar[]))
      AND (CAST(:facilities AS varchar[]) IS NULL OR NOT EXISTS (
          SELECT FROM layer l JOIN job j ON j.pk_job = l.pk_job
          WHERE l.pk_layer = blocked.pk_layer AND j.pk_facility <> ALL(CAST(:facilities AS varchar[]))
      ))
    """
)
# A reservation that a booking is about to delete is locked by it: it is left to the booking.
_END = text(
    """
    DELETE FROM opencue_sched_hold WHERE pk_host IN (
        SELECT pk_host FROM opencue_sched_hold WHERE pk_host = ANY(CAST(:hosts AS varchar[])) FOR UPDATE SKIP LOCKED
    )
    RETURNING pk_host
    """
)
# Prolong reservations, except those that another transaction has locked.
_RENEW = text(
    """
    UPDATE opencue_sched_hold hold SET until = to_timestamp(kept.until), free_at = to_timestamp(kept.free_at)
    FROM json_to_recordset(CAST(:holds AS json))
         AS kept(host varchar, layer_id varchar, until double precision, free_at double precision)
    WHERE hold.pk_host = kept.host AND hold.pk_layer = kept.layer_id AND hold.pk_host IN (
        SELECT pk_host FROM opencue_sched_hold WHERE pk_host = ANY(CAST(:hosts AS varchar[])) FOR UPDATE SKIP LOCKED
    )
    """
)
# Reserve hosts for layers; a host that another transaction has locked, or that is reserved by now, is left out.
_GRANT = text(
    """
    WITH locked AS (
        SELECT pk_host FROM host WHERE pk_host = ANY(CAST(:hosts AS varchar[]))
        ORDER BY pk_host FOR NO KEY UPDATE SKIP LOCKED
    )
    INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, until, free_at)
    SELECT locked.pk_host, layer_id, job_id, cores, memory_kb, gpus, to_timestamp(until), to_timestamp(free_at)
    FROM locked
    JOIN json_to_recordset(CAST(:holds AS json))
         AS granted(host varchar, layer_id varchar, job_id varchar, cores int, memory_kb bigint, gpus int,
                    until double precision, free_at double precision) ON granted.host = locked.pk_host
    ON CONFLICT (pk_host) DO NOTHING
    RETURNING pk_host
    """
)


def fetch_host_kinds(
    connection: Connection, facilities: Sequence[str] | None, tags: Collection[str], staleness: float
) -> dict[str, int]:
    """The kinds of hosts that take frames now and have one of the tags: for each kind the id of one host, and how many
    hosts there are. Hosts of one kind are alike when idle, and have the same ones of these ``tags``."""
    parameters = {"facilities": facilities, "tags": sorted(tags), "staleness": staleness}
    return {row.pk_host: row.hosts for row in connection.execute(_HOST_KINDS, parameters)}


def fetch_layers(connection: Connection, layer_ids: Collection[str]) -> Sequence[Row[Any]]:
    """The layers among these that have waiting frames, a row each: ``pk_layer``, ``pk_job``, ``str_name``, ``waiting``
    frames, the job's ``priority``, and for how long the layer has been blocked (``blocked_seconds``).

    ``elapsed``: the seconds since that was written. ``placed``: whether a frame of the layer was placed since then.
    Where nothing was written yet, these are 0 and None.
    """
    return connection.execute(_LAYERS, {"layers": sorted(layer_ids)}).all()


def fetch_candidates(
    connection: Connection, asked: Sequence[Mapping[str, Any]], staleness: float, *, most: int
) -> dict[str, list[str]]:
    """Layer id -> ids of at most ``most`` hosts that are not reserved and may take its frames when idle.

    Each mapping in ``asked`` has ``layer_id`` and ``facility_id``, ``tags`` and ``alloc_ids`` of which a host must have
    one each, and the ``cores``, ``memory_kb`` and ``gpus`` that it must have at least. Its last report is at most
    ``staleness`` seconds old.
    """
    found: dict[str, list[str]] = {}
    for row in connection.execute(_CANDIDATES, {"asked": json.dumps(asked), "staleness": staleness, "most": most}):
        found.setdefault(row.layer_id, []).append(row.pk_host)
    return found


def fetch_runs(connection: Connection, host_ids: Collection[str]) -> Sequence[Row[Any]]:
    """What runs on these hosts, a row for each proc: ``pk_host``, the ``centicores``, ``memory_kb`` and ``gpus`` that
    it has reserved, and ``ends_at``.

    ``ends_at`` is when the frame ends if it takes its layer's mean run time, in epoch seconds of the database's clock;
    None where no frame of the layer has succeeded.
    """
    return connection.execute(_RUNS, {"hosts": sorted(host_ids)}).all()


def reserved_hosts(connection: Connection, facilities: Sequence[str] | None) -> frozenset[str]:
    """The ids of hosts with a row of a reservation, also where it has run out or the host was deleted."""
    return frozenset(connection.execute(_HOLDS, {"facilities": facilities}).scalars())


def write_blocked(
    connection: Connection, blocked: Mapping[str, tuple[float, int]], facilities: Sequence[str] | None
) -> None:
    """Write for how many seconds layers have been blocked, and how many of their frames wait, by layer id. What was
    written of other layers in these facilities, and of layers that are gone, is deleted."""
    layers = sorted(blocked)
    connection.execute(_FORGET_BLOCKED, {"layers": layers, "facilities": facilities})
    parameters = {
        "layers": layers,
        "seconds": [blocked[layer][0] for layer in layers],
        "waiting": [blocked[layer][1] for layer in layers],
    }
    if blocked:
        connection.execute(_WRITE_BLOCKED, parameters)


def end_reservations(connection: Connection, host_ids: Collection[str]) -> frozenset[str]:
    """Reserve these hosts no more. Returns those that were reserved and that no booking is about to use."""
    return frozenset(connection.execute(_END, {"hosts": sorted(host_ids)}).scalars())


def renew_reservations(connection: Connection, reservations: Mapping[str, Reservation]) -> None:
    """Write ``until`` and ``free_at`` of these reservations, by host id, as far as they are still there."""
    connection.execute(_RENEW, _parameters(reservations))


def grant_reservations(connection: Connection, reservations: Mapping[str, Reservation]) -> frozenset[str]:
    """Reserve hosts, by id. Returns the ids of those that are reserved now: no other transaction had their rows locked,
    and they had no reservation. Their rows stay locked until the transaction ends."""
    return frozenset(connection.execute(_GRANT, _parameters(reservations)).scalars())


def _parameters(reservations: Mapping[str, Reservation]) -> dict[str, Any]:
    """Reservations, by host id, as parameters of _RENEW and _GRANT."""
    rows = [{"host": host_id, **asdict(reservation)} for host_id, reservation in reservations.items()]
    return {"hosts": list(reservations), "holds": json.dumps(rows)}
