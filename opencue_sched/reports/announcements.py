"""Announcements in Redis after a commit: procs that are released, to the ledger, and hosts that changed, to the host
caches of the workers.

RQDs are answered after PostgreSQL's COMMIT, and nobody who handles their reports waits for Redis: one that accepts and
never answers would delay each end of a frame by the time-outs of every call. What is lost is made up for: the trigger
on ``proc`` notifies the workers of the same ids, and a recompute finds what nobody heard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

import structlog
from redis.exceptions import RedisError

from opencue_sched.accounting.ledger import Ledger
from opencue_sched.background import PeriodicThread
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.errors import SchedulerError

_log = structlog.get_logger(__name__)

MOST_WAITING = 20_000
"""How many ids may wait to be announced, some 2 MB: what a large farm ends in two minutes. Further ids are dropped."""
STOP_SECONDS = 2.0
"""How long a process that stops goes on announcing."""
_RETRY_SECONDS = 1.0
"""The time after which an announcement that failed is tried again."""


def announce(
    ledger: Ledger | None,
    changes: HostChanges | None,
    count: Callable[[str], object],
    procs: Sequence[str],
    hosts: Sequence[str],
) -> None:
    """Release the procs in the ledger, then publish the hosts: a pass that plans these finds the counters lowered.

    To be called after the commit, and never fails: what was committed must not be taken for failed.
    """

    def attempt(step: str, tell: Callable[[Sequence[str]], object], ids: Sequence[str]) -> None:
        try:
            tell(ids)
        except Exception as error:
            expected = isinstance(error, SchedulerError | RedisError)
            told = _log.warning if expected else _log.exception
            told("announce_failed", step=step, error=str(error), ids=ids[:20], total=len(ids))
            count(f"{step}_failed")

    if ledger is not None and procs:
        attempt("ledger_release", ledger.release, procs)
    if changes is not None and hosts:
        attempt("host_changes", changes.publish, hosts)


class AnnouncementSender:
    """Announces in a thread of its own, in the order of `put`. Thread-safe.

    ``count`` is called for every id that is dropped because MOST_WAITING wait, and as `announce` does.
    """

    def __init__(self, ledger: Ledger, changes: HostChanges, count: Callable[[str], object]) -> None:
        self._ledger = ledger
        self._changes = changes
        self._count = count
        # What waits, each id once, and whether the thread has something in hand: under the condition's lock.
        self._procs: dict[str, None] = {}
        self._hosts: dict[str, None] = {}
        self._busy = False
        self._changed = threading.Condition()
        self._thread = PeriodicThread(
            "announcements", self._send, failed="announcements_not_sent", retry_seconds=_RETRY_SECONDS
        )

    def put(self, procs: Sequence[str], hosts: Sequence[str]) -> None:
        """Have the procs released in the ledger and the hosts published after them. Returns at once."""
        dropped = 0
        with self._changed:
            for waiting, ids in ((self._procs, procs), (self._hosts, hosts)):
                for id_ in ids:
                    if id_ in waiting or len(self._procs) + len(self._hosts) < MOST_WAITING:
                        waiting[id_] = None
                    else:
                        dropped += 1
        for _ in range(dropped):
            self._count("announcement_dropped")
        self._thread.start()
        self._thread.wake()

    def close(self, seconds: float = STOP_SECONDS) -> int:
        """Go on announcing for at most ``seconds``, and end. Returns how many ids were not announced."""
        until = monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: not (self._busy or self._procs or self._hosts), seconds)
            left = len(self._procs) + len(self._hosts)
        self._thread.stop(max(0.0, until - monotonic()))
        if left:
            _log.warning("announcements_given_up", ids=left)
        return left

    def _send(self) -> float | None:
        with self._changed:
            procs, hosts = list(self._procs), list(self._hosts)
            self._procs.clear()
            self._hosts.clear()
            self._busy = bool(procs or hosts)
            self._changed.notify_all()
        if not self._busy:
            return None
        announce(self._ledger, self._changes, self._count, procs, hosts)
        return 0.0
