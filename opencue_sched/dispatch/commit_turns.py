"""Commits of one process that lock the same rows follow each other.

Passes of a process plan on what the others leave of a host, so two plans may book on one host at the same time without
taking anything from each other. Their transactions cannot: who finds a host locked loses what it planned there. And
plans of different clusters meet in the counters of a job with layers in both, where the triggers on frames make each
wait for the other's COMMIT while it holds rows that a third waits for, until somebody's time is over. Here the second
waits for the first, which it knows of, before it holds anything. Other processes, and whoever ends runs, are met at the
row as before.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class CommitTurns:
    """Of one process. Thread-safe; who holds a turn asks for no second one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[object, frozenset[str]] = {}

    def asked(self) -> int:
        """How many are at work or wait for their turn."""
        with self._changed:
            return len(self._asked)

    @contextmanager
    def on(self, ids: Collection[str], *, wait_seconds: float) -> Iterator[bool]:
        """Wait until all who asked before for one of these ids of hosts and jobs are done, but not for longer than
        ``wait_seconds``; whether they were in time.

        In the order in which they asked: nobody waits in a circle, and a plan of many hosts is not overtaken for ever.
        """
        ticket, rows = object(), frozenset(ids)
        with self._changed:
            self._asked[ticket] = rows
        try:
            with self._changed:
                mine = self._changed.wait_for(lambda: self._is_next(ticket, rows), timeout=wait_seconds)
            yield mine
        finally:
            with self._changed:
                del self._asked[ticket]
                self._changed.notify_all()

    def _is_next(self, ticket: object, rows: frozenset[str]) -> bool:
        for asked, wanted in self._asked.items():
            if asked is ticket:
                break
            if not rows.isdisjoint(wanted):
                return False
        return True
