"""Waiting in tests: a condition with a deadline, never a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4
"""Machines are shared and noisy: a deadline only ends a test that hangs, it is not what the test is about."""

MOST_SECONDS = 200.0
"""Below the time-out of a test, so that what was waited for is named."""

LEAST_PAUSE, MOST_PAUSE = 0.005, 0.05


def eventually(
    check: Callable[[], T], seconds: float = 10.0, what: str = "condition", *, told: Callable[[], str] = str
) -> T:
    """The first true answer of ``check``; fails after ``seconds`` of a quiet machine, with what ``told`` returns.

    A check that takes long is made less often: it may not take from what it waits for the machine that does it.
    """
    began = time.monotonic()
    patience = min(seconds * PATIENCE, MOST_SECONDS)
    while True:
        asked = time.monotonic()
        if result := check():
            return result
        now = time.monotonic()
        if now - began > patience:
            raise AssertionError(f"{what} not met in {patience:g} s\n{told()}".rstrip())
        time.sleep(min(max(LEAST_PAUSE, now - asked, (now - began) / 50), MOST_PAUSE))


def tail_of(*logs: Path, lines: int = 25) -> Callable[[], str]:
    """For ``told``: the end of each log as it is when the wait failed."""

    def tell() -> str:
        return "\n".join(f"--- {log.name}\n{_tail(log, lines)}" for log in logs)

    return tell


def _tail(log: Path, lines: int) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
