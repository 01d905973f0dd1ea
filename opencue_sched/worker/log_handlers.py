"""Where log lines go, and what becomes of those that cannot be written."""

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


class TellsLosses(logging.Handler):
    """A handler that tells once a minute, by all handlers, how many lines it could not write. What it does runs under
    its lock."""

    what: str
    _clock: Callable[[], float]
    _lost = 0
    _why: str | None = None
    _tell_at = -math.inf
    _telling = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened anew
            self.handleError(record)
        if self._lost and not self._telling and self._clock() >= self._tell_at:
            lost, self._lost, self._tell_at = self._lost, 0, self._clock() + LOSSES_TOLD_EVERY_SECONDS
            self._telling = True
            structlog.get_logger(__name__).error("log_lines_lost", log=self.what, lines=lost, error=self._why)
            self._telling = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._telling:
            self._lost, self._why = self._lost + 1, error.strerror


class Terminal(TellsLosses, logging.StreamHandler[TextIO]):
    """Standard error."""

    what = "standard error"

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._clock = clock


class LogFile(TellsLosses, WatchedFileHandler):
    """A log file that is opened anew once logrotate has renamed or removed it."""

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
