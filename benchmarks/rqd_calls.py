"""Calls of many RQDs, each with a connection of its own, by one thread that writes and reads HTTP/2 itself.

A gRPC client of this process takes as long for a call as the service that answers it, and both share the machine: the
service was measured while it waited for its callers. What is sent are the bytes of gRPC, and what comes back is read as
far as the end of a call needs.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_FRAME_HEAD = struct.Struct(">HBBBI")
_MESSAGE_HEAD = struct.Struct(">BI")
_FIRST_WINDOW = 65_535
_LONGEST_FRAME = 16_384
_RECEIVED_AT_ONCE = 65_536
_CONNECT_SECONDS, _CONNECT_AGAIN_SECONDS = 60.0, 0.05
_ANSWER_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RqdCall:
    """A call of an RQD: the number of its connection, the path of the call, and the message as it is sent."""

    connection: int
    path: str
    message: bytes


@dataclass
class Calls:
    """Calls that are sent one after the other: so many a second, and so many at once; the rest waits for answers.

    One thread uses it, as RqdConnections.
    """

    calls: Iterator[RqdCall]
    at_once: int
    rate: float = float("inf")
    """Calls a second."""
    answers: list[float] = field(default_factory=list)
    """How long each answer took (seconds), in the order of the answers."""
    sent: int = 0
    over: bool = False
    """Whether every call is answered."""
    _last_is_sent: bool = False

    @property
    def may_send(self) -> bool:
        """Whether fewer than `at_once` wait for answers, of those that are left."""
        return not self._last_is_sent and self.sent - len(self.answers) < self.at_once

    def due(self, seconds: float) -> RqdCall | None:
        """The next call to send, so long after the first one; None: not now, or there is no more."""
        if not self.may_send or self.sent / self.rate > seconds:
            return None
        call = next(self.calls, None)
        self.sent += call is not None
        self._last_is_sent = call is None
        self._note_end()
        return call

    def note_answer(self, seconds: float) -> None:
        self.answers.append(seconds)
        self._note_end()

    def _note_end(self) -> None:
        self.over = self._last_is_sent and len(self.answers) == self.sent


class _Connection:
    """A connection to the service; one thread uses it."""

    def __init__(self, port: int) -> None:
        self._headers: dict[str, bytes] = {}
        self._authority = f"127.0.0.1:{port}".encode()
        self._next_stream = 1
        self._window = _FIRST_WINDOW
        self._unread = b""
        self._under_way: dict[int, tuple[Calls, float]] = {}
        self._answered: set[int] = set()
        self.socket = _connect(port)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        self.receive()

    def send(self, call: RqdCall, calls: Calls) -> None:
        """Begin a call, one of ``calls``."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        message = _MESSAGE_HEAD.pack(0, len(call.message)) + call.message
        assert len(message) <= _LONGEST_FRAME, "a message of more than one frame is not written here"
        while self._window < len(message):  # the service has not read enough of what was sent
            self.receive()
        self._window -= len(message)
        headers = self._headers.get(call.path) or self._headers.setdefault(call.path, self._encoded(call.path))
        frames = _frame(_HEADERS, _END_HEADERS, stream, headers) + _frame(_DATA, _END_STREAM, stream, message)
        self._under_way[stream] = calls, time.monotonic()
        self.socket.sendall(frames)

    def receive(self) -> None:
        """Read what has come, note the answers, and say what the service asks to be told."""
        received = self.socket.recv(_RECEIVED_AT_ONCE)
        assert received, "the service has closed a connection"
        unread, begin = self._unread + received, 0
        while len(unread) - begin >= _FRAME_HEAD.size:
            high, low, kind, flags, stream = _FRAME_HEAD.unpack_from(unread, begin)
            end = begin + _FRAME_HEAD.size + (high << 8 | low)
            if len(unread) < end:
                break
            self._handle(kind, flags, stream, unread[begin + _FRAME_HEAD.size : end])
            begin = end
        self._unread = unread[begin:]

    def _handle(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == _DATA:
            self._answered.add(stream)
        elif kind == _HEADERS and flags & _END_STREAM:
            # An answer is a message and the headers behind it; a refusal is headers alone.
            assert stream in self._answered, "the service has refused a call"
            self._answered.remove(stream)
            calls, began = self._under_way.pop(stream)
            calls.note_answer(time.monotonic() - began)
        elif kind == _SETTINGS and not flags & _ACK:
            self.socket.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(_frame(_PING, _ACK, 0, content))
        elif kind == _WINDOW and stream == 0:
            self._window += int.from_bytes(content)
        assert kind not in (_RESET, _GO_AWAY), "the service has ended a call or a connection"

    def _encoded(self, path: str) -> bytes:
        """The headers of a call: by their number in HTTP/2's table, or with a text of their own, which is not kept."""
        texts = [(b"\x04", path.encode()), (b"\x01", self._authority), (b"\x0f\x10", b"application/grpc")]
        named = [(b"te", b"trailers"), (b"grpc-timeout", b"60S"), (b"user-agent", b"benchmark")]
        texts += [(b"\x00" + _text(name), value) for name, value in named]
        return b"\x83\x86" + b"".join(name + _text(value) for name, value in texts)


def _text(content: bytes) -> bytes:
    return bytes((len(content),)) + content


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    length = len(content)
    return _FRAME_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + content


def _connect(port: int) -> socket.socket:
    """Connect to the service, which may not have begun to listen yet."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_CONNECT_AGAIN_SECONDS)


class RqdConnections:
    """So many connections to the report service on a port. One thread uses them; pings of the service are answered
    while calls are sent."""

    def __init__(self, port: int, connections: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = [_Connection(port) for _ in range(connections)]
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def close(self) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.socket.close()

    def send(self, *flows: Calls) -> None:
        """Send the calls of all flows side by side, and wait for the answers. Raises AssertionError when the service
        refuses a call or does not answer."""
        began = answered = time.monotonic()
        while not all(calls.over for calls in flows):
            for calls in flows:
                while call := calls.due(time.monotonic() - began):
                    self._connections[call.connection].send(call, calls)
            ready = self._selector.select(self._wait_seconds(flows, time.monotonic() - began))
            for key, _ in ready:
                key.data.receive()
            answered = time.monotonic() if ready else answered
            assert time.monotonic() - answered < _ANSWER_SECONDS, "the service does not answer"

    def _wait_seconds(self, flows: Sequence[Calls], seconds: float) -> float:
        """How long nothing is due."""
        until_due = [calls.sent / calls.rate - seconds for calls in flows if calls.may_send]
        return max(0.0, min([_LONGEST_WAIT_SECONDS, *until_due]))
