"""Structured logs, and the signals that change their level on a running process.

SIGUSR1 toggles info and debug without the SQL logger, SIGUSR2 with it (scheduler reference, "Enable Debug Logging").
Celery has a use of its own for SIGUSR1, a dump of the stacks, so the handlers call whatever handler was there before.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

import structlog

from opencue_sched.settings import Logging, unknown_variables

SQL_LOGGER = "sqlalchemy.engine"
_SEVERAL_LINES_A_TASK = ("celery.worker.strategy", "celery.app.trace", "kombu", "celery.redirected")


def configure_logging(settings: Logging) -> None:
    """Send structlog and the standard library's records to standard error, and to a file if asked to; then warn of
    variables that are no settings. Raises OSError for a file."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if settings.path is not None:
        handlers.append(logging.FileHandler(settings.path))
    for handler in handlers:
        # Text for who looks on; whatever reads the log later gets one JSON object a line.
        watched = not isinstance(handler, logging.FileHandler) and sys.stderr.isatty()
        renderer: Any = structlog.dev.ConsoleRenderer(colors=False) if watched else structlog.processors.JSONRenderer()
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared,
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            )
        )
    logging.basicConfig(level=settings.level.upper(), handlers=handlers, force=True)
    _hush(settings.level != "debug")
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
    for name in unknown_variables(os.environ):
        structlog.get_logger(__name__).warning("variable_is_no_setting", variable=name)


def _hush(hush: bool) -> None:
    """Keep to their warnings those who log several lines a task, except at the debug level."""
    for noisy in _SEVERAL_LINES_A_TASK:
        logging.getLogger(noisy).setLevel(logging.WARNING if hush else logging.NOTSET)


def install_level_signals() -> None:
    """SIGUSR1 and SIGUSR2 toggle the level, then the handler that was there before runs."""
    for number, of_sql in ((signal.SIGUSR1, logging.WARNING), (signal.SIGUSR2, logging.INFO)):
        before = signal.getsignal(number)

        def handle(signum: int, frame: FrameType | None, *, of_sql: int = of_sql, before: Any = before) -> None:
            debug = logging.getLogger().level != logging.DEBUG
            logging.getLogger().setLevel(logging.DEBUG if debug else logging.INFO)
            logging.getLogger(SQL_LOGGER).setLevel(of_sql if debug else logging.WARNING)
            _hush(not debug)
            structlog.get_logger(__name__).info("log_level_changed", to="debug" if debug else "info")
            if callable(before):
                before(signum, frame)

        signal.signal(number, handle)
