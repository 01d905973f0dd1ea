"""Calls of RQDs that wait until what they report is committed, without a thread for each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import grpc
import structlog

from opencue_sched.background import PeriodicThread

_log = structlog.get_logger(__name__)

NOTHING = b""
"""A message without fields, or with zeros in all of them: the answer to each call that is served."""

_LOOK_SECONDS = 1.0
"""The time between two looks for calls that have waited for too long."""

_THREADS = 2
"""How many threads send answers. The first is woken for each; the others look each _LOOK_SECONDS, for where that one
waits for an RQD that reads nothing. Two that are woken would cost more than they send sooner."""

Send = Callable[[bytes | None], object]
"""gRPC's function that answers a call whose handler has returned: first with a message, if there is one, and at last
with None, which ends the call. It waits until the message is on its way."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that waits, of one RQD."""

    context: grpc.ServicerContext
    send: Send
    until: float
    """The moment at which it is answered at the latest, in monotonic time."""


Refusal = tuple[grpc.StatusCode, str]
"""A status, and the words that explain it."""


class WaitingCalls:
    """Calls whose handlers have returned, each answered once: when its future ends, or with ``too_late`` after
    ``seconds``. Thread-safe.

    Threads of its own send the answers, so that the thread which ends the futures waits for no RQD. ``refusal`` says
    what an error of a future is answered with.
    """

    def __init__(self, refusal: Callable[[BaseException], Refusal], *, too_late: Refusal, seconds: float) -> None:
        self._refusal = refusal
        self._too_late = too_late
        self._seconds = seconds
        self._numbers = count()
        """Numbers for calls, each given once."""
        self._calls: dict[int, _Call] = {}
        """The calls that are not answered yet, by number, in the order they came. Under ``_lock``. Futures know the
        numbers alone: what they keep until PostgreSQL is back must not keep an answered call, and its connection."""
        self._lock = threading.Lock()
        self._ended: deque[tuple[int, Refusal | None]] = deque()
        """Answers to send, of any thread, in the order in which the threads that send them take them."""
        self._threads = [
            PeriodicThread(f"answers-{number}", self._answer, failed="answers_not_sent", retry_seconds=_LOOK_SECONDS)
            for number in range(_THREADS)
        ]

    def __len__(self) -> int:
        with self._lock:
            return len(self._calls)

    def start(self) -> None:
        """Begin to answer."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, each after the answers that it has found."""
        for thread in self._threads:
            thread.stop()

    def put(self, done: Future[Any], context: grpc.ServicerContext, send: Send) -> None:
        """Keep a call until ``done`` has ended, and answer it then."""
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = _Call(context, send, time.monotonic() + self._seconds)

        def ended(of: Future[Any]) -> None:
            error = of.exception()
            self._ended.append((number, self._refusal(error) if error is not None else None))
            self._threads[0].wake()

        done.add_done_callback(ended)

    def _answer(self) -> float:
        """Answer what has ended and what has waited for too long."""
        now = time.monotonic()
        with self._lock:
            # They are in the order in which they are too late.
            late = [number for number, _ in takewhile(lambda numbered: numbered[1].until <= now, self._calls.items())]
        self._ended.extend((number, self._too_late) for number in late)
        while ended := self._next():
            number, refusal = ended
            with self._lock:
                call = self._calls.pop(number, None)
            if call is None:  # it was answered as too late, or ended just before that
                continue
            try:
                _send(call, refusal)
            except Exception:
                _log.exception("answer_not_sent")
                call.context.cancel()  # its RQD hears that nothing comes
        return _LOOK_SECONDS

    def _next(self) -> tuple[int, Refusal | None] | None:
        """The number of a call that ended, or was too late, with its refusal, if any; None where there is no more."""
        with suppress(IndexError):
            return self._ended.popleft()
        return None


def _send(call: _Call, refusal: Refusal | None) -> None:
    """Answer a call and end it; ``refusal``: the status to end it with, None for success."""
    if refusal is None:
        call.send(NOTHING)
    else:
        call.context.set_code(refusal[0])
        call.context.set_details(refusal[1])
    call.send(None)
