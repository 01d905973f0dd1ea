"""Undoing a committed booking whose frame certainly does not run (facts C, "Compensation")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from opencue_sched.domain.states import ExitStatus
from opencue_sched.store.booking import lock_stats
from opencue_sched.store.procs import delete_procs, lock_hosts, lock_runs, restore_hosts

# The version is the one *after* the start: with the one before, the frame would stay RUNNING for ever. Exit status 299
# makes the history trigger forget the run. A frame that has a proc again is somebody else's. RUNNING to WAITING with
# checkpointing on would become CHECKPOINT, for a checkpoint that nobody makes: it is off for the moment.
_CLEAR_FRAMES = text(
    """
    UPDATE frame f
    SET str_state = 'WAITING', int_exit_status = :exit_status, ts_stopped = current_timestamp,
        ts_updated = current_timestamp, int_version = COALESCE(f.int_version, 0) + 1,
        str_checkpoint_state = 'DISABLED'
    FROM unnest(CAST(:frames AS varchar[]), CAST(:versions AS int[])) AS started(pk_frame, version)
    JOIN frame AS was ON was.pk_frame = started.pk_frame
    WHERE f.pk_frame = started.pk_frame AND f.str_state = 'RUNNING'
      AND f.int_version IS NOT DISTINCT FROM started.version
      AND NOT EXISTS (SELECT 1 FROM proc p WHERE p.pk_frame = f.pk_frame)
    RETURNING f.pk_frame, was.str_checkpoint_state
    """
)
_CHECKPOINTING = text(
    """
    UPDATE frame f SET str_checkpoint_state = before.state
    FROM unnest(CAST(:frames AS varchar[]), CAST(:states AS varchar[])) AS before(pk_frame, state)
    WHERE f.pk_frame = before.pk_frame
    """
)


@dataclass(frozen=True, slots=True)
class StartedFrame:
    """A committed booking. ``version`` is frame.int_version as the booking left it."""

    proc_id: str
    host_id: str
    frame_id: str
    layer_id: str
    job_id: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Undone:
    """``procs`` were deleted and their hosts restored by this call; ``frames`` wait again because of it."""

    procs: frozenset[str]
    frames: frozenset[str]


def undo_bookings(connection: Connection, started: Sequence[StartedFrame]) -> Undone:
    """Delete the procs, give the hosts back what they hold now, set the frames WAITING with exit status 299.

    Idempotent: what somebody else released, or an earlier call undid, is left as it is. Locks frames, procs, hosts,
    layer and job counters, in this order. Seven statements whatever the number of bookings, one more for frames that
    have a checkpoint.
    """
    lock_runs(connection, [s.proc_id for s in started], [s.frame_id for s in started])
    lock_hosts(connection, {s.host_id for s in started})
    lock_stats(connection, {s.layer_id for s in started}, {s.job_id for s in started})
    deleted = delete_procs(connection, [s.proc_id for s in started])
    restore_hosts(connection, deleted)
    cleared = connection.execute(
        _CLEAR_FRAMES,
        {
            "frames": [s.frame_id for s in started],
            "versions": [s.version for s in started],
            "exit_status": int(ExitStatus.FRAME_CLEARED),
        },
    ).all()
    checkpoints = {row.pk_frame: row.str_checkpoint_state for row in cleared if row.str_checkpoint_state != "DISABLED"}
    if checkpoints:
        connection.execute(_CHECKPOINTING, {"frames": list(checkpoints), "states": list(checkpoints.values())})
    return Undone(frozenset(proc.id for proc in deleted), frozenset(row.pk_frame for row in cleared))
