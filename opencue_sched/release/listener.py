"""PostgreSQL notifications: releases, changed hosts and caps, new work and shows given back, as whoever does it commits
them.

A notification is a hint. One that is missed while the connection is away is made up for by the recompute, the reseed
and the sweep; after a reconnection ``on_reconnect`` lets them run at once.
"""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg2
import structlog
from psycopg2.extensions import ISOLATION_LEVEL_AUTOCOMMIT, quote_ident
from sqlalchemy import make_url

from opencue_sched.release.model import EventCounts
from opencue_sched.settings import Settings
from opencue_sched.store.engine import DEAD_CONNECTION, connect

_log = structlog.get_logger(__name__)

RELEASE_CHANNEL, CAPS_CHANNEL, WORK_CHANNEL = "opencue_sched_release", "opencue_sched_caps", "opencue_sched_work"
HANDED_BACK_CHANNEL = "opencue_sched_handed_back"

_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 10.0
_PROBE_SECONDS = 10.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Handlers:
    """Called in the listener's thread; keep them short. None: the channel is not listened to.

    ``on_release(released procs, changed hosts)``, ``on_caps(vertex keys)``, ``on_work(show ids)`` and
    ``on_handed_back(show ids)``; ``on_reconnect()`` after notifications may have been missed.
    """

    on_release: Callable[[Sequence[str], Sequence[str]], object] | None = None
    on_caps: Callable[[Sequence[str]], object] | None = None
    on_work: Callable[[Sequence[str]], object] | None = None
    on_handed_back: Callable[[Sequence[str]], object] | None = None
    on_reconnect: Callable[[], object] | None = None


class NotificationListener:
    """A thread with a connection of its own, reopened with growing pauses when it is lost."""

    def __init__(self, settings: Settings, handlers: Handlers, *, counts: EventCounts | None = None) -> None:
        self._address = database_address(settings.sqlalchemy_url)
        self._connect_timeout = max(1, round(settings.database.connect_timeout))
        self._handlers = handlers
        self.counts = counts or EventCounts()
        self._stop = threading.Event()
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._dispatch: dict[str, Callable[[Any], None]] = {}
        if handlers.on_release is not None:
            self._dispatch[RELEASE_CHANNEL] = self._release
        if handlers.on_caps is not None:
            self._dispatch[CAPS_CHANNEL] = self._caps
        if handlers.on_work is not None:
            self._dispatch[WORK_CHANNEL] = self._shows(handlers.on_work)
        if handlers.on_handed_back is not None:
            self._dispatch[HANDED_BACK_CHANNEL] = self._shows(handlers.on_handed_back)

    def start(self) -> None:
        """Start listening, now or as soon as PostgreSQL can be reached."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread and its connection."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def wait_connected(self, timeout: float) -> bool:
        """Whether it listens, waiting at most ``timeout`` seconds for it."""
        return self._connected.wait(timeout)

    @property
    def connected(self) -> bool:
        """Whether it listens now."""
        return self._connected.is_set()

    def _run(self) -> None:
        retry_after = _FIRST_RETRY_SECONDS
        before = False
        while not self._stop.is_set():
            try:
                connection = self._connect()
            except psycopg2.Error as error:
                self.counts.add("listener_connect_failed")
                _log.warning("listener_cannot_connect", error=str(error).strip(), retry_in=retry_after)
                self._stop.wait(retry_after)
                retry_after = min(retry_after * 2, _LONGEST_RETRY_SECONDS)
                continue
            try:
                self._connected.set()
                if before and self._handlers.on_reconnect is not None:
                    self._call("reconnect", self._handlers.on_reconnect)
                before, retry_after = True, _FIRST_RETRY_SECONDS
                self._listen(connection)
            except (psycopg2.Error, OSError) as error:
                self.counts.add("listener_lost")
                _log.warning("listener_lost_connection", error=str(error).strip())
                self._stop.wait(retry_after)
            finally:
                self._connected.clear()
                connection.close()

    def _connect(self) -> Any:
        ours = {
            "connect_timeout": self._connect_timeout,
            "application_name": "opencue-sched-listener",
            "options": "-c statement_timeout=5000",
            **DEAD_CONNECTION,
        }
        connection = connect(**{**self._address, **ours})
        try:
            connection.set_isolation_level(ISOLATION_LEVEL_AUTOCOMMIT)
            with connection.cursor() as cursor:
                for channel in self._dispatch:
                    cursor.execute(f"LISTEN {quote_ident(channel, cursor)}")
        except psycopg2.Error:
            connection.close()
            raise
        return connection

    def _listen(self, connection: Any) -> None:
        idle = 0.0
        # select() knows no file above 1023, and a process with a connection to each of many hosts has more.
        news = select.poll()
        news.register(connection, select.POLLIN)
        while not self._stop.is_set():
            if news.poll(1000 * _POLL_SECONDS):
                connection.poll()
                idle = 0.0
            else:
                idle += _POLL_SECONDS
                if idle >= _PROBE_SECONDS:
                    with connection.cursor() as cursor:
                        cursor.execute("SELECT 1")
                    idle = 0.0
            while connection.notifies:
                notification = connection.notifies.pop(0)
                self._handle(notification.channel, notification.payload)

    def _handle(self, channel: str, payload: str) -> None:
        """A payload that makes no sense, or a handler that fails, costs this notification only."""
        try:
            content = json.loads(payload)
            self._dispatch[channel](content)
        except (ValueError, KeyError, TypeError) as error:
            self.counts.add("notification_malformed")
            _log.warning("notification_malformed", channel=channel, payload=payload[:200], error=str(error))
        except Exception:
            self.counts.add("notification_failed")
            _log.exception("notification_failed", channel=channel)
        else:
            self.counts.add(f"notification_{channel}")

    def _call(self, name: str, handler: Callable[[], object]) -> None:
        try:
            handler()
        except Exception:
            self.counts.add("notification_failed")
            _log.exception("notification_failed", channel=name)

    def _release(self, content: Any) -> None:
        if not isinstance(content, dict):
            raise TypeError("expected an object with procs and hosts")
        procs, hosts = _ids(content.get("procs", [])), _ids(content.get("hosts", []))
        if self._handlers.on_release is not None:
            self._handlers.on_release(procs, hosts)

    def _caps(self, content: Any) -> None:
        keys = _ids(content.get("vertices", []) if isinstance(content, dict) else content)
        if self._handlers.on_caps is not None:
            self._handlers.on_caps(keys)

    @staticmethod
    def _shows(handler: Callable[[Sequence[str]], object]) -> Callable[[Any], None]:
        def pass_on(content: Any) -> None:
            handler(_ids(content.get("shows", []) if isinstance(content, dict) else content))

        return pass_on


def database_address(url: str) -> dict[str, Any]:
    """The arguments that SQLAlchemy's engine would connect with. It reads characters in a password that end the address
    for PostgreSQL's own library."""
    parsed = make_url(url)
    _, arguments = parsed.get_dialect()().create_connect_args(parsed)
    return dict(arguments)


def _ids(value: Any) -> list[str]:
    """A JSON list of ids; anything else raises TypeError."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("expected a list of ids")
    return value
