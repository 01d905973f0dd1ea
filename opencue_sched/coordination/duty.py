"""What this process has in hand, and whether it takes more: working, paused, or draining before its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class DutyState(StrEnum):
    """``PAUSED`` takes no dispatch work, ``DRAINING`` nothing at all, both until told to resume."""

    STARTING = "starting"
    WORKING = "working"
    PAUSED = "paused"
    DRAINING = "draining"


class Duty:
    """Thread-safe. The state is changed without the lock, so that a signal handler may do it."""

    def __init__(self) -> None:
        self.state = DutyState.STARTING
        self._stopping = False
        self._changed = threading.Condition()
        self._in_hand = 0

    @property
    def in_hand(self) -> int:
        """Tasks under way in this process."""
        return self._in_hand

    @property
    def takes_work(self) -> bool:
        """Whether new work may begin."""
        return self.state in (DutyState.STARTING, DutyState.WORKING)

    def begin(self) -> None:
        """The process is ready: take work, unless it was told not to already."""
        if self.state is DutyState.STARTING:
            self.state = DutyState.WORKING

    def pause(self) -> None:
        """Take no more dispatch work for now."""
        if not self._stopping:
            self.state = DutyState.PAUSED

    def drain(self) -> None:
        """Take no more work of any kind for now."""
        self.state = DutyState.DRAINING

    def resume(self) -> None:
        """Take work again, unless this process is about to end."""
        if not self._stopping:
            self.state = DutyState.WORKING

    def stop(self) -> None:
        """Take no more work ever. Safe in a signal handler."""
        self._stopping = True
        self.state = DutyState.DRAINING

    @contextmanager
    def task(self) -> Iterator[None]:
        """Count one task while it runs."""
        with self._changed:
            self._in_hand += 1
        try:
            yield
        finally:
            with self._changed:
                self._in_hand -= 1
                self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until nothing is in hand; False when that took longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._in_hand:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True
