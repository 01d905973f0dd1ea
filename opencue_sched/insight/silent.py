"""Hosts that stopped reporting while frames of a job run there: what becomes of these frames, and when.

The words follow the reaper's rules (farm/reaper.py): nobody else takes frames off a host that cannot be asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from opencue_sched.domain.farm import HardwareState
from opencue_sched.settings import Settings
from opencue_sched.store import insight as figures
from opencue_sched.store import procs
from opencue_sched.store.procs import DEAF_FACTOR, GIVE_UP_SECONDS
from opencue_sched.store.schema import SchemaFacts


@dataclass(frozen=True, slots=True)
class SilentHost:
    """A host that is DOWN, or has not reported for longer than ``host_cache.host_staleness_threshold``.

    ``frames`` are the names of the job's frames there. ``due_seconds``: in how long the reaper ends them although their
    host cannot be asked; 0 with its next look, None when that depends on the host. ``becomes`` says it in words.
    """

    host: str
    state: str
    silent_seconds: float
    frames: tuple[str, ...]
    due_seconds: float | None
    becomes: str

    @property
    def words(self) -> str:
        """A sentence for people."""
        number = len(self.frames)
        frames = f"{number} frame{'' if number == 1 else 's'} of it"
        silent = f"has been silent for {span(self.silent_seconds)}"
        return f"host {self.host} ({self.state}), with {frames}, {silent}: {self.becomes}"


def silent_hosts(connection: Connection, settings: Settings, facts: SchemaFacts, job_id: str) -> tuple[SilentHost, ...]:
    """The silent hosts that frames of a job run on, in two statements."""
    found = figures.silent_runs(connection, job_id, staleness=settings.host_cache.host_staleness_threshold)
    if not found:
        return ()
    after = settings.release.host_down_after
    up, silent, _ = procs.hearing(connection, silent_after=after)
    # As the reaper has it, see Reaper._mark_hosts_down.
    deaf = silent > max(1, up // 2)
    hosts = []
    for row in found:
        due, becomes = _fate(row.state, row.silent_for, after * (DEAF_FACTOR if deaf else 1.0), deaf=deaf)
        if facts.origin == "cuebot" and not row.managed:
            due, becomes = None, "its show is not managed by this scheduler, so a Cuebot decides"
        hosts.append(SilentHost(row.host, row.state, max(0.0, row.silent_for), tuple(row.frames), due, becomes))
    return tuple(hosts)


def _fate(state: str, silent_for: float, down_after: float, *, deaf: bool) -> tuple[float | None, str]:
    again = "they wait again once the reaper, which looks every 30 s, has looked for it in vain"
    if state == HardwareState.DOWN:
        return 0.0, again
    if state == HardwareState.UP:
        due = max(0.0, down_after - silent_for)
        many = ", as most hosts are silent" if deaf else ""
        return due, f"it is DOWN {f'in {span(due)}' if due else 'by then'}, after {span(down_after)}{many}; {again}"
    dead = f"or are dead after {span(GIVE_UP_SECONDS)} of silence"
    return None, f"they wait again once it boots or its RQD answers that they are gone, {dead}"


def span(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
