"""Hosts that break frames, in words: which were named by store/failed_runs.py, and why."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from opencue_sched.domain.names import plural
from opencue_sched.settings import Settings
from opencue_sched.store.failed_runs import breaking_hosts

_NAMES_TOLD = 3
"""How many jobs a sentence on a host names."""


def find_breaking_hosts(connection: Connection, settings: Settings) -> dict[str, str]:
    """The hosts that frames of several jobs failed on lately, by name, the worst first, each with a sentence on it."""
    return {row.host: _words(row) for row in breaking_hosts(connection, settings.queue.uncounted_exit_statuses)}


def _words(row: Row[Any]) -> str:
    """A sentence that names a host, how much failed there within the last hour, and the first of the jobs."""
    more = len(row.names) - _NAMES_TOLD
    jobs = ", ".join(row.names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
    frames = plural(row.frames, "frame")
    return (
        f"host {row.host} may break frames: {frames} of {plural(row.jobs, 'job')} failed there within the last hour "
        f"and ran through elsewhere, or were not tried elsewhere ({jobs})"
    )
