"""The connections to the RQDs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
from opencue_proto import rqd_pb2, rqd_pb2_grpc

from opencue_sched.domain.names import is_address, same_host
from opencue_sched.errors import RqdFailure
from opencue_sched.settings import Rqd

_log = structlog.get_logger(__name__)
# gRPC writes a traceback for each answer that it cannot read; the call fails all the same, which is told with its host.
logging.getLogger("grpc._common").setLevel(logging.CRITICAL)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_LONGEST_CONNECT_SECONDS = 2.0
"""The longest that making a connection may take, and at most half of ``rqd.timeout``, which leaves a call a second
attempt. Within a farm a connection takes milliseconds; a packet that is lost is sent again after a second."""
IDLE_SECONDS = 300.0
"""gRPC closes a connection that was not used this long: a host that is booked is called more often."""
_RESOLVE_SECONDS = 5.0
"""The least time between two resolutions of a name. gRPC would use the address that it found last for 30 s."""
_KEEPALIVE_SECONDS = 300.0
"""The time between two pings of a connection on which nothing else is said: the least that RQD's server allows, before
it closes the connection. Without pings the kernel sent for 16 minutes to a host whose address was gone."""
_KEEPALIVE_TIMEOUT_SECONDS = 10.0
"""How long the answer to a ping may take before the connection counts as dead."""
_READY = grpc.ChannelConnectivity.READY.value[0]
_NOT_ANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
CALLS_TO_UNREACHED = 2
"""How many calls in a row without an answer make a host unreached; it may be dialled anew, too (`RqdChannels`)."""
UNREACHED_SECONDS = 120.0
"""How long after the last call a host is named as unreached: one that nobody calls may be down, or deleted."""
NAME_BELIEVED_SECONDS = 60.0
"""How long after a host's RQD told its name frames are launched over that connection without asking for it again."""
_WARN_SECONDS = 60.0
"""The time between two warnings of one host."""
SHORTEST_TELLING_SECONDS = 1.0
"""The shortest deadline whose end says something of a host: a call with less may end for want of time alone."""
_CALLS_AT_ONCE = 16
"""Threads of one process that call RQDs. Each waits for a host nearly all its time: with fewer, the hosts that do not
answer sooner hold up the launches on those that do."""


class _Replaced(grpc.RpcError):
    """A call that was not made, because its connection was replaced and closed meanwhile."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "failed to connect to all addresses: the connection was replaced meanwhile"


class _Connection(grpc.UnaryUnaryClientInterceptor):
    """One connection to the RQD of ``host``.

    ``heard`` is called at each call's begin and end, ``named`` with the name in each report: see `RqdChannels._hear`
    and `_name`.
    """

    def __init__(
        self,
        host: _Host,
        options: list[tuple[str, int]],
        heard: Callable[..., None],
        named: Callable[[_Connection, str], None],
    ) -> None:
        self.host = host
        self.channel = grpc.insecure_channel(host.address, options=options)
        self.stub = rqd_pb2_grpc.RqdInterfaceStub(grpc.intercept_channel(self.channel, self))
        self.heard = heard
        self.named = named
        # Read and written under the lock of RqdChannels.
        self.calls = 0
        """Calls under way."""
        self.retired = self.closed = False

    def believed_since(self, since: float) -> bool:
        """Whether the host's RQD has told its name since then, over a connection that is there: where it is not, the
        next call dials anew, and another machine may answer."""
        return self.host.named_at > since and self.is_up()

    def is_up(self) -> bool:
        """Whether gRPC is connected now; True as well where it does not say."""
        # gRPC tells everybody else by a callback, for which each channel would have a thread.
        asked: Any = getattr(getattr(self.channel, "_channel", None), "check_connectivity_state", None)
        try:
            return asked is None or asked(False) == _READY
        except ValueError:  # closed: the call will say so
            return True

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """gRPC's hook around one call."""
        self.heard(self, calls=1)
        try:
            call = continuation(details, request)
        except BaseException:
            self.heard(self, calls=-1)
            raise
        self.heard(self, calls=-1, ended=call, details=details)
        if isinstance(request, rqd_pb2.RqdStaticReportStatusRequest) and call.code() is grpc.StatusCode.OK:
            self.named(self, call.result().host_report.host.name)
        return call


@dataclass
class _Host:
    """What the calls to one host's RQD told. Everything is read and written under the lock of RqdChannels."""

    name: str
    address: str
    connection: _Connection | None = None
    named_at: float = -math.inf
    """The time at which the RQD last answered by the host's own name (monotonic); no call has failed since."""
    answers_as: str = ""
    """The name of another host, if the last answer came under that name."""
    unanswered: int = 0
    """How many calls in a row got no answer."""
    since: float = 0.0
    """Epoch seconds of the first of the calls in a row that got no answer."""
    failed_at: float = -math.inf
    """The time at which a call last got no answer, or another host's (monotonic)."""
    words: str = ""
    """The error of the last call without an answer."""
    warned_at: float = -math.inf
    """The time at which the trouble was last logged (monotonic)."""

    def trouble(self) -> str:
        """What is wrong with the connection, for people; a sentence about its RQD, without that."""
        if words := self.misnamed():
            return words
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"({self.address}) does not answer: {self.words}, since {since}"

    def misnamed(self) -> str:
        """``(address) answers as another``, when another host's RQD answers there; else empty."""
        return f"({self.address}) answers as {self.answers_as}" if self.answers_as else ""


class RqdChannels(AbstractContextManager["RqdChannels"]):
    """One connection per host, opened at first use, closed after five idle minutes.

    A connection whose calls run into their deadlines in a row is replaced, for which the host's name is resolved anew:
    where an address is gone nobody resets the connection to it, and the kernel would send into it for 16 minutes. So is
    one to another machine, which might go on for ever after the name was put right. Where hosts are dialled by their
    full names, so is one whose calls fail otherwise, and the name is asked for anew.

    Thread-safe. gRPC does not survive a fork: make one per process, after the fork.
    """

    def __init__(
        self,
        settings: Rqd,
        *,
        full_name: Callable[[str], str] = str,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """``full_name`` is asked for the name with domain of a host where ``rqd.dial_by`` is full; it raises RqdFailure
        where it cannot tell. ``quiet``: no warnings in the log, as for a command, which tells what it found. A
        connection without a call for ``idle_seconds`` is closed."""
        self.settings = settings
        self._idle_seconds = idle_seconds
        self._quiet = quiet
        self._addresses = {name.lower(): address for name, address in settings.addresses.items()}
        self._full_name = full_name
        self._clock = clock
        self._lock = threading.Lock()
        """Guards ``_hosts`` and ``_retired`` with what is in them, and ``_closed``. No RQD is called while it is
        held."""
        self._hosts: dict[str, _Host] = {}
        """The hosts that were called, by name."""
        self._retired: set[_Connection] = set()
        """Connections that were replaced while calls went over them."""
        self._threads = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="rqd")
        self._closed = False

    def address(self, host_name: str) -> str:
        """``address:port`` of the RQD on a host: from ``rqd.addresses``, or else OpenCue's rule, ``name:8444``,
        where ``rqd.dial_by`` says so with the domain."""
        known = self.settings.addresses.get(host_name) or self._addresses.get(host_name.lower())
        if known is not None:
            return known
        name = self._full_name(host_name) if self.settings.dial_by == "full" else host_name
        if ":" in name and not name.startswith("["):
            name = f"[{name}]"
        return f"{name}:{self.settings.grpc_port}"

    def stub(self, host_name: str) -> Any:
        """The RqdInterfaceStub for a host. Ask for it at each call: the connection may be replaced."""
        with self._lock:
            host = self._hosts.get(host_name)
            if self._closed:
                raise RuntimeError("RqdChannels is closed")
            if host is not None and host.connection is not None:
                return host.connection.stub
        address = self.address(host_name)  # without the lock: it may ask the database
        with self._lock:
            if self._closed:
                raise RuntimeError("RqdChannels is closed")
            host = self._hosts.setdefault(host_name, _Host(host_name, address))
            if host.connection is None:
                host.address = address
                host.connection = _Connection(host, self._options(), self._hear, self._name)
            return host.connection.stub

    def misnamed(self, host_name: str) -> str:
        """``(address) answers as another``, when the last report that came for a host was another host's: its name, or
        its entry in ``rqd.addresses``, leads to another machine. Else empty."""
        with self._lock:
            host = self._hosts.get(host_name)
            return host.misnamed() if host is not None else ""

    def check_name(self, host_name: str) -> None:
        """Make sure that a host's RQD is its own: ask for its name, unless it told that in the last minute over a
        connection that still stands. Raises RqdFailure when it is another host's, or does not tell."""
        with self._lock:
            host = self._hosts.get(host_name)
            connection = host.connection if host is not None else None
            if connection is not None and connection.believed_since(self._clock() - NAME_BELIEVED_SECONDS):
                return
        request = rqd_pb2.RqdStaticReportStatusRequest()
        try:
            self.stub(host_name).ReportStatus(request, timeout=self.settings.timeout)
        except grpc.RpcError as error:
            raise RqdFailure(f"asked for its name, it did not answer ({describe(error)})") from error
        if words := self.misnamed(host_name):
            raise RqdFailure(f"its RQD {words}")

    def unreached(self) -> tuple[tuple[str, str], ...]:
        """The hosts that did not answer calls of the last two minutes, or in whose place another host answered: the
        longest silence first, each with its name and words that follow "its RQD"."""
        with self._lock:
            now = self._clock()
            unreached = [
                host
                for host in self._hosts.values()
                if (host.unanswered >= CALLS_TO_UNREACHED or host.answers_as)
                and now - host.failed_at < UNREACHED_SECONDS
            ]
            unreached.sort(key=lambda host: host.since)
            return tuple((host.name, host.trouble()) for host in unreached)

    def each(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Call ``function`` with every item, up to 16 at once, and return the results in the order of the items. The
        first exception is raised once all calls have ended."""
        futures = [self._threads.submit(function, argument) for argument in items]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close every connection. Calls under way end as cancelled."""
        with self._lock:
            self._closed = True
            opened = [host.connection for host in self._hosts.values() if host.connection is not None]
            opened += self._retired
        for connection in opened:
            connection.channel.close()
        self._threads.shutdown(wait=True)

    def _hear(self, connection: _Connection, *, calls: int, ended: Any = None, details: Any = None) -> None:
        """Count the calls under way by ``calls``, and learn from one that ``ended``; ``details`` is how it was made.
        Raises _Replaced for one that is about to be made over a connection that is closed."""
        with self._lock:
            if connection.closed and calls > 0:
                raise _Replaced
            if calls > 0 and not connection.is_up():
                connection.host.named_at = -math.inf  # this call dials anew
            connection.calls += calls
            if ended is not None:
                self._learn(connection, ended, details)
            over = self._is_over(connection)
        if over:
            connection.channel.close()

    def _name(self, connection: _Connection, name: str) -> None:
        """Learn by whose name a report is that came over a connection."""
        host = connection.host
        # A host known by its address is the machine that has the address.
        own = not name or is_address(host.name) or same_host(host.name, name)
        with self._lock:
            if connection.retired:
                return
            host.named_at = self._clock() if own else -math.inf
            host.answers_as = "" if own else name
            if not own:
                host.failed_at = self._clock()
                self._warn(host, "rqd_answers_as_another_host", answers_as=name)
                self._retire(connection)
            over = self._is_over(connection)
        if over:
            connection.channel.close()

    def _retire(self, connection: _Connection) -> None:
        """Have the next call to its host dial anew. Under the lock."""
        connection.retired, connection.host.connection = True, None
        self._retired.add(connection)

    def _is_over(self, connection: _Connection) -> bool:
        """Whether a retired connection is to be closed, which the caller does. Under the lock."""
        # Not before its last call has ended: closing would cancel those that may be answered yet.
        over = connection.retired and not connection.calls and not self._closed
        if over:
            connection.closed = True
            self._retired.discard(connection)
        return over

    def _learn(self, connection: _Connection, ended: Any, details: Any) -> None:
        """Learn from a call that ended, by its gRPC status, whether the host answers; once it did not
        CALLS_TO_UNREACHED times, say so. Under the lock."""
        host, code, seconds = connection.host, ended.code(), details.timeout
        if code is grpc.StatusCode.CANCELLED or connection.retired:
            return
        if code not in _NOT_ANSWERED:
            host.unanswered = 0
            return
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED
        if details.wait_for_ready:
            return  # a host that is DOWN was asked whether it is there again: see RqdKiller.answers
        if late and seconds is not None and seconds < min(SHORTEST_TELLING_SECONDS, self.settings.timeout):
            return  # the rest of a caller's time, not enough for an answer
        now = self._clock()
        host.named_at = -math.inf  # the next connection may lead elsewhere
        if not host.unanswered:
            host.since = time.time()
        host.unanswered += 1
        host.failed_at, host.words = now, describe(ended)
        # A name with its domain is another one once the host's domain changed: nothing may ever listen at this one.
        may_be_renamed = self.settings.dial_by == "full"
        if (late or may_be_renamed) and host.unanswered >= CALLS_TO_UNREACHED:
            self._retire(connection)
        if host.unanswered >= CALLS_TO_UNREACHED:
            self._warn(host, "rqd_does_not_answer", calls=host.unanswered, error=host.words)

    def _warn(self, host: _Host, event: str, **fields: object) -> None:
        """Log a warning about a host, one a minute."""
        now = self._clock()
        if not self._quiet and now - host.warned_at >= _WARN_SECONDS:
            host.warned_at = now
            _log.warning(event, host=host.name, address=host.address, **fields)

    def _options(self) -> list[tuple[str, int]]:
        """A connection attempt must end well before the call's deadline, so that a host that is down is told apart
        from one that may have received the call. (gRPC takes the least reconnect back-off as its connect time-out.)

        With a keepalive gRPC has the kernel give a connection up on which nothing is acknowledged for its time-out.
        RQD's server ends connections that are pinged more often than every 300 s (gRPC's default).
        """
        connect_seconds = min(_LONGEST_CONNECT_SECONDS, self.settings.timeout / 2)
        return [
            ("grpc.min_reconnect_backoff_ms", max(1, int(connect_seconds * 1000))),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.dns_min_time_between_resolutions_ms", int(_RESOLVE_SECONDS * 1000)),
            ("grpc.client_idle_timeout_ms", int(self._idle_seconds * 1000)),
            ("grpc.keepalive_time_ms", int(_KEEPALIVE_SECONDS * 1000)),
            ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_TIMEOUT_SECONDS * 1000)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(error: grpc.RpcError) -> str:
    """``CODE: text`` of a failed call."""
    return f"{error.code().name}: {error.details() or 'no details'}"


_ENDED_BY_IT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_ENDING = ("RebootIdle", "RebootNow", "ShutdownRqdIdle", "ShutdownRqdNow")


def tell(channels: RqdChannels, host_name: str, call: str) -> str:
    """Tell RQD to RebootIdle, RebootNow, ShutdownRqdIdle, ShutdownRqdNow, LockAll or UnlockAll; why it refused, or
    nothing. A connection that breaks may be the end that was asked for, so ask first whether its RQD answers at all."""
    method = rqd_pb2.DESCRIPTOR.services_by_name["RqdInterface"].methods_by_name[call]
    request = getattr(rqd_pb2, method.input_type.name)()
    try:
        getattr(channels.stub(host_name), call)(request, timeout=channels.settings.timeout)
    except grpc.RpcError as error:
        return "" if call in _ENDING and error.code() in _ENDED_BY_IT else describe(error)
    return ""
