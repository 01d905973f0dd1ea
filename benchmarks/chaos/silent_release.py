"""A release nobody hears of: procs deleted by hand on a database whose trigger kept quiet.

The ledger keeps their bookings until a recompute finds them, and their processes run on without a proc until a host
report names them. The frames wait again at once, so that they may be started somewhere else meanwhile.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from opencue_sched.domain.states import ExitStatus
from opencue_sched.store.booking import lock_stats
from opencue_sched.store.procs import delete_procs, lock_hosts, restore_hosts

# Only shows of ours: for others, whoever releases also writes the accounting tables.
_VICTIMS = text(
    """
    SELECT p.pk_proc, p.pk_host, f.pk_frame, f.pk_layer, f.pk_job
    FROM proc p JOIN frame f USING (pk_frame) JOIN show s ON s.pk_show = p.pk_show
    WHERE f.str_state = 'RUNNING' AND s.b_scheduler_managed
    ORDER BY p.pk_proc LIMIT :most FOR NO KEY UPDATE OF f SKIP LOCKED
    """
)
_QUIET = text("SET LOCAL session_replication_role = 'replica'")
_LOUD = text("SET LOCAL session_replication_role = 'origin'")
_CLEAR_FRAMES = text(
    """
    UPDATE frame SET str_state = 'WAITING', int_exit_status = :status, ts_stopped = current_timestamp,
                     ts_updated = current_timestamp, int_version = coalesce(int_version, 0) + 1
    WHERE pk_frame = ANY(CAST(:frames AS varchar[])) AND str_state = 'RUNNING'
    """
)


def release_silently(connection: Connection, *, most: int) -> list[str]:
    """Delete up to ``most`` procs of running frames without a notification. Returns the ids of the frames, which run on
    and wait."""
    victims = connection.execute(_VICTIMS, {"most": most}).all()
    lock_hosts(connection, {row.pk_host for row in victims})
    lock_stats(connection, {row.pk_layer for row in victims}, {row.pk_job for row in victims})
    connection.execute(_QUIET)
    deleted = delete_procs(connection, [row.pk_proc for row in victims])
    connection.execute(_LOUD)
    restore_hosts(connection, deleted)
    gone = {proc.id for proc in deleted}
    frames = [row.pk_frame for row in victims if row.pk_proc in gone]
    connection.execute(_CLEAR_FRAMES, {"frames": frames, "status": int(ExitStatus.FRAME_CLEARED)})
    return frames
