"""Whose fault it is when RQD does not take a frame: the host's, the job's, or that of the two together.

Either can look like the other: a host without a disk refuses every job, and a job with a user nobody may be is refused
by every host. A host that says that it takes nothing, or says nothing, is at fault itself and rests. Any other refusal
is first between the layer and the host: they are kept apart, for longer each time, and both go on with others. It also
counts against the job, until one of its frames is launched, and against the host, until it takes a frame: a job that
several hosts refused within a minute is at fault, and so is a host that refused several jobs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.launch import LaunchOutcome, LaunchState

HOSTS_TO_BLAME = 3
JOBS_TO_BLAME = 3
APART_SECONDS = 5.0
LONGEST_APART_SECONDS = 60.0
"""How long a layer and a host are kept apart at first, and at most: what the host lacked may be free again."""
REMEMBERED_SECONDS = 60.0
_REMEMBERED = 10_000
# Of both RQDs: down, about to stop, taken back by its user, or with less free than PostgreSQL says.
_HOST_WORDS = ("HardwareState", "shutdown", "imby", "insufficient idle")


@dataclass(frozen=True, slots=True)
class Blame:
    """``jobs``: what RQD said, by id. ``hosts``: names of those that take nothing now."""

    jobs: Mapping[str, str]
    hosts: frozenset[str]


class _Against:
    """Who refused, or was refused, lately: name -> who said so -> when."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, dict[str, float]] = OrderedDict()

    def note(self, name: str, by: str, now: float) -> None:
        self._said.setdefault(name, {})[by] = now
        self._said.move_to_end(name)
        while len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)

    def clear(self, name: str) -> None:
        self._said.pop(name, None)

    def lately(self, name: str, now: float) -> int:
        return sum(now - at < REMEMBERED_SECONDS for at in self._said.get(name, {}).values())


class Refusals:
    """The refusals of the last minute, of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs, self._hosts = _Against(), _Against()
        self._apart = Cooldowns[tuple[str, str]](APART_SECONDS, LONGEST_APART_SECONDS, clock)

    def apart(self) -> Mapping[tuple[str, str], str]:
        """The layers and hosts (id, name) that are kept apart now, and what RQD said."""
        return self._apart.active()

    def blame(self, outcomes: Iterable[LaunchOutcome], job_of: Mapping[str, str], layer_of: Mapping[str, str]) -> Blame:
        """Note how launches ended; ``job_of``, ``layer_of``: ids by proc id. What is blamed starts anew afterwards."""
        with self._lock:
            return self._blame([it for it in outcomes if it.sends], job_of, layer_of)

    def _blame(self, sent: list[LaunchOutcome], job_of: Mapping[str, str], layer_of: Mapping[str, str]) -> Blame:
        now = self._clock()
        said: dict[str, str] = {}
        hosts = {it.host_name for it in sent if it.state is not LaunchState.LAUNCHED and not _refuses_the_job(it)}
        for it in filter(_refuses_the_job, sent):
            job = job_of[it.proc_id]
            said[job] = str(it.error)
            self._jobs.note(job, it.host_name, now)
            self._hosts.note(it.host_name, job, now)
            self._apart.failed((layer_of[it.proc_id], it.host_name), said[job])
        for it in sent:
            if it.state is LaunchState.LAUNCHED:
                self._jobs.clear(job_of[it.proc_id])
                self._hosts.clear(it.host_name)
                self._apart.worked((layer_of[it.proc_id], it.host_name))
        jobs = {job: text for job, text in said.items() if self._jobs.lately(job, now) >= HOSTS_TO_BLAME}
        refusing = {it.host_name for it in sent if _refuses_the_job(it) and job_of[it.proc_id] not in jobs}
        hosts |= {host for host in refusing if self._hosts.lately(host, now) >= JOBS_TO_BLAME}
        for job in jobs:
            self._jobs.clear(job)
        for host in hosts:
            self._hosts.clear(host)
        return Blame(jobs, frozenset(hosts))


def _refuses_the_job(outcome: LaunchOutcome) -> bool:
    return (
        outcome.state is LaunchState.FAILED
        and outcome.answered
        and not any(word in str(outcome.error) for word in _HOST_WORDS)
    )
