"""What a pass does beside the thread that carries it out, in a fixed order: for tests that take over between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


class InTurn:
    """Runs what it is given at once, or at its end, instead of beside the thread that gives it."""

    def __init__(self, *, last: bool) -> None:
        self.last = last
        self.given: list[Callable[[], Any]] = []

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> InTurn:
        self.given.append(partial(work, *args))
        if not self.last:
            self.result()
        return self

    def map(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
        return [work(*given) for given in zip(*arguments, strict=False)]

    def result(self) -> None:
        while self.given:
            self.given.pop(0)()
