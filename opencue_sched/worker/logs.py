"""Structured logs, and the signals that change their level on a running process.

SIGUSR1 toggles info and debug without the SQL logger, SIGUSR2 with it (docs/references.md). Celery has a use of its own
for SIGUSR1, a dump of the stacks, so the handlers call whatever handler was there before.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from types import FrameType
from typing import Any

import structlog
from billiard.exceptions import RestartFreqExceeded
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.store_errors import describe, is_trouble
from opencue_sched.errors import NotReady, WrongConfiguration
from opencue_sched.settings import Logging, unknown_variables
from opencue_sched.worker.log_handlers import LogFile, Terminal

SQL_LOGGER = "sqlalchemy.engine"
_SEVERAL_LINES_A_TASK = ("celery.worker.strategy", "celery.app.trace", "kombu", "celery.redirected")


TOLD_AGAIN_SECONDS = 60.0
"""The time from one line about a store in trouble to the next of the same kind."""


class TroubleLines:
    """Lets one line pass a store, kind of error and minute, without a traceback: a store that is away, or takes no
    write, is met by everything that a process does, and no place in the code is at fault.

    Warnings of ours are told apart by their event. What names a proc is told each time: people look for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When each was told last, and how often it was not since. Under the lock: any thread logs.
        self._told: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def processor(self, _logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """What structlog calls where a line is written, so the error that is being handled there is known. A line about
        an error that was caught before has it as ``exc_info``."""
        given = event.get("exc_info")
        trouble = _trouble(given if isinstance(given, BaseException) else sys.exc_info()[1])
        if trouble is None or method not in ("warning", "error", "exception", "critical") or "proc" in event:
            return event
        store, kind, words = trouble
        repeated = self._repeated(store, kind, str(event["event"]) if method == "warning" else "")
        if repeated is None:
            raise structlog.DropEvent
        if event.pop("exc_info", None):
            event["error"] = words
        if repeated:
            event["repeated"] = repeated
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """What handlers ask of a record of Celery's or another library's, which carries its error with it."""
        if isinstance(record.msg, dict) or record.levelno < logging.WARNING:
            return True
        if "repeated" in record.__dict__:  # asked by another handler
            return record.__dict__["repeated"] is not None
        given = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        errors = [error for error in (*(record.exc_info or ()), *given) if isinstance(error, BaseException)]
        trouble = next(filter(None, map(_trouble, errors)), None)
        if trouble is not None:
            store, kind, _ = trouble
            repeated = self._repeated(store, kind, "")
        elif any(isinstance(error, RestartFreqExceeded) for error in errors):
            # Celery's word for a broker that fails again and again, beside the line that says how.
            repeated = self._repeated("broker", RestartFreqExceeded.__name__, "", unless_any=True)
        else:
            return True
        record.exc_info = record.exc_text = None
        record.__dict__["repeated"] = repeated
        return repeated is not None

    def _repeated(self, store: str, kind: str, event: str, *, unless_any: bool = False) -> int | None:
        """How often this was not told since the last time, now that it is time to; None before that, and with
        ``unless_any`` while anything was told lately."""
        with self._lock:
            now = self._clock()
            lately = any(now - told_at < TOLD_AGAIN_SECONDS for told_at, _ in self._told.values())
            told_at, times = self._told.get((store, kind, event), (-math.inf, 0))
            if now - told_at < TOLD_AGAIN_SECONDS or (unless_any and lately):
                self._told[store, kind, event] = told_at, times + 1
                return None
            self._told[store, kind, event] = now, 0
            return times


def _trouble(error: BaseException | None) -> tuple[str, str, str] | None:
    """The store that an error says is in trouble, the kind of that, and its words; None for any other error."""
    if isinstance(error, NotReady | BrokerError):
        return "redis", type(error).__name__, str(error)
    if isinstance(error, RedisError | SQLAlchemyError) and is_trouble(error):
        store = "redis" if isinstance(error, RedisError) else "postgresql"
        return store, type(getattr(error, "orig", None) or error).__name__, describe(error)
    return None


def configure_logging(settings: Logging, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Send structlog and the standard library's records to standard error, and to a file if asked to; then warn of
    variables that are no settings. Raises WrongConfiguration for a file that cannot be opened."""
    once = TroubleLines(clock)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    handlers: list[logging.Handler] = [Terminal(sys.stderr, clock)]
    if settings.path is not None:
        try:
            handlers.append(LogFile(settings.path, clock))
        except OSError as error:
            raise WrongConfiguration(f"OPENCUE_SCHED_LOGGING__PATH: the log file cannot be opened ({error})") from error
    for handler in handlers:
        # Text for who looks on; whatever reads the log later gets one JSON object a line.
        watched = isinstance(handler, Terminal) and sys.stderr.isatty()
        renderer: Any = structlog.dev.ConsoleRenderer(colors=False) if watched else structlog.processors.JSONRenderer()
        handler.addFilter(once.filter)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[structlog.stdlib.ExtraAdder(allow=["repeated"]), _only_repeats, *shared],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            )
        )
    logging.basicConfig(level=settings.level.upper(), handlers=handlers, force=True)
    _hush(settings.level != "debug")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            once.processor,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    for name in unknown_variables(os.environ):
        structlog.get_logger(__name__).warning("variable_is_no_setting", variable=name)


def _only_repeats(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop the count of lines that a log line stands for where it stands for itself alone."""
    if not event.get("repeated", True):
        del event["repeated"]
    return event


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
