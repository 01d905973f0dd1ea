"""The signal to stop, for a process that is the first of a container."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def end_by_sigterm_as_first_process() -> None:
    """Have SIGTERM end this process from now on if it is the first of its container: the kernel gives that one no
    signal without a handler. A service has a handler of its own later, when there is something to give back."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
