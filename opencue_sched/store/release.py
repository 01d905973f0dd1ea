"""The statements that end runs: they lock counters, stop frames, and write usage and peak memory.

Deleting procs and giving hosts back what they held is in procs.py; which state a frame gets is for reports/ to say.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.jobs import MEMORY_FLOOR_KB
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import ExitStatus, FrameState
from opencue_sched.domain.units import INT_MAX
from opencue_sched.store.arrays import texts
from opencue_sched.store.booking import COUNTERS_OF_JOBS, COUNTERS_OF_LAYERS, lock_stats
from opencue_sched.store.lookups import prepared, row_of, same_key
from opencue_sched.store.procs import (
    LOCKED_HOSTS,
    LOCKED_SHOWS,
    RESTORED_HOSTS,
    DeletedProc,
    as_dicts,
    delete_procs,
    lock_hosts,
    lock_runs,
    restore_hosts,
    restored,
)

# Stops frames that run. Past core and GPU seconds are 4-byte integers, which a wide frame that keeps failing would
# overflow: they stay at the largest. A run that ends with 299 (cleared) adds no seconds, and the history trigger
# deletes its row. While checkpointing is on, a trigger makes CHECKPOINT of WAITING here, and only a Cuebot ends that
# state: so checkpointing is turned off. The state is compared so that no index serves: otherwise a plan made when
# PostgreSQL knew of no frame that runs reads all of those.
_STOPPED = f"""
    UPDATE frame
       SET str_state = stop.state, int_exit_status = stop.exit_status, ts_updated = current_timestamp,
           ts_stopped = stop.at,  -- a second ahead, as Cuebot does
           int_mem_max_used = coalesce(stop.max_rss_kb, frame.int_mem_max_used),
           str_checkpoint_state = 'DISABLED',
           int_version = coalesce(frame.int_version, 0) + 1,
           int_total_past_core_time = least(:most, frame.int_total_past_core_time
             + coalesce(round(stop.counted * extract(epoch FROM stop.at - ts_started) * frame.int_cores / 100), 0)),
           int_total_past_gpu_time = least(:most, frame.int_total_past_gpu_time
             + coalesce(round(stop.counted * extract(epoch FROM stop.at - ts_started) * frame.int_gpus), 0))
      FROM (SELECT *, current_timestamp + interval '1 second' AS at, CAST(exit_status <> 299 AS int) AS counted
              FROM json_to_recordset(CAST(:rows AS json))
                     AS row(frame_id varchar, version int, state varchar, exit_status bigint, max_rss_kb bigint)) stop
     WHERE {same_key("frame.pk_frame", "stop.frame_id")} AND frame.str_state IS NOT DISTINCT FROM 'RUNNING'
       AND frame.int_version IS NOT DISTINCT FROM stop.version
    RETURNING frame.pk_frame AS id, frame.pk_layer AS layer_id, frame.pk_job AS job_id, frame.str_state AS state,
              stop.exit_status = 0 AS success, coalesce(stop.max_rss_kb, 0) AS max_rss_kb,
              CAST(greatest(0, coalesce(extract(epoch FROM frame.ts_stopped - frame.ts_started), 0)) AS float8)
                AS seconds,
              frame.int_cores AS centicores, frame.int_gpus AS gpus,
              (SELECT job.str_state FROM job WHERE job.pk_job = frame.pk_job) AS job_state
"""  # noqa: S608 - only our own constants
_STOP_FRAMES = text(_STOPPED)
# One message: what the frame triggers and the release write is locked, in the order of every transaction, and the
# frames are stopped.
_LOCK_AND_STOP_FRAMES = prepared(
    f"{LOCKED_SHOWS}; {LOCKED_HOSTS}; {COUNTERS_OF_LAYERS}; {COUNTERS_OF_JOBS}; {_STOPPED}"
)


def _add_usage(table: str, *, more: str = "") -> str:
    """SQL that adds the sums of each layer's, or job's, runs to its usage, and sets ``more`` columns."""
    return f"""
        UPDATE {table}_usage
           SET int_core_time_success = int_core_time_success + sums.core_ok,
               int_core_time_fail = int_core_time_fail + sums.core_bad,
               int_gpu_time_success = int_gpu_time_success + sums.gpu_ok,
               int_gpu_time_fail = int_gpu_time_fail + sums.gpu_bad,
               int_clock_time_success = least(:most, int_clock_time_success + sums.clock_ok),
               int_clock_time_fail = least(:most, int_clock_time_fail + sums.clock_bad),
               int_frame_success_count = int_frame_success_count + sums.ok,
               int_frame_fail_count = int_frame_fail_count + sums.bad,
               int_clock_time_high = greatest(int_clock_time_high, sums.high){more}
          FROM sums WHERE {same_key(f"{table}_usage.pk_{table}", f"sums.{table}")}
    """  # noqa: S608 - only our own constants


_LAYER_LOW = ", int_clock_time_low = coalesce(least(nullif(int_clock_time_low, 0), sums.low), 0)"
# A row of sums is of a layer (job is null) or of a job. No order of locks: callers hold the counters of these layers
# and jobs. Peaks are compared so that their indexes do not serve, by which PostgreSQL would find all that are lower.
_USAGE = f"""
    WITH ended AS (
        SELECT layer_id AS layer, job_id AS job, success, CAST(least(:most, round(seconds)) AS bigint) AS clock,
               CAST(round(seconds * centicores / 100) AS bigint) AS core,
               CAST(round(seconds * gpus) AS bigint) AS gpu, max_rss_kb AS rss
          FROM json_to_recordset(CAST(:ended AS json))
               AS row(layer_id varchar, job_id varchar, success boolean, seconds float8, centicores int, gpus int,
                      max_rss_kb bigint)),
    sums AS (
        SELECT layer, job, count(*) FILTER (WHERE success) AS ok, count(*) FILTER (WHERE NOT success) AS bad,
               coalesce(sum(clock) FILTER (WHERE success), 0) AS clock_ok,
               coalesce(sum(clock) FILTER (WHERE NOT success), 0) AS clock_bad,
               coalesce(sum(core) FILTER (WHERE success), 0) AS core_ok,
               coalesce(sum(core) FILTER (WHERE NOT success), 0) AS core_bad,
               coalesce(sum(gpu) FILTER (WHERE success), 0) AS gpu_ok,
               coalesce(sum(gpu) FILTER (WHERE NOT success), 0) AS gpu_bad,
               max(clock) FILTER (WHERE success) AS high, min(clock) FILTER (WHERE success) AS low, max(rss) AS rss
          FROM ended GROUP BY GROUPING SETS ((layer), (job))),
    layer_times AS ({_add_usage("layer", more=_LAYER_LOW)}),
    job_times AS ({_add_usage("job")}),
    layer_peaks AS (
        UPDATE layer_mem SET int_max_rss = sums.rss
          FROM sums WHERE {same_key("layer_mem.pk_layer", "sums.layer")}
                      AND (layer_mem.int_max_rss < sums.rss) IS TRUE)
    UPDATE job_mem SET int_max_rss = sums.rss
      FROM sums WHERE {same_key("job_mem.pk_job", "sums.job")} AND (job_mem.int_max_rss < sums.rss) IS TRUE
"""  # noqa: S608 - only our own constants
# Adds the runs that succeeded and failed to the figures of their shows. Every run that ends in a show locks that one
# row, in order where there are several: a loop over what is sorted looks them up and locks them one by one.
_SHOWS = f"""
    WITH locked AS (
        SELECT ended.*
          FROM (SELECT show, count(*) FILTER (WHERE success) AS ok, count(*) FILTER (WHERE NOT success) AS bad
                  FROM json_to_recordset(CAST(:ended AS json)) AS row(show varchar, success boolean)
                 GROUP BY show ORDER BY show) ended
         CROSS JOIN LATERAL (SELECT FROM show_stats WHERE pk_show = ended.show FOR NO KEY UPDATE) target)
    UPDATE show_stats SET int_frame_success_count = int_frame_success_count + locked.ok,
                          int_frame_fail_count = int_frame_fail_count + locked.bad
      FROM locked WHERE {same_key("show_stats.pk_show", "locked.show")}
"""  # noqa: S608 - only our own constants
# Lowers what layers ask for to the most memory that their frames used, and a margin. Layers that ask for more are
# locked in the order of every transaction, as in _SHOWS, and each is judged by its row as the lock found it. Others,
# which are most of them, are neither waited for nor written. Memory is compared as peaks are in _USAGE.
_LOWERED_MEMORY = f"""
    WITH locked AS (
        SELECT layer.*
          FROM (SELECT * FROM json_to_recordset(CAST(:peaks AS json)) AS row(layer varchar, rss bigint)
                 ORDER BY layer) peak
          JOIN {row_of("layer_mem", "layer_mem", "pk_layer = peak.layer")} ON true
         CROSS JOIN LATERAL (SELECT greatest(peak.rss, layer_mem.int_max_rss) AS rss) used
         CROSS JOIN LATERAL (
               SELECT pk_layer, used.rss + :margin AS memory FROM layer
                WHERE pk_layer = peak.layer AND b_optimize AND used.rss > 0
                  AND (int_mem_min > used.rss + :margin) IS TRUE
                  FOR NO KEY UPDATE) layer)
    UPDATE layer SET int_mem_min = locked.memory
      FROM locked WHERE {same_key("layer.pk_layer", "locked.pk_layer")}
"""  # noqa: S608 - only our own constants
# After procs ended: give their hosts back what they held, record usage, lower the memory of layers, count for shows.
_RECORD_RUNS = prepared(f"{RESTORED_HOSTS}; {_USAGE}; {_LOWERED_MEMORY}; {_SHOWS}")
# Set the state of the frames among these whose state is one of the expected ones.
_SET_FRAME_STATES = text(
    """
    UPDATE frame SET str_state = :state, ts_updated = current_timestamp, int_version = coalesce(int_version, 0) + 1
     WHERE pk_frame = ANY(CAST(:frames AS varchar[])) AND str_state = ANY(CAST(:expected AS varchar[]))
    RETURNING pk_frame AS id, pk_layer AS layer_id, pk_job AS job_id, str_state AS state
    """
)

ChangedFrame = Row[Any]
"""A frame whose state a call changed: its ``id``, ``layer_id`` and ``job_id``; ``state`` is what the triggers made of
it (DEPEND). One that was stopped also has ``success`` and the ``max_rss_kb``, ``seconds``, ``centicores`` and ``gpus``
of its run, and the ``job_state`` of its job."""


Counters = frozenset[tuple[str, str]]
"""``("layer", id)`` and ``("job", id)`` of the counters that a step will change: what must be locked before it."""


class WiderLocks(Exception):
    """The transaction must start over with these counters locked as well."""

    def __init__(self, counters: Counters) -> None:
        super().__init__("counters of dependents were not locked")
        self.counters = counters


def counters_of(rows: Iterable[Any]) -> Counters:
    """The counters of the layers and jobs of ``rows``, which have a ``layer_id`` and a ``job_id``, as frames do."""
    return Counters(counter for row in rows for counter in (("layer", row.layer_id), ("job", row.job_id)))


@dataclass(frozen=True, slots=True)
class FrameStop:
    """A frame to stop, and the state that it gets."""

    frame_id: str
    version: int | None
    """The frame is stopped only while its int_version is this."""
    state: FrameState
    exit_status: int
    max_rss_kb: int | None = None
    """The peak of the frame's memory; None: what is known of the peak stays."""


def lock_counters(connection: Connection, counters: Counters) -> None:
    """Lock layer_stat rows, then job_stat rows, each in id order: before any frame of theirs changes state."""
    lock_stats(connection, _of_kind("layer", counters), _of_kind("job", counters))


def stop_frames(connection: Connection, stops: Sequence[FrameStop]) -> Sequence[ChangedFrame]:
    """Stop running frames, each only if it is still RUNNING at the version given; returns those stopped."""
    return connection.execute(_STOP_FRAMES, _stops(stops)).all()


def lock_and_stop_frames(
    connection: Connection,
    stops: Sequence[FrameStop],
    *,
    shows: Collection[str],
    hosts: Collection[str],
    counters: Counters,
) -> Sequence[ChangedFrame]:
    """Lock shows (FOR SHARE: whether each is scheduler managed stays as it is), hosts and counters, each in id order,
    and `stop_frames`."""
    locked = {
        "shows": texts(shows),
        "hosts": texts(hosts),
        "layers": texts(_of_kind("layer", counters)),
        "jobs": texts(_of_kind("job", counters)),
    }
    return connection.execute(_LOCK_AND_STOP_FRAMES, {**locked, **_stops(stops)}).all()


def _of_kind(wanted: str, counters: Counters) -> list[str]:
    """The ids of the counters of one kind."""
    return [row_id for kind, row_id in counters if kind == wanted]


def _stops(stops: Sequence[FrameStop]) -> dict[str, object]:
    """The parameters of _STOP_FRAMES."""
    rows = [
        {
            "frame_id": stop.frame_id,
            "version": stop.version,
            "state": stop.state,
            "exit_status": stop.exit_status,
            "max_rss_kb": stop.max_rss_kb,
        }
        for stop in stops
    ]
    return {"rows": json.dumps(rows), "most": INT_MAX}


def set_frame_states(
    connection: Connection, frame_ids: Collection[str], state: FrameState, expected: Collection[FrameState]
) -> Sequence[ChangedFrame]:
    """Move frames that are in one of the ``expected`` states to ``state``; returns what each became.

    The triggers have a say: SUCCEEDED to EATEN stays SUCCEEDED, WAITING with open dependencies becomes DEPEND.
    """
    parameters = {"frames": list(frame_ids), "state": state.value, "expected": [each.value for each in expected]}
    return connection.execute(_SET_FRAME_STATES, parameters).all()


def record_runs(
    connection: Connection,
    deleted: Sequence[DeletedProc],
    stopped: Collection[tuple[ChangedFrame, str]],
    peaks_kb: Mapping[str, int],
) -> None:
    """Give the hosts back what deleted procs had reserved (`restore_hosts`), and write what stopped frames, each with
    its show's id, leave behind.

    That is: layer_usage and job_usage (seconds), the peaks in layer_mem and job_mem, and show_stats. The layers of
    ``peaks_kb`` (id to peak memory, KB) that allow it have their int_mem_min lowered to the peak and a quarter GB; a
    layer of which nothing was measured stays as it is. All is one message, the last of its transaction but where a job
    finishes.
    """
    frames = as_dicts([frame for frame, _ in stopped])
    ended = [{**frame, "show": show_id} for frame, (_, show_id) in zip(frames, stopped, strict=True)]
    connection.execute(
        _RECORD_RUNS,
        {
            **restored(deleted),
            "ended": json.dumps(ended),
            "most": INT_MAX,
            "peaks": json.dumps([{"layer": layer, "rss": rss} for layer, rss in peaks_kb.items()]),
            "margin": MEMORY_FLOOR_KB,
        },
    )


# A job's history is written when it finishes, which is before what its last runs took is known.
_RECORD_LAST_RUNS = text(
    """
    WITH layers AS (
        UPDATE layer_history
           SET int_core_time_success = used.int_core_time_success, int_core_time_fail = used.int_core_time_fail,
               int_gpu_time_success = used.int_gpu_time_success, int_gpu_time_fail = used.int_gpu_time_fail,
               int_max_rss = peak.int_max_rss
          FROM layer_usage used JOIN layer_mem peak ON peak.pk_layer = used.pk_layer
         WHERE used.pk_job = ANY(CAST(:jobs AS varchar[])) AND layer_history.pk_layer = used.pk_layer)
    UPDATE job_history
       SET int_core_time_success = used.int_core_time_success, int_core_time_fail = used.int_core_time_fail,
           int_gpu_time_success = used.int_gpu_time_success, int_gpu_time_fail = used.int_gpu_time_fail,
           int_max_rss = peak.int_max_rss
      FROM job_usage used JOIN job_mem peak ON peak.pk_job = used.pk_job
     WHERE used.pk_job = ANY(CAST(:jobs AS varchar[])) AND job_history.pk_job = used.pk_job
    """
)


def record_last_runs(connection: Connection, finished_job_ids: Collection[str]) -> None:
    """Have the history of finished jobs include what the runs of this transaction took (`record_runs`)."""
    if finished_job_ids:
        connection.execute(_RECORD_LAST_RUNS, {"jobs": list(finished_job_ids)})


def undo_bookings(connection: Connection, procs: Sequence[PlannedProc]) -> frozenset[str]:
    """Undo committed bookings whose frames certainly do not run: delete the procs, give the hosts back what the procs
    have reserved by now (memory may have grown), set the frames WAITING with exit status 299.

    ``proc.frame.version`` must be int_version after the booking (CommitResult.committed): with the one before, the
    frame would stay RUNNING for ever. Idempotent: what another process released or booked again, or an earlier call
    undid, is left as it is. Returns the ids of the procs deleted. The same statements for any number of bookings.
    """
    ids = [proc.proc_id for proc in procs]
    # In the order of every transaction that ends runs: frames, procs, hosts, counters of layers, of jobs.
    lock_runs(connection, ids, [proc.frame.id for proc in procs])
    lock_hosts(connection, {proc.host.id for proc in procs})
    lock_stats(connection, {proc.layer.id for proc in procs}, {proc.job.id for proc in procs})
    deleted = delete_procs(connection, ids)
    restore_hosts(connection, deleted)
    undone = frozenset(proc.id for proc in deleted)
    # The process that deleted the others has seen to their frames, which may have procs again.
    frames = [proc.frame for proc in procs if proc.proc_id in undone]
    waiting, cleared = FrameState.WAITING, ExitStatus.FRAME_CLEARED
    stop_frames(connection, [FrameStop(frame.id, frame.version, waiting, cleared) for frame in frames])
    return undone
