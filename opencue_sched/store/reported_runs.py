"""What host reports say about running frames, and procs that they no longer name.

Reports come from every host every few seconds, so nothing here waits for a row somebody else is changing: it is skipped
(SKIP LOCKED) and written by the next report. Only growing a reservation waits, for its host.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.states import FrameState, JobState

_LOCK_HOST = text("SELECT int_mem_idle FROM host WHERE pk_host = :host FOR NO KEY UPDATE")
_READ_REPORTED = text(
    """
    SELECT run.ordinal, proc.pk_proc, proc.pk_frame AS proc_frame, proc.int_mem_reserved, proc.b_local,
           job.str_state AS job_state, owner.pk_proc AS owner, owner.pk_host AS owner_host,
           frame.str_state AS frame_state, frame.pk_layer, frame.pk_job,
           CAST(extract(epoch FROM clock_timestamp() - frame.ts_updated) AS float8) AS frame_age,
           CAST(extract(epoch FROM clock_timestamp() - owner.ts_dispatched) AS float8) AS owner_age,
           layer.int_timeout, layer.int_timeout_llu
      FROM unnest(CAST(:procs AS varchar[]), CAST(:frames AS varchar[])) WITH ORDINALITY AS run(proc, frame, ordinal)
      LEFT JOIN proc ON proc.pk_proc = run.proc
      LEFT JOIN job ON job.pk_job = proc.pk_job
      LEFT JOIN frame ON frame.pk_frame = run.frame
      LEFT JOIN layer ON layer.pk_layer = frame.pk_layer
      LEFT JOIN proc owner ON owner.pk_frame = run.frame
     ORDER BY run.ordinal
    """
)
_RUNS = """
    run AS (
        SELECT * FROM json_to_recordset(CAST(:rows AS json))
               AS row(proc_id varchar, frame_id varchar, layer_id varchar, job_id varchar, rss_kb bigint,
                      max_rss_kb bigint, pss_kb bigint, max_pss_kb bigint, virtual_kb bigint, max_virtual_kb bigint,
                      gpu_memory_kb bigint, max_gpu_memory_kb bigint, swap_kb bigint, llu_time bigint))
"""
_UPDATE_PROCS = text(
    f"""
    WITH {_RUNS},
    locked AS (
        SELECT proc.pk_proc FROM proc WHERE pk_proc IN (SELECT proc_id FROM run)
         ORDER BY pk_proc FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE proc
       SET ts_ping = current_timestamp, int_mem_used = run.rss_kb, int_mem_max_used = run.max_rss_kb,
           int_pss_used = run.pss_kb, int_pss_max_used = run.max_pss_kb, int_virt_used = run.virtual_kb,
           int_virt_max_used = run.max_virtual_kb, int_gpu_mem_used = run.gpu_memory_kb,
           int_gpu_mem_max_used = run.max_gpu_memory_kb, int_swap_used = least(run.swap_kb, 2147483647)
      FROM run JOIN locked ON locked.pk_proc = run.proc_id
     WHERE proc.pk_proc = run.proc_id AND proc.pk_frame = run.frame_id
    """  # noqa: S608
)
_UPDATE_FRAMES = text(
    f"""
    WITH {_RUNS},
    locked AS (
        SELECT frame.pk_frame FROM frame WHERE pk_frame IN (SELECT frame_id FROM run) AND str_state = 'RUNNING'
         ORDER BY pk_frame FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE frame
       SET ts_updated = current_timestamp, int_mem_used = run.rss_kb, int_mem_max_used = run.max_rss_kb,
           int_pss_used = run.pss_kb, int_pss_max_used = run.max_pss_kb, int_gpu_mem_used = run.gpu_memory_kb,
           int_gpu_mem_max_used = run.max_gpu_memory_kb,
           ts_llu = CASE WHEN run.llu_time > 0 THEN to_timestamp(run.llu_time) ELSE frame.ts_llu END
      FROM run JOIN locked ON locked.pk_frame = run.frame_id
     WHERE frame.pk_frame = run.frame_id
    """  # noqa: S608
)
_RAISE_LAYERS = text(
    f"""
    WITH {_RUNS},
    peak AS (SELECT layer_id, max(max_rss_kb) AS rss FROM run GROUP BY layer_id),
    locked AS (
        SELECT layer.pk_layer, peak.rss FROM layer JOIN peak ON peak.layer_id = layer.pk_layer
         WHERE layer.int_mem_min < peak.rss ORDER BY layer.pk_layer FOR NO KEY UPDATE OF layer SKIP LOCKED)
    UPDATE layer SET int_mem_min = locked.rss FROM locked WHERE layer.pk_layer = locked.pk_layer
    """  # noqa: S608
)
_RAISE_LAYER_PEAKS = text(
    f"""
    WITH {_RUNS},
    peak AS (SELECT layer_id, max(max_rss_kb) AS rss, max(max_pss_kb) AS pss FROM run GROUP BY layer_id),
    locked AS (
        SELECT layer_mem.pk_layer, peak.rss, peak.pss FROM layer_mem JOIN peak ON peak.layer_id = layer_mem.pk_layer
         WHERE layer_mem.int_max_rss < peak.rss OR layer_mem.int_max_pss < peak.pss
         ORDER BY layer_mem.pk_layer FOR NO KEY UPDATE OF layer_mem SKIP LOCKED)
    UPDATE layer_mem SET int_max_rss = greatest(int_max_rss, locked.rss),
                         int_max_pss = greatest(int_max_pss, locked.pss)
      FROM locked WHERE layer_mem.pk_layer = locked.pk_layer
    """  # noqa: S608
)
_RAISE_JOB_PEAKS = text(
    f"""
    WITH {_RUNS},
    peak AS (SELECT job_id, max(max_rss_kb) AS rss, max(max_pss_kb) AS pss FROM run GROUP BY job_id),
    locked AS (
        SELECT job_mem.pk_job, peak.rss, peak.pss FROM job_mem JOIN peak ON peak.job_id = job_mem.pk_job
         WHERE job_mem.int_max_rss < peak.rss OR job_mem.int_max_pss < peak.pss
         ORDER BY job_mem.pk_job FOR NO KEY UPDATE OF job_mem SKIP LOCKED)
    UPDATE job_mem SET int_max_rss = greatest(int_max_rss, locked.rss), int_max_pss = greatest(int_max_pss, locked.pss)
      FROM locked WHERE job_mem.pk_job = locked.pk_job
    """  # noqa: S608
)
_LOCK_GROWING = text(
    """
    SELECT pk_proc, int_mem_reserved FROM proc
     WHERE pk_proc = ANY(CAST(:procs AS varchar[])) AND pk_host = :host AND NOT b_local
     ORDER BY pk_proc FOR NO KEY UPDATE SKIP LOCKED
    """
)
_GROW = text(
    """
    UPDATE proc SET int_mem_reserved = grown.memory
      FROM unnest(CAST(:procs AS varchar[]), CAST(:memory AS bigint[])) AS grown(proc, memory)
     WHERE proc.pk_proc = grown.proc
    """
)
_UNREPORTED = text(
    """
    SELECT proc.pk_proc, proc.pk_frame, proc.ts_ping FROM proc
     WHERE proc.pk_host = :host AND NOT proc.b_local AND proc.pk_proc <> ALL(CAST(:reported AS varchar[]))
       AND proc.ts_dispatched < clock_timestamp() - CAST(:grace AS float8) * interval '1 second'
       AND proc.ts_ping < clock_timestamp() - CAST(:unseen AS float8) * interval '1 second'
    """
)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """What the database knows about a running process that was reported. Ages in seconds; None: no such row."""

    proc_id: str | None
    proc_frame_id: str | None
    proc_memory_kb: int
    proc_local: bool
    job_state: JobState | None
    owner_proc_id: str | None
    owner_host_id: str | None
    owner_age: float
    frame_state: FrameState | None
    frame_age: float
    layer_id: str
    job_id: str
    timeout_minutes: int
    timeout_llu_minutes: int


@dataclass(frozen=True, slots=True)
class RunUsage:
    """What a running frame uses, KB; ``llu_time`` is the epoch of its last log line, 0 when unknown."""

    proc_id: str
    frame_id: str
    layer_id: str
    job_id: str
    rss_kb: int
    max_rss_kb: int
    pss_kb: int
    max_pss_kb: int
    virtual_kb: int
    max_virtual_kb: int
    gpu_memory_kb: int
    max_gpu_memory_kb: int
    swap_kb: int
    llu_time: int


@dataclass(frozen=True, slots=True)
class UnreportedProc:
    """A proc its host no longer reports."""

    proc_id: str
    frame_id: str | None
    pinged_at: datetime


def read_reported(connection: Connection, runs: Sequence[tuple[str, str]]) -> list[ReportedRun]:
    """What is known about each reported (proc id, frame id), in the order given."""
    parameters = {"procs": [proc for proc, _ in runs], "frames": [frame for _, frame in runs]}
    return [_reported(row) for row in connection.execute(_READ_REPORTED, parameters)]


def update_runs(connection: Connection, runs: Iterable[RunUsage]) -> None:
    """Memory, last log line and ts_ping of running frames; peaks of their layers and jobs only ever rise.

    A layer whose frames need more than its minimum gets that minimum (as Cuebot does). One short transaction each in
    the caller is not needed: no statement waits for a lock.
    """
    rows = json.dumps([asdict(run) for run in runs])
    for statement in (_UPDATE_FRAMES, _UPDATE_PROCS, _RAISE_LAYERS, _RAISE_LAYER_PEAKS, _RAISE_JOB_PEAKS):
        connection.execute(statement, {"rows": rows})


def grow_reservations(connection: Connection, host_id: str, wanted_kb: Mapping[str, int]) -> dict[str, int]:
    """Raise procs' memory reservations to ``wanted_kb``, as far as the host's idle memory goes, smallest first.

    The trigger of the schema takes the difference from the host. Returns the new reservation of each proc that grew.
    """
    locked = connection.execute(_LOCK_GROWING, {"procs": list(wanted_kb), "host": host_id}).all()
    idle = connection.execute(_LOCK_HOST, {"host": host_id}).scalar() or 0
    grown: dict[str, int] = {}
    for row in sorted(locked, key=lambda row: wanted_kb[row.pk_proc] - row.int_mem_reserved):
        more = wanted_kb[row.pk_proc] - row.int_mem_reserved
        if 0 < more <= idle:
            idle -= more
            grown[row.pk_proc] = wanted_kb[row.pk_proc]
    if grown:
        connection.execute(_GROW, {"procs": list(grown), "memory": list(grown.values())})
    return grown


def unreported_procs(
    connection: Connection, host_id: str, reported: Collection[str], *, grace: float, unseen: float
) -> list[UnreportedProc]:
    """Procs of a host its report does not name, ``grace`` seconds after dispatch and silent for ``unseen`` seconds."""
    parameters = {"host": host_id, "reported": list(reported), "grace": grace, "unseen": unseen}
    return [
        UnreportedProc(row.pk_proc, row.pk_frame, row.ts_ping) for row in connection.execute(_UNREPORTED, parameters)
    ]


def _reported(row: Row[Any]) -> ReportedRun:
    return ReportedRun(
        row.pk_proc,
        row.proc_frame,
        row.int_mem_reserved or 0,
        bool(row.b_local),
        None if row.job_state is None else JobState(row.job_state),
        row.owner,
        row.owner_host,
        row.owner_age or 0.0,
        None if row.frame_state is None else FrameState(row.frame_state),
        row.frame_age or 0.0,
        row.pk_layer or "",
        row.pk_job or "",
        row.int_timeout or 0,
        row.int_timeout_llu or 0,
    )
