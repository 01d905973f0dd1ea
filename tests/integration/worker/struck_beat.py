"""A beat that is told to stop wherever that could hurt."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import structlog
from celery.beat import ScheduleEntry

from opencue_sched.beat import LeaderScheduler

log = structlog.get_logger(__name__)


class StruckScheduler(LeaderScheduler):
    """Gets the signal STRUCK_BY of its environment with each message that it sends, while it holds a lock that its
    close() takes, and once more while it closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = int(os.environ["STRUCK_BY"])
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send a message, and be told to stop before that."""
        # Without ``with``, which would give the lock back where a handler raises. An Event's does not always do so.
        self._lock.acquire()
        signal.raise_signal(self._number)
        self._lock.release()
        super().apply_entry(entry, producer=producer)

    def close(self) -> None:
        """Hand over, and be told to stop again before that is done."""
        with self._lock:
            log.info("struck_beat_closes")
            signal.raise_signal(self._number)
            super().close()
