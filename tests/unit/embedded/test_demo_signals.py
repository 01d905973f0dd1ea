"""The demo gives everything back however it is told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from opencue_sched.embedded.demo.run import clean_up_on_signals

ENDS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_kept() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in ENDS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDS)
def test_it_ends_as_on_ctrl_c_when_told_to_and_when_its_terminal_is_closed(number: signal.Signals) -> None:
    clean_up_on_signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    # the shell says so as well, while it cleans up
    signal.raise_signal(signal.SIGHUP)


def test_it_goes_on_without_a_terminal_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    clean_up_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
