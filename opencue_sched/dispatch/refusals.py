"""Finds out what is at fault when RQD does not take a frame: the host, the job, or the two together.

One refusal does not show which: a host without a disk refuses every job, and every host refuses a job of an unknown
user.
- A host that does not answer, or says that it takes nothing (_HOST_WORDS), is at fault and gets a cooldown.
- After any other refusal the layer and the host get a cooldown as a pair, longer each time; both go on with others.
- That refusal also counts against the job and against the host, for REMEMBERED_SECONDS or until a frame of the job,
  or on the host, is launched. A job that HOSTS_TO_BLAME hosts refused is at fault; so is a host that refused
  JOBS_TO_BLAME jobs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.rqd.launch import LaunchOutcome

HOSTS_TO_BLAME = 3
"""How many hosts must have refused a job's frames for the job to be at fault. With fewer, two broken hosts would set
a sound job aside; with more, a job that no host can run has more launches refused before it is."""
JOBS_TO_BLAME = 3
"""How many jobs' frames a host must have refused for the host to be at fault. With one, a job that is refused
everywhere would take each host that it comes to from all others for a time: beside such a job 64 frames of 2 s took
87 s instead of 12."""
APART_SECONDS = 5.0
"""First cooldown of a layer on a host, which doubles up to LONGEST_APART_SECONDS: what the host lacked may be free
again."""
LONGEST_APART_SECONDS = 60.0
"""The longest cooldown of a layer on a host."""
REMEMBERED_SECONDS = 60.0
"""How long a refusal counts."""
_HOST_WORDS = ("HardwareState", "shutdown", "imby", "insufficient idle")
"""Words of an RQD, of either kind, that is down, about to stop, taken back by its user, or has less free than
PostgreSQL says."""


class Blame(NamedTuple):
    """What is at fault for refused launches."""

    jobs: Mapping[str, str]
    """What RQD said, by job id."""
    hosts: frozenset[str]
    """Names of the hosts that take nothing now."""


class Refusals:
    """The refusals of the last minute, of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # When each refusal came that counts against a job (job, host), and against a host (host, job); under the lock.
        self._against: dict[tuple[str, str], float] = {}
        self.apart = Cooldowns[tuple[str, str]](APART_SECONDS, LONGEST_APART_SECONDS, clock)
        """The layers on hosts (layer id, host name) that are kept apart, and what RQD said."""

    def blame(self, outcomes: Iterable[LaunchOutcome]) -> Blame:
        """Note how launches ended, and return what is at fault by now. Counting starts anew for that."""
        refused: dict[tuple[str, str], str] = {}
        hosts: set[str] = set()
        launched: set[str] = set()
        with self._lock:
            now = self._clock()
            kept_apart = self.apart.active()
            for outcome in outcomes:
                if not (outcome.sends or outcome.unfit_host):
                    continue
                host, frame, error = outcome.request.host_name, outcome.request.run_frame, outcome.error
                words = str(error)
                if error is None:
                    launched |= {frame.job_id, host}
                    self.apart.worked((frame.layer_id, host))
                elif (
                    error.outcome_unknown
                    or not outcome.answered
                    or any(host_words in words for host_words in _HOST_WORDS)
                ):
                    hosts.add(host)
                else:
                    refused[frame.job_id, host] = words
                    self._against[frame.job_id, host] = self._against[host, frame.job_id] = now
                    # A frame that was sent before the two were kept apart says nothing new.
                    if (frame.layer_id, host) not in kept_apart:
                        kept_apart[frame.layer_id, host] = words
                        self.apart.failed((frame.layer_id, host), words)
            self._forget(now, launched)
            times = Counter(name for name, _ in self._against)
            jobs = {job: words for (job, _), words in refused.items() if times[job] >= HOSTS_TO_BLAME}
            hosts |= {host for job, host in refused if job not in jobs and times[host] >= JOBS_TO_BLAME}
            self._forget(now, jobs.keys() | hosts)
            return Blame(jobs, frozenset(hosts))

    def _forget(self, now: float, names: Collection[str]) -> None:
        """Forget what counts against these jobs and hosts, and what came long ago."""
        self._against = {
            pair: at for pair, at in self._against.items() if now - at < REMEMBERED_SECONDS and pair[0] not in names
        }
