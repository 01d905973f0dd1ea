"""Satisfies and reopens dependencies, and finishes jobs whose frames are over.

A dependency is satisfied once: the transaction that makes it inactive lowers the counts of the frames that wait for it,
and the trigger of the schema turns a frame whose count reaches zero from DEPEND to WAITING. FRAME_BY_FRAME and
PREVIOUS_FRAME rows are only containers of FRAME_ON_FRAME rows; the last child closes its container.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import NamedTuple

from sqlalchemy import Connection, TextClause, text

from opencue_sched.domain.states import FrameState
from opencue_sched.store import frame_memory, job_events
from opencue_sched.store.arrays import texts
from opencue_sched.store.lost_runs import UpkeepScope, job_in_scope
from opencue_sched.store.release import Counters, counters_of

# Open dependencies on these frames, layers or jobs, and on any frame of some layers; none that groups others.
_FOUND = """
    SELECT 'depend' AS kind, pk_depend AS id FROM depend
     WHERE b_active AND NOT b_composite
       AND ((pk_frame_depend_on = ANY(CAST(:frames AS varchar[]))
              AND str_type IN ('FRAME_ON_FRAME', 'LAYER_ON_FRAME', 'JOB_ON_FRAME', 'LAYER_ON_SIM_FRAME'))
         OR (pk_layer_depend_on = ANY(CAST(:any_layers AS varchar[])) AND str_type = 'LAYER_ON_LAYER' AND b_any)
         OR (pk_layer_depend_on = ANY(CAST(:layers AS varchar[]))
              AND str_type IN ('FRAME_ON_LAYER', 'LAYER_ON_LAYER', 'JOB_ON_LAYER'))
         OR (pk_job_depend_on = ANY(CAST(:jobs AS varchar[]))
              AND str_type IN ('FRAME_ON_JOB', 'LAYER_ON_JOB', 'JOB_ON_JOB')))
"""
_FIND_DEPENDS = text(_FOUND)
# One row per (dependency, frame that waits for it).
_DEPENDENTS = """
    dependents AS (
        SELECT frame.pk_frame, frame.pk_layer, frame.pk_job
          FROM named JOIN frame ON frame.pk_job = named.pk_job_depend_er AND frame.int_depend_count > 0
         WHERE named.str_type IN ('JOB_ON_JOB', 'JOB_ON_LAYER', 'JOB_ON_FRAME')
        UNION ALL
        SELECT frame.pk_frame, frame.pk_layer, frame.pk_job
          FROM named JOIN frame ON frame.pk_layer = named.pk_layer_depend_er AND frame.int_depend_count > 0
         WHERE named.str_type IN ('LAYER_ON_JOB', 'LAYER_ON_LAYER', 'LAYER_ON_FRAME', 'LAYER_ON_SIM_FRAME')
        UNION ALL
        SELECT frame.pk_frame, frame.pk_layer, frame.pk_job
          FROM named JOIN frame ON frame.pk_frame = named.pk_frame_depend_er AND frame.int_depend_count > 0
         WHERE named.str_type IN ('FRAME_ON_JOB', 'FRAME_ON_LAYER', 'FRAME_ON_FRAME'))
"""
_NAMED = "named AS (SELECT * FROM depend WHERE pk_depend = ANY(CAST(:depends AS varchar[])))"
# The layers and jobs of frames that wait for these dependencies.
_AFFECTED = text(f"WITH {_NAMED}, {_DEPENDENTS} SELECT DISTINCT pk_layer AS layer_id, pk_job AS job_id FROM dependents")  # noqa: S608
# Satisfy the open dependencies among these. Returns the satisfied ones, each with the dependency that groups it.
_SATISFY = text(
    """
    WITH locked AS (
        SELECT pk_depend FROM depend
         WHERE pk_depend = ANY(CAST(:depends AS varchar[])) AND b_active AND NOT b_composite
         ORDER BY pk_depend FOR NO KEY UPDATE)
    UPDATE depend SET b_active = false, ts_satisfied = current_timestamp, str_signature = depend.pk_depend
      FROM locked WHERE depend.pk_depend = locked.pk_depend
    RETURNING depend.pk_depend, depend.pk_parent
    """
)
# Lock the frames that wait for these dependencies, in id order.
_LOCK_DEPENDENTS = text(
    f"""
    WITH {_NAMED}, {_DEPENDENTS}
    SELECT pk_frame FROM frame WHERE pk_frame IN (SELECT pk_frame FROM dependents) ORDER BY pk_frame FOR NO KEY UPDATE
    """  # noqa: S608 - only our own constants
)
# Take these dependencies off the counts of the frames that wait for them.
_LOWER_COUNTS = text(
    f"""
    WITH {_NAMED}, {_DEPENDENTS},
    less AS (SELECT pk_frame, count(*) AS satisfied FROM dependents GROUP BY pk_frame)
    UPDATE frame SET int_depend_count = greatest(0, frame.int_depend_count - less.satisfied)
      FROM less WHERE frame.pk_frame = less.pk_frame
    RETURNING frame.str_state
    """  # noqa: S608 - only our own constants
)
# Close dependencies that group others once none of these is open.
_CLOSE_CONTAINERS = text(
    """
    UPDATE depend SET b_active = false, ts_satisfied = current_timestamp, str_signature = pk_depend
     WHERE pk_depend = ANY(CAST(:parents AS varchar[])) AND b_active
       AND str_type IN ('FRAME_BY_FRAME', 'PREVIOUS_FRAME', 'LAYER_ON_SIM_FRAME')
       AND NOT EXISTS (SELECT FROM depend child WHERE child.pk_parent = depend.pk_depend AND child.b_active)
    """
)
# What the end of some frames may have completed: dependencies on them, layers and jobs of which nothing is left to run.
_COMPLETE = text(
    f"""
    {_FOUND}
    UNION ALL
    SELECT 'layer', layer_stat.pk_layer FROM layer_stat JOIN job ON job.pk_job = layer_stat.pk_job
     WHERE layer_stat.pk_layer = ANY(CAST(:ended_layers AS varchar[])) AND job.str_state <> 'STARTUP'
       AND int_waiting_count + int_running_count + int_dead_count + int_depend_count = 0
    UNION ALL
    SELECT 'job', job.pk_job FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
     WHERE job.pk_job = ANY(CAST(:ended_jobs AS varchar[])) AND job.str_state = 'PENDING'
       AND int_waiting_count + int_running_count + int_dead_count + int_depend_count + int_checkpoint_count = 0
    """  # noqa: S608 - only our own constants
)
# Finish the pending jobs among these.
_FINISH_JOBS = text(
    """
    WITH locked AS (
        SELECT pk_job FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state = 'PENDING'
         ORDER BY pk_job FOR UPDATE)
    UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL, ts_stopped = current_timestamp
      FROM locked WHERE job.pk_job = locked.pk_job AND job.str_state = 'PENDING'
    RETURNING job.pk_job
    """
)
# Start the post jobs of these jobs.
_START_POST_JOBS = text(
    """
    WITH due AS (DELETE FROM job_post WHERE pk_job = ANY(CAST(:jobs AS varchar[])) RETURNING pk_post_job)
    UPDATE job SET str_state = 'PENDING' WHERE pk_job IN (SELECT pk_post_job FROM due) AND str_state <> 'FINISHED'
    RETURNING pk_job
    """
)
# Counts the open dependencies of frames that wait again. A frame that ran, or had rendered, when a dependency was added
# has a number that is too low, and would start before that dependency is met. The dependencies are locked: otherwise
# one that is met just now would be counted, and nobody would lower the number again.
_WAIT_FOR_OPEN = text(
    """
    WITH again AS (
        SELECT pk_frame, pk_layer, pk_job FROM frame
         WHERE pk_frame = ANY(CAST(:frames AS varchar[])) AND str_state = 'WAITING'),
    found AS (
        SELECT again.pk_frame, depend.pk_depend FROM again
          JOIN depend ON depend.pk_job_depend_er = again.pk_job AND depend.pk_frame_depend_er = again.pk_frame
         WHERE depend.b_active AND depend.str_type IN ('FRAME_ON_JOB', 'FRAME_ON_LAYER', 'FRAME_ON_FRAME')
        UNION ALL
        SELECT again.pk_frame, depend.pk_depend FROM again
          JOIN depend ON depend.pk_job_depend_er = again.pk_job AND depend.pk_layer_depend_er = again.pk_layer
         WHERE depend.b_active AND depend.pk_frame_depend_er IS NULL
           AND depend.str_type IN ('LAYER_ON_JOB', 'LAYER_ON_LAYER', 'LAYER_ON_FRAME', 'LAYER_ON_SIM_FRAME')
        UNION ALL
        SELECT again.pk_frame, depend.pk_depend FROM again
          JOIN depend ON depend.pk_job_depend_er = again.pk_job
         WHERE depend.b_active AND depend.pk_frame_depend_er IS NULL AND depend.pk_layer_depend_er IS NULL
           AND depend.str_type IN ('JOB_ON_JOB', 'JOB_ON_LAYER', 'JOB_ON_FRAME')),
    locked AS (
        SELECT pk_depend FROM depend WHERE pk_depend IN (SELECT pk_depend FROM found) AND b_active AND NOT b_composite
         ORDER BY pk_depend FOR SHARE),
    counted AS (SELECT found.pk_frame, count(*) AS depends FROM found JOIN locked USING (pk_depend) GROUP BY 1)
    UPDATE frame SET int_depend_count = counted.depends
      FROM counted WHERE frame.pk_frame = counted.pk_frame AND frame.int_depend_count < counted.depends
    """
)
# The conditions for dependencies that were met by frames and layers which are to render again, and for the frames that
# waited for them.
_MET_BY = """
    NOT b_active AND NOT b_composite
       AND ((str_type = 'FRAME_ON_FRAME' AND pk_frame_depend_on = ANY(CAST(:frames AS varchar[])))
         OR (str_type = 'LAYER_ON_LAYER' AND pk_layer_depend_on = ANY(CAST(:layers AS varchar[]))))
"""
_WAITED = """
    JOIN frame ON (str_type = 'FRAME_ON_FRAME' AND frame.pk_frame = pk_frame_depend_er)
               OR (str_type = 'LAYER_ON_LAYER' AND frame.pk_layer = pk_layer_depend_er)
"""
# Open these dependencies again, and count them again at the frames that wait for them.
_REACTIVATE = text(
    f"""
    WITH again AS (
        UPDATE depend SET b_active = true, ts_satisfied = NULL WHERE {_MET_BY}
        RETURNING str_type, pk_frame_depend_er, pk_layer_depend_er),
    more AS (SELECT frame.pk_frame, count(*) AS waits_for FROM again {_WAITED} GROUP BY frame.pk_frame)
    UPDATE frame SET int_depend_count = int_depend_count + more.waits_for
      FROM more WHERE frame.pk_frame = more.pk_frame
    """  # noqa: S608 - only our own constants
)
# The layers and jobs of frames that would wait again.
_REACTIVATED_AFFECTS = text(
    f"SELECT DISTINCT frame.pk_layer AS layer_id, frame.pk_job AS job_id FROM depend {_WAITED} WHERE {_MET_BY}"  # noqa: S608
)


# What is left by a process that died after the end of a frame and before what follows from it: see find_stuck.

STUCK_JOBS = text(
    f"""
    SELECT job.pk_job FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
     WHERE job.str_state = 'PENDING' AND job.ts_started < current_timestamp - interval '60 seconds'
       AND {job_in_scope("job.pk_job")}
       AND int_waiting_count + int_running_count + int_dead_count + int_depend_count + int_checkpoint_count = 0
       AND (CAST(:among AS varchar[]) IS NULL OR job.pk_job = ANY(CAST(:among AS varchar[])))
       AND NOT EXISTS (SELECT FROM frame WHERE frame.pk_job = job.pk_job
                          AND frame.str_state NOT IN ('SUCCEEDED', 'EATEN'))
     LIMIT :limit
    """  # noqa: S608 - only our own constants
)
"""PENDING jobs, a minute old or more, whose every frame is SUCCEEDED or EATEN."""
STUCK_DEPENDS = text(
    f"""
    WITH waiting AS NOT MATERIALIZED (
        SELECT * FROM depend WHERE b_active AND NOT b_composite AND {job_in_scope("pk_job_depend_er")}
           AND (CAST(:among AS varchar[]) IS NULL OR pk_depend = ANY(CAST(:among AS varchar[]))))
    (SELECT pk_depend FROM waiting JOIN job ON job.pk_job = pk_job_depend_on AND job.str_state = 'FINISHED'
      WHERE waiting.str_type IN ('JOB_ON_JOB', 'LAYER_ON_JOB', 'FRAME_ON_JOB')
        AND NOT EXISTS (SELECT FROM frame WHERE frame.pk_job = pk_job_depend_on
                           AND frame.str_state <> ALL(CAST(:done AS varchar[])))
      LIMIT :limit)
    UNION ALL
    (SELECT pk_depend FROM waiting
      WHERE str_type IN ('JOB_ON_LAYER', 'LAYER_ON_LAYER', 'FRAME_ON_LAYER')
        AND (NOT EXISTS (SELECT FROM frame WHERE frame.pk_layer = pk_layer_depend_on
                            AND frame.str_state <> ALL(CAST(:done AS varchar[])))
             OR (b_any AND str_type = 'LAYER_ON_LAYER'
                 AND EXISTS (SELECT FROM frame WHERE frame.pk_layer = pk_layer_depend_on
                                AND frame.str_state = ANY(CAST(:done AS varchar[])))))
      LIMIT :limit)
    UNION ALL
    (SELECT pk_depend FROM waiting JOIN frame ON frame.pk_frame = pk_frame_depend_on
      WHERE str_type IN ('JOB_ON_FRAME', 'LAYER_ON_FRAME', 'FRAME_ON_FRAME', 'LAYER_ON_SIM_FRAME')
        AND frame.str_state = ANY(CAST(:done AS varchar[]))
      LIMIT :limit)
    """  # noqa: S608 - only our own constants
)
"""Active dependencies whose target is over. The limit is for each of their three kinds (on job, layer, frame)."""


class Satisfied(NamedTuple):
    """What satisfying dependencies did."""

    depends: int = 0
    """How many dependencies were satisfied."""
    freed_frames: int = 0
    """How many of the frames that waited for them are WAITING now."""


def find_depends(
    connection: Connection,
    *,
    frames: Collection[str] = (),
    frame_layers: Collection[str] = (),
    layers: Collection[str] = (),
    jobs: Collection[str] = (),
) -> list[str]:
    """Active dependencies on any of these frames, complete layers or complete jobs.

    ``frame_layers`` are the layers of ``frames``: a LAYER_ON_LAYER dependency on any frame is met by the first frame
    of the layer that ends.
    """
    parameters = {
        "frames": texts(frames),
        "any_layers": texts(frame_layers),
        "layers": texts(layers),
        "jobs": texts(jobs),
    }
    return [row.id for row in connection.execute(_FIND_DEPENDS, parameters)]


def counters_of_dependents(connection: Connection, depend_ids: Collection[str]) -> Counters:
    """The counters that satisfying these dependencies will change."""
    if not depend_ids:
        return Counters()
    return counters_of(connection.execute(_AFFECTED, {"depends": list(depend_ids)}))


def satisfy_depends(connection: Connection, depend_ids: Collection[str]) -> Satisfied:
    """Satisfy dependencies that are still active. The counters of their dependents must be locked."""
    flipped = connection.execute(_SATISFY, {"depends": list(depend_ids)}).all() if depend_ids else []
    if not flipped:
        return Satisfied()
    named = {"depends": [row.pk_depend for row in flipped]}
    connection.execute(_LOCK_DEPENDENTS, named)
    frames = connection.execute(_LOWER_COUNTS, named).scalars().all()
    parents = {row.pk_parent for row in flipped if row.pk_parent}
    if parents:
        connection.execute(_CLOSE_CONTAINERS, {"parents": list(parents)})
    return Satisfied(len(flipped), sum(state == FrameState.WAITING.value for state in frames))


class Completed(NamedTuple):
    """What follows from the end of frames."""

    layers: Sequence[str]
    """Layers with no frame left that is waiting, running, dead or dependent (checkpoints: as Cuebot)."""
    jobs: Sequence[str]
    """PENDING jobs with every frame over."""
    depends: Sequence[str]
    """Active dependencies that are met: on the frames, or on the layers and jobs that are complete."""


def complete(
    connection: Connection, *, frames: Collection[str], layer_ids: Collection[str], job_ids: Collection[str]
) -> Completed:
    """What follows from the end of ``frames``. ``layer_ids`` and ``job_ids`` are those of their layers and jobs that
    may be complete now."""
    parameters = {
        "frames": texts(frames),
        "any_layers": texts(layer_ids),
        "layers": "{}",
        "jobs": "{}",
        "ended_layers": texts(layer_ids),
        "ended_jobs": texts(job_ids),
    }
    found: dict[str, list[str]] = {"layer": [], "job": [], "depend": []}
    for row in connection.execute(_COMPLETE, parameters):
        found[row.kind].append(row.id)
    layers, jobs, depends = found["layer"], found["job"], found["depend"]
    if layers or jobs:
        depends = [*dict.fromkeys([*depends, *find_depends(connection, layers=layers, jobs=jobs)])]
    return Completed(layers, jobs, depends)


def finish_jobs(connection: Connection, job_ids: Collection[str]) -> list[str]:
    """Make PENDING jobs FINISHED, write the event of each, and make their post jobs PENDING. Returns the ids of the
    jobs that this call finished."""
    if not job_ids:
        return []
    finished = [row.pk_job for row in connection.execute(_FINISH_JOBS, {"jobs": list(job_ids)})]
    if finished:
        frame_memory.forget_jobs(connection, finished)
        job_events.note_ends(connection, finished)
        connection.execute(_START_POST_JOBS, {"jobs": finished})
    return finished


def counters_of_reactivation(connection: Connection, frames: Collection[str], layers: Collection[str]) -> Counters:
    """The counters that `reactivate_depends` will change."""
    return counters_of(connection.execute(_REACTIVATED_AFFECTS, {"frames": list(frames), "layers": list(layers)}))


def reactivate_depends(connection: Connection, frames: Collection[str], layers: Collection[str]) -> None:
    """Make the dependencies on these frames and layers active again, since these are to render again.

    Only those of types FRAME_ON_FRAME and LAYER_ON_LAYER, as Cuebot does. The triggers turn
    dependents that are not running to DEPEND.
    """
    connection.execute(_REACTIVATE, {"frames": list(frames), "layers": list(layers)})


_ADD_LOCK_KEY = 0x6F63732D64657073
"""The advisory lock under which a dependency is added to jobs that were submitted before: the bytes of ``ocs-deps``."""
# Wait for the advisory lock: of two dependencies that would make a circle, the second one is to see the first.
_ADD_IN_TURN = text("SELECT pg_advisory_xact_lock(:key)")


def add_in_turn(connection: Connection) -> None:
    """Wait until no other transaction adds dependencies. Each transaction looks whether its own dependencies close a
    circle, and sees those of others only once these are committed. Call it before any row is locked."""
    connection.execute(_ADD_IN_TURN, {"key": _ADD_LOCK_KEY})


def wait_for_open(connection: Connection, frame_ids: Collection[str]) -> None:
    """Have frames that this transaction made WAITING wait for all their open dependencies, also those that were added
    while they ran or after they had rendered. Lock their counters first."""
    connection.execute(_WAIT_FOR_OPEN, {"frames": list(frame_ids)})


def find_stuck(
    connection: Connection,
    stuck: TextClause,
    *,
    done: Collection[FrameState],
    limit: int,
    scope: UpkeepScope,
    among: Collection[str] | None = None,
) -> list[str]:
    """Ids of jobs or dependencies that are stuck. ``stuck``: STUCK_JOBS or STUCK_DEPENDS; ``done``: the states in which
    a frame satisfies a dependency."""
    wanted = {"done": [state.value for state in done], "limit": limit, "among": None if among is None else list(among)}
    return list(connection.execute(stuck, wanted | asdict(scope)).scalars())
