"""The statements of the booking transaction, in their order.

Locks are taken in one order by everyone who books or ends runs: frame, (proc,) host, layer_stat, job_stat. Booking
waits for no frame (SKIP LOCKED: another transaction is at work there), for hosts a moment, and for the counters, each
in key order. Every row is written once per statement: PostgreSQL silently skips a second update of one row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.domain.frame_command import JobDetails, LaunchDetails, LayerDetails, check_layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import STATUSES_NOT_COUNTED_AS_RETRY
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.errors import InvalidInput
from opencue_sched.store.arrays import numbers, texts
from opencue_sched.store.limit_types import TERMS
from opencue_sched.store.lookups import PLANNED_ONCE, prepared, row_of, same_key
from opencue_sched.store.pending import DELAYING_STATUSES, SWITCHED_ON
from opencue_sched.store.reservations import HELD, HOLD_COLUMNS, LOCKED_CENTICORES
from opencue_sched.store.schema import SchemaFacts, with_start_after
from opencue_sched.store.set_based_frames import MARKER, UNCOUNTED, UNRECORDED

FIRST_MEMORY_USED_KB = 262_144
"""proc.int_mem_used before the first host report, as Cuebot writes it."""
# Set the time-outs of the commit's transaction, and have its statements planned by index.
#
# The last four settings are for the planner. Every row of a booking is named by its id, and statements here join in the
# order in which they are written, in one plan for any number of rows. Left to itself PostgreSQL reads all frames for
# some hundred ids, or all that wait of the few shows that it takes for managed ones: its statistics of a table as small
# as that of the shows are never fresh. Where no index of a table serves, a plan without sequential scans has one all
# the same, at a cost beyond each threshold of the just-in-time compiler: where that is on, such a statement takes 0.3
# to 3 s.
_SET_TIMEOUTS = prepared(
    """
    SELECT set_config('statement_timeout', :statement_ms, true), set_config('lock_timeout', :lock_ms, true),
           set_config('idle_in_transaction_session_timeout', :idle_ms, true),
           CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
                THEN set_config('transaction_timeout', :transaction_ms, true) END,
           set_config('enable_seqscan', 'off', true), set_config('join_collapse_limit', '1', true),
           set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)
    """
)
# Lock frames and read what the plan rests on: one row a layer, with the frames of the layer that were locked. Frames
# come with their layers, so that both lists are joined first, and each frame is looked up and locked by itself:
# PostgreSQL expects next to none of them to wait, and where it knew of no frame when the statement was planned it would
# compare all frames of the farm with all that are wanted. Layer and state are compared so that no other index serves:
# where each layer had one frame when the statement was planned, an index scan of a layer with twenty thousand would
# follow. Frames are locked in no order: nobody is waited for.
_LOCK_FRAMES = f"""
    WITH planned AS MATERIALIZED (
        SELECT l.pk_layer, l.int_cores_min, l.int_cores_max, l.int_mem_min, l.int_gpus_min, l.int_gpu_mem_min,
               l.str_tags, l.b_threadable, j.str_os, j.pk_folder, j.pk_dept,
               ARRAY(SELECT ll.pk_limit_record FROM layer_limit ll WHERE ll.pk_layer = l.pk_layer) AS named_limit_ids,
               ARRAY(SELECT of_layer.pk_limit_record
                     FROM {row_of("layer_limit", "of_layer", "pk_layer = l.pk_layer")}
                     JOIN {row_of("limit_record", "its", "pk_limit_record = of_layer.pk_limit_record")} ON true)
                   AS limit_ids,
               COALESCE(q.until > now(), false) AS quarantined, {SWITCHED_ON} {{started}} AS may_start
        FROM unnest(CAST(:layers AS varchar[])) AS wanted(pk_layer)
        JOIN {row_of("layer", "l", "pk_layer = wanted.pk_layer")} ON true
        JOIN {row_of("job", "j", "pk_job = l.pk_job")} ON true
        JOIN {row_of("show", "s", "pk_show = j.pk_show")} ON true
        LEFT JOIN {row_of("opencue_sched_quarantine", "q", "pk_job = j.pk_job")} ON true
    ),
    locked AS MATERIALIZED (
        SELECT f.pk_layer, f.pk_frame, GREATEST(planned.int_mem_min, asked.memory_kb) AS memory_kb
        FROM unnest(CAST(:frames AS varchar[]), CAST(:versions AS int[]), CAST(:frame_layers AS varchar[]))
             AS wanted(pk_frame, version, pk_layer)
        JOIN planned ON planned.pk_layer = wanted.pk_layer AND planned.may_start
        CROSS JOIN LATERAL (
            SELECT pk_frame, pk_layer FROM frame
            WHERE pk_frame = wanted.pk_frame AND pk_layer IS NOT DISTINCT FROM wanted.pk_layer
              AND str_state IS NOT DISTINCT FROM 'WAITING' AND int_version IS NOT DISTINCT FROM wanted.version
              AND NOT EXISTS (SELECT 1 FROM proc p WHERE p.pk_frame = frame.pk_frame OFFSET 0)
            FOR NO KEY UPDATE OF frame SKIP LOCKED
        ) f
        LEFT JOIN {row_of("opencue_sched_frame_memory", "asked", "pk_frame = f.pk_frame")} ON true
    )
    SELECT planned.*, of_layer.frames, of_layer.memory
    FROM planned
    LEFT JOIN (
        SELECT pk_layer, array_agg(pk_frame) AS frames, array_agg(memory_kb) AS memory FROM locked GROUP BY pk_layer
    ) of_layer ON of_layer.pk_layer = planned.pk_layer
"""  # noqa: S608 - only our own constants

# Two statements in one message: the second sees the reservations that were granted before the first had its locks, and
# no host is reserved anew while its row is locked (store/reservations.py).
_LOCK_THESE = """
    SELECT set_config('opencue_sched.locked_hosts', CAST(coalesce(array_agg(locked.pk_host), '{{}}') AS text), true)
    FROM (
        SELECT pk_host FROM host WHERE pk_host = ANY(CAST(:hosts AS varchar[]))
        ORDER BY pk_host FOR NO KEY UPDATE {unless_locked}
    ) locked;
"""
# What the hosts that were locked have idle now, and who has them reserved.
_READ_LOCKED = f"""
    SELECT h.pk_host AS id, h.pk_alloc AS alloc_id, h.str_lock_state = 'OPEN' AND s.str_state = 'UP' AS up,
           h.int_cores_idle - {LOCKED_CENTICORES} AS centicores, h.int_mem_idle AS memory_kb, h.int_gpus_idle AS gpus,
           h.int_gpu_mem_idle AS gpu_memory_kb,
           CAST(extract(epoch FROM clock_timestamp()) AS double precision) AS now, {HOLD_COLUMNS}
    FROM host h JOIN {row_of("host_stat", "s", "pk_host = h.pk_host")} ON true
    LEFT JOIN {HELD} ON true
    WHERE h.pk_host = ANY(CAST(current_setting('opencue_sched.locked_hosts') AS varchar[]))
"""  # noqa: S608 - only our own constants
# Lock hosts, waiting :wait_ms for each row at most, and read them.
_LOCK_HOSTS = prepared(
    f"""
    SELECT set_config('opencue_sched.lock_timeout', current_setting('lock_timeout'), true);
    SAVEPOINT opencue_sched_hosts;
    SELECT set_config('lock_timeout', :wait_ms, true);
    {_LOCK_THESE.format(unless_locked="")}
    SELECT set_config('lock_timeout', current_setting('opencue_sched.lock_timeout'), true);
    {_READ_LOCKED}
    """
)
# Lock the hosts that nobody else has locked, once the wait of _LOCK_HOSTS has run out, and read them.
_LOCK_FREE_HOSTS = prepared(
    f"""
    ROLLBACK TO SAVEPOINT opencue_sched_hosts;
    {_LOCK_THESE.format(unless_locked="SKIP LOCKED")}
    {_READ_LOCKED}
    """
)

# Two statements in one message: the second sees what was committed before the first had its locks. Locks are asked for,
# not waited for: a transaction that changes a cap has its vertex for itself (revision 0006).
_CAPS = prepared(
    f"""
    SELECT set_config('opencue_sched.caps_changing', CAST(coalesce(array_agg(name), '{{}}') AS text), true)
    FROM unnest(CAST(:vertices AS varchar[])) AS name
    WHERE NOT pg_try_advisory_xact_lock_shared(hashtextextended('opencue_sched_caps:' || name, 0))
       OR NOT pg_try_advisory_xact_lock_shared(
              hashtext('opencue_sched_caps:' || split_part(name, ':', 1)), hashtext(name) & 1023);
    WITH wanted AS MATERIALIZED (
        SELECT name, split_part(name, ':', 1) AS kind, split_part(name, ':', 2) AS id, split_part(name, ':', 3) AS alloc
        FROM unnest(CAST(:vertices AS varchar[])) AS name
    )
    SELECT vertex, cores, gpus, terms, vertex <> ALL(changing.names) AS steady
    FROM (SELECT CAST(current_setting('opencue_sched.caps_changing') AS varchar[])) AS changing(names), (
        SELECT name AS vertex, CAST(int_burst AS bigint) AS cores, CAST(-1 AS bigint) AS gpus, '' AS terms
        FROM wanted JOIN {row_of("subscription", "sub", "pk_show = wanted.id AND pk_alloc = wanted.alloc")}
            ON kind = 'sub'
        UNION ALL
        SELECT name, int_max_cores, int_max_gpus, ''
        FROM wanted JOIN {row_of("folder_resource", "folder", "pk_folder = wanted.id")} ON kind = 'folder'
        UNION ALL
        SELECT name, int_max_cores, int_max_gpus, ''
        FROM wanted JOIN {row_of("job_resource", "job", "pk_job = wanted.id")} ON kind = 'job'
        UNION ALL
        SELECT name, COALESCE(int_max_value, 0), -1, terms.terms
        FROM wanted JOIN {row_of("limit_record", "limit_record", "pk_limit_record = wanted.id")} ON kind = 'limit'
        {TERMS}
    ) caps
    """  # noqa: S608 - only our own constants
)
COUNTERS_OF_LAYERS = (
    "SELECT pk_layer FROM layer_stat WHERE pk_layer = ANY(CAST(:layers AS varchar[])) "
    "ORDER BY pk_layer FOR NO KEY UPDATE"
)
"""Locks rows of layer_stat, in the order in which every transaction locks them."""
COUNTERS_OF_JOBS = (
    "SELECT pk_job FROM job_stat WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job FOR NO KEY UPDATE"
)
"""Locks rows of job_stat, in the order in which every transaction locks them: after those of layer_stat."""
_LOCK_STATS = prepared(f"{COUNTERS_OF_LAYERS}; {COUNTERS_OF_JOBS}")
# Lock the counters among the same that no transaction has locked, and say which.
_LOCK_FREE_STATS = prepared(
    f"""
    WITH layers AS MATERIALIZED ({COUNTERS_OF_LAYERS} SKIP LOCKED),
    jobs AS MATERIALIZED ({COUNTERS_OF_JOBS} SKIP LOCKED)
    SELECT pk_layer FROM layers UNION ALL SELECT pk_job FROM jobs
    """  # noqa: S608 - only our own constants
)
# Undo what was written since _INSERT_PROCS began.
_BACK = text("ROLLBACK TO SAVEPOINT opencue_sched_unwritten")
# Insert procs; returns those inserted, without any whose frame has a proc already.
_INSERT_PROCS = prepared(
    """
    SAVEPOINT opencue_sched_unwritten;
    INSERT INTO proc (pk_proc, pk_host, pk_show, pk_job, pk_layer, pk_frame,
                      int_cores_reserved, int_mem_reserved, int_mem_pre_reserved, int_mem_used,
                      int_gpus_reserved, int_gpu_mem_reserved, int_gpu_mem_pre_reserved, b_local)
    SELECT pk_proc, pk_host, pk_show, pk_job, pk_layer, pk_frame,
           cores, memory, memory, :memory_used, gpus, gpu_memory, gpu_memory, false
    FROM unnest(CAST(:procs AS varchar[]), CAST(:hosts AS varchar[]), CAST(:shows AS varchar[]),
                CAST(:jobs AS varchar[]), CAST(:layers AS varchar[]), CAST(:frames AS varchar[]),
                CAST(:cores AS bigint[]), CAST(:memory AS bigint[]),
                CAST(:gpus AS int[]), CAST(:gpu_memory AS bigint[]))
         AS planned(pk_proc, pk_host, pk_show, pk_job, pk_layer, pk_frame, cores, memory, gpus, gpu_memory)
    ON CONFLICT DO NOTHING
    RETURNING pk_proc
    """
)
# A frame whose layer waited because it got no licence uses no retry.
_WAITED_FOR_A_LICENCE = f"(f.int_exit_status > 1 AND f.int_exit_status = ANY({DELAYING_STATUSES}))"
# Have frames run; their versions afterwards.
_RUNNING = f"""
    UPDATE frame f
    SET str_state = 'RUNNING', str_host = planned.host_name, int_cores = planned.cores,
        int_mem_reserved = planned.memory, int_gpus = planned.gpus, int_gpu_mem_reserved = planned.gpu_memory,
        ts_started = current_timestamp, ts_updated = current_timestamp, ts_stopped = NULL,
        int_retries = f.int_retries + CASE WHEN f.int_exit_status = ANY(CAST(:no_retry AS int[]))
                                             OR {_WAITED_FOR_A_LICENCE} THEN 0 ELSE 1 END,
        int_version = COALESCE(f.int_version, 0) + 1
    FROM unnest(CAST(:frames AS varchar[]), CAST(:host_names AS varchar[]), CAST(:cores AS int[]),
                CAST(:memory AS bigint[]), CAST(:gpus AS int[]), CAST(:gpu_memory AS bigint[]))
         AS planned(pk_frame, host_name, cores, memory, gpus, gpu_memory)
    WHERE {same_key("f.pk_frame", "planned.pk_frame")}
    RETURNING f.pk_frame, f.int_version
"""  # noqa: S608 - only our own constants
# Lock the counters and start frames: Cuebot's triggers count and record them.
_START_FRAMES = prepared("; ".join((COUNTERS_OF_LAYERS, COUNTERS_OF_JOBS, _RUNNING)))

# Starts frames where Cuebot's triggers leave their counters and history to us (set_based_frames.py). All of it is one
# message. It writes counters and history only where both triggers left out every frame.
_MARK = f"""
    SELECT set_config('{UNCOUNTED}', '0', true), set_config('{UNRECORDED}', '0', true),
           set_config('{MARKER}', CAST(pg_current_xact_id() AS text), true)
"""
_UNMARK = f"SELECT set_config('{MARKER}', '', true)"
_ALL_LEFT_OUT = f"""
    current_setting('{UNCOUNTED}') = CAST(:started AS text) AND current_setting('{UNRECORDED}') = CAST(:started AS text)
"""
_STARTED = f"""
    unnest(CAST(:frames AS varchar[])) AS planned(pk_frame)
    JOIN {row_of("frame", "f", "pk_frame = planned.pk_frame")} ON true
"""
# Count the started frames in their layers.
_COUNT_IN_LAYERS = f"""
    UPDATE layer_stat s
    SET int_waiting_count = s.int_waiting_count - started.frames,
        int_running_count = s.int_running_count + started.frames,
        ts_started = COALESCE(s.ts_started, started.first, current_timestamp)
    FROM (SELECT f.pk_layer, count(*) AS frames, min(f.ts_started) AS first FROM {_STARTED} GROUP BY f.pk_layer) started
    WHERE {same_key("s.pk_layer", "started.pk_layer")} AND {_ALL_LEFT_OUT}
"""  # noqa: S608 - only our own constants
# Count the started frames in their jobs.
_COUNT_IN_JOBS = f"""
    UPDATE job_stat s
    SET int_waiting_count = s.int_waiting_count - started.frames,
        int_running_count = s.int_running_count + started.frames
    FROM (SELECT f.pk_job, count(*) AS frames FROM {_STARTED} GROUP BY f.pk_job) started
    WHERE {same_key("s.pk_job", "started.pk_job")} AND {_ALL_LEFT_OUT}
"""  # noqa: S608 - only our own constants
# Write the started frames into the history, unless the history is switched off.
_RECORD = f"""
    INSERT INTO frame_history (pk_frame, pk_layer, pk_job, str_name, str_state, int_cores, int_mem_reserved, int_gpus,
                               int_gpu_mem_reserved, str_host, int_ts_started, pk_alloc)
    SELECT f.pk_frame, f.pk_layer, f.pk_job, f.str_name, f.str_state, f.int_cores, f.int_mem_reserved, f.int_gpus,
           f.int_gpu_mem_reserved, f.str_host, epoch(current_timestamp),
           (SELECT h.pk_alloc FROM host h WHERE h.str_name = f.str_host)
    FROM {_STARTED}
    WHERE {_ALL_LEFT_OUT} AND NOT EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY')
"""  # noqa: S608 - only our own constants
# The versions of the started frames, and how many of them each trigger left out.
_READ_STARTED = f"""
    SELECT f.pk_frame, f.int_version, CAST(current_setting('{UNCOUNTED}') AS int) AS uncounted,
           CAST(current_setting('{UNRECORDED}') AS int) AS unrecorded
    FROM {_STARTED}
    WHERE f.str_state = 'RUNNING'
"""  # noqa: S608 - only our own constants
# Start frames where the triggers leave counters and history to us, in one message.
_START_ALL_FRAMES = prepared(
    "; ".join(
        (
            COUNTERS_OF_LAYERS,
            COUNTERS_OF_JOBS,
            "SAVEPOINT opencue_sched_unstarted",
            _MARK,
            _RUNNING,
            _UNMARK,
            _COUNT_IN_LAYERS,
            _COUNT_IN_JOBS,
            _RECORD,
            _READ_STARTED,
        )
    )
)
# Undo what _START_ALL_FRAMES wrote.
_UNSTARTED = text("ROLLBACK TO SAVEPOINT opencue_sched_unstarted")
# Take procs from the idle amounts of their hosts, and end the reservations that they were booked on.
_TAKE_FROM_HOSTS = prepared(
    f"""
    UPDATE host h
    SET int_cores_idle = h.int_cores_idle - taken.cores, int_mem_idle = h.int_mem_idle - taken.memory,
        int_gpus_idle = h.int_gpus_idle - taken.gpus, int_gpu_mem_idle = h.int_gpu_mem_idle - taken.gpu_memory
    FROM (
        SELECT pk_host, sum(cores) AS cores, sum(memory) AS memory, sum(gpus) AS gpus, sum(gpu_memory) AS gpu_memory
        FROM unnest(CAST(:hosts AS varchar[]), CAST(:cores AS bigint[]), CAST(:memory AS bigint[]),
                    CAST(:gpus AS bigint[]), CAST(:gpu_memory AS bigint[]))
             AS planned(pk_host, cores, memory, gpus, gpu_memory)
        GROUP BY pk_host
    ) taken
    WHERE {same_key("h.pk_host", "taken.pk_host")};
    DELETE FROM opencue_sched_hold hold
    USING unnest(CAST(:owner_hosts AS varchar[]), CAST(:owners AS varchar[])) AS booked(pk_host, pk_layer)
    WHERE {same_key("hold.pk_host", "booked.pk_host")} AND hold.pk_layer = booked.pk_layer
    """  # noqa: S608 - only our own constants
)


def set_timeouts(connection: Connection, *, statement: float, lock: float, idle: float, whole: float) -> None:
    """Bound this transaction on the server, in seconds; ``whole`` only where the server can (PostgreSQL 17)."""
    parameters = {
        "statement_ms": _milliseconds(statement),
        "lock_ms": _milliseconds(lock),
        "idle_ms": _milliseconds(idle),
        "transaction_ms": _milliseconds(whole),
    }
    connection.execute(_SET_TIMEOUTS, parameters)


def lock_frames(
    connection: Connection, procs: Sequence[PlannedProc], columns: SchemaFacts
) -> tuple[dict[str, int], dict[str, Row[Any]]]:
    """Lock those frames that may still be started: waiting, unchanged, without a proc, of a job and show that may run.
    A frame that another transaction has locked is left out. One message.

    Returns the memory (KB) that each locked frame asks for now, by frame id; and of each layer, by id, what a plan
    rests on as it is now: the columns of layer and job, whether the job is ``quarantined``, and the ids of the layer's
    limits: all that it names (``named_limit_ids``) and those that exist (``limit_ids``).
    """
    parameters = {
        "layers": texts({proc.layer.id for proc in procs}),
        "frames": texts(proc.frame.id for proc in procs),
        "versions": numbers(proc.frame.version for proc in procs),
        "frame_layers": texts(proc.layer.id for proc in procs),
    }
    rows = connection.execute(with_start_after(_LOCK_FRAMES, columns.has_start_after, once=True), parameters).all()
    frames = {frame: kb for row in rows if row.frames for frame, kb in zip(row.frames, row.memory, strict=True)}
    return frames, {row.pk_layer: row for row in rows}


def lock_hosts(connection: Connection, host_ids: Collection[str], *, wait_seconds: float) -> dict[str, Row[Any]]:
    """Lock hosts in key order, as transactions that end frames do. One message. Returns their rows, by id.

    A row says whether the host is ``up`` (UP and OPEN), its ``alloc_id``, what is idle (``centicores``, ``memory_kb``,
    ``gpus``, ``gpu_memory_kb``), for whom it drains (``reservations.reservation_of``), which stays so until this
    transaction ends, and the time by the database's clock (``now``, epoch seconds).

    Waits for hosts that another transaction has locked. When one takes longer than ``wait_seconds`` the database's
    error is raised, after which only `lock_free_hosts` may be called.
    """
    parameters = {"hosts": texts(sorted(host_ids)), "wait_ms": _milliseconds(wait_seconds)}
    return {row.id: row for row in connection.execute(_LOCK_HOSTS, parameters)}


def lock_free_hosts(connection: Connection, host_ids: Collection[str]) -> dict[str, Row[Any]]:
    """Give back what `lock_hosts` has locked, and lock those hosts that are free now. To be called after `lock_hosts`,
    also when that has raised an error."""
    return {row.id: row for row in connection.execute(_LOCK_FREE_HOSTS, {"hosts": texts(sorted(host_ids))})}


def read_caps(connection: Connection, vertices: Collection[str]) -> dict[str, Row[Any]]:
    """The caps of vertices as they are now, by vertex, kept from changing until the transaction ends. One message. A
    vertex that no longer exists has no row.

    A vertex is its kind (sub, folder, job, limit) and ids, with colons between. ``cores`` are centicores, of a limit
    frames; ``terms`` are a limit's (limit_types.TERMS). ``steady`` is false where another transaction is changing the
    cap just now, which therefore may change before this one ends.
    """
    return {row.vertex: row for row in connection.execute(_CAPS, {"vertices": texts(sorted(vertices))})}


def lock_stats(connection: Connection, layer_ids: Collection[str], job_ids: Collection[str]) -> None:
    """Lock the counters the frame triggers will write: all layers' in key order, then all jobs'.

    Left to the triggers, two plans take them in the order of their frames and deadlock.
    """
    connection.execute(_LOCK_STATS, {"layers": texts(layer_ids), "jobs": texts(job_ids)})


def lock_free_stats(connection: Connection, layer_ids: Collection[str], job_ids: Collection[str]) -> frozenset[str]:
    """Lock the counters of these layers and jobs that no other transaction has locked, without waiting. Returns the ids
    of the layers and jobs whose counters were locked."""
    parameters = {"layers": texts(layer_ids), "jobs": texts(job_ids)}
    return frozenset(connection.execute(_LOCK_FREE_STATS, parameters).scalars())


def take_back_writes(connection: Connection) -> None:
    """Undo everything from the last insert_procs on, also after an error; frames and hosts stay locked."""
    connection.execute(_BACK)


def insert_procs(connection: Connection, procs: Sequence[PlannedProc]) -> frozenset[str]:
    """Insert procs, and return the ids of those that were inserted. A frame that got another proc meanwhile keeps that
    one."""
    parameters = {
        "procs": texts(proc.proc_id for proc in procs),
        "hosts": texts(proc.host.id for proc in procs),
        "shows": texts(proc.vertices.show_id for proc in procs),
        "jobs": texts(proc.job.id for proc in procs),
        "layers": texts(proc.layer.id for proc in procs),
        "frames": texts(proc.frame.id for proc in procs),
        **_amounts(procs),
        "memory_used": FIRST_MEMORY_USED_KB,
    }
    return frozenset(connection.execute(_INSERT_PROCS, parameters).scalars())


def start_frames(
    connection: Connection, procs: Sequence[PlannedProc], uncounted: Collection[int], facts: SchemaFacts
) -> dict[str, int]:
    """Set locked frames RUNNING. Returns each frame's int_version afterwards, by id (a trigger may raise it by more
    than one). A retry counts unless the frame's last run ended with an exit status among ``uncounted``, or one of
    OpenCue's own.

    The counters are locked by the same message (see lock_stats): every plan of these jobs waits for them, so they are
    locked for no round trip but COMMIT's.

    Where Cuebot's triggers leave counters and history to us (``facts.set_based_frames``), both are written once for all
    frames. One of the functions may have been put back meanwhile. Where the triggers then left out some frames, and
    not all of them in both, all is taken back and done again by the triggers.
    """
    parameters = {
        "layers": texts({proc.layer.id for proc in procs}),
        "jobs": texts({proc.job.id for proc in procs}),
        "frames": texts(proc.frame.id for proc in procs),
        "host_names": texts(proc.host.name for proc in procs),
        **_amounts(procs),
        "no_retry": numbers(map(int, sorted({*STATUSES_NOT_COUNTED_AS_RETRY, *uncounted}))),
    }
    if facts.set_based_frames:
        rows = connection.execute(_START_ALL_FRAMES, {**parameters, "started": len(procs)}).all()
        left_out = {(row.uncounted, row.unrecorded) for row in rows}
        if len(rows) == len(procs) and left_out in ({(len(procs), len(procs))}, {(0, 0)}):
            return {row.pk_frame: row.int_version for row in rows}
        connection.execute(_UNSTARTED)
    return {row.pk_frame: row.int_version for row in connection.execute(_START_FRAMES, parameters)}


def take_from_hosts(connection: Connection, procs: Sequence[PlannedProc]) -> None:
    """Lower the idle columns of locked hosts, each host once by the sum of its procs, and end the hosts' reservations
    for layers of these procs: the host drained for them. One message."""
    pairs = sorted({(proc.host.id, proc.layer.id) for proc in procs})
    owners = {"owner_hosts": texts(host for host, _ in pairs), "owners": texts(layer for _, layer in pairs)}
    hosts = texts(proc.host.id for proc in procs)
    connection.execute(_TAKE_FROM_HOSTS, {"hosts": hosts, **_amounts(procs), **owners})


def _amounts(procs: Sequence[PlannedProc]) -> dict[str, str]:
    """What each proc takes, as columns: centicores, KB, whole GPUs."""
    return {
        "cores": numbers(proc.resources.cores * CENTICORES_PER_CORE for proc in procs),
        "memory": numbers(proc.resources.memory_kb for proc in procs),
        "gpus": numbers(proc.resources.gpus for proc in procs),
        "gpu_memory": numbers(proc.resources.gpu_memory_kb for proc in procs),
    }


def _milliseconds(seconds: float) -> str:
    """Seconds as the server's time-outs take them: never 0, which would mean no time-out at all."""
    return str(max(1, round(seconds * 1000)))


# What the frames of a plan are launched with: read with what is booked, so no pass keeps it, and it is never stale.

# The key decides between two rows of one variable, so that the same rows always give the same environment.
_LAUNCH_DETAILS = prepared(
    f"""
    {PLANNED_ONCE}
    SELECT j.pk_job AS job_id, NULL AS layer_id, j.str_shot, j.str_user, j.int_uid, j.str_log_dir, j.str_loki_url,
           NULL AS str_cmd, NULL AS str_range, NULL AS int_chunk_size,
           (SELECT json_object_agg(e.str_key, COALESCE(e.str_value, '') ORDER BY e.pk_job_env)
            FROM job_env e WHERE e.pk_job = j.pk_job AND e.str_key <> '') AS environment
    FROM job j
    WHERE j.pk_job = ANY(CAST(:jobs AS varchar[]))
    UNION ALL
    SELECT l.pk_job, l.pk_layer, NULL, NULL, NULL, NULL, NULL, l.str_cmd, l.str_range, l.int_chunk_size,
           (SELECT json_object_agg(e.str_key, COALESCE(e.str_value, '') ORDER BY e.pk_layer_env)
            FROM layer_env e WHERE e.pk_layer = l.pk_layer AND e.str_key <> '')
    FROM layer l
    WHERE l.pk_layer = ANY(CAST(:layers AS varchar[]))
    ORDER BY layer_id NULLS FIRST
    """  # noqa: S608 - only our own constant
)


def fetch_launch_details(connection: Connection, job_ids: Collection[str], layer_ids: Collection[str]) -> LaunchDetails:
    """Read what frames of these layers are launched with, in one statement; ``job_ids`` are the layers' jobs."""
    jobs: dict[str, JobDetails] = {}
    layers: dict[str, LayerDetails] = {}
    unfit = dict.fromkeys(layer_ids, "its row, or that of its job, is gone")
    for row in connection.execute(_LAUNCH_DETAILS, {"jobs": texts(job_ids), "layers": texts(layer_ids)}):
        variables = row.environment or {}
        if row.layer_id is None:
            log_dir, loki_url = row.str_log_dir or "", row.str_loki_url or ""
            jobs[row.job_id] = JobDetails(row.str_shot, row.str_user, row.int_uid, log_dir, loki_url, variables)
            continue
        if row.job_id not in jobs:
            continue
        layer = LayerDetails(row.str_cmd, row.str_range, row.int_chunk_size, variables)
        try:
            check_layer(row.layer_id, layer)
        except InvalidInput as error:
            unfit[row.layer_id] = str(error)
        else:
            layers[row.layer_id] = layer
            del unfit[row.layer_id]
    return LaunchDetails(jobs, layers, unfit)
