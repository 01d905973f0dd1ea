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

from opencue_sched.clients.lua_scripts import load_script
from tests.kit.polling import eventually

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Call:
    """``at`` in seconds since the epoch; ``text`` the command, its keys and arguments, with blanks between."""

    at: float
    text: str

    def runs(self, script: str) -> bool:
        """Whether this is a call of that script."""
        return self.text.startswith(f"EVALSHA {load_script(script).sha} ")


class RedisLog:
    """What Redis was asked for the length of a ``with``, or until it goes away; what its scripts did as well."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True)
        self._monitor = self._client.monitor()
        self._calls: list[Call] = []
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
                    self._calls.append(Call(float(said["time"]), str(said["command"])))
            except RedisConnectionError:
                return

    def since(self, moment: float) -> list[Call]:
        """Everything from a moment on (seconds since the epoch) up to now, in its order."""
        self._read_up_to_now()
        return [call for call in list(self._calls) if call.at >= moment]

    def calls(self, script: str, *, since: float = 0.0, naming: str = "") -> list[Call]:
        """All calls of a script so far, from a moment on, that have ``naming`` in them."""
        return [call for call in self.since(since) if call.runs(script) and naming in call.text]

    def _read_up_to_now(self) -> None:
        said = f"ECHO {uuid.uuid4().hex}"
        self._client.execute_command(*said.split())
        eventually(lambda: any(call.text == said for call in self._calls[::-1]), 10, "the end of the log of Redis")
