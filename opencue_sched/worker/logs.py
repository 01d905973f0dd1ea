"""Structured logs, and the signals that change their level on a running process.

SIGUSR1 toggles info and debug without the SQL logger, SIGUSR2 with it (scheduler reference, "Enable Debug Logging").
Celery has its own uses for SIGUSR1 (stack dumps in the parent, soft time limits in pool children), so the handlers are
set in the parent only and call whatever handler was there before. Children are told by SIGUSR2, which is free there.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
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


_CHOICES = ("as_started", "info", "debug", "debug_with_sql")
_chosen = mmap.mmap(-1, 1)
"""The number of the choice that signals made, in memory that a worker shares with the children of its pool."""


def _apply() -> str:
    """Take over the choice; its name."""
    choice = _CHOICES[_chosen[0]]
    if choice != "as_started":
        logging.getLogger().setLevel(logging.INFO if choice == "info" else logging.DEBUG)
        _hush(choice == "info")
        logging.getLogger(SQL_LOGGER).setLevel(logging.INFO if choice == "debug_with_sql" else logging.WARNING)
    return choice


def install_level_signals(children: Callable[[], Sequence[int]] = tuple) -> None:
    """SIGUSR1 and SIGUSR2 toggle the level here and in ``children``, then the handler that was there before runs."""
    owner = os.getpid()
    for number, debug in ((signal.SIGUSR1, "debug"), (signal.SIGUSR2, "debug_with_sql")):
        before = signal.getsignal(number)

        def handle(signum: int, frame: FrameType | None, *, debug: str = debug, before: Any = before) -> None:
            if os.getpid() != owner:  # a child that was forked a moment ago
                _apply()
                return
            _chosen[0] = _CHOICES.index("info" if logging.getLogger().level == logging.DEBUG else debug)
            structlog.get_logger(__name__).info("log_level_changed", to=_apply())
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
            if callable(before):
                before(signum, frame)

        signal.signal(number, handle)


def follow_level_signals() -> None:
    """In a child of the pool: take over the parent's level, now and at each SIGUSR2 from it. SIGUSR1 is Celery's."""
    signal.signal(signal.SIGUSR2, lambda *_: _apply())
    _apply()
