"""Heals what a crash can leave between the end of a frame and what follows from it.

Our own completions do all of it in one transaction and leave nothing. A Cuebot does it in several, a person in psql in
none: dependencies whose target is over stay active, frames wait for dependencies that are gone, jobs whose frames are
all over stay PENDING, and frames stay in CHECKPOINT when nobody copies their checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.domain.states import FrameState
from opencue_sched.release.model import ReleasePolicy
from opencue_sched.store import depends, release

_log = structlog.get_logger(__name__)

BATCH = 500
"""Most rows of each kind healed by one pass."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one pass healed."""

    depends: int = 0
    freed_frames: int = 0
    finished_jobs: int = 0
    checkpoints: int = 0

    @property
    def found_anything(self) -> bool:
        return bool(self.depends or self.freed_frames or self.finished_jobs or self.checkpoints)


def recover_depends(engine: Engine, policy: ReleasePolicy, *, batch: int = BATCH) -> Recovery:
    """One bounded pass over jobs, dependencies, frames and checkpoints, a transaction each. Safe at any time, anywhere.

    What is found is looked at again once its counters are locked, so a frame retried meanwhile is left alone.
    """
    with engine.begin() as connection:
        finished = _finish_jobs(connection, batch)
    with engine.begin() as connection:
        met = _meet_stale_depends(connection, policy, batch)
    with engine.begin() as connection:
        freed = _free_stuck_frames(connection, batch)
    with engine.begin() as connection:
        checkpoints = _drop_stale_checkpoints(connection, batch)
    recovery = Recovery(met.depends, len(met.freed_frames) + freed, finished, checkpoints)
    if recovery.found_anything:
        _log.warning(
            "stuck_work_recovered",
            depends=recovery.depends,
            frames=recovery.freed_frames,
            jobs=recovery.finished_jobs,
            checkpoints=recovery.checkpoints,
        )
    return recovery


def _finish_jobs(connection: Connection, batch: int) -> int:
    """Job-level dependencies are met by the next step, which sees the jobs as finished."""
    jobs = depends.find_unfinished_jobs(connection, limit=batch)
    if not jobs:
        return 0
    release.lock_counters(connection, release.Counters(jobs=frozenset(jobs)))
    return len(depends.finish_jobs(connection, depends.find_unfinished_jobs(connection, limit=batch, among=jobs)))


def _meet_stale_depends(connection: Connection, policy: ReleasePolicy, batch: int) -> depends.Satisfied:
    done = [FrameState.SUCCEEDED]
    if not policy.satisfy_only_on_frame_success:
        done.append(FrameState.EATEN)
    found = depends.find_stale_depends(connection, done=done, limit=batch)
    if not found:
        return depends.Satisfied(0, {})
    affected = depends.counters_of_dependents(connection, found)
    release.lock_counters(connection, affected)
    return depends.satisfy_depends(
        connection, depends.find_stale_depends(connection, done=done, limit=batch, among=found)
    )


def _free_stuck_frames(connection: Connection, batch: int) -> int:
    frames, affected = depends.find_stuck_frames(connection, limit=batch)
    if not frames:
        return 0
    release.lock_counters(connection, affected)
    still, _ = depends.find_stuck_frames(connection, limit=batch, among=frames)
    return depends.free_stuck_frames(connection, still)


def _drop_stale_checkpoints(connection: Connection, batch: int) -> int:
    frames, affected = release.find_stale_checkpoints(connection, limit=batch)
    if not frames:
        return 0
    release.lock_counters(connection, affected)
    return release.drop_checkpoints(connection, frames)
