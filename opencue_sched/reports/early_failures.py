"""Frames that failed soon after their start, read from OpenCue's history where a Cuebot takes the reports.

A history says with which status a run ended, and not whether it was killed. A host that breaks every frame does so
within seconds, and few runs are killed so soon: a failure within a minute is believed.
"""

from __future__ import annotations

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.store_errors import describe
from opencue_sched.reports.run_ends import may_be_of_a_host
from opencue_sched.store.failed_runs import failed_early, note_past_failures
from opencue_sched.store.limit_bindings import shortages_of

_log = structlog.get_logger(__name__)

EARLY_SECONDS = 60.0
"""A run that failed later may have been killed."""
SINCE_SECONDS = 600.0
"""How far back each look goes: runs that no process looked at for a while are found all the same. With more, each look
reads more runs that were noted before."""
MOST_RUNS = 1_000
"""How many runs one look takes at most."""


def note_early_failures(engine: Engine) -> int:
    """Note the frames that failed on their hosts lately (store/failed_runs.py), and return how many. Safe at any time,
    anywhere. An error of PostgreSQL is logged and not raised: the next call finds the same frames."""
    try:
        return _note(engine)
    except SQLAlchemyError as error:
        _log.error("early_failures_not_noted", error=describe(error))
        return 0


def _note(engine: Engine) -> int:
    """Note the failures of the last SINCE_SECONDS for which a host may be to blame, and return how many; those for want
    of a licence are left out. Raises SQLAlchemyError."""
    with engine.begin() as connection:
        early = failed_early(connection, since=SINCE_SECONDS, early=EARLY_SECONDS, most=MOST_RUNS)
        failed = [run for run in early if may_be_of_a_host(run["status"])]
        short = shortages_of(connection, {run["status"] for run in failed}) if failed else {}
        failed = [run for run in failed if run["status"] not in short]
        note_past_failures(connection, failed)
    return len(failed)
