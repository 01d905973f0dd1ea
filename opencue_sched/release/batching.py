"""Completions that arrive together are applied together: one transaction, and one fsync, for all that wait.

RQD never sends a completion again, so one that could not be written is kept here and tried until PostgreSQL is back,
whatever its caller was answered meanwhile. Only a full queue or a process that dies loses it, and then the frame is
found missing by its host's next reports.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from opencue_sched.domain.errors import SchedulerError
from opencue_sched.release.model import CompletedFrame, CompletionOutcome, EventCounts

_log = structlog.get_logger(__name__)

MOST_TOGETHER = 64
MOST_WAITING = 20_000
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 5.0

Apply = Callable[[Sequence[CompletedFrame]], Sequence[CompletionOutcome | DBAPIError]]
"""Answers each report; raises DBAPIError when the database is away and all are still to be done."""


class NotAccepting(SchedulerError):
    """The service is stopping, or too many completions wait for the database."""


@dataclass(slots=True, eq=False)
class _Waiting:
    report: CompletedFrame
    done: Future[CompletionOutcome] = field(default_factory=Future)


class CompletionBatcher:
    """One thread that applies completions in the order they arrive. ``submit`` is thread-safe."""

    def __init__(self, apply: Apply, *, counts: EventCounts | None = None, most_waiting: int = MOST_WAITING) -> None:
        self._apply = apply
        self._counts = counts or EventCounts()
        self._most_waiting = most_waiting
        self._queue: deque[_Waiting] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> int:
        """Accept nothing more, apply what waits for up to ``timeout`` seconds; returns how many could not be."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout)
        self._give_up.set()
        self._thread.join(timeout=_LONGEST_RETRY_SECONDS)
        with self._wake:
            left, self._queue = list(self._queue), deque()
        for waiting in left:
            waiting.done.set_exception(NotAccepting("the report service stopped"))
        if left:
            _log.error("completions_abandoned", procs=[waiting.report.proc_id for waiting in left])
        return len(left)

    @property
    def waiting(self) -> int:
        """Completions not yet applied."""
        with self._wake:
            return len(self._queue)

    def submit(self, report: CompletedFrame) -> Future[CompletionOutcome]:
        """Queue a completion; the future ends with its outcome, or the error the database refused it with."""
        with self._wake:
            if self._stopping:
                raise NotAccepting("the report service is stopping")
            if len(self._queue) >= self._most_waiting:
                self._counts.add("completion_queue_full")
                raise NotAccepting(f"{len(self._queue)} completions wait for the database already")
            waiting = _Waiting(report)
            self._queue.append(waiting)
            self._wake.notify()
            return waiting.done

    def _run(self) -> None:
        retry_after = _FIRST_RETRY_SECONDS
        together = MOST_TOGETHER
        while not self._give_up.is_set():
            batch = self._next(together)
            if not batch:
                return
            try:
                self._apply_batch(batch)
            except (DBAPIError, PoolTimeout) as error:
                # One at a time until it works again, in case it is one report that makes the statement time out.
                self._counts.add("completion_retry")
                _log.warning("completions_kept", waiting=self.waiting, error=str(error).partition("\n")[0])
                self._give_up.wait(retry_after)
                retry_after = min(retry_after * 2, _LONGEST_RETRY_SECONDS)
                together = 1
                self._rotate(batch)
            else:
                retry_after, together = _FIRST_RETRY_SECONDS, MOST_TOGETHER

    def _next(self, together: int) -> list[_Waiting]:
        """The completions at the head of the queue, which stay in it until they are applied. Empty: stop."""
        with self._wake:
            while not self._queue:
                if self._stopping:
                    return []
                self._wake.wait()
            return [self._queue[index] for index in range(min(together, len(self._queue)))]

    def _rotate(self, batch: Sequence[_Waiting]) -> None:
        """A single completion that keeps failing goes to the end, so that it does not hold up the others."""
        with self._wake:
            if len(batch) == 1 and len(self._queue) > 1:
                self._queue.rotate(-1)

    def _apply_batch(self, batch: Sequence[_Waiting]) -> None:
        try:
            answers = self._apply([waiting.report for waiting in batch])
        except (DBAPIError, PoolTimeout):
            raise
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    self._apply_batch([waiting])
                return
            _log.exception("completion_failed", proc=batch[0].report.proc_id, host=batch[0].report.host_name)
            self._finish(batch[0], error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            self._finish(waiting, answer)

    def _finish(self, waiting: _Waiting, answer: CompletionOutcome | BaseException) -> None:
        with self._wake:
            if waiting not in self._queue:
                return
            self._queue.remove(waiting)
        if isinstance(answer, BaseException):
            self._counts.add("completion_refused")
            waiting.done.set_exception(answer)
        else:
            waiting.done.set_result(answer)
