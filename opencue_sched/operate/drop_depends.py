"""Letting a job go on without what it waits for."""

from __future__ import annotations

from collections.abc import Collection

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.release.ending import WiderLocks, with_counters
from opencue_sched.store import depends, jobs, release

log = structlog.get_logger(__name__)


def drop_depends(engine: Engine, job_id: str, depend_ids: Collection[str] | None = None) -> depends.Satisfied:
    """Satisfy what a job still waits for: everything, or these dependencies and the pairs of frames they group."""

    def step(connection: Connection, wider: release.Counters) -> depends.Satisfied:
        found = jobs.open_depends(connection, job_id, depend_ids)
        affected = depends.counters_of_dependents(connection, found)
        release.lock_counters(connection, affected | wider)
        still = jobs.open_depends(connection, job_id, depend_ids)
        if not (affected | wider).covers(depends.counters_of_dependents(connection, still)):
            raise WiderLocks(depends.counters_of_dependents(connection, still))
        return depends.satisfy_depends(connection, still)

    satisfied, _ = with_counters(engine, step)
    log.info("depends_dropped", job=job_id, depends=satisfied.depends, freed=len(satisfied.freed_frames))
    return satisfied
