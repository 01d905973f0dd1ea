"""Waiting in tests: a condition with a deadline, never a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


PATIENCE = 4
"""Machines are shared and noisy: a deadline only ends a test that hangs, it is not what the test is about."""


def eventually(check: Callable[[], T], seconds: float = 10.0, what: str = "condition") -> T:
    """The first true answer of ``check``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not (result := check()):
        assert time.monotonic() < deadline, f"{what} not met in {seconds:g} s"
        time.sleep(0.01)
    return result
