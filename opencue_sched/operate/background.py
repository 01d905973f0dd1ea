"""Work beside the tasks: on threads that say why they failed, and that end before what they use is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.domain.errors import SchedulerError

log = structlog.get_logger(__name__)

STOP_SECONDS = 10.0


class Closing(SchedulerError):
    """The process is ending: what waits in the background gives up."""


class Background:
    """The background work of one process. Thread-safe."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, threading.Thread] = {}

    def start(self, name: str, work: Callable[[], object]) -> bool:
        """Run ``work`` on a thread, unless the work of this name still runs or the process ends; whether it began.

        Whoever starts it has to start it again if it fails: here a failure is only told.
        """
        with self._lock:
            if self._closed.is_set() or name in self._running:
                return False
            thread = self._running[name] = threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
            thread.start()
            return True

    def sleep(self, seconds: float) -> None:
        """What background work calls to wait. Raises Closing as soon as the process ends."""
        if self._closed.wait(seconds):
            raise Closing("the process is ending")

    def close(self, timeout: float = STOP_SECONDS) -> None:
        """Begin nothing more, wake what sleeps, and wait for the threads, each for up to ``timeout`` seconds."""
        with self._lock:
            self._closed.set()
            running = dict(self._running)
        for name, thread in running.items():
            thread.join(timeout)
            if thread.is_alive():
                log.warning("background_work_abandoned", work=name, waited_seconds=timeout)

    def _run(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Closing:
            log.info("background_work_given_up", work=name, reason="the process is ending")
        except (SchedulerError, SQLAlchemyError, RedisError) as error:
            log.warning("background_work_failed", work=name, error=str(error))
        except Exception:
            log.exception("background_work_failed", work=name)
        finally:
            with self._lock:
                del self._running[name]
