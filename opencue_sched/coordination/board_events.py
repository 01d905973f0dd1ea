"""What happens on a board, from its Stream: POSTED, CLAIMED, READY, EXPIRED, REMOVED and TRASHED, each written in the
same call that made it true. Who listens hears of the first four and of REMOVAL, as TaskFlow's boards say it, and of
TRASHED.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import redis
import structlog

from opencue_sched.background import PeriodicThread

log = structlog.get_logger(__name__)

ANY = "*"
POSTED = "POSTED"
REMOVAL = "REMOVAL"
"""A job left the board: it was consumed or withdrawn, or put into the trash, of which TRASHED tells as well."""
KINDS = (POSTED, "CLAIMED", "READY", "EXPIRED", REMOVAL, "TRASHED")
_HEARD_AS = {"REMOVED": (REMOVAL,), "TRASHED": ("TRASHED", REMOVAL)}
"""Which kinds callbacks hear of an event of the Stream; of any other kind they hear as it is."""
_BLOCK_SECONDS = 1.0
_RETRY_SECONDS = 1.0


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
        block = max(1, round(1000 * min(seconds, _BLOCK_SECONDS, time_out / 2)))
        answer = cast("list[Any]", self._client.xread({self._stream: self._position}, block=block, count=1000))
        entries = answer[0][1] if answer else []
        if entries:
            self._position = entries[-1][0]
        return [fields for _, fields in entries]


def stream_end(client: redis.Redis, stream: str) -> str:
    """The id of a stream's newest entry; that before any of one that has none."""
    newest = cast("list[tuple[str, object]]", client.xrevrange(stream, count=1))
    return newest[0][0] if newest else "0-0"


Callback = Callable[[str, dict[str, Any]], None]


class Notifier(PeriodicThread):
    """Calls back, from a thread of its own, for events of the kinds registered. Callbacks must be quick.

    The thread runs from the first registration on. ``find_job`` gives the job of an event by its id and name.
    """

    def __init__(self, open_reader: Callable[[], EventReader], find_job: Callable[[str, str], object]) -> None:
        super().__init__("board-events", self._pass_on, failed="board_events_unreadable", retry_seconds=_RETRY_SECONDS)
        self._open = open_reader
        self._find_job = find_job
        self._reader: EventReader | None = None
        self._lock = threading.Lock()
        self._callbacks: dict[str, list[Callback]] = defaultdict(list)

    def register(self, kind: str, callback: Callback) -> None:
        """Call ``callback(kind, {"job": job, "name": name})`` for each event of ``kind`` from now on; with ANY once for
        each event. Raises ValueError for a kind that there is not (KINDS)."""
        if kind not in (*KINDS, ANY):
            raise ValueError(f"{kind!r} is no kind of event; there are {', '.join(KINDS)}, and {ANY!r} for all")
        with self._lock:
            self._reader = self._reader or self._open()
            self._callbacks[kind].append(callback)
        self.start()

    def deregister(self, kind: str, callback: Callback) -> None:
        """Stop calling ``callback`` for ``kind``."""
        with self._lock:
            if callback in self._callbacks[kind]:
                self._callbacks[kind].remove(callback)

    def _pass_on(self) -> float:
        for event in self._reader.read(_BLOCK_SECONDS / 2) if self._reader else ():
            kinds = _HEARD_AS.get(event["kind"], (event["kind"],))
            with self._lock:
                called = [(kind, callback) for kind in kinds for callback in self._callbacks[kind]]
                called += [(kinds[0], callback) for callback in self._callbacks[ANY]]
            if not called:
                continue
            job = self._find_job(event["job"], event["name"])
            for kind, callback in called:
                try:
                    callback(kind, {"job": job, "name": event["name"]})
                except Exception:
                    log.exception("board_callback_failed", kind=kind, job=event["job"])
        return 0.0
