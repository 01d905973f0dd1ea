"""The signals to stop: how a service takes them, and how the first process of a container does before it is one."""

from __future__ import annotations

import os
import signal
import sys
from queue import Empty, SimpleQueue
from typing import NoReturn


class StopOrder:
    """The order to stop, which SIGTERM, SIGINT and SIGHUP give from now on; SIGHUP only where it is not ignored (by
    nohup).

    The handlers note the order, and do nothing else. A handler that stopped the service would wait for ever for a lock
    that the interrupted code holds. One that raised SystemExit could leave such a lock taken: an Event can be
    interrupted between taking its lock and the block that gives the lock back.
    """

    def __init__(self) -> None:
        self._signals: SimpleQueue[int] = SimpleQueue()
        """The signals that came. A handler may fill a SimpleQueue while it interrupts a call of the same queue; of an
        Event it may not."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda received, _frame: self._signals.put(received))

    def wait(self, seconds: float) -> bool:
        """Wait for the order, at most ``seconds``. Returns whether it was given. Called by the main thread."""
        try:
            self._signals.put(self._signals.get(timeout=seconds))  # put back: the order stands
        except Empty:
            return False
        return True


def end_by_sigterm_as_first_process() -> None:
    """Have SIGTERM end this process from now on if it is the first of its container: the kernel gives that one no
    signal without a handler. A service has a handler of its own later, when there is something to give back."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: object) -> NoReturn:
    """End the process as a shell says that a signal ended it: with 128 and the signal's number."""
    sys.exit(128 + number)
