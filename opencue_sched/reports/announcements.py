"""Announcements in Redis after a commit: the ledger releases the procs that ended, and the host caches of the workers
learn which hosts changed.

RQDs are answered after PostgreSQL's COMMIT, and with an AnnouncementSender no thread that handles a report waits for
Redis: a Redis that accepts connections and never answers would delay the completion of each frame by the time-outs of
every call. No announcement is repeated, because what is lost is made up for: the trigger on ``proc`` notifies the
workers of the same procs, and a recompute finds what no worker heard.
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
"""How many ids of procs and hosts may wait to be announced, some 2 MB: those of the frames that a large farm ends in
two minutes. Further ids are dropped."""
STOP_SECONDS = 2.0
"""How long a process that stops goes on announcing: a Redis that answers takes far less, any other is not waited
for."""
_LOGGED_IDS = 20
"""How many ids of a failed announcement are logged, the first ones."""
_RETRY_SECONDS = 1.0
"""The pause after a round in which ``count`` raised an error: `announce` itself raises none. The round's ids are not
announced again."""


def announce(
    ledger: Ledger | None,
    changes: HostChanges | None,
    count: Callable[[str], object],
    procs: Sequence[str],
    hosts: Sequence[str],
) -> None:
    """Release the procs in the ledger, then publish the hosts, also where the release failed. In this order a pass that
    plans on the hosts finds the counters lowered.

    Call this after the commit. No failure is raised, because the caller would take what was committed for failed: it is
    logged, and ``count`` is called with ``ledger_release_failed`` or ``host_changes_failed``. Without a ledger no proc
    is released, without ``changes`` no host is published.
    """

    def attempt(step: str, write: Callable[[Sequence[str]], object], ids: Sequence[str]) -> None:
        try:
            write(ids)
        except Exception as error:
            expected = isinstance(error, SchedulerError | RedisError)
            log = _log.warning if expected else _log.exception
            log("announce_failed", step=step, error=str(error), ids=ids[:_LOGGED_IDS], total=len(ids))
            count(f"{step}_failed")

    if ledger is not None and procs:
        attempt("ledger_release", ledger.release, procs)
    if changes is not None and hosts:
        attempt("host_changes", changes.publish, hosts)


class AnnouncementSender:
    """Announces in a thread of its own. Each round announces all that waits, procs before hosts, and each of these in
    the order in which they were put. Thread-safe.

    ``count`` is called with ``announcement_dropped`` for every id that is dropped because MOST_WAITING wait, and with
    the names that `announce` has for failures.
    """

    def __init__(self, ledger: Ledger, changes: HostChanges, count: Callable[[str], object]) -> None:
        self._ledger = ledger
        self._changes = changes
        self._count = count
        self._changed = threading.Condition()
        """Notified when a round has begun. Its lock guards what waits and ``_busy``."""
        self._procs: dict[str, None] = {}
        """The ids that wait, as keys: a dict keeps their order and each of them once. ``_hosts`` is the same."""
        self._hosts: dict[str, None] = {}
        self._busy = False
        """Whether the thread is announcing the ids of a round."""
        self._thread = PeriodicThread(
            "announcements", self._send, failed="announcements_not_sent", retry_seconds=_RETRY_SECONDS
        )

    def put(self, procs: Sequence[str], hosts: Sequence[str]) -> None:
        """Have the procs released in the ledger and the hosts published after them. Returns at once. Nothing is
        announced after close()."""
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
        """Go on announcing for at most ``seconds``, and end. Returns how many ids still waited then; those of a round
        under way are not among them."""
        until = monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: not (self._busy or self._procs or self._hosts), seconds)
            left = len(self._procs) + len(self._hosts)
        self._thread.stop(max(0.0, until - monotonic()))
        if left:
            _log.warning("announcements_given_up", ids=left)
        return left

    def _send(self) -> float | None:
        """Make a round: announce all that waits. Returns seconds until the next round, or None where nothing waited:
        put() then wakes the thread."""
        with self._changed:
            procs, hosts = list(self._procs), list(self._hosts)
            self._procs.clear()
            self._hosts.clear()
            self._busy = bool(procs or hosts)
            self._changed.notify_all()
        if not self._busy:
            return None
        announce(self._ledger, self._changes, self._count, procs, hosts)
        return 0.0  # at once: the next round finds that nothing is under way any more, for which close() waits
