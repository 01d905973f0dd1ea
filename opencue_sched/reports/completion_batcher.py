"""Completions that arrive together are applied together, in one transaction and with one fsync.

RQD never sends a completion again, so one that could not be written stays in the queue until PostgreSQL is back, even
when its caller's wait has ended. Only a full queue or a process that dies loses it; then the reports of its host show
that the frame does not run any more.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog

from opencue_sched.clients.store_errors import describe
from opencue_sched.errors import SchedulerError
from opencue_sched.reports.completion import MOST_TOGETHER
from opencue_sched.reports.run_ends import CompletedFrame, RunOutcome

_log = structlog.get_logger(__name__)

MOST_WAITING = 20_000
"""How many completions may wait for the database; further ones are refused. RQDs that do not send them again show in
their host reports that the frames have ended."""
SHORTEST_GATHER_SECONDS, LONGEST_GATHER_SECONDS = 0.01, 0.05
"""How long completions wait for others, while fewer than MOST_TOGETHER do, to be applied with them: as long as those
before them took, within these bounds. A transaction of few costs as much planning, and as many messages, as one of
many; so where they come fast, more are applied together, and what each costs falls."""
_FIRST_RETRY_SECONDS, _LONGEST_BATCH_RETRY_SECONDS = 0.2, 5.0
"""The pause after a batch that was not applied, which doubles up to the longest."""


class NotAccepting(SchedulerError):
    """The service is stopping, or too many completions wait for the database."""


class CompletionRefused(SchedulerError):
    """The end of a frame cannot be written: the database refused it, or a bug did. The text goes to the RQD."""

    def __init__(self, report: CompletedFrame, error: Exception) -> None:
        super().__init__(
            f"the end of frame {report.frame_id} ({report.name}) on host {report.host_name} was not written: "
            f"{describe(error)}; mend what stands in its way: the frame stays RUNNING until the reaper finds that its "
            "run is lost"
        )


class CompletionBatcher:
    """One thread that applies completions in the order they arrive. ``submit`` is thread-safe.

    ``apply`` answers each report; it raises an error when it applied none.
    """

    def __init__(
        self, apply: Callable[[Sequence[CompletedFrame]], Sequence[RunOutcome]], count: Callable[[str], object]
    ) -> None:
        self._apply = apply
        self._count = count
        self._queue: deque[tuple[CompletedFrame, Future[RunOutcome]]] = deque()
        """The completions that wait or are being applied, each with what its sender waits for, in the order of arrival.
        Under the lock of ``_wake``, as ``_stopping`` is."""
        self._wake = threading.Condition()
        self._stopping = False
        self._give_up = threading.Event()
        """Set once completions that wait are to be given up: the thread begins no further batch."""
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)

    def start(self) -> None:
        """Begin to apply completions."""
        self._thread.start()

    def stop(self, timeout: float) -> int:
        """Accept no more, apply the queue for up to ``timeout`` seconds; returns how many completions are left."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout)
        self._give_up.set()
        self._thread.join(timeout=_LONGEST_BATCH_RETRY_SECONDS)
        with self._wake:
            for _, done in self._queue:
                done.set_exception(NotAccepting("the report service stopped"))
            if self._queue:
                _log.error("completions_abandoned", procs=[report.proc_id for report, _ in self._queue])
            return len(self._queue)

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """How many completions wait or are being applied."""
        with self._wake:
            return len(self._queue)

    def submit(self, report: CompletedFrame) -> Future[RunOutcome]:
        """Queue a completion; the future ends with its outcome, or with CompletionRefused or NotAccepting."""
        with self._wake:
            if self._stopping:
                raise NotAccepting("the report service is stopping")
            if len(self._queue) >= MOST_WAITING:
                self._count("completion_queue_full")
                raise NotAccepting(f"{len(self._queue)} completions wait for the database already")
            done: Future[RunOutcome] = Future()
            self._queue.append((report, done))
            self._wake.notify()
            return done

    def _run(self) -> None:
        """Apply completions in batches until the queue is closed and empty, or given up. A batch that fails is tried
        again, one completion at a time."""
        retry_after, together = _FIRST_RETRY_SECONDS, MOST_TOGETHER
        gather_seconds = SHORTEST_GATHER_SECONDS
        while not self._give_up.is_set() and (batch := self._next(together, gather_seconds)):
            began = time.monotonic()
            try:
                outcomes = self._apply([report for report, _ in batch])
            except Exception as error:
                self._count("completion_retry")
                _log.warning("completions_kept", waiting=self.waiting, error=describe(error))
                self._give_up.wait(retry_after)
                # One at a time until it works again, in case it is one report that makes the statement time out; then
                # it does not hold up the others.
                retry_after, together = min(retry_after * 2, _LONGEST_BATCH_RETRY_SECONDS), 1
                with self._wake:
                    self._queue.rotate(-len(batch))  # to the end, so that the others are tried before these again
                continue
            retry_after, together = _FIRST_RETRY_SECONDS, MOST_TOGETHER
            gather_seconds = min(max(SHORTEST_GATHER_SECONDS, time.monotonic() - began), LONGEST_GATHER_SECONDS)
            with self._wake:
                for (report, done), outcome in zip(batch, outcomes, strict=True):
                    self._queue.popleft()
                    if done.done():  # stop() has given it up
                        continue
                    if outcome.error is not None:
                        done.set_exception(CompletionRefused(report, outcome.error))
                    else:
                        done.set_result(outcome)

    def _next(self, together: int, gather_seconds: float) -> list[tuple[CompletedFrame, Future[RunOutcome]]]:
        """The completions at the head of the queue, at most ``together``, which stay in the queue until they are
        applied. No completions: the thread is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._stopping)
            few = len(self._queue) < together
        if few:
            self._give_up.wait(gather_seconds)
        with self._wake:
            return list(itertools.islice(self._queue, together))
