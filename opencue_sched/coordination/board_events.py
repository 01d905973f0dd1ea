"""What happens on a board, from its Stream: POSTED, CLAIMED, READY, EXPIRED, REMOVED and TRASHED, each written in the
same call that made it true.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import redis
import structlog

from opencue_sched.coordination.rounds import Rounds

log = structlog.get_logger(__name__)

POSTED = "POSTED"
CLAIMED = "CLAIMED"
READY = "READY"
EXPIRED = "EXPIRED"
REMOVED = "REMOVED"
TRASHED = "TRASHED"
RESYNC = "RESYNC"
ANY = "*"
_BLOCK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_START = "0-0"


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` RESYNC: events were lost (trimmed, or Redis was emptied); look at the board again."""

    kind: str
    job: str = ""
    name: str = ""


class EventReader:
    """Reads a board's events from now on."""

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._position = self._newest()

    def read(self, seconds: float) -> list[Event]:
        """The events since the last call, waiting up to ``seconds`` for one. Raises RedisError."""
        block = max(1, round(min(seconds, self._longest_block()) * 1000))
        newest = self._newest()
        emptied = _before(newest, self._position)
        trimmed = self._position != _START and _before(self._position, self._oldest())
        if emptied or trimmed:
            self._position = newest
            return [Event(RESYNC)]
        answer = cast("list[Any]", self._client.xread({self._stream: self._position}, block=block, count=1000))
        if not answer:
            return []
        entries = answer[0][1]
        self._position = entries[-1][0]
        return [Event(fields["kind"], fields["job"], fields["name"]) for _, fields in entries]

    def _longest_block(self) -> float:
        time_out = self._client.get_connection_kwargs().get("socket_timeout")
        return _BLOCK_SECONDS if time_out is None else min(_BLOCK_SECONDS, time_out / 2)

    def _newest(self) -> str:
        entries = cast("list[Any]", self._client.xrevrange(self._stream, count=1))
        return str(entries[0][0]) if entries else _START

    def _oldest(self) -> str:
        entries = cast("list[Any]", self._client.xrange(self._stream, count=1))
        return str(entries[0][0]) if entries else _START


def _before(first: str, second: str) -> bool:
    def parts(text: str) -> tuple[int, int]:
        milliseconds, _, number = text.partition("-")
        return int(milliseconds), int(number or 0)

    return parts(first) < parts(second)


Callback = Callable[[str, dict[str, Any]], None]


class Notifier:
    """Calls back, from a thread of its own, for events of the kinds registered. Callbacks must be quick.

    After a loss callbacks of every kind get RESYNC once. The thread runs from the first registration on.
    """

    def __init__(self, open_reader: Callable[[], EventReader]) -> None:
        self._open = open_reader
        self._lock = threading.Lock()
        self._callbacks: dict[str, list[Callback]] = defaultdict(list)
        self._rounds: Rounds | None = None

    def register(self, kind: str, callback: Callback) -> None:
        """Call ``callback(kind, {"job": uuid, "name": name})`` for each event of ``kind`` from now on (ANY: each)."""
        with self._lock:
            self._callbacks[kind].append(callback)
            if self._rounds is None:
                self._rounds = Rounds(
                    "board-events",
                    partial(self._pass_on, self._open()),
                    failed="board_events_unreadable",
                    retry_seconds=_RETRY_SECONDS,
                )
                self._rounds.start()

    def deregister(self, kind: str, callback: Callback) -> None:
        """Stop calling ``callback`` for ``kind``."""
        with self._lock:
            if callback in self._callbacks[kind]:
                self._callbacks[kind].remove(callback)

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.stop()

    def _pass_on(self, reader: EventReader) -> float:
        for event in reader.read(_BLOCK_SECONDS / 2):
            self._call(event)
        return 0.0

    def _call(self, event: Event) -> None:
        with self._lock:
            if event.kind == RESYNC:
                called = [callback for callbacks in self._callbacks.values() for callback in callbacks]
            else:
                called = [*self._callbacks[event.kind], *self._callbacks[ANY]]
        for callback in called:
            try:
                callback(event.kind, {"job": event.job, "name": event.name})
            except Exception:
                log.exception("board_callback_failed", kind=event.kind, job=event.job)
