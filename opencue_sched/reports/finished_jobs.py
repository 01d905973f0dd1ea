"""Moves finished jobs to the history tables after a time, in a database that opencue-sched made, as Cuebots do in
theirs.

A run moves jobs in portions, each in a transaction. All locks are on rows of jobs that are over, so no pass and no
completion waits for one. After each portion the run pauses for as long as the portion took, which leaves PostgreSQL to
others. A process may end between two portions: the next run goes on with what is left.
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
"""How many jobs one run finds to be due at most, by reading all jobs once: more than it moves."""

MOVE_SECONDS = 20.0
"""How long after its first portion a run begins further ones; the next run goes on with what is left."""

LOCK_WAIT_MILLISECONDS = 100
"""How long a portion waits for rows of its jobs that another transaction holds: one that retries frames, say."""

_OF_A_JOB = (Failure.ROWS, Failure.HOST, Failure.BUSY, Failure.REPEAT)
"""The failures of a portion that the rows of a job can cause, or another transaction on them."""


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
    """Move the jobs in ``scope`` that finished ``after_seconds`` ago or more. None is moved in the first day after the
    upgrade, or after a Cuebot last moved some. Any number of processes may do this: each job is moved once.

    ``stopping`` says whether the process is to end, ``pause`` waits the given seconds between two portions.
    """
    with engine.connect() as connection:
        if not finished_jobs.may_begin(connection):
            return Moved()
        left = finished_jobs.find_due(connection, after_seconds, scope=scope, most=MOST_LOOKED_AT)
    # ``alone``: how many portions from here on are of one job each, to find the job at which a portion failed.
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
        # Jobs that did not fit into the portion come again, and a large job that has frames left.
        left = [*(job.id for job in due if job.id not in gone), *left]
        jobs, frames, portions = jobs + len(gone), frames + deleted, portions + 1
        pause(time.monotonic() - began)
    if portions or refused:
        _log.info("finished_jobs_moved", jobs=jobs, frames=frames, refused=refused)
    return Moved(jobs, frames, portions, refused)


def _portion(due: Sequence[Row[Any]]) -> dict[str, str]:
    """The names by id of the jobs that the next transaction moves: the first of ``due``, as many as fit. A first job
    that is too large for a portion goes alone, in several."""
    sizes = accumulate(job.size for job in due)
    fitting = [job for job, size in zip(due, sizes, strict=True) if size <= FRAMES_PER_PORTION]
    return {job.id: job.name for job in fitting or due[:1]}
