"""The connections to the RQDs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import grpc
from opencue_proto import rqd_pb2, rqd_pb2_grpc

from opencue_sched.settings import Rqd

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_LONGEST_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 300.0
"""gRPC closes a connection that was not used this long: a host that is booked is called more often."""
_CALLS_AT_ONCE = 16
"""Threads of one process that call RQDs. Each waits for a host nearly all its time."""


class RqdChannels(AbstractContextManager["RqdChannels"]):
    """One connection per RQD, opened at first use, closed after five idle minutes.

    Thread-safe. gRPC does not survive a fork: make one per process, after the fork.
    """

    def __init__(self, settings: Rqd) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Any, Any]] = {}
        self._threads = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="rqd")
        self._closed = False

    def address(self, host_name: str) -> str:
        """``address:port`` of the RQD on a host: from ``rqd.addresses``, or else OpenCue's rule, ``name:8444``."""
        known = self.settings.addresses.get(host_name)
        if known is not None:
            return known
        name = f"[{host_name}]" if ":" in host_name and not host_name.startswith("[") else host_name
        return f"{name}:{self.settings.grpc_port}"

    def stub(self, host_name: str) -> Any:
        """The RqdInterfaceStub for a host."""
        address = self.address(host_name)
        with self._lock:
            if self._closed:
                raise RuntimeError("RqdChannels is closed")
            if address not in self._open:
                channel = grpc.insecure_channel(address, options=self._options())
                self._open[address] = channel, rqd_pb2_grpc.RqdInterfaceStub(channel)
            return self._open[address][1]

    def each(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Call ``function`` with every item, up to 16 at once, and return the results in the order of the items. The
        first exception is raised once all calls have ended."""
        futures = [self._threads.submit(function, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close every connection. Calls under way end as cancelled."""
        with self._lock:
            self._closed = True
            opened, self._open = self._open, {}
        for channel, _ in opened.values():
            channel.close()
        self._threads.shutdown(wait=True)

    def _options(self) -> list[tuple[str, int]]:
        """A connection attempt must end well before the call's deadline, so that a host that is down is told apart
        from one that may have received the call. (gRPC takes the least reconnect back-off as its connect time-out.)
        """
        connect_seconds = min(_LONGEST_CONNECT_SECONDS, self.settings.timeout / 2)
        return [
            ("grpc.min_reconnect_backoff_ms", max(1, int(connect_seconds * 1000))),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.client_idle_timeout_ms", int(_IDLE_SECONDS * 1000)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(error: grpc.RpcError) -> str:
    """``CODE: text`` of a failed call."""
    return f"{error.code().name}: {error.details() or 'no details'}"


_ENDED_BY_IT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def tell(channels: RqdChannels, host_name: str, call: str) -> str:
    """Tell RQD to RebootIdle, RebootNow, ShutdownRqdIdle or ShutdownRqdNow; why it refused, or nothing. A connection
    that breaks is the end that was asked for, so ask first whether its RQD answers at all."""
    method = rqd_pb2.DESCRIPTOR.services_by_name["RqdInterface"].methods_by_name[call]
    request = getattr(rqd_pb2, method.input_type.name)()
    try:
        getattr(channels.stub(host_name), call)(request, timeout=channels.settings.timeout)
    except grpc.RpcError as error:
        return "" if error.code() in _ENDED_BY_IT else describe(error)
    return ""
