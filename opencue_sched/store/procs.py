"""Procs on their way out: locks, what is known about a run, deletion, and giving back what was reserved.

Every transaction that ends runs takes its locks in one order, which the booking transaction shares where they meet:
frame, proc, host, layer_stat, job_stat, then everything else. Booking waits for no frame (SKIP LOCKED) and inserts new
procs only, so the two never wait for each other in a circle.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, TextClause, text

from opencue_sched.store.arrays import texts
from opencue_sched.store.lookups import AS_WRITTEN, BY_KEYS, prepared, row_of, same_key

HELD = """coalesce(sum(greatest(0, int_cores_reserved)), 0) AS cores,
                   coalesce(sum(greatest(0, int_mem_reserved)), 0) AS memory,
                   coalesce(sum(greatest(0, int_gpus_reserved)), 0) AS gpus,
                   coalesce(sum(greatest(0, int_gpu_mem_reserved)), 0) AS gpu_memory"""
"""What procs have reserved of their host, in a SELECT from them. A proc that reserves less than nothing counts as 0:
otherwise more would be idle than the host has, which the column may not be able to hold."""

# Lock these frames in id order.
_FRAMES = (
    "SELECT pk_frame FROM frame WHERE pk_frame = ANY(CAST(:frames AS varchar[])) ORDER BY pk_frame FOR NO KEY UPDATE"
)
# Lock these procs, and the procs of these frames, in id order. The ids of the latter are looked up by their frames, and
# then all rows by id: with OR between the two keys, a plan made where there was no proc goes through the whole table.
# Both keys are compared once more, for a proc that has lost its frame while its lock was waited for.
_PROCS = f"""
    SELECT pk_proc FROM proc
     WHERE pk_proc = ANY(CAST(:procs AS varchar[]) || ARRAY(
               SELECT owner.pk_proc FROM unnest(CAST(:frames AS varchar[])) AS run(frame)
                 JOIN {row_of("proc", "owner", "pk_frame = run.frame")} ON true))
       AND (pk_proc IN (SELECT unnest(CAST(:procs AS varchar[])))
            OR pk_frame IN (SELECT unnest(CAST(:frames AS varchar[]))))
     ORDER BY pk_proc FOR UPDATE
"""  # noqa: S608 - only our own constants
LOCKED_HOSTS = (
    "SELECT pk_host FROM host WHERE pk_host = ANY(CAST(:hosts AS varchar[])) ORDER BY pk_host FOR NO KEY UPDATE"
)
"""Locks host rows in id order, as booking does."""
LOCKED_SHOWS = "SELECT pk_show FROM show WHERE pk_show = ANY(CAST(:shows AS varchar[])) ORDER BY pk_show FOR SHARE"
"""Locks show rows: whether a show is scheduler managed stays as it is until the transaction ends."""
# Lock runs: frames first, then procs.
_LOCK_RUNS = text(f"{AS_WRITTEN} {_FRAMES}; {_PROCS}")
_LOCK_HOSTS = text(LOCKED_HOSTS)
# The counters are read without their lock: good enough to foresee which layers and jobs are about to complete.
_RUNS = f"""
    SELECT coalesce(proc.pk_proc, '') AS proc_id, coalesce(proc.pk_host, '') AS host_id,
           coalesce(host.str_name, '') AS host_name, coalesce(host_stat.str_state, '') AS host_state,
           coalesce(proc.pk_frame, '') AS proc_frame_id, coalesce(proc.pk_show, '') AS proc_show_id,
           coalesce(proc.int_mem_reserved, 0) AS memory_reserved_kb, coalesce(proc.b_local, false) AS local,
           proc.ts_ping AS pinged_at, coalesce(frame.pk_frame, '') AS frame_id,
           coalesce(frame.pk_layer, '') AS layer_id, coalesce(frame.pk_job, '') AS job_id,
           coalesce(job.pk_show, '') AS show_id, coalesce(frame.str_state, '') AS frame_state,
           frame.int_version AS version, coalesce(frame.int_retries, 0) AS retries,
           CAST(coalesce(extract(epoch FROM clock_timestamp() - frame.ts_updated), 0) AS float8) AS frame_age,
           CAST(coalesce(extract(epoch FROM clock_timestamp() - frame.ts_started), 0) AS float8) AS run_seconds,
           coalesce(frame.str_host, '') AS frame_host,
           coalesce(owner.pk_proc, '') AS owner_proc_id, coalesce(owner.pk_host, '') AS owner_host_id,
           CAST(coalesce(extract(epoch FROM clock_timestamp() - owner.ts_dispatched), 0) AS float8) AS owner_age,
           coalesce(job.str_state, '') AS job_state, coalesce(job.int_max_retries, 0) AS max_retries,
           coalesce(job.b_autoeat, false) AS autoeat, coalesce(layer.int_timeout, 0) AS timeout_minutes,
           coalesce(layer.int_timeout_llu, 0) AS timeout_llu_minutes,
           coalesce(layer_stat.int_waiting_count + layer_stat.int_running_count + layer_stat.int_dead_count
                      + layer_stat.int_depend_count, 0) AS layer_open,
           coalesce(job_stat.int_waiting_count + job_stat.int_running_count + job_stat.int_dead_count
                      + job_stat.int_depend_count + job_stat.int_checkpoint_count, 0) AS job_open
      FROM unnest(CAST(:run_procs AS varchar[]), CAST(:run_frames AS varchar[])) WITH ORDINALITY
             AS run(proc, frame, ordinal)
      LEFT JOIN {row_of("proc", "proc", "pk_proc = run.proc")} ON true
      LEFT JOIN {row_of("host", "host", "pk_host = proc.pk_host")} ON true
      LEFT JOIN {row_of("host_stat", "host_stat", "pk_host = proc.pk_host")} ON true
      LEFT JOIN {row_of("frame", "frame", "pk_frame = run.frame")} ON true
      LEFT JOIN {row_of("proc", "owner", "pk_frame = run.frame")} ON true
      LEFT JOIN {row_of("job", "job", "pk_job = frame.pk_job")} ON true
      LEFT JOIN {row_of("layer", "layer", "pk_layer = frame.pk_layer")} ON true
      LEFT JOIN {row_of("layer_stat", "layer_stat", "pk_layer = frame.pk_layer")} ON true
      LEFT JOIN {row_of("job_stat", "job_stat", "pk_job = frame.pk_job")} ON true
     ORDER BY run.ordinal
"""  # noqa: S608 - only our own constants
_READ_RUNS = text(_RUNS)
# Statements of one message: the last sees what was committed before the others had their locks.
_LOCK_AND_READ_RUNS = prepared(f"{BY_KEYS} {_FRAMES}; {_PROCS}; {_RUNS}")
# Delete procs; those deleted, with what each held and of whom.
_DELETE_PROCS = text(
    """
    DELETE FROM proc USING host
     WHERE proc.pk_proc = ANY(CAST(:procs AS varchar[])) AND host.pk_host = proc.pk_host
    RETURNING proc.pk_proc AS id, proc.pk_host AS host_id, host.pk_alloc AS alloc_id,
              coalesce(proc.pk_show, '') AS show_id, coalesce(proc.pk_job, '') AS job_id,
              coalesce(proc.pk_layer, '') AS layer_id, proc.b_local AS local,
              coalesce((SELECT b_scheduler_managed FROM show WHERE show.pk_show = proc.pk_show), false) AS managed,
              greatest(0, proc.int_cores_reserved) AS centicores, greatest(0, proc.int_mem_reserved) AS memory_kb,
              greatest(0, proc.int_gpus_reserved) AS gpus, greatest(0, proc.int_gpu_mem_reserved) AS gpu_memory_kb
    """
)
_DELETED = """
    json_to_recordset(CAST(:procs AS json))
      AS deleted(host_id varchar, alloc_id varchar, show_id varchar, job_id varchar, layer_id varchar,
                 centicores bigint, memory_kb bigint, gpus bigint, gpu_memory_kb bigint)
"""
RESTORED_HOSTS = f"""
    UPDATE host
       SET int_cores_idle = greatest(0, least(int_cores - held.cores, int_cores_idle + back.cores)),
           int_mem_idle = greatest(0, least(int_mem - held.memory, int_mem_idle + back.memory)),
           int_gpus_idle = greatest(0, least(int_gpus - held.gpus, int_gpus_idle + back.gpus)),
           int_gpu_mem_idle = greatest(0, least(int_gpu_mem - held.gpu_memory, int_gpu_mem_idle + back.gpu_memory))
      FROM (SELECT host_id, sum(centicores) AS cores, sum(memory_kb) AS memory, sum(gpus) AS gpus,
                   sum(gpu_memory_kb) AS gpu_memory
              FROM {_DELETED} GROUP BY 1) back
      CROSS JOIN LATERAL (
            SELECT {HELD} FROM proc WHERE proc.pk_host = back.host_id) held
     WHERE {same_key("host.pk_host", "back.host_id")}
"""  # noqa: S608 - only our own constants
"""What `restore_hosts` does; its parameters are those of `restored`."""
_RESTORE_HOSTS = text(RESTORED_HOSTS)


def _decrement(table: str, owner: str) -> TextClause:
    """Take what deleted procs had off the rows of an accounting table that own them, locked in key order first."""
    return text(
        f"""
        WITH less AS (
            SELECT owner.pk_{table} AS id, sum(centicores) AS cores, sum(gpus) AS gpus
              FROM {_DELETED} LEFT JOIN job ON job.pk_job = deleted.job_id JOIN {table} owner ON {owner}
             GROUP BY 1),
        locked AS (
            SELECT less.* FROM {table} JOIN less ON less.id = {table}.pk_{table}
             ORDER BY less.id FOR NO KEY UPDATE OF {table})
        UPDATE {table} SET int_cores = greatest(0, {table}.int_cores - locked.cores),
                           int_gpus = greatest(0, {table}.int_gpus - locked.gpus)
          FROM locked WHERE {table}.pk_{table} = locked.id
        """  # noqa: S608 - only our own constants
    )


# In the order Cuebot writes them.
_ACCOUNTS = (
    _decrement("subscription", "owner.pk_show = deleted.show_id AND owner.pk_alloc = deleted.alloc_id"),
    _decrement("layer_resource", "owner.pk_layer = deleted.layer_id"),
    _decrement("job_resource", "owner.pk_job = deleted.job_id"),
    _decrement("folder_resource", "owner.pk_folder = job.pk_folder"),
    _decrement("point", "owner.pk_dept = job.pk_dept AND owner.pk_show = job.pk_show"),
)


Run = Row[Any]
"""What the database knows about one (proc id, frame id) that a host reported or a caller wants ended: the columns of
``_READ_RUNS``. Ages in seconds.

``proc_id`` is empty when there is no such proc, and the next eight fields mean nothing then; ``proc_frame_id`` is empty
when its frame was taken off it (eaten, killed). ``frame_id`` is empty when there is no such frame; the other fields are
that frame's, and what its job and layer say about how its run may end; ``run_seconds`` is how long ago the frame was
started, by the clock of the database. ``owner_proc_id`` is the proc that has the frame
now. ``layer_open`` and ``job_open`` count the frames that are not over yet; they were read without a lock.
"""

DeletedProc = Row[Any]
"""A proc that was deleted, with what it had reserved at that moment (memory may have grown since booking): the columns
of ``_DELETE_PROCS``. Centicores, KB, whole GPUs, none below 0. ``managed``: its show is scheduler managed."""


def lock_runs(connection: Connection, proc_ids: Collection[str], frame_ids: Collection[str]) -> None:
    """Lock the frames, then the procs that are named or that own one of the frames. Waits."""
    connection.execute(_LOCK_RUNS, {"procs": texts(proc_ids), "frames": texts(frame_ids)})


def read_runs(connection: Connection, runs: Sequence[tuple[str, str]]) -> Sequence[Run]:
    """What is known about each (proc id, frame id), in the order given. An empty id finds nothing."""
    return connection.execute(_READ_RUNS, _named(runs)).all()


def lock_and_read_runs(connection: Connection, runs: Sequence[tuple[str, str]]) -> Sequence[Run]:
    """`lock_runs`, then `read_runs`, in one message."""
    ids = {"procs": texts({proc for proc, _ in runs if proc}), "frames": texts({frame for _, frame in runs if frame})}
    return connection.execute(_LOCK_AND_READ_RUNS, {**ids, **_named(runs)}).all()


def lock_hosts(connection: Connection, host_ids: Collection[str]) -> None:
    """Lock host rows in id order, as booking does: nothing is booked on them until this transaction ends."""
    connection.execute(_LOCK_HOSTS, {"hosts": texts(host_ids)})


def delete_procs(connection: Connection, proc_ids: Collection[str]) -> Sequence[DeletedProc]:
    """Delete procs. Only what this call really deleted is returned, so one of several racing callers wins each."""
    return connection.execute(_DELETE_PROCS, {"procs": texts(proc_ids)}).all()


def restore_hosts(connection: Connection, procs: Sequence[DeletedProc]) -> None:
    """Give the hosts back what deleted procs had reserved, each host once, never above what the other procs leave of
    its total: procs of before a boot may have more than the host has now. Lock the hosts first."""
    if procs:
        connection.execute(_RESTORE_HOSTS, restored(procs))


def restored(procs: Sequence[DeletedProc]) -> dict[str, str]:
    """The parameters of RESTORED_HOSTS."""
    return {"procs": _as_json(procs)}


def decrement_accounts(connection: Connection, procs: Sequence[DeletedProc]) -> None:
    """Lower the five accounting tables for procs of unmanaged shows, as Cuebot does for its own."""
    for statement in _ACCOUNTS if procs else ():
        connection.execute(statement, {"procs": _as_json(procs)})


def _named(runs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Runs (proc id, frame id) as parameters of _RUNS."""
    return {"run_procs": texts(proc for proc, _ in runs), "run_frames": texts(frame for _, frame in runs)}


def _as_json(procs: Sequence[DeletedProc]) -> str:
    return json.dumps(as_dicts(procs))


def as_dicts(rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    """Rows of one statement with the names of its columns; an `_asdict` of each would look for the names again."""
    names = rows[0]._fields if rows else ()
    return [dict(zip(names, row, strict=True)) for row in rows]
