"""Calls that wait for a commit: each is answered once, whatever becomes of the others."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import grpc

from opencue_sched.reports.waiting_calls import NOTHING, Refusal, WaitingCalls
from tests.kit.polling import eventually

TOO_LATE = (grpc.StatusCode.UNAVAILABLE, "too late")


def refusal(error: BaseException) -> Refusal:
    return grpc.StatusCode.INTERNAL, f"refused: {error}"


@contextmanager
def waiting(seconds: float = 60.0) -> Iterator[WaitingCalls]:
    calls = WaitingCalls(refusal, too_late=TOO_LATE, seconds=seconds)
    calls.start()
    try:
        yield calls
    finally:
        calls.stop()


class Sender:
    """A sender's side of a call: gRPC's context, and what was sent."""

    def __init__(self, hold: Callable[[], object] = lambda: None) -> None:
        self.sent: list[object] = []
        self._hold = hold

    def send(self, message: bytes | None) -> None:
        self._hold()
        self.sent.append(message)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.sent.append(code)

    def set_details(self, details: str) -> None:
        self.sent.append(details)

    def cancel(self) -> None:
        self.sent.append("cancelled")

    def wait_in(self, calls: WaitingCalls) -> Future[Any]:
        done: Future[Any] = Future()
        calls.put(done, cast(grpc.ServicerContext, self), self.send)
        return done


def test_a_call_is_answered_when_its_future_ends_and_not_before() -> None:
    with waiting() as calls:
        # given two calls that wait
        first, second = Sender(), Sender()
        done, failed = first.wait_in(calls), second.wait_in(calls)
        assert len(calls) == 2
        # when one of them is refused
        failed.set_exception(ValueError("no such frame"))
        eventually(lambda: second.sent == [grpc.StatusCode.INTERNAL, "refused: no such frame", None])
        # then the other one is not answered, until it is done
        assert (first.sent, len(calls)) == ([], 1)
        done.set_result("applied")
        eventually(lambda: first.sent == [NOTHING, None])
        assert len(calls) == 0


def test_a_future_that_has_ended_is_answered_at_once() -> None:
    done: Future[Any] = Future()
    done.set_result("applied")
    sender = Sender()
    with waiting() as calls:
        calls.put(done, cast(grpc.ServicerContext, sender), sender.send)
        eventually(lambda: sender.sent == [NOTHING, None])


def test_a_call_that_waits_for_too_long_is_answered_once() -> None:
    with waiting(seconds=0.0) as calls:
        late, after = Sender(), Sender()
        done = late.wait_in(calls)
        eventually(lambda: late.sent == [*TOO_LATE, None])
        # when its future ends after all, and another's
        done.set_result("applied")
        after.wait_in(calls).set_result("applied")
        # then nothing more is sent
        eventually(lambda: None in after.sent)
        assert late.sent == [*TOO_LATE, None]


def test_an_answered_call_is_not_kept_by_a_future_that_has_not_ended() -> None:
    """Of an RQD whose call is kept the connection is kept as well, and a service that stops waits for it."""
    with waiting(seconds=0.0) as calls:
        sender = Sender()
        sent, known = sender.sent, weakref.ref(sender)
        done = sender.wait_in(calls)
        eventually(lambda: sent == [*TOO_LATE, None])
        del sender
        # PostgreSQL is still away
        assert not done.done()

        def is_gone() -> bool:
            gc.collect()
            return known() is None

        eventually(is_gone)


def test_an_answer_that_cannot_be_sent_ends_its_call_and_no_other() -> None:
    def broken() -> None:
        raise ValueError("no such connection")

    with waiting() as calls:
        failing, after = Sender(hold=broken), Sender()
        failing.wait_in(calls).set_result("applied")
        after.wait_in(calls).set_result("applied")
        eventually(lambda: after.sent == [NOTHING, None])
        eventually(lambda: failing.sent == ["cancelled"])


def test_a_sender_that_reads_nothing_keeps_no_other_waiting() -> None:
    read = threading.Event()
    with waiting() as calls:
        # given a sender that takes no answer
        stuck, others = Sender(hold=lambda: read.wait(60)), [Sender() for _ in range(20)]
        stuck.wait_in(calls).set_result("applied")
        # when others are done
        for sender in others:
            sender.wait_in(calls).set_result("applied")
        # then each is answered
        try:
            eventually(lambda: all(sender.sent == [NOTHING, None] for sender in others))
        finally:
            read.set()
        eventually(lambda: stuck.sent == [NOTHING, None])
