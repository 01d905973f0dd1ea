"""Handlers that write log lines to standard error or a file, and count the lines they could not write."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TextIO

import structlog

LOSSES_TOLD_EVERY_SECONDS = 60.0
"""The time between two log lines that say how many lines were lost."""


class TellsLosses(logging.Handler):
    """A handler that counts the lines it could not write, and logs the count once a minute, by all handlers. Its state
    changes under the handler's own lock."""

    what: str
    """What the handler writes to, for people."""
    _clock: Callable[[], float]
    _lost = 0
    """Lines that were lost since that was told last."""
    _why: str | None = None
    """The error of the last line that was lost."""
    _tell_at = -math.inf
    """The time at which losses may be told again, by the clock."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a line; then log the lines that were lost, if it is time to."""
        # Lost lines are logged without this handler's lock: that line goes through the other handler, which may have
        # lost lines as well, and be about to log that through this one.
        written = super().handle(record)
        if lost := self._losses_to_tell():
            structlog.get_logger(__name__).error("log_lines_lost", log=self.what, lines=lost, error=self._why)
        return bool(written)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; one that cannot be written is counted."""
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened anew
            self.handleError(record)

    def _losses_to_tell(self) -> int:
        """How many lines were lost, if the caller is to tell that now."""
        self.acquire()
        try:
            if not self._lost or self._clock() < self._tell_at:
                return 0
            lost, self._lost, self._tell_at = self._lost, 0, self._clock() + LOSSES_TOLD_EVERY_SECONDS
            return lost
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif record.name != __name__:  # the line that tells of losses is not counted itself
            self._lost, self._why = self._lost + 1, error.strerror


class Terminal(TellsLosses, logging.StreamHandler[TextIO]):
    """Writes log lines to standard error."""

    what = "standard error"

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._clock = clock


class LogFile(TellsLosses, WatchedFileHandler):
    """Writes log lines to a file that is opened anew once logrotate has renamed or removed it."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(path)
        self.what = str(path)
        self._clock = clock

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        super().handleError(record)
        # What it could not write would be tried again with the next line, and keep the file from being opened anew.
        failed, self.stream = self.stream, None
        if failed is not None:
            with suppress(OSError):
                failed.close()
