"""What a pass does beside the thread that carries it out, in a fixed order: for tests that take over between steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InTurn(Executor):
    """Runs what it is given at once, or when its result is asked for, instead of beside the thread that gives it."""

    def __init__(self, *, last: bool) -> None:
        self.last = last

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        given = _Given(lambda: work(*args, **named))
        if not self.last:
            given.result()
        return given


class _Given(Future[Any]):
    """Work that is done by whoever asks for its result first."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._work())
        return super().result(timeout)
