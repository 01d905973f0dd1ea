"""What host reports say about running frames, of many hosts at once.

Reports come from every host every few seconds, so nothing here waits for a row that another transaction is changing: it
is skipped (SKIP LOCKED) and written by the next report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, TextClause, text

from opencue_sched.store import frame_memory
from opencue_sched.store.arrays import numbers, texts
from opencue_sched.store.lookups import BY_KEYS, prepared, row_of, same_key
from opencue_sched.store.reports import lock_free_hosts

UNCHANGED_SECONDS = 60.0
"""A frame whose memory and log stay as they are is written this often: frames without a proc are lost, and processes
without one are killed, by how long ago their frame was written."""

_BY_KEY = f"SELECT set_config('enable_bitmapscan', 'off', true); {BY_KEYS}"
# Undo _BY_KEY: the statements after this one are planned as PostgreSQL likes.
_PLAN_FREELY = text(
    """
    SELECT set_config(name, 'on', true)
      FROM unnest(ARRAY['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin', 'enable_bitmapscan']) AS name
    """
)
# What is known of reported runs: some of the columns of `procs.read_runs`, from fewer tables.
_READ_REPORTED = prepared(
    f"""
    {_BY_KEY}
    SELECT coalesce(proc.pk_proc, '') AS proc_id, coalesce(proc.pk_host, '') AS host_id,
           coalesce(CASE WHEN proc.pk_host <> run.host
                         THEN (SELECT str_name FROM host WHERE host.pk_host = proc.pk_host) END, '') AS other_host_name,
           coalesce(proc.pk_frame, '') AS proc_frame_id,
           coalesce(proc.int_mem_reserved, 0) AS memory_reserved_kb, coalesce(proc.b_local, false) AS local,
           coalesce(frame.pk_frame, '') AS frame_id, coalesce(frame.pk_layer, '') AS layer_id,
           coalesce(frame.pk_job, '') AS job_id, coalesce(frame.str_state, '') AS frame_state,
           CAST(coalesce(extract(epoch FROM clock_timestamp() - frame.ts_updated), 0) AS float8) AS frame_age,
           CAST(coalesce(extract(epoch FROM clock_timestamp() - frame.ts_started), 0) AS float8) AS run_seconds,
           coalesce(owner.pk_proc, '') AS owner_proc_id, coalesce(owner.pk_host, '') AS owner_host_id,
           CAST(coalesce(extract(epoch FROM clock_timestamp() - owner.ts_dispatched), 0) AS float8) AS owner_age,
           coalesce(job.str_state, '') AS job_state, coalesce(layer.int_timeout, 0) AS timeout_minutes,
           coalesce(layer.int_timeout_llu, 0) AS timeout_llu_minutes,
           coalesce(layer.int_mem_min, 0) AS layer_memory_kb
      FROM unnest(CAST(:procs AS varchar[]), CAST(:frames AS varchar[]), CAST(:hosts AS varchar[])) WITH ORDINALITY
             AS run(proc, frame, host, place)
      LEFT JOIN {row_of("proc", "proc", "pk_proc = run.proc")} ON true
      LEFT JOIN {row_of("frame", "frame", "pk_frame = run.frame")} ON true
      LEFT JOIN {row_of("job", "job", "pk_job = frame.pk_job")} ON true
      LEFT JOIN {row_of("layer", "layer", "pk_layer = frame.pk_layer")} ON true
      -- Not looked for where the proc has the frame. OFFSET 0 keeps the condition in front of the look.
      LEFT JOIN LATERAL (SELECT * FROM proc had WHERE had.pk_frame = run.frame
                            AND proc.pk_frame IS DISTINCT FROM run.frame OFFSET 0) owner ON true
     ORDER BY run.place
    """  # noqa: S608 - only our own constant
)


class Usage(NamedTuple):
    """What a host reports of a running frame, and whose it is. The fields from ``rss`` on are RQD's, see
    RunningFrameInfo: KB, and an epoch, 0 when unknown."""

    proc_id: str
    frame_id: str
    layer_id: str
    job_id: str
    layer_memory_kb: int
    """What the frame's layer asks for."""
    rss: int
    max_rss: int
    pss: int
    max_pss: int
    used_gpu_memory: int
    max_used_gpu_memory: int
    vsize: int
    max_vsize: int
    used_swap_memory: int
    llu_time: int


_NUMBERS = Usage._fields[Usage._fields.index("rss") :]
# Writes reported runs: frames only where something has changed, procs always, because ts_ping is of this report. The
# state is compared so that no index serves, as in release.py.
_UPDATE_RUNS = prepared(
    f"""
    {_BY_KEY}
    WITH run AS MATERIALIZED (
        SELECT * FROM unnest(CAST(:procs AS varchar[]), CAST(:frames AS varchar[]),
                             {", ".join(f"CAST(:{name} AS bigint[])" for name in _NUMBERS)})
                      AS row(proc, frame, {", ".join(_NUMBERS)})),
    frames AS (
        SELECT run.* FROM run CROSS JOIN LATERAL (
            SELECT FROM frame
             WHERE pk_frame = run.frame AND str_state IS NOT DISTINCT FROM 'RUNNING'
               AND (ts_updated < current_timestamp - CAST(:unchanged AS float8) * interval '1 second'
                    OR (int_mem_used, int_mem_max_used, int_pss_used, int_pss_max_used, int_gpu_mem_used,
                        int_gpu_mem_max_used)
                       IS DISTINCT FROM
                       (run.rss, run.max_rss, run.pss, run.max_pss, run.used_gpu_memory, run.max_used_gpu_memory)
                    OR (run.llu_time > 0 AND ts_llu IS DISTINCT FROM to_timestamp(run.llu_time)))
               FOR NO KEY UPDATE SKIP LOCKED) locked),
    written AS (
        UPDATE frame
           SET ts_updated = current_timestamp, int_mem_used = rss, int_mem_max_used = max_rss,
               int_pss_used = pss, int_pss_max_used = max_pss, int_gpu_mem_used = used_gpu_memory,
               int_gpu_mem_max_used = max_used_gpu_memory,
               ts_llu = CASE WHEN llu_time > 0 THEN to_timestamp(llu_time) ELSE ts_llu END
          FROM frames WHERE {same_key("frame.pk_frame", "frames.frame")}),
    procs AS (
        SELECT run.* FROM run CROSS JOIN LATERAL (
            SELECT FROM proc WHERE pk_proc = run.proc AND pk_frame IS NOT DISTINCT FROM run.frame
               FOR NO KEY UPDATE SKIP LOCKED) locked)
    UPDATE proc
       SET ts_ping = current_timestamp, int_mem_used = rss, int_mem_max_used = max_rss,
           int_pss_used = pss, int_pss_max_used = max_pss, int_virt_used = vsize,
           int_virt_max_used = max_vsize, int_gpu_mem_used = used_gpu_memory,
           int_gpu_mem_max_used = max_used_gpu_memory, int_swap_used = least(used_swap_memory, 2147483647)
      FROM procs
     WHERE {same_key("proc.pk_proc", "procs.proc")} AND proc.pk_frame IS NOT DISTINCT FROM procs.frame
    """  # noqa: S608 - only our own constants
)


def _raising(table: str) -> TextClause:
    """SQL that raises the peaks of rows of one kind of owner, where they are lower."""
    return prepared(
        f"""
        WITH locked AS (
            SELECT peak.*
              FROM unnest(CAST(:ids AS varchar[]), CAST(:rss AS bigint[]), CAST(:pss AS bigint[])) AS peak(id, rss, pss)
             CROSS JOIN LATERAL (
                 SELECT FROM {table}_mem
                  WHERE pk_{table} = peak.id AND (int_max_rss < peak.rss OR int_max_pss < peak.pss)
                    FOR NO KEY UPDATE SKIP LOCKED) lower)
        UPDATE {table}_mem SET int_max_rss = greatest(int_max_rss, locked.rss),
                               int_max_pss = greatest(int_max_pss, locked.pss)
          FROM locked WHERE {same_key(f"{table}_mem.pk_{table}", "locked.id")}
        """  # noqa: S608 - only our own constants
    )


_RAISE_LAYER_PEAKS, _RAISE_JOB_PEAKS = _raising("layer"), _raising("job")
# Raises memory reservations, the smallest raise first, as far as the idle memory of each host goes.
_GROW = text(
    """
    WITH wish AS (
        SELECT proc.pk_proc, proc.pk_host, wished.memory, wished.memory - proc.int_mem_reserved AS more
          FROM unnest(CAST(:procs AS varchar[]), CAST(:memory AS bigint[]), CAST(:hosts AS varchar[]))
                 AS wished(proc, memory, host)
          JOIN proc ON proc.pk_proc = wished.proc AND proc.pk_host = wished.host
         WHERE wished.memory > proc.int_mem_reserved AND NOT proc.b_local
         ORDER BY proc.pk_proc FOR NO KEY UPDATE OF proc SKIP LOCKED)
    UPDATE proc SET int_mem_reserved = granted.memory
      FROM (SELECT pk_proc, pk_host, memory, sum(more) OVER (PARTITION BY pk_host ORDER BY more, pk_proc) AS together
              FROM wish) granted
      JOIN host ON host.pk_host = granted.pk_host AND granted.together <= host.int_mem_idle
     WHERE proc.pk_proc = granted.pk_proc
    RETURNING proc.pk_host
    """
)


class ReportedRun(NamedTuple):
    """What the database knows about one (proc id, frame id) that a host reports: columns of `procs.Run`, and what the
    layer asks for, in the order of _READ_REPORTED. Not a Row, whose attributes take longer to read: each of these is
    read many times."""

    proc_id: str
    host_id: str
    other_host_name: str
    """The host that has the proc; empty where that is the one which reports."""
    proc_frame_id: str
    memory_reserved_kb: int
    local: bool
    """Whether the proc was dispatched locally by a Cuebot."""
    frame_id: str
    layer_id: str
    job_id: str
    frame_state: str
    frame_age: float
    run_seconds: float
    owner_proc_id: str
    owner_host_id: str
    owner_age: float
    job_state: str
    timeout_minutes: int
    timeout_llu_minutes: int
    layer_memory_kb: int


def read_reported(connection: Connection, runs: Sequence[tuple[str, str, str]]) -> Sequence[ReportedRun]:
    """What is known about each (proc id, frame id, id of the host that reports it), in the order given."""
    if not runs:
        return ()
    procs, frames, hosts = map(texts, zip(*runs, strict=True))
    found = connection.execute(_READ_REPORTED, {"procs": procs, "frames": frames, "hosts": hosts})
    return [ReportedRun._make(row) for row in found.all()]


def update_runs(connection: Connection, runs: Sequence[Usage], *, frames_to_raise: int) -> None:
    """Memory, last log line and ts_ping of running frames; peaks of their layers and jobs only ever rise.

    A frame with a peak above its layer's minimum gets a minimum of its own for its next start; once ``frames_to_raise``
    of a layer have one, the layer's is raised (`frame_memory.note_peaks`). No statement waits for a lock.
    """
    columns = dict(zip(Usage._fields, zip(*runs, strict=True), strict=True))
    job_of = dict(zip(columns["layer_id"], columns["job_id"], strict=True))
    layers_rss, layers_pss = (_highest(columns["layer_id"], columns[name]) for name in ("max_rss", "max_pss"))
    _raise_peaks(connection, _RAISE_LAYER_PEAKS, layers_rss, layers_pss)
    jobs = [job_of[layer_id] for layer_id in layers_rss]
    jobs_rss, jobs_pss = (_highest(jobs, peaks.values()) for peaks in (layers_rss, layers_pss))
    _raise_peaks(connection, _RAISE_JOB_PEAKS, jobs_rss, jobs_pss)
    needy = [run for run in runs if run.max_rss > run.layer_memory_kb]
    if needy:
        # Few rows, and all hosts that a layer may use.
        connection.execute(_PLAN_FREELY)
        layers = {run.layer_id for run in needy}
        peaks_kb = {run.frame_id: run.max_rss for run in needy}
        frame_memory.note_peaks(connection, peaks_kb, layers, frames_to_raise=frames_to_raise)
    # Last, as completions wait for these rows until the transaction ends.
    ids = {"procs": texts(columns["proc_id"]), "frames": texts(columns["frame_id"])}
    numbers_of = {name: numbers(columns[name]) for name in _NUMBERS}
    connection.execute(_UPDATE_RUNS, {**ids, **numbers_of, "unchanged": UNCHANGED_SECONDS})


def _highest(owner_ids: Iterable[str], peaks_kb: Iterable[int]) -> dict[str, int]:
    """The highest of the peaks of each owner, in the order in which the owners come first."""
    highest: dict[str, int] = {}
    for owner_id, peak_kb in zip(owner_ids, peaks_kb, strict=True):
        if peak_kb > highest.get(owner_id, -1):
            highest[owner_id] = peak_kb
    return highest


def _raise_peaks(
    connection: Connection, statement: TextClause, rss_kb: Mapping[str, int], pss_kb: Mapping[str, int]
) -> None:
    """Raise the peaks of layers or jobs, named in the same order in both mappings."""
    peaks = {"ids": texts(rss_kb), "rss": numbers(rss_kb.values()), "pss": numbers(pss_kb.values())}
    connection.execute(statement, peaks)


def grow_reservations(connection: Connection, wanted_kb: Mapping[str, Mapping[str, int]]) -> frozenset[str]:
    """Raise the memory reservations of procs (by host, then proc) to ``wanted_kb``, as far as their host's idle memory
    goes, smallest first; the hosts where any grew. The trigger of the schema takes the difference from the host."""
    # Hosts before procs, against the usual order: what others have locked is skipped, so there is no deadlock.
    locked = lock_free_hosts(connection, wanted_kb)
    wishes = [(proc_id, kb, host_id) for host_id in locked for proc_id, kb in wanted_kb[host_id].items()]
    wanted = {
        "procs": texts(proc_id for proc_id, _, _ in wishes),
        "memory": numbers(kb for _, kb, _ in wishes),
        "hosts": texts(host_id for _, _, host_id in wishes),
    }
    return frozenset(connection.execute(_GROW, wanted).scalars())
