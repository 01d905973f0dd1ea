"""Boot and status reports that wait to be handled: one slot each per host, the latest status wins."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from opencue_proto import report_pb2

MOST_HOSTS = 20_000


@dataclass(slots=True)
class HostMail:
    """What one host has sent since it was last served. ``received_at`` is of the status report, by the inbox clock."""

    host_name: str
    boot: report_pb2.BootReport | None = None
    status: report_pb2.HostReport | None = None
    received_at: float = 0.0


class HostInbox:
    """Thread-safe. A host is served by one thread at a time, and hosts in the order they began to wait."""

    def __init__(self, *, most_hosts: int = MOST_HOSTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_hosts = most_hosts
        self._clock = clock
        self._ready: OrderedDict[str, HostMail] = OrderedDict()
        self._held: dict[str, HostMail] = {}
        self._busy: set[str] = set()
        self._wake = threading.Condition()
        self._closed = False

    def put_boot(self, host_name: str, report: report_pb2.BootReport) -> bool:
        """Keep a boot report until it is served; False when too many hosts wait."""
        with self._wake:
            mail = self._mail(host_name)
            if mail is None:
                return False
            mail.boot = report
            return True

    def put_status(self, host_name: str, report: report_pb2.HostReport) -> bool:
        """Keep a status report in place of an older one; False when too many hosts wait."""
        with self._wake:
            mail = self._mail(host_name)
            if mail is None:
                return False
            mail.status = report
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

    def _mail(self, host_name: str) -> HostMail | None:
        place = self._held if host_name in self._busy else self._ready
        mail = place.get(host_name)
        if mail is None:
            if self._closed or len(self._ready) + len(self._held) >= self._most_hosts:
                return None
            mail = place[host_name] = HostMail(host_name)
            self._wake.notify()
        return mail
