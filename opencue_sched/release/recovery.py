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
from opencue_sched.store.lost import EVERYTHING, UpkeepScope

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


def recover_depends(
    engine: Engine, policy: ReleasePolicy, *, scope: UpkeepScope = EVERYTHING, batch: int = BATCH
) -> Recovery:
    """One bounded pass over jobs, dependencies, frames and checkpoints, a transaction each. Safe at any time, anywhere.

    Of a dependency it is the job that waits which has to be in ``scope``.

    What is found is looked at again once its counters are locked, so a frame retried meanwhile is left alone.
    """
    with engine.begin() as connection:
        finished = _finish_jobs(connection, scope, batch)
    with engine.begin() as connection:
        met = _meet_stale_depends(connection, policy, scope, batch)
    with engine.begin() as connection:
        freed = _free_stuck_frames(connection, scope, batch)
    with engine.begin() as connection:
        checkpoints = _drop_stale_checkpoints(connection, scope, batch)
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


def _finish_jobs(connection: Connection, scope: UpkeepScope, batch: int) -> int:
    """Job-level dependencies are met by the next step, which sees the jobs as finished."""
    jobs = depends.find_unfinished_jobs(connection, limit=batch, scope=scope)
    if not jobs:
        return 0
    release.lock_counters(connection, release.Counters(jobs=frozenset(jobs)))
    still = depends.find_unfinished_jobs(connection, limit=batch, scope=scope, among=jobs)
    return len(depends.finish_jobs(connection, still))


def _meet_stale_depends(
    connection: Connection, policy: ReleasePolicy, scope: UpkeepScope, batch: int
) -> depends.Satisfied:
    done = [FrameState.SUCCEEDED]
    if not policy.satisfy_only_on_frame_success:
        done.append(FrameState.EATEN)
    found = depends.find_stale_depends(connection, done=done, limit=batch, scope=scope)
    if not found:
        return depends.Satisfied(0, {})
    affected = depends.counters_of_dependents(connection, found)
    release.lock_counters(connection, affected)
    still = depends.find_stale_depends(connection, done=done, limit=batch, scope=scope, among=found)
    return depends.satisfy_depends(connection, still)


def _free_stuck_frames(connection: Connection, scope: UpkeepScope, batch: int) -> int:
    frames, affected = depends.find_stuck_frames(connection, limit=batch, scope=scope)
    if not frames:
        return 0
    release.lock_counters(connection, affected)
    still, _ = depends.find_stuck_frames(connection, limit=batch, scope=scope, among=frames)
    return depends.free_stuck_frames(connection, still)


def _drop_stale_checkpoints(connection: Connection, scope: UpkeepScope, batch: int) -> int:
    frames, affected = release.find_stale_checkpoints(connection, limit=batch, scope=scope)
    if not frames:
        return 0
    release.lock_counters(connection, affected)
    return release.drop_checkpoints(connection, frames)
