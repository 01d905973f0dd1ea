"""Whose fault it is when RQD does not take a frame: the host's, which then rests, or the job's, which is set aside.

Either can look like the other: a host without a disk refuses every job, and a job with a user nobody may be is refused
by every host. A host that says what it lacks, or says nothing, is at fault itself. Any other refusal counts against the
job, until one of its frames is launched; refused by several hosts within a minute, the job is at fault.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opencue_sched.dispatch.launch import LaunchOutcome, LaunchState

HOSTS_TO_BLAME = 3
REMEMBERED_SECONDS = 60.0
_REMEMBERED_JOBS = 10_000
# Of both RQDs: down, about to stop, taken back by its user, or with less free than PostgreSQL says.
_HOST_WORDS = ("HardwareState", "shutdown", "imby", "insufficient", "reserve")


@dataclass(frozen=True, slots=True)
class Blame:
    """``jobs``: what RQD said, by id. ``hosts``: names of those that failed for no such job."""

    jobs: Mapping[str, str]
    hosts: frozenset[str]


class Refusals:
    """The refusals of the last minute, of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: OrderedDict[str, dict[str, float]] = OrderedDict()

    def blame(self, outcomes: Iterable[LaunchOutcome], job_of: Mapping[str, str]) -> Blame:
        """Take in how launches ended; ``job_of``: job ids by proc id. A job that is blamed starts anew afterwards."""
        with self._lock:
            return self._blame([it for it in outcomes if it.sends], job_of)

    def _blame(self, sent: list[LaunchOutcome], job_of: Mapping[str, str]) -> Blame:
        now = self._clock()
        said: dict[str, str] = {}
        for it in sent:
            if _blames_the_job(it):
                job = job_of[it.proc_id]
                said[job] = str(it.error)
                self._refused.setdefault(job, {})[it.host_name] = now
                self._refused.move_to_end(job)
        for it in sent:
            if it.state is LaunchState.LAUNCHED:
                self._refused.pop(job_of[it.proc_id], None)
        blamed = {job: text for job, text in said.items() if self._hosts_against(job, now) >= HOSTS_TO_BLAME}
        for job in blamed:
            del self._refused[job]
        while len(self._refused) > _REMEMBERED_JOBS:
            self._refused.popitem(last=False)
        failed = (it for it in sent if it.state is not LaunchState.LAUNCHED)
        return Blame(
            blamed,
            frozenset(it.host_name for it in failed if not (_blames_the_job(it) and job_of[it.proc_id] in blamed)),
        )

    def _hosts_against(self, job: str, now: float) -> int:
        refused = self._refused.get(job, {})
        return sum(now - at < REMEMBERED_SECONDS for at in refused.values())


def _blames_the_job(outcome: LaunchOutcome) -> bool:
    return (
        outcome.state is LaunchState.FAILED
        and outcome.answered
        and not any(word in str(outcome.error) for word in _HOST_WORDS)
    )
