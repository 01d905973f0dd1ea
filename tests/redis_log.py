"""What a Redis was asked, and when, by its own clock: MONITOR, read by a thread.

Tests that judge a schedule by it say which call should have done a thing, and whether that call did. A slow machine
makes calls late; it does not let one pass by what it should have found.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched.lua_scripts import load_script
from tests.polling import eventually

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Call:
    """A call of one script. ``at`` in seconds since the epoch, ``text`` its keys and arguments with blanks between."""

    at: float
    text: str


class RedisLog:
    """The calls of scripts for the length of a ``with``, or until Redis goes away."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True)
        self._monitor = self._client.monitor()
        self._lines: list[tuple[float, str]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="redis-log")

    def __enter__(self) -> Self:
        self._monitor.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._monitor.__exit__()
        self._client.close()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                if self._monitor.connection.can_read(timeout=_POLL_SECONDS):
                    said = self._monitor.next_command()
                    self._lines.append((float(said["time"]), str(said["command"])))
            except RedisConnectionError:
                return

    def calls(self, script: str, *, since: float = 0.0, naming: str = "") -> list[Call]:
        """All calls of a script so far, from a moment on (seconds since the epoch), that have ``naming`` in them."""
        self._read_up_to_now()
        command = f"EVALSHA {load_script(script).sha} "
        return [
            Call(at, text.removeprefix(command))
            for at, text in list(self._lines)
            if at >= since and text.startswith(command) and naming in text
        ]

    def _read_up_to_now(self) -> None:
        said = f"ECHO {uuid.uuid4().hex}"
        self._client.execute_command(*said.split())
        eventually(lambda: any(text == said for _, text in self._lines[::-1]), 10, "the end of the log of Redis")
