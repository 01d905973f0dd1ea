"""Where each RQD is, and the open connections to them.

One owner of the mapping host name -> address, used by launch, kill and reaper alike: ``rqd.addresses`` when it names
the host, otherwise OpenCue's own rule, ``name:8444`` in plain text.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from opencue_proto import rqd_pb2_grpc

from opencue_sched.settings import Rqd

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_LONGEST_CONNECT_SECONDS = 2.0


@dataclass(slots=True)
class _Pooled:
    channel: Any
    stub: Any
    last_used: float
    borrowers: int = field(default=1)


class RqdChannels:
    """One connection per RQD, opened at first use, closed when idle for ``rqd.channel_idle_timeout`` seconds.

    Thread-safe. gRPC does not survive a fork: make one per process, after the fork; use in another process raises
    RuntimeError.
    """

    def __init__(self, settings: Rqd, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: dict[str, _Pooled] = {}
        self._next_eviction = clock() + settings.channel_idle_timeout
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def address(self, host_name: str) -> str:
        """``address:port`` of the RQD on a host."""
        known = self.settings.addresses.get(host_name)
        if known is not None:
            return known
        name = f"[{host_name}]" if ":" in host_name and not host_name.startswith("[") else host_name
        return f"{name}:{self.settings.grpc_port}"

    @contextlib.contextmanager
    def stub(self, host_name: str) -> Iterator[Any]:
        """A RqdInterfaceStub for a host; its connection is not evicted inside the ``with`` block."""
        address = self.address(host_name)
        pooled = self._borrow(address)
        try:
            yield pooled.stub
        finally:
            with self._lock:
                pooled.borrowers -= 1
                pooled.last_used = self._clock()

    def each(
        self,
        function: Callable[[_Item], _Result],
        items: Iterable[_Item],
        *,
        progress: Callable[[], None] = lambda: None,
    ) -> list[_Result]:
        """``function`` of every item, up to ``rqd.launch_concurrency`` at once, in the order of the items.

        ``progress`` is called as they end. The first exception is raised once all have ended.
        """
        with self._lock:
            self._check_usable()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.settings.launch_concurrency, thread_name_prefix="rqd")
            futures = [self._threads.submit(function, item) for item in items]
        errors = []
        for future in futures:
            if (error := future.exception()) is not None:
                errors.append(error)
            progress()
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    @property
    def open_addresses(self) -> frozenset[str]:
        """Addresses with an open connection."""
        with self._lock:
            return frozenset(self._pool)

    def evict_idle(self) -> int:
        """Close the connections that nobody used for the idle time-out; returns how many."""
        with self._lock:
            return self._evict(self._clock())

    def close(self) -> None:
        """Close everything. Calls under way end as cancelled."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, {}
            threads, self._threads = self._threads, None
        for pooled in pool.values():
            pooled.channel.close()
        if threads is not None:
            threads.shutdown(wait=True)

    def _borrow(self, address: str) -> _Pooled:
        with self._lock:
            self._check_usable()
            now = self._clock()
            if now >= self._next_eviction:
                self._evict(now)
            pooled = self._pool.get(address)
            if pooled is None:
                channel = grpc.insecure_channel(address, options=self._options())
                pooled = self._pool[address] = _Pooled(channel, rqd_pb2_grpc.RqdInterfaceStub(channel), now)
            else:
                pooled.borrowers += 1
                pooled.last_used = now
            return pooled

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("RqdChannels was made before a fork; make one in each process")
        if self._closed:
            raise RuntimeError("RqdChannels is closed")

    def _evict(self, now: float) -> int:
        idle = self.settings.channel_idle_timeout
        self._next_eviction = now + idle / 4
        gone = [key for key, it in self._pool.items() if not it.borrowers and now - it.last_used >= idle]
        for address in gone:
            self._pool.pop(address).channel.close()
        return len(gone)

    def _options(self) -> list[tuple[str, int]]:
        """A connection attempt must end well before the call's deadline, so that a host that is down is told apart
        from one that may have received the call. (gRPC takes the least reconnect back-off as its connect time-out.)
        """
        connect_seconds = min(
            _LONGEST_CONNECT_SECONDS, self.settings.launch_timeout / 2, self.settings.kill_timeout / 2
        )
        return [
            ("grpc.min_reconnect_backoff_ms", max(1, int(connect_seconds * 1000))),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
