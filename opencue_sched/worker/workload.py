"""The tasks that a worker's process has in hand, and whether it takes more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opencue_sched.coordination.presence import WorkerState


class Workload:
    """The tasks that this process has in hand, and whether it takes more: working, paused, or draining before its end.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        """Read by any thread. Changed only by the methods of this class, which take no lock: one of their callers is a
        signal handler, and the thread that it interrupted may hold the lock."""
        self._stopping = False
        """Whether stop() was called; never unset. Without a lock, for the same reason."""
        self._changed = threading.Condition()
        """Guards ``in_hand``, and is notified whenever a task ends."""
        self.in_hand = 0
        """How many tasks are under way in this process. Any thread may read the number."""

    @property
    def takes_work(self) -> bool:
        """Whether a message that has come may be worked on."""
        return self.state in (WorkerState.STARTING, WorkerState.WORKING)

    def begin(self) -> None:
        """Say that the process is ready: it works from now on, unless it was paused or told to drain meanwhile."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.WORKING

    def become(self, state: WorkerState) -> None:
        """Pause, drain or work again, as a control command wants it; nothing changes in a process about to end."""
        if not self._stopping:
            self.state = state

    def stop(self) -> None:
        """Take no more work until the process ends. Safe in a signal handler."""
        self._stopping = True
        self.state = WorkerState.DRAINING

    @contextmanager
    def task(self) -> Iterator[None]:
        """A context that counts as a task in hand."""
        with self._changed:
            self.in_hand += 1
        try:
            yield
        finally:
            with self._changed:
                self.in_hand -= 1
                self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no task is in hand; False when that took longer than ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.in_hand, seconds)
