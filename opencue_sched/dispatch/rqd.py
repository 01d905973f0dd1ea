"""Asking RQD what it really runs, and making sure that a frame does not run there.

What RQD's answers are worth (opencue-rqd 1.37, observed and read in its source; its Rust successor, read):

- ReportStatus lists running frames with the proc they belong to (``resource_id``).
- A frame that was accepted but whose log is still being set up is in no list; its cores are already in
  ``core_info.booked_cores``, so more cores booked than listed means "wait".
- KillRunningFrame answers NOT_FOUND for a frame it does not know. A kill that reaches it between the listing of a frame
  and the start of its process makes RQD kill itself, so a frame of ours that has just started is adopted, never killed.
- The Rust RQD refuses to kill without a message.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from opencue_proto import report_pb2, rqd_pb2, rqd_pb2_grpc

from opencue_sched.settings import Rqd

# Where each RQD is, and the open connections to them.
#
# One owner of the mapping host name -> address, used by launch, kill and reaper alike: ``rqd.addresses`` when it names
# the host, otherwise OpenCue's own rule, ``name:8444`` in plain text.

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_LONGEST_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 300.0
"""A connection that was not used this long is closed: a host that is booked is called more often."""
_CALLS_AT_ONCE = 16
"""Threads of one process that call RQDs. Each waits for a host nearly all its time."""


@dataclass(slots=True)
class _Pooled:
    channel: Any
    stub: Any
    last_used: float
    borrowers: int = field(default=1)


class RqdChannels:
    """One connection per RQD, opened at first use, closed after five idle minutes.

    Thread-safe. gRPC does not survive a fork: make one per process, after the fork; use in another process raises
    RuntimeError.
    """

    def __init__(self, settings: Rqd, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: dict[str, _Pooled] = {}
        self._next_eviction = clock() + _IDLE_SECONDS
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
        """``function`` of every item, up to 16 at once, in the order of the items.

        ``progress`` is called as they end. The first exception is raised once all have ended.
        """
        with self._lock:
            self._check_usable()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="rqd")
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
        """Close the connections that were idle for five minutes; returns how many."""
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
        idle = _IDLE_SECONDS
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


_POLL_SECONDS = 0.1


class Whereabouts(StrEnum):
    """Whether a frame runs on a host."""

    OURS = "ours"
    ANOTHERS = "anothers"
    SETTING_UP = "setting_up"
    ABSENT = "absent"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class FrameSeen:
    """What RQD said about one frame; ``detail`` is for an operator."""

    place: Whereabouts
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RunningFrameRef:
    """A frame that may run on a host. ``cores_centicores`` as launched; 0 when not known (reaper)."""

    host_name: str
    frame_id: str
    proc_id: str
    cores_centicores: int = 0


class Fate(StrEnum):
    """How a kill-and-confirm ended."""

    RUNNING = "running"
    NOT_RUNNING = "not_running"
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """``killed`` says that RQD accepted a kill; ``detail`` is for an operator."""

    fate: Fate
    killed: bool
    detail: str


def look(channels: RqdChannels, ref: RunningFrameRef, *, timeout: float | None = None) -> FrameSeen:
    """Ask the host's RQD whether it runs the frame, and for which proc."""
    try:
        with channels.stub(ref.host_name) as stub:
            answer = stub.ReportStatus(
                rqd_pb2.RqdStaticReportStatusRequest(), timeout=timeout or channels.settings.kill_timeout
            )
    except grpc.RpcError as error:
        return FrameSeen(Whereabouts.UNREACHABLE, describe(error))
    return frame_seen(answer.host_report, ref)


def answers(channels: RqdChannels, host_name: str, *, seconds: float) -> bool:
    """Whether the host's RQD answers a ReportStatus within ``seconds``; a connection refused is tried again in that
    time, whatever became of the tries before."""
    request = rqd_pb2.RqdStaticReportStatusRequest()
    try:
        with channels.stub(host_name) as stub:
            stub.ReportStatus(request, timeout=seconds, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return True


def frame_seen(report: report_pb2.HostReport, ref: RunningFrameRef) -> FrameSeen:
    """What a host report says about one frame."""
    listed = 0
    for frame in report.frames:
        listed += frame.num_cores
        if frame.frame_id == ref.frame_id:
            if frame.resource_id == ref.proc_id:
                return FrameSeen(Whereabouts.OURS, f"runs for proc {ref.proc_id}")
            return FrameSeen(Whereabouts.ANOTHERS, f"runs for another proc, {frame.resource_id}")
    unlisted = report.core_info.booked_cores - listed
    if unlisted > 0 and unlisted >= ref.cores_centicores:
        return FrameSeen(Whereabouts.SETTING_UP, f"{unlisted} centicores are booked by frames not listed yet")
    return FrameSeen(Whereabouts.ABSENT, "not listed")


def kill(channels: RqdChannels, host_name: str, frame_id: str, reason: str) -> tuple[bool, str]:
    """Ask RQD to kill a frame. Returns (accepted, detail); an unknown frame is (False, "not found").

    Raises grpc.RpcError for any other answer. Never call it once the frame has been put back to WAITING: it may have
    been booked on the same host again, and RQD knows frames by frame id only.
    """
    request = rqd_pb2.RqdStaticKillRunningFrameRequest(frame_id=frame_id, message=reason)
    try:
        with channels.stub(host_name) as stub:
            stub.KillRunningFrame(request, timeout=channels.settings.kill_timeout)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return False, "not found"
        raise
    return True, "kill accepted"


def kill_and_confirm(
    channels: RqdChannels,
    ref: RunningFrameRef,
    *,
    reason: str,
    adopt: bool = False,
    timeout: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Confirmation:
    """Make sure that a frame does not run on a host, and say only what RQD confirmed.

    NOT_RUNNING is answered when RQD was asked to kill the frame (or knew nothing of it) and a report taken after that
    no longer lists it nor is setting anything up. With ``adopt``, a frame found running for ``ref.proc_id`` is left
    alone and answered as RUNNING. UNCONFIRMED after ``timeout`` seconds (default ``rqd.kill_timeout``): nothing may be
    freed then. The caller must still own the frame (see `kill`).
    """
    limit = clock() + (timeout or channels.settings.kill_timeout)
    killed = asked = False
    while True:
        left = max(0.05, limit - clock())
        seen = look(channels, ref, timeout=min(left, channels.settings.kill_timeout))
        if adopt and seen.place is Whereabouts.OURS and not killed:
            return Confirmation(Fate.RUNNING, killed, seen.detail)
        if asked and seen.place is Whereabouts.ABSENT:
            return Confirmation(Fate.NOT_RUNNING, killed, seen.detail)
        if seen.place in (Whereabouts.OURS, Whereabouts.ANOTHERS, Whereabouts.ABSENT):
            try:
                accepted, _ = kill(channels, ref.host_name, ref.frame_id, reason)
            except grpc.RpcError as error:
                seen = FrameSeen(Whereabouts.UNREACHABLE, describe(error))
            else:
                asked = True
                killed = killed or accepted
                if not accepted and clock() < limit:
                    continue
        if clock() >= limit:
            return Confirmation(Fate.UNCONFIRMED, killed, f"{seen.place.value}: {seen.detail}")
        time.sleep(min(_POLL_SECONDS, max(0.0, limit - clock())))


def describe(error: grpc.RpcError) -> str:
    """``CODE: text`` of a failed call."""
    return f"{error.code().name}: {error.details() or 'no details'}"
