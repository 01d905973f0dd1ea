"""Runs of the last day that failed in a way for which the host may be to blame (table ``opencue_sched_failed_run``). A
frame is not given to such a host again while another may take it, and a host on which frames of several jobs failed is
named.

Without a Cuebot our report service notes these runs when it takes their completions. Beside a Cuebot, which takes the
completions, they are read from OpenCue's history. The history does not tell a frame that failed from one that was
killed, so only runs that failed within a minute of their start are taken from it (reports/early_failures.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.procs import Run

BREAKING_JOBS = 3
"""The fewest jobs whose frames failed on a host within the last hour for the host to be named. One or two may fail
there by themselves; with more, a broken host that few jobs come to is not named."""

# Note failed runs, and delete up to 1000 that are older than a day.
_NOTE = text(
    """
    DELETE FROM opencue_sched_failed_run
     WHERE (pk_frame, str_host) IN (SELECT pk_frame, str_host FROM opencue_sched_failed_run
                                     WHERE ts < now() - interval '1 day' LIMIT 1000 FOR UPDATE SKIP LOCKED);
    INSERT INTO opencue_sched_failed_run AS noted (pk_frame, str_host, pk_layer, pk_job, int_exit_status, ts)
    SELECT DISTINCT ON (frame, host) frame, host, layer, job, status, coalesce(to_timestamp(at), now())
      FROM json_to_recordset(CAST(:failed AS json))
           AS failed(frame varchar, host varchar, layer varchar, job varchar, status bigint, at bigint)
     WHERE host <> ''
     ORDER BY frame, host, at DESC
    ON CONFLICT (pk_frame, str_host) DO UPDATE SET ts = excluded.ts, int_exit_status = excluded.int_exit_status
     WHERE noted.ts < excluded.ts
    """
)
# Runs that failed early, of jobs that are still pending. That leaves out most frames that a person killed: their job
# was killed with them, or they had run for a while.
_FAILED_EARLY = text(
    """
    SELECT past.pk_frame AS frame, past.str_host AS host, past.pk_layer AS layer, past.pk_job AS job,
           past.int_exit_status AS status, past.int_ts_stopped AS at
      FROM frame_history past JOIN job ON job.pk_job = past.pk_job
     WHERE past.int_ts_stopped > CAST(extract(epoch FROM now()) - :seconds AS bigint)
       AND past.int_ts_stopped - past.int_ts_started <= :early
       AND past.int_exit_status <> 0 AND job.str_state = 'PENDING'
     ORDER BY past.int_ts_stopped DESC LIMIT :most
    """
)
# Hosts on which frames of several jobs failed. A frame that failed on every host, or in a layer that fails on other
# hosts too, says something of its job and not of the host.
_BREAKING_HOSTS = text(
    """
    SELECT failed.str_host AS host, count(DISTINCT failed.pk_job) AS jobs, count(*) AS frames,
           array_agg(DISTINCT job.str_name ORDER BY job.str_name) AS names
      FROM opencue_sched_failed_run failed
      JOIN frame ON frame.pk_frame = failed.pk_frame JOIN job ON job.pk_job = failed.pk_job
     WHERE failed.ts > now() - interval '1 hour' AND failed.int_exit_status <> ALL(CAST(:uncounted AS bigint[]))
       AND CASE WHEN frame.str_state = 'SUCCEEDED' THEN frame.str_host IS DISTINCT FROM failed.str_host
                ELSE NOT EXISTS (SELECT FROM opencue_sched_failed_run elsewhere
                                  WHERE elsewhere.pk_layer = failed.pk_layer AND elsewhere.str_host <> failed.str_host)
           END
     GROUP BY failed.str_host HAVING count(DISTINCT failed.pk_job) >= :jobs
     ORDER BY jobs DESC, host LIMIT :most
    """
)
_MOST_HOSTS = 50
"""How many hosts are named at most."""


def note_failures(connection: Connection, failed: Sequence[tuple[Run, int]]) -> None:
    """Note that these runs failed just now, each on the host on which it ran and with its exit status."""
    rows = [
        {"frame": run.frame_id, "host": run.frame_host, "layer": run.layer_id, "job": run.job_id, "status": status}
        for run, status in failed
    ]
    if rows:
        connection.execute(_NOTE, {"failed": json.dumps(rows)})


def failed_early(connection: Connection, *, since: float, early: float, most: int) -> list[dict[str, Any]]:
    """Runs of pending jobs that ended within the last ``since`` seconds, by OpenCue's history, and failed within
    ``early`` seconds of their start: at most ``most``, the latest first.

    Each has the ids of its ``frame``, ``layer`` and ``job``, the name of its ``host``, its exit ``status``, and ``at``,
    when it ended, in epoch seconds.
    """
    rows = connection.execute(_FAILED_EARLY, {"seconds": since, "early": early, "most": most})
    return [dict(row._mapping) for row in rows]


def note_past_failures(connection: Connection, failed: Sequence[Mapping[str, Any]]) -> None:
    """Note runs as `failed_early` returns them. The same run may be noted any number of times."""
    if failed:
        connection.execute(_NOTE, {"failed": json.dumps([dict(run) for run in failed])})


def breaking_hosts(connection: Connection, uncounted: Collection[int]) -> Sequence[Row[Any]]:
    """Hosts on which frames of at least BREAKING_JOBS jobs failed within the last hour, those with the most jobs first.

    A frame counts if it succeeded on another host since; otherwise if no frame of its layer failed on another host. A
    row has the ``host`` (its name), how many ``jobs`` and ``frames`` failed there, and the ``names`` of these jobs.
    ``uncounted``: exit statuses that do not count as failures of a host. OpenCue's own of that sort are never noted
    (reports/run_ends.py).
    """
    wanted = {"uncounted": sorted(uncounted), "jobs": BREAKING_JOBS, "most": _MOST_HOSTS}
    return connection.execute(_BREAKING_HOSTS, wanted).all()
