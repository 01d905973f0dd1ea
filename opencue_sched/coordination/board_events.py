"""What happens on a board, from its Stream: POSTED, CLAIMED, READY, EXPIRED, REMOVED and TRASHED, each written in the
same call that made it true. Who listens hears of the first four and of REMOVAL, as TaskFlow's boards say it, and of
TRASHED.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog

from opencue_sched.background import PeriodicThread

log = structlog.get_logger(__name__)

ANY = "*"
"""Stands for every kind where a callback is registered."""
POSTED = "POSTED"
REMOVAL = "REMOVAL"
"""A job left the board: it was consumed or withdrawn, or put into the trash, of which TRASHED tells as well."""
KINDS = (POSTED, "CLAIMED", "READY", "EXPIRED", REMOVAL, "TRASHED")
_HEARD_AS = {"REMOVED": (REMOVAL,), "TRASHED": ("TRASHED", REMOVAL)}
"""The kinds under which callbacks hear of an event of the Stream. An event of any other kind is heard under its own."""
BLOCK_SECONDS = 1.0
"""How long one read of the Stream waits for events at most."""
_RETRY_SECONDS = 1.0
"""The time after which a Stream that could not be read is read again."""


class EventReader:
    """Reads a board's events from now on: the fields ``kind``, ``job`` and ``name``. Where it falls 10,000 behind, the
    oldest are lost."""

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._position = stream_end(client, stream)

    def read(self, seconds: float) -> list[dict[str, str]]:
        """The events since the last call, waiting up to ``seconds`` for one. Raises RedisError."""
        time_out = self._client.get_connection_kwargs().get("socket_timeout") or math.inf
        block = max(1, round(1000 * min(seconds, BLOCK_SECONDS, time_out / 2)))
        answer = cast("list[Any]", self._client.xread({self._stream: self._position}, block=block, count=1000))
        entries = answer[0][1] if answer else []
        if entries:
            self._position = entries[-1][0]
        return [fields for _, fields in entries]


def stream_end(client: redis.Redis, stream: str) -> str:
    """The id of a stream's newest entry; that before any of one that has none."""
    newest = cast("list[tuple[str, object]]", client.xrevrange(stream, count=1))
    return newest[0][0] if newest else "0-0"


@dataclass(frozen=True)
class _Listener:
    """A callback with what it was registered with."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    details_filter: Callable[[dict[str, Any]], object] | None

    def hear(self, kind: str, details: dict[str, Any]) -> None:
        """Call back for an event of this kind, if its details are wanted."""
        if self.details_filter is None or self.details_filter(details):
            self.callback(kind, *self.args, **self.kwargs, details=details)


class Notifier(PeriodicThread):
    """Calls back, from a thread of its own, for events of the kinds registered. Callbacks must be quick.

    The thread runs from the first registration on. ``find_job`` gives the job of an event by its id and name.
    """

    def __init__(self, open_reader: Callable[[], EventReader], find_job: Callable[[str, str], object]) -> None:
        super().__init__("board-events", self._pass_on, failed="board_events_unreadable", retry_seconds=_RETRY_SECONDS)
        self._open = open_reader
        self._find_job = find_job
        self._reader: EventReader | None = None
        """Set once, under ``_lock``, before the thread starts; then read by the thread."""
        self._lock = threading.Lock()
        self._listeners: dict[str, list[_Listener]] = defaultdict(list)
        """The listeners to each kind of event. Under ``_lock``: any thread registers, this one calls back."""

    def register(
        self,
        kind: str,
        callback: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        details_filter: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """Call ``callback(kind, *args, details={"job": job, "name": name}, **kwargs)`` for each event of ``kind`` from
        now on whose details ``details_filter`` takes; with ANY once for each event.

        Raises ValueError for a kind that there is not (KINDS).
        """
        if kind not in (*KINDS, ANY):
            raise ValueError(f"{kind!r} is no kind of event; there are {', '.join(KINDS)}, and {ANY!r} for all")
        with self._lock:
            self._reader = self._reader or self._open()
            self._listeners[kind].append(_Listener(callback, tuple(args or ()), dict(kwargs or {}), details_filter))
        self.start()

    def deregister(self, kind: str, callback: Callable[..., object]) -> None:
        """Stop calling ``callback`` for ``kind``; where it was registered more than once, once less."""
        with self._lock:
            listeners = self._listeners[kind]
            if found := [listener for listener in listeners if listener.callback == callback]:
                listeners.remove(found[0])

    def _pass_on(self) -> float:
        for event in self._reader.read(BLOCK_SECONDS / 2) if self._reader else ():
            kinds = _HEARD_AS.get(event["kind"], (event["kind"],))
            with self._lock:
                called = [(kind, listener) for kind in kinds for listener in self._listeners[kind]]
                called += [(kinds[0], listener) for listener in self._listeners[ANY]]
            if not called:
                continue
            job = self._find_job(event["job"], event["name"])
            for kind, listener in called:
                try:
                    listener.hear(kind, {"job": job, "name": event["name"]})
                except Exception:
                    log.exception("board_callback_failed", kind=kind, job=event["job"])
        return 0.0
