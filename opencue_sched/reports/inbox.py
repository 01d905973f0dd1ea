"""What hosts sent and nobody has handled yet: of each host and each kind the latest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import structlog

_log = structlog.get_logger(__name__)

MOST_HOSTS = 5_000
"""Reports of this many hosts may wait: some 10 KB each as they were sent, and in memory up to forty times as much."""

Mail = Mapping[str, Any]


class HostInbox:
    """Mail that waits to be handled by ``serve``, which gets hosts, each with what `put` was given: of each kind the
    latest. Thread-safe.

    Up to ``together`` hosts are served at once, in the order they began to wait. Where fewer wait, one of the
    ``threads`` gives them ``gather_seconds`` to become more; another takes them as soon as they are enough. A host is
    served by one thread at a time. What ``serve`` raises is logged.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[tuple[str, Mail]]], None],
        *,
        name: str,
        threads: int,
        together: int = 1,
        gather_seconds: float = 0.0,
    ) -> None:
        self._serve = serve
        self._together = together
        self._gather_seconds = gather_seconds
        # What waits, whether a thread waits for more, which hosts are being served, and the threads: under the
        # condition's lock.
        self._wake = threading.Condition()
        self._mail: dict[str, dict[str, Any]] = {}
        self._gathering = False
        self._served: set[str] = set()
        self._names = [f"{name}-{number}" for number in range(threads)]
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def put(self, host_name: str, **mail: Any) -> bool:
        """Keep a host's ``boot`` report, its ``status`` report, ``received_at`` in monotonic time, or ``kill``, which
        ends processes of it, until it is served, in place of an older one.

        False: too many hosts wait, or the inbox is closed.
        """
        with self._wake:
            if self._closed.is_set() or (host_name not in self._mail and len(self._mail) >= MOST_HOSTS):
                return False
            self._mail.setdefault(host_name, {}).update(mail)
            if not self._threads:
                self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in self._names]
                for thread in self._threads:
                    thread.start()
            if self._is_to_take():
                self._wake.notify()
            return True

    def close(self) -> None:
        """Drop what waits, and wait for what is being served."""
        with self._wake:
            self._closed.set()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        """Serve hosts, one batch after the other, until the inbox is closed. An error of a batch is logged."""
        while hosts := self._next():
            try:
                self._serve(hosts)
            except Exception:
                _log.exception("host_mail_failed", hosts=[name for name, _ in hosts][:20])
            with self._wake:
                self._served -= {name for name, _ in hosts}
                self._wake.notify_all()

    def _next(self) -> list[tuple[str, Mail]]:
        """The hosts that have waited longest and are not being served. Empty: closed."""
        while not self._closed.is_set():
            with self._wake:
                self._wake.wait_for(lambda: self._closed.is_set() or (self._is_to_take() and self._free(1)))
                gathers = self._gather_seconds > 0 and len(self._mail) < self._together
                self._gathering |= gathers
            if gathers:
                self._closed.wait(self._gather_seconds)
            with self._wake:
                if gathers:
                    self._gathering = False
                names = self._free(self._together)
                if self._mail.keys() - names:
                    self._wake.notify()
                # Another thread may have taken them meanwhile.
                if not self._closed.is_set() and names:
                    self._served.update(names)
                    return [(name, self._mail.pop(name)) for name in names]
        return []

    def _is_to_take(self) -> bool:
        """Whether a thread that has nothing to do is to take what waits, or to wait for more of it."""
        return not self._gathering or len(self._mail) >= self._together

    def _free(self, most: int) -> list[str]:
        """The hosts that have waited longest and are not being served, at most so many. Under the lock of ``_wake``."""
        return list(islice((name for name in self._mail if name not in self._served), most))
