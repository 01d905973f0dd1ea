"""Moves finished jobs to the history tables after a time, in a database that opencue-sched made. Cuebots do so, too.

In portions, a transaction each. All of its locks are on rows of jobs that are over, so no pass and no completion waits
for one. Between two portions it pauses for as long as the portion took, which leaves PostgreSQL to the others. A
process may end between any two: what is left is for the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import structlog
from sqlalchemy import Engine, Row
from sqlalchemy.exc import DBAPIError

from opencue_sched.clients.store_errors import Failure, classify, describe
from opencue_sched.store import finished_jobs
from opencue_sched.store.lost_runs import EVERYTHING, UpkeepScope

_log = structlog.get_logger(__name__)

FRAMES_PER_PORTION = 500
"""How many frames one transaction deletes at most: in some 50 ms beside a farm at work, on two cores."""

MOST_LOOKED_AT = 10_000
"""Jobs that one run finds to be due, by reading all jobs once: more than it moves."""

MOVE_SECONDS = 20.0
"""No portion is begun later than this after the first; the next run goes on with the rest."""

LOCK_WAIT_MILLISECONDS = 100
"""A portion gives up when somebody holds rows of its jobs for longer: a person who retries frames, say."""

_OF_A_JOB = (Failure.ROWS, Failure.HOST, Failure.BUSY, Failure.REPEAT)
"""What the rows of a job, or somebody at work on them, can make a portion fail with."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one run has moved."""

    jobs: int = 0
    frames: int = 0
    portions: int = 0
    refused: int = 0
    """How many jobs could not be deleted; the next run tries them again."""


def move_finished_jobs(
    engine: Engine,
    after_seconds: float,
    *,
    scope: UpkeepScope = EVERYTHING,
    stopping: Callable[[], bool] = lambda: False,
    pause: Callable[[float], None] = time.sleep,
) -> Moved:
    """Move the jobs in ``scope`` that finished ``after_seconds`` ago or more; none on the day of the upgrade. Any
    number of processes may, each job is moved once.

    ``stopping`` says whether the process is to end, ``pause`` waits so many seconds between two portions.
    """
    with engine.connect() as connection:
        if not finished_jobs.may_begin(connection):
            return Moved()
        left = finished_jobs.find_due(connection, after_seconds, scope=scope, most=MOST_LOOKED_AT)
    # ``alone``: so many portions from here on are of one job each, to find the job at which a portion failed.
    jobs = frames = portions = refused = alone = 0
    until = time.monotonic() + MOVE_SECONDS
    while left and not stopping() and (began := time.monotonic()) < until:
        most = 1 if alone else finished_jobs.MOST_JOBS
        looked_at, left = left[:most], left[most:]
        names: dict[str, str] = {}
        try:
            with engine.begin() as connection:
                finished_jobs.give_way(connection, LOCK_WAIT_MILLISECONDS)
                due = finished_jobs.lock_due(connection, looked_at, after_seconds, scope=scope)
                names = _portion(due)
                deleted = finished_jobs.delete_frames(connection, names, most=FRAMES_PER_PORTION)
                gone = finished_jobs.delete_jobs(connection, names)
        except DBAPIError as error:
            if not names or classify(error) not in _OF_A_JOB:
                raise
            alone = max(alone - 1, 0)
            if len(names) == 1:
                refused += 1
                _log.warning("finished_job_not_moved", job=next(iter(names)), error=describe(error))
            else:
                # One of the jobs is to blame: each goes alone until the portion would have been over.
                alone = len(names)
            left = [*(job.id for job in due if job.id not in names or len(names) > 1), *left]
            continue
        alone = max(alone - 1, 0)
        if not gone and not deleted:
            continue
        # What did not fit, and a large job, of which more frames are left.
        left = [*(job.id for job in due if job.id not in gone), *left]
        jobs, frames, portions = jobs + len(gone), frames + deleted, portions + 1
        pause(time.monotonic() - began)
    if portions or refused:
        _log.info("finished_jobs_moved", jobs=jobs, frames=frames, refused=refused)
    return Moved(jobs, frames, portions, refused)


def _portion(due: Sequence[Row[Any]]) -> dict[str, str]:
    """The jobs that the next transaction moves, id -> name: the first of those that are ``due``, as many as it takes. A
    first job that is too large goes alone."""
    sizes = accumulate(job.size for job in due)
    fitting = [job for job, size in zip(due, sizes, strict=True) if size <= FRAMES_PER_PORTION]
    return {job.id: job.name for job in fitting or due[:1]}
