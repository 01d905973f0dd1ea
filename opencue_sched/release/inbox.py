"""Boot and status reports that wait to be handled: one slot each per host, the latest status wins."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from opencue_proto import report_pb2

MOST_HOSTS = 20_000
MOST_BYTES = 32 * 1024 * 1024
"""As they were sent. In memory a report can take forty times as much."""


@dataclass(slots=True)
class HostMail:
    """What one host has sent since it was last served. ``received_at`` is of the status report, by the inbox clock."""

    host_name: str
    boot: report_pb2.BootReport | None = None
    status: report_pb2.HostReport | None = None
    received_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of both reports as they were sent."""
        return sum(report.ByteSize() for report in (self.boot, self.status) if report is not None)


class HostInbox:
    """Thread-safe. A host is served by one thread at a time, and hosts in the order they began to wait."""

    def __init__(
        self,
        *,
        most_hosts: int = MOST_HOSTS,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_hosts = most_hosts
        self._most_bytes = most_bytes
        self._bytes = 0
        self._clock = clock
        self._ready: OrderedDict[str, HostMail] = OrderedDict()
        self._held: dict[str, HostMail] = {}
        self._busy: set[str] = set()
        self._wake = threading.Condition()
        self._closed = False

    def put_boot(self, host_name: str, report: report_pb2.BootReport) -> bool:
        """Keep a boot report until it is served; False when too many hosts or bytes wait."""
        with self._wake:
            return self._put(host_name, boot=report) is not None

    def put_status(self, host_name: str, report: report_pb2.HostReport) -> bool:
        """Keep a status report in place of an older one; False when too many hosts or bytes wait."""
        with self._wake:
            mail = self._put(host_name, status=report)
            if mail is None:
                return False
            mail.received_at = self._clock()
            return True

    def take(self) -> HostMail | None:
        """Wait for a host's mail; None once closed. Call `done` afterwards."""
        with self._wake:
            while not self._ready:
                if self._closed:
                    return None
                self._wake.wait()
            if self._closed:
                return None
            host_name, mail = self._ready.popitem(last=False)
            self._busy.add(host_name)
            self._bytes -= mail.size
            return mail

    def done(self, host_name: str) -> None:
        """The host was served; what it sent meanwhile is next."""
        with self._wake:
            self._busy.discard(host_name)
            mail = self._held.pop(host_name, None)
            if mail is not None:
                self._ready[host_name] = mail
                self._wake.notify()

    def age(self, mail: HostMail) -> float:
        """Seconds since its status report came."""
        return self._clock() - mail.received_at

    def close(self) -> None:
        """Drop what waits and let every `take` return None."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    @property
    def waiting(self) -> int:
        """Hosts with unserved mail."""
        with self._wake:
            return len(self._ready) + len(self._held)

    def _put(self, host_name: str, **reports: report_pb2.BootReport | report_pb2.HostReport) -> HostMail | None:
        """The host's mail with this report in it; None, and nothing changed, when there is no room for it."""
        place = self._held if host_name in self._busy else self._ready
        old = place.get(host_name)
        mail = replace(old or HostMail(host_name), **reports)
        more = mail.size - (old.size if old is not None else 0)
        full = old is None and (self._closed or len(self._ready) + len(self._held) >= self._most_hosts)
        if full or (more > 0 and self._bytes + more > self._most_bytes):
            return None
        self._bytes += more
        place[host_name] = mail
        if old is None:
            self._wake.notify()
        return mail
