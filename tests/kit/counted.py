"""Events counted, for tests that look at the counts."""

from __future__ import annotations

import threading
from collections import Counter


class Counted(Counter[str]):
    """Counts the events it is called with. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __call__(self, event: str, amount: int = 1) -> None:
        with self._lock:
            self[event] += amount
