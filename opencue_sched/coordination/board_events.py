"""The events of a board: `EventReader` reads them from the board's Stream, and `Notifier` calls back for them.

The board's scripts write each event in the same call that makes it true: POSTED (a new job), READY (the job can be
claimed), CLAIMED, EXPIRED (a claim ran out), REMOVED and TRASHED. A callback hears REMOVED by TaskFlow's name for it,
REMOVAL.
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
"""A job left the board: it was consumed, withdrawn or put into the trash. A job put into the trash is heard of as
TRASHED, too."""
KINDS = (POSTED, "CLAIMED", "READY", "EXPIRED", REMOVAL, "TRASHED")
_HEARD_AS = {"REMOVED": (REMOVAL,), "TRASHED": ("TRASHED", REMOVAL)}
"""The kinds under which callbacks hear of an event of the Stream, for the kinds that are not heard under their own name
alone. A callback for ANY hears of the event under the first."""
BLOCK_SECONDS = 1.0
"""How long one read of the Stream waits for events at most, whatever its caller asks for."""
_MOST_EVENTS = 1000
"""How many events one read of the Stream returns at most: a reader that is far behind takes them in portions."""
_ROUND_SECONDS = 0.5
"""How long a round of the Notifier waits for events at most. Whoever stops the Notifier waits as long for the round."""
_RETRY_SECONDS = 1.0
"""The time after which a Stream that could not be read is read again."""


class EventReader:
    """Reads the events of a board that are written after the reader was made. For one thread at a time.

    The Stream keeps about 10,000 events (EVENTS_KEPT in lua/includes/board.lua): a reader that is further behind loses
    the oldest. Making a reader raises RedisError, as reading does.
    """

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._position = stream_end(client, stream)

    def read(self, seconds: float) -> list[dict[str, str]]:
        """The oldest events not yet read, up to 1,000, each with ``kind``, ``job`` (the job's id) and ``name`` (the
        job's name). Waits up to ``seconds`` for the first of them; empty when none came. Raises RedisError."""
        # Redis has to answer before the client gives the connection up.
        time_out = self._client.get_connection_kwargs().get("socket_timeout") or math.inf
        block = max(1, round(1000 * min(seconds, BLOCK_SECONDS, time_out / 2)))
        answer = cast("list[Any]", self._client.xread({self._stream: self._position}, block=block, count=_MOST_EVENTS))
        entries = answer[0][1] if answer else []
        if entries:
            self._position = entries[-1][0]
        return [fields for _, fields in entries]


def stream_end(client: redis.Redis, stream: str) -> str:
    """The id of the newest entry of a stream; of an empty stream "0-0", which comes before any entry. Raises
    RedisError."""
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
    """Calls back, from a thread of its own, for events of the kinds registered.

    One callback follows the other in that thread, so a slow one holds up all others. An exception of a callback is
    logged, and the next callback is called. The thread runs from the first registration on. ``find_job`` returns what a
    callback gets as the job of an event, from the job's id and name; it has to return something for a job that is gone.
    """

    def __init__(self, open_reader: Callable[[], EventReader], find_job: Callable[[str, str], object]) -> None:
        super().__init__("board-events", self._pass_on, failed="board_events_unreadable", retry_seconds=_RETRY_SECONDS)
        self._open = open_reader
        self._find_job = find_job
        self._reader: EventReader | None = None
        """Set once, under ``_lock``, before the thread starts; then read by the thread."""
        self._lock = threading.Lock()
        self._listeners: dict[str, list[_Listener]] = defaultdict(list)
        """The listeners to each kind of event. Under ``_lock``: any thread registers, the Notifier's reads."""

    def register(
        self,
        kind: str,
        callback: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        details_filter: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """Call ``callback(kind, *args, details={"job": job, "name": name}, **kwargs)`` for each event of ``kind`` from
        now on.

        Where there is a ``details_filter``, only for events for whose details it returns true. A callback for ANY is
        called once for each event, with the kind of the event. Raises ValueError for a kind that is neither in KINDS
        nor ANY, and what opening the reader raises, at the first registration.
        """
        if kind not in (*KINDS, ANY):
            raise ValueError(f"{kind!r} is no kind of event; there are {', '.join(KINDS)}, and {ANY!r} for all")
        with self._lock:
            self._reader = self._reader or self._open()
            self._listeners[kind].append(_Listener(callback, tuple(args or ()), dict(kwargs or {}), details_filter))
        self.start()  # does nothing where the thread runs

    def deregister(self, kind: str, callback: Callable[..., object]) -> None:
        """Undo one registration of ``callback`` for ``kind``, the oldest; without any, do nothing."""
        with self._lock:
            listeners = self._listeners[kind]
            if found := [listener for listener in listeners if listener.callback == callback]:
                listeners.remove(found[0])

    def _pass_on(self) -> float:
        """Wait for events and call back for them. Returns 0.0: the next round is made at once."""
        for event in self._reader.read(_ROUND_SECONDS) if self._reader else ():
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
