"""Rows that make no sense: each is logged once with its id, counted every time, and skipped."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from threading import Lock

import structlog

from opencue_sched.domain.farm import BadRow

log = structlog.get_logger(__name__)

_REMEMBERED = 10_000


class BadRowLog:
    """Logs each bad row once, however often it is met. Remembers the latest 10,000. Thread-safe."""

    def __init__(self) -> None:
        self._seen: OrderedDict[BadRow, None] = OrderedDict()
        self._met: Counter[str] = Counter()
        self._lock = Lock()

    def report(self, rows: Iterable[BadRow]) -> int:
        """Count these rows and log those that are new; how many were."""
        return sum(self._report(row) for row in rows)

    def taken_counts(self) -> Counter[str]:
        """How many bad rows were met since the last call, by table."""
        with self._lock:
            met, self._met = self._met, Counter()
            return met

    def _report(self, row: BadRow) -> bool:
        with self._lock:
            self._met[row.table] += 1
            if row in self._seen:
                self._seen.move_to_end(row)
                return False
            self._seen[row] = None
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        log.warning(f"{row.table}_skipped", id=row.id, name=row.name, reason=row.reason)
        return True
