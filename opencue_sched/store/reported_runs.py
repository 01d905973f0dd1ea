"""What host reports say about running frames.

Reports come from every host every few seconds, so nothing here waits for a row somebody else is changing: it is
skipped (SKIP LOCKED) and written by the next report. Only growing a reservation waits, for its host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, TextClause, text

from opencue_sched.store import frame_memory
from opencue_sched.store.reports import LOCK_HOST

# The columns are RQD's, see RunningFrameInfo.
_RUNS = """
    run AS (
        SELECT * FROM json_to_recordset(CAST(:rows AS json))
               AS row(resource_id varchar, frame_id varchar, layer_id varchar, job_id varchar, rss bigint,
                      max_rss bigint, pss bigint, max_pss bigint, vsize bigint, max_vsize bigint,
                      used_gpu_memory bigint, max_used_gpu_memory bigint, used_swap_memory bigint, llu_time bigint))
"""
_UPDATE_PROCS = text(
    f"""
    WITH {_RUNS},
    locked AS (
        SELECT proc.pk_proc FROM proc WHERE pk_proc IN (SELECT resource_id FROM run)
         ORDER BY pk_proc FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE proc
       SET ts_ping = current_timestamp, int_mem_used = run.rss, int_mem_max_used = run.max_rss,
           int_pss_used = run.pss, int_pss_max_used = run.max_pss, int_virt_used = run.vsize,
           int_virt_max_used = run.max_vsize, int_gpu_mem_used = run.used_gpu_memory,
           int_gpu_mem_max_used = run.max_used_gpu_memory, int_swap_used = least(run.used_swap_memory, 2147483647)
      FROM run JOIN locked ON locked.pk_proc = run.resource_id
     WHERE proc.pk_proc = run.resource_id AND proc.pk_frame = run.frame_id
    """  # noqa: S608
)
_UPDATE_FRAMES = text(
    f"""
    WITH {_RUNS},
    locked AS (
        SELECT frame.pk_frame FROM frame WHERE pk_frame IN (SELECT frame_id FROM run) AND str_state = 'RUNNING'
         ORDER BY pk_frame FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE frame
       SET ts_updated = current_timestamp, int_mem_used = run.rss, int_mem_max_used = run.max_rss,
           int_pss_used = run.pss, int_pss_max_used = run.max_pss, int_gpu_mem_used = run.used_gpu_memory,
           int_gpu_mem_max_used = run.max_used_gpu_memory,
           ts_llu = CASE WHEN run.llu_time > 0 THEN to_timestamp(run.llu_time) ELSE frame.ts_llu END
      FROM run JOIN locked ON locked.pk_frame = run.frame_id
     WHERE frame.pk_frame = run.frame_id
    """  # noqa: S608
)


def _raise_peaks(table: str) -> TextClause:
    return text(
        f"""
        WITH {_RUNS},
        peak AS (SELECT {table}_id AS id, max(max_rss) AS rss, max(max_pss) AS pss FROM run GROUP BY 1),
        locked AS (
            SELECT mem.pk_{table} AS id, peak.rss, peak.pss FROM {table}_mem mem JOIN peak ON peak.id = mem.pk_{table}
             WHERE mem.int_max_rss < peak.rss OR mem.int_max_pss < peak.pss
             ORDER BY mem.pk_{table} FOR NO KEY UPDATE OF mem SKIP LOCKED)
        UPDATE {table}_mem SET int_max_rss = greatest(int_max_rss, locked.rss),
                               int_max_pss = greatest(int_max_pss, locked.pss)
          FROM locked WHERE {table}_mem.pk_{table} = locked.id
        """  # noqa: S608
    )


_UPDATE_RUNS = (_UPDATE_FRAMES, _UPDATE_PROCS, _raise_peaks("layer"), _raise_peaks("job"))
_GROW = text(
    """
    WITH wish AS (
        SELECT proc.pk_proc, wished.memory, wished.memory - proc.int_mem_reserved AS more
          FROM proc JOIN unnest(CAST(:procs AS varchar[]), CAST(:memory AS bigint[])) AS wished(proc, memory)
                      ON wished.proc = proc.pk_proc AND wished.memory > proc.int_mem_reserved
         WHERE proc.pk_host = :host AND NOT proc.b_local
         ORDER BY proc.pk_proc FOR NO KEY UPDATE OF proc SKIP LOCKED)
    UPDATE proc SET int_mem_reserved = granted.memory
      FROM (SELECT pk_proc, memory, sum(more) OVER (ORDER BY more, pk_proc) AS together FROM wish) granted
     WHERE proc.pk_proc = granted.pk_proc AND granted.together <= :idle
    """
)


def update_runs(connection: Connection, runs: Sequence[Mapping[str, Any]], *, frames_to_raise: int) -> None:
    """Memory, last log line and ts_ping of running frames; peaks of their layers and jobs only ever rise. The keys are
    the columns of ``_RUNS``.

    A frame with a peak above its layer's minimum gets a minimum of its own for its next start; once ``frames_to_raise``
    of a layer have one, the layer's is raised (`frame_memory.note_peaks`). No statement waits for a lock.
    """
    rows = json.dumps(runs)
    for statement in _UPDATE_RUNS:
        connection.execute(statement, {"rows": rows})
    peaks = {run["frame_id"]: run["max_rss"] for run in runs}
    frame_memory.note_peaks(connection, peaks, frames_to_raise=frames_to_raise)


def grow_reservations(connection: Connection, host_id: str, wanted_kb: Mapping[str, int]) -> bool:
    """Raise procs' memory reservations to ``wanted_kb``, as far as the host's idle memory goes, smallest first; whether
    any grew. The trigger of the schema takes the difference from the host."""
    # Host before procs, against the usual order: procs that others have locked are skipped, so there is no deadlock.
    idle = connection.execute(LOCK_HOST, {"host": host_id}).scalar() or 0
    wanted = {"procs": list(wanted_kb), "memory": list(wanted_kb.values()), "host": host_id, "idle": idle}
    return connection.execute(_GROW, wanted).rowcount > 0
