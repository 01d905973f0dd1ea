"""Messages to the report service that cannot be read: of another program, or damaged on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

_Answer = TypeVar("_Answer")

_log = structlog.get_logger(__name__)

TOLD_EVERY_SECONDS = 60.0
"""The time from one warning about a peer to the next."""
_MOST_PEERS = 10_000
"""How many peers are remembered; with more, all are forgotten."""


class UnreadableMessages:
    """Refuses and counts messages that cannot be read, and warns of them once a minute and peer. Left to gRPC, each
    would be a traceback. Thread-safe.
    """

    def __init__(self, count: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._count = count
        self._clock = clock
        # When the last warning about each peer was logged. Under the lock: any thread of the server asks.
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()

    def read_for(self, call: str, message: type[Message], answer: Callable[..., _Answer]) -> Callable[..., _Answer]:
        """A function for gRPC that reads the ``message`` of a call, by its path, and has ``answer`` answer it, which is
        called with the message and what else gRPC gives: the context, and to some a function that sends answers."""

        def read_and_answer(content: bytes, context: Any, *send: Any) -> _Answer:
            try:
                request = message.FromString(content)
            except DecodeError as error:
                self._tell(context.peer(), call)
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {error}")
            return answer(request, context, *send)

        return read_and_answer

    def _tell(self, address: str, call: str) -> None:
        """Count a message that cannot be read, and log it unless its peer had one less than TOLD_EVERY_SECONDS ago. Any
        thread."""
        self._count("report_unreadable")
        # ipv4:10.0.0.7:51234: a port of its own for each connection.
        peer = address.partition(":")[2].rpartition(":")[0] or address
        with self._lock:
            now = self._clock()
            if now - self._told.get(peer, now - TOLD_EVERY_SECONDS) < TOLD_EVERY_SECONDS:
                return
            if len(self._told) >= _MOST_PEERS:
                self._told.clear()
            self._told[peer] = now
        _log.warning("report_unreadable", peer=peer, call=call)
