"""The threads beside the work: each does one thing again and again, and no error ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from opencue_sched.errors import SchedulerError

log = structlog.get_logger(__name__)
STOP_SECONDS = 10.0
"""How long the end of a round is waited for when a thread is stopped."""


class PeriodicThread:
    """Calls ``make_round()`` from a daemon thread called ``name``, one call after the other, until it is stopped.

    ``make_round`` returns in how many seconds it wants to be called again; None: not before ``wake()`` is called, which
    cuts every other wait short as well. An error costs its round only. The error is logged as the event ``failed``,
    once until another error comes or a round goes well, and the next round is made ``retry_seconds`` later, each time
    twice as long up to ``longest_retry_seconds``.
    """

    def __init__(
        self,
        name: str,
        make_round: Callable[[], float | None],
        *,
        failed: str,
        retry_seconds: float,
        longest_retry_seconds: float = 0.0,
    ) -> None:
        self._make_round = make_round
        self._failed = failed
        self._first_retry = self._retry = retry_seconds
        self._longest_retry = max(retry_seconds, longest_retry_seconds)
        self._told = ""
        """The last error that was logged. Touched by this thread alone, as is the pause before the next retry."""
        self._wanted = threading.Event()
        """Set by any thread that wants a round now."""
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        """Held by the caller that starts the thread: of several one does."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, with a first round at once, unless the thread has begun."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def wake(self) -> None:
        """Have a round made now; while a round is under way, another one after that."""
        self._wanted.set()

    def pause(self, seconds: float) -> bool:
        """Wait within a round. Returns True as soon as the thread is to end."""
        return self._stopped.wait(seconds)

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """End after the round under way, waiting up to ``timeout`` seconds for that. Returns whether the thread has
        ended."""
        self._stopped.set()
        self._wanted.set()
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return True
        self._thread.join(timeout)
        if left := self._thread.is_alive():
            log.warning("thread_left_behind", thread=self._thread.name, waited_seconds=timeout)
        return not left

    def _run(self) -> None:
        """Make rounds until stop() is called; each begins when the pause of the one before is over, or wake() is
        called."""
        pause: float | None = 0.0
        while not self._stopped.is_set():
            self._wanted.wait(pause)
            self._wanted.clear()
            if not self._stopped.is_set():
                pause = self._round()

    def _round(self) -> float | None:
        """Make one round; returns the pause after it in seconds, None: until wake(). An error is logged, unless it is
        that of the round before, and the time to the retry is waited here."""
        try:
            pause = self._make_round()
        except Exception as error:
            # Behind the first line of what PostgreSQL said stands the statement with its parameters.
            said = str(error.orig).partition("\n")[0] if isinstance(error, DBAPIError) else str(error)
            text = f"{type(error).__name__}: {said}"
            if text != self._told:
                # A store that is away is expected now and then; anything else is a defect, told with where it happened.
                expected = isinstance(error, SchedulerError | SQLAlchemyError | RedisError)
                (log.warning if expected else log.exception)(self._failed, thread=self._thread.name, error=text)
            self._told = text
            self._stopped.wait(self._retry)
            self._retry = min(2 * self._retry, self._longest_retry)
            return 0.0
        self._told, self._retry = "", self._first_retry
        return pause
