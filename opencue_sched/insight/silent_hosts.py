"""Hosts that stopped reporting while frames of a job run there, and what becomes of these frames.

The words follow the rules of the reaper (reports/reaper.py), which alone takes frames off a host that does not answer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from opencue_sched.domain.names import plural
from opencue_sched.domain.states import HardwareState
from opencue_sched.domain.units import duration_text
from opencue_sched.settings import Settings
from opencue_sched.store import jobs
from opencue_sched.store.hosts import list_hosts, list_procs
from opencue_sched.store.lost_runs import DEAF_FACTOR, GIVE_UP_SECONDS
from opencue_sched.store.schema import read_origin

_REAP_INTERVAL_SECONDS = 30.0
"""The time between two reaps, as celeryconfig.py's beat_schedule has it; for the words alone."""


@dataclass(frozen=True, slots=True)
class SilentHost:
    """A host that is DOWN, or has not reported for longer than ``host_cache.host_staleness_threshold`` (seconds)."""

    host: str
    state: str
    silent_seconds: float
    frames: tuple[str, ...]
    """The names of the job's frames there."""
    becomes: str
    """What becomes of the frames on the host, and when, in words."""

    @property
    def words(self) -> str:
        """A sentence for people."""
        frames = f"{plural(len(self.frames), 'frame')} of it"
        silent = f"has been silent for {duration_text(self.silent_seconds)}"
        return f"host {self.host} ({self.state}), with {frames}, {silent}: {self.becomes}"


def silent_hosts(connection: Connection, settings: Settings, job: jobs.JobView) -> tuple[SilentHost, ...]:
    """The silent hosts that frames of a job run on. Procs of local bookings do not count."""
    # Where Cuebot made the tables, it may run beside this scheduler, with the shows that are not managed.
    left_to_cuebot = not job.show_managed and read_origin(connection) == "cuebot"
    frames: defaultdict[str, list[str]] = defaultdict(list)
    for proc in list_procs(connection, job_id=job.id):
        if proc.frame is not None and not proc.local:
            frames[proc.host_id].append(proc.frame)
    return tuple(
        SilentHost(
            host.host,
            host.state,
            host.report_age,
            tuple(sorted(frames[host.id])),
            _becomes(host, settings, left_to_cuebot=left_to_cuebot),
        )
        for host in list_hosts(connection, host_ids=list(frames))
        if host.state == HardwareState.DOWN or host.report_age > settings.host_cache.host_staleness_threshold
    )


def _becomes(host: Row[Any], settings: Settings, *, left_to_cuebot: bool) -> str:
    """What becomes of the frames on a silent host, in words. ``left_to_cuebot``: whether a Cuebot looks after the show
    of the job."""
    looks = f"which looks every {_REAP_INTERVAL_SECONDS:g} s"
    again = f"they wait again once the reaper, {looks}, has looked for the host and not found it"
    if left_to_cuebot:
        return "its show is not managed by this scheduler, so a Cuebot decides"
    if host.state == HardwareState.DOWN:
        return again
    if host.state == HardwareState.UP:
        after = settings.release.host_down_after
        longer = duration_text(after * DEAF_FACTOR)
        return f"the host is DOWN after {duration_text(after)}, or {longer} while most hosts are silent; {again}"
    # REBOOTING, REPAIR and the like: silence alone never makes such a host DOWN.
    dead = f"or are dead after {duration_text(GIVE_UP_SECONDS)} of silence"
    return f"they wait again once the host boots or its RQD answers that they are gone, {dead}"
