"""Heals what a crash can leave between the end of a frame and what follows from it.

Our own completions do all of it in one transaction and leave nothing. A Cuebot does it in several, a person in psql
in none: dependencies whose target is over stay active, and jobs whose frames are all over stay PENDING.
"""

from __future__ import annotations

from functools import partial

import structlog
from sqlalchemy import Engine

from opencue_sched.reports.run_ends import satisfying_states
from opencue_sched.settings import Release
from opencue_sched.store import depends, release
from opencue_sched.store.lost_runs import EVERYTHING, UpkeepScope
from opencue_sched.store.release import Counters

_log = structlog.get_logger(__name__)

RECOVERED_PER_CALL = 500
"""How many rows of each kind one pass heals at most, in one transaction, which keeps the counters of their jobs locked.
What is left over is found by the next pass."""


def recover_depends(engine: Engine, settings: Release, *, scope: UpkeepScope = EVERYTHING) -> dict[str, int]:
    """Finish stuck jobs, then satisfy stuck dependencies, a bounded number of each, in a transaction each.

    Returns how many ``depends`` were satisfied, how many frames that freed (``freed_frames``), and ``finished_jobs``.
    Any number of processes may do this at any time, also beside a Cuebot. A dependency is in ``scope`` when the job
    that waits is.
    """
    find = partial(depends.find_stuck, done=satisfying_states(settings), limit=RECOVERED_PER_CALL, scope=scope)
    with engine.begin() as connection:
        jobs = find(connection, depends.STUCK_JOBS)
        release.lock_counters(connection, Counters(("job", job_id) for job_id in jobs))
        # Looked for again under the locks: a job whose frames were retried meanwhile is left alone.
        finished = depends.finish_jobs(connection, jobs and find(connection, depends.STUCK_JOBS, among=jobs))
    # After the jobs, for the dependencies on jobs that were finished just now.
    with engine.begin() as connection:
        stuck = find(connection, depends.STUCK_DEPENDS)
        release.lock_counters(connection, depends.counters_of_dependents(connection, stuck))
        met = depends.satisfy_depends(connection, stuck and find(connection, depends.STUCK_DEPENDS, among=stuck))
    recovered = {**met._asdict(), "finished_jobs": len(finished)}
    if any(recovered.values()):
        _log.warning("stuck_work_recovered", **recovered)
    return recovered
