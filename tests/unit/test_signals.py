"""The order to stop, by a signal that may come at any moment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from opencue_sched.signals import StopOrder

ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEADLINE_SECONDS = 10


@pytest.fixture(autouse=True)
def handlers_kept() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (*ORDERS, signal.SIGALRM)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.alarm(0)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def deadline() -> None:
    """Ends a wait for a lock that nobody gives back."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no answer within {DEADLINE_SECONDS} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(DEADLINE_SECONDS)


def waited(order: StopOrder, seconds: float, *, struck_at: int) -> tuple[bool, bool]:
    """What wait() answers where a signal comes at the n-th step within it: the beginning or the end of a function that
    it calls. And whether it has so many steps."""
    steps = 0

    def step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == struck_at:
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(step)
    try:
        answer = order.wait(seconds)
    finally:
        sys.setprofile(None)
    return answer, steps >= struck_at


@pytest.mark.parametrize("given_before", [False, True], ids=["first signal", "second signal"])
def test_an_order_that_comes_at_any_step_of_the_wait_is_heard(deadline: None, given_before: bool) -> None:
    steps, struck = 0, True
    while struck:
        # given an order to stop, that perhaps was given before
        steps += 1
        order = StopOrder()
        if given_before:
            signal.raise_signal(signal.SIGTERM)
        # when a signal comes within the wait for it, then this wait or the next one says so
        answer, struck = waited(order, 0.001, struck_at=steps)
        assert answer or order.wait(0) or not struck, f"step {steps}"
    assert steps > 3


@pytest.mark.parametrize("number", ORDERS)
def test_an_order_stands_once_it_was_given(deadline: None, number: signal.Signals) -> None:
    order = StopOrder()
    assert not order.wait(0)
    signal.raise_signal(number)
    assert [order.wait(2 * DEADLINE_SECONDS), order.wait(0)] == [True, True]


def test_a_hangup_is_no_order_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = StopOrder()
    signal.raise_signal(signal.SIGHUP)
    assert not order.wait(0)
