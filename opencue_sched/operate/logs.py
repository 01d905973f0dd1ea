"""Structured logs, and the signals that change their level on a running process.

SIGUSR1 toggles info and debug without the SQL logger, SIGUSR2 with it (scheduler reference, "Enable Debug Logging").
Celery has its own uses for SIGUSR1 (stack dumps in the parent, soft time limits in pool children), so the handlers are
set in the parent only and call whatever handler was there before.
"""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType
from typing import Any

import structlog

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.settings import Logging

SQL_LOGGER = "sqlalchemy.engine"
_SEVERAL_LINES_A_TASK = ("celery.worker.strategy", "celery.app.trace", "kombu", "celery.redirected")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(settings: Logging) -> None:
    """Send structlog and the standard library's records to standard error, and to a file if asked to."""
    level = _LEVELS.get(settings.level.lower())
    if level is None:
        raise InvalidInput(f"logging.level {settings.level!r} is none of {', '.join(_LEVELS)}")
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    )
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if settings.file_appender:
        if settings.path is None:
            raise InvalidInput("logging.file_appender is on but logging.path names no file")
        handlers.append(logging.FileHandler(settings.path))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level)
    _hush(level > logging.DEBUG)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _hush(hush: bool) -> None:
    """Keep to their warnings those who log several lines a task, except at the debug level."""
    for noisy in _SEVERAL_LINES_A_TASK:
        logging.getLogger(noisy).setLevel(logging.WARNING if hush else logging.NOTSET)


def toggle_debug(*, sql: bool) -> str:
    """Switch the root logger between info and debug; ``sql`` takes the SQL logger along. Returns the new level."""
    root = logging.getLogger()
    debug = root.level != logging.DEBUG
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    _hush(not debug)
    logging.getLogger(SQL_LOGGER).setLevel(logging.INFO if debug and sql else logging.WARNING)
    return "debug" if debug else "info"


def install_level_signals() -> None:
    """SIGUSR1 and SIGUSR2 toggle the level, then the handler that was there before runs."""
    for number, sql in ((signal.SIGUSR1, False), (signal.SIGUSR2, True)):
        before = signal.getsignal(number)

        def handle(signum: int, frame: FrameType | None, *, sql: bool = sql, before: Any = before) -> None:
            level = toggle_debug(sql=sql)
            structlog.get_logger(__name__).info("log_level_changed", level=level, sql=sql)
            if callable(before):
                before(signum, frame)

        signal.signal(number, handle)
