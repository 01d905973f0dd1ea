"""The report service: what every RQD of a farm reports to when there is no Cuebot.

Completions are answered once they are committed. Boot and status reports are answered at once; a few threads handle
them later, the reports of many hosts in one transaction, and of each host its latest report alone. Any number of
services may run: where two of them end the same run of a frame, the database lets one win.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message
from opencue_proto import report_pb2

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.clients.postgres import make_engine
from opencue_sched.clients.store_errors import describe, is_trouble
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.reports.announcements import AnnouncementSender
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.completion_batcher import CompletionBatcher, NotAccepting
from opencue_sched.reports.host_reports import HostReports, StatusReport
from opencue_sched.reports.inbox import HostInbox, Mail
from opencue_sched.reports.reported_host import LONGEST_FULL_NAME, checked_name
from opencue_sched.reports.reported_runs import check_frame
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.reports.unreadable import UnreadableMessages
from opencue_sched.reports.waiting_calls import NOTHING, Refusal, Send, WaitingCalls
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import RqdKiller
from opencue_sched.settings import Settings
from opencue_sched.signals import StopOrder
from opencue_sched.store.hosts import full_names

_log = structlog.get_logger(__name__)

REPORTS_TOGETHER = 64
"""The most hosts whose reports are handled in one transaction. Since they share one, and write only what is new, a
report costs 2.9 ms of processor time, of the service and PostgreSQL, and not 16.2 (1,200 hosts with eight frames each).
With more, bookings on these hosts wait longer for the rows that a transaction locks."""
REPORT_THREADS = 2
"""How many threads handle reports: while one waits for PostgreSQL the other computes."""
GATHER_SECONDS = 0.1
"""How long a transaction waits for further reports while fewer than REPORTS_TOGETHER hosts have one. From 640 reports a
second on none waits so long. With less time fewer reports share a transaction, which is what makes them cheap; with
more, a report is older when it is handled (reported_runs.SETTLED_SECONDS)."""
KILL_THREADS = 8
"""How many threads end processes on hosts. Each waits for one RQD, so as many RQDs may be silent before kills wait. An
RQD that accepts calls and answers none takes a thread for seconds with each frame that is to end (5 s were measured);
with more threads more of them may be silent, and no kill costs less."""


class NotServed(grpc.GenericRpcHandler):
    """Refuses every call that the handlers before it do not serve, with a remedy.

    Where there is no Cuebot, ``cueadmin``, CueGUI and everything else on pycue may still be pointed at this port: it is
    the port they know. One call of theirs is answered, with zeros. By that call pycue asks for a Cuebot's own figures,
    to see whether a server is there; where it is refused, pycue says that no connection could be established, and does
    not show the remedy.
    """

    def service(self, handler_call_details: Any) -> Any:
        """gRPC's hook: the handler of one call."""
        called = handler_call_details.method.strip("/").replace("/", ".")
        if called == "cue.CueInterface.GetSystemStats":
            return grpc.unary_unary_rpc_method_handler(lambda _request, _context: NOTHING)
        text = (
            f"{called} is not served by opencue-sched's report service, which serves RQDs alone; see opencue-sched "
            "--help (docs/cueadmin.md has the command for each of cueadmin's)"
        )
        return grpc.unary_unary_rpc_method_handler(
            lambda _request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
        )


LARGEST_REPORT_BYTES = 1024 * 1024
"""The largest message that gRPC takes. The report of a host with hundreds of running frames, and all their child
processes, is smaller."""

_CONNECTION_GRACE_SECONDS = 30.0
"""How long calls under way may still take once their connection is too old. The longest call takes less: it ends
after ServiceBounds.answer_seconds."""


@dataclass(frozen=True, slots=True)
class ServiceBounds:
    """How many calls a report service takes, and for how long."""

    connection_age_seconds: float = 600.0
    """Greatest age of a connection, which gRPC varies by a tenth. An RQD keeps its connection as long as it may: after
    one of two services behind an address was restarted, all hosts would stay with the other."""
    vanished_peer_seconds: float = 10.0
    """The time after which the RQD of a call is asked whether it is still there.

    The call ends if the RQD does not answer for as long again. A call whose message has begun to come keeps a thread
    until the message is whole. Without this bound as many hosts as there are threads for status reports
    (_HOST_REPORT_CALL_THREADS), all gone in the middle of a message, would stop those reports until their connections
    are too old."""
    most_calls: int = 4_000
    """How many calls are taken at once; further calls are refused. Also how many completions may wait for their
    answers: a further completion is applied too, but its RQD is told at once what it is else told after
    ``answer_seconds``."""
    answer_seconds: float = 20.0
    """How long a completion may take until it is committed. Then its RQD is told that PostgreSQL does not answer, and
    the completion stays in hand."""


SERVICE_BOUNDS = ServiceBounds()
"""The bounds of every report service; tests have narrower ones."""
_CALL_THREADS = 32
"""How many threads take completions, which are answered later (WaitingCalls). A few would do. But an RQD that opens a
call and sends no message keeps a thread until its connection is too old: as many such RQDs as there are threads hold up
all completions until then."""
_HOST_REPORT_CALL_THREADS = 2
"""How many threads take boot and status reports, of which none is to wait behind completions. A thread that finds the
next call when it has done with one need not be woken: two busy threads cost less than many that are woken in turn."""
_INTERFACE = "report.RqdReportInterface"
_STOP_SECONDS = 10.0
"""How long calls under way, and completions that wait, have at a stop."""
_PULSE_SECONDS = 2.0
"""The time between two signs of life for the probes."""
_REPEAT_REFUSAL_SECONDS = 600.0
"""How often the log repeats the same refusal of a host's reports."""
_LONGEST_LABEL = 300
"""The most characters of a frame's name in the log."""
_DATABASE_AWAY_SECONDS = 0.5
"""The pause before reports are handled again after PostgreSQL was away."""


def server_options(bounds: ServiceBounds = SERVICE_BOUNDS) -> list[tuple[str, int]]:
    """How the server treats connections and messages."""
    vanished_ms = int(bounds.vanished_peer_seconds * 1000)
    return [
        # No pings that measure how much a connection carries: the messages of an RQD are small, and seconds apart.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", LARGEST_REPORT_BYTES),
        ("grpc.max_connection_age_ms", int(bounds.connection_age_seconds * 1000)),
        ("grpc.max_connection_age_grace_ms", int(_CONNECTION_GRACE_SECONDS * 1000)),
        ("grpc.keepalive_time_ms", vanished_ms),
        ("grpc.keepalive_timeout_ms", vanished_ms),
        ("grpc.http2.ping_timeout_ms", vanished_ms),
        # A port that another process listens on is refused, not shared with it.
        ("grpc.so_reuseport", 0),
    ]


class ReportService:
    """The gRPC server that takes the three calls of RQD, with the queues and threads that handle them.

    The releaser's ``count`` is called for every event (completion_applied, report_refused, ...). ``port`` is the port
    that the server listens on, 0 before start().
    """

    def __init__(
        self, settings: Settings, releaser: Releaser, killer: RqdKiller, *, bounds: ServiceBounds = SERVICE_BOUNDS
    ) -> None:
        self._settings = settings.release
        self._bounds = bounds
        self.count = releaser.count
        self._clock = releaser.clock
        self.completions = CompletionBatcher(releaser.end, self.count)
        self.inbox = HostInbox(
            self._serve,
            name="host-reports",
            threads=REPORT_THREADS,
            together=REPORTS_TOGETHER,
            gather_seconds=GATHER_SECONDS,
        )
        # Kills have an inbox of their own, so that no report waits for an RQD that does not answer. A later kill takes
        # the place of one that waits: it comes from a later report, which names what still runs.
        self._kills = HostInbox(self._kill, name="host-kills", threads=KILL_THREADS)
        self._reports = HostReports(releaser, killer, settings.scheduler.facility)
        self._waiting = WaitingCalls(_refusal, too_late=_TOO_LATE, seconds=bounds.answer_seconds)
        self._server: grpc.Server | None = None
        self._stopping = threading.Event()
        # Logs a refusal whenever it is not in the cache: once for each host, reason and period.
        self._warn = lru_cache(maxsize=10_000)(
            lambda host_name, reason, _period: _log.warning("report_refused", host=host_name, reason=reason)
        )
        self.port = 0

    def start(self) -> None:
        """Open the port and begin. Raises SchedulerError when the address cannot be had."""
        server = grpc.server(
            ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="report"),
            maximum_concurrent_rpcs=self._bounds.most_calls,
            options=server_options(self._bounds),
        )
        server.add_registered_method_handlers(_INTERFACE, self._handlers())
        server.add_generic_rpc_handlers((NotServed(),))
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise SchedulerError(
                f"the report service cannot listen on {address} ({error}); set OPENCUE_SCHED_RELEASE__HOST and __PORT"
            ) from error
        self.completions.start()
        self._waiting.start()
        server.start()
        self._server = server
        _log.info("report_service_started", host=self._settings.host, port=self.port)

    def stop(self) -> int:
        """Stop taking calls, apply the completions that wait, end the threads. Returns completions given up."""
        server, self._server = self._server, None
        if server is None:
            return 0
        stopped = server.stop(grace=_STOP_SECONDS)
        abandoned = self.completions.stop(_STOP_SECONDS)
        self._stopping.set()
        self.inbox.close()
        self._kills.close()
        stopped.wait(timeout=_STOP_SECONDS)
        self._waiting.stop()
        _log.info("report_service_stopped", abandoned=abandoned)
        return abandoned

    def _serve(self, hosts: Sequence[tuple[str, Mail]]) -> None:
        """Handle the mail of hosts: boot reports one by one, status reports together. What is wrong with a report
        affects its host alone.

        The status report of a host whose boot report failed is dropped. Where a store was in trouble the boot report is
        put back, because an RQD sends it once; the next status report comes by itself.
        """
        failures = {name: self._boot(mail["boot"]) if "boot" in mail else None for name, mail in hosts}
        reporting = [(name, mail) for name, mail in hosts if "status" in mail and failures[name] is None]
        try:
            outcomes = self._reports.statuses(
                [StatusReport(mail["status"], mail["received_at"]) for _, mail in reporting]
            )
        except Exception as error:
            failures.update((name, error) for name, _ in reporting)
        else:
            for (name, _), outcome in zip(reporting, outcomes, strict=True):
                failures[name] = outcome.error
                if outcome.error is None:
                    self.count("host_report")
                if outcome.kill is not None:
                    self._kills.put(name, kill=outcome.kill)
        database_away = False
        for name, mail in hosts:
            failure = failures[name]
            if failure is not None and self._note_failure(name, failure):
                database_away = True
                if "boot" in mail:
                    self.inbox.put(name, boot=mail["boot"])
        if database_away:
            self._stopping.wait(_DATABASE_AWAY_SECONDS)

    def _boot(self, report: report_pb2.BootReport) -> Exception | None:
        """Handle a boot report. Returns the error where that failed."""
        try:
            self._reports.boot(report)
        except Exception as error:
            return error
        self.count("boot_report")
        return None

    def _kill(self, hosts: Sequence[tuple[str, Mail]]) -> None:
        """Kill what is to be killed on these hosts. Called by the inbox of kills; an error is told and keeps no other
        host waiting."""
        for name, mail in hosts:
            try:
                mail["kill"]()
            except Exception as error:
                self._note_failure(name, error)

    def _note_failure(self, host_name: str, error: Exception) -> bool:
        """Count and log why a host's mail was not handled. Returns whether PostgreSQL or Redis is in trouble."""
        if isinstance(error, InvalidInput):
            self.log_refusal(host_name, str(error))
            return False
        self.count("report_failed")
        if is_trouble(error):
            _log.warning("host_report_failed", host=host_name, error=describe(error), exc_info=error)
            return True
        _log.error("host_report_failed", host=host_name, error=describe(error), exc_info=error)
        return False

    def log_refusal(self, host_name: str, message: str) -> None:
        """Count a refusal. A host that reports nonsense does so every few seconds: it is logged every ten minutes."""
        self.count("report_refused")
        self._warn(host_name[:LONGEST_FULL_NAME], message, time.monotonic() // _REPEAT_REFUSAL_SECONDS)

    # The calls of RQD

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        """The handler of each call by its name, made once: gRPC would look for them, and make them, for every call."""
        messages = UnreadableMessages(self.count, self._clock)
        host_reports = ThreadPoolExecutor(_HOST_REPORT_CALL_THREADS, thread_name_prefix="host-report")

        def read(name: str, message: type[Message], take: Callable[..., Any]) -> Any:
            return messages.read_for(f"/{_INTERFACE}/{name}", message, take)

        completion: Any = read(
            "ReportRunningFrameCompletion", report_pb2.RqdReportRunningFrameCompletionRequest, self._take_completion
        )
        # Of the handlers of gRPC only those of calls with many answers may return before they answer, so this one says
        # that it has many. An RQD, which waits for one answer, sees no difference.
        completion.experimental_non_blocking = True
        status: Any = read("ReportStatus", report_pb2.RqdReportStatusRequest, self._take_status)
        boot: Any = read("ReportRqdStartup", report_pb2.RqdReportRqdStartupRequest, self._take_boot)
        status.experimental_thread_pool = boot.experimental_thread_pool = host_reports
        return {
            "ReportRunningFrameCompletion": grpc.unary_stream_rpc_method_handler(completion),
            "ReportStatus": grpc.unary_unary_rpc_method_handler(status),
            "ReportRqdStartup": grpc.unary_unary_rpc_method_handler(boot),
        }

    def _take_completion(
        self, request: report_pb2.RqdReportRunningFrameCompletionRequest, context: Any, send: Send
    ) -> None:
        """Take the end of a frame, which is answered by ``send`` once it is committed."""
        report = request.frame_complete_report
        try:
            check_frame(report.frame, "frame.", needs_ids=True)
            completed = read_completion(
                report,
                silent_seconds=self._reports.silences.seconds(report.host.name, report.frame),
                received_at=self._clock(),
            )
            done = self.completions.submit(completed)
        except InvalidInput as refusal:
            self.log_refusal(report.host.name, str(refusal))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        except NotAccepting as refusal:
            context.abort(*_refusal(refusal))
        else:
            # A completion is applied also where too many calls wait: an RQD may report it once and never again. Here,
            # as in all handlers, abort() raises.
            if len(self._waiting) >= self._bounds.most_calls:
                context.abort(*_TOO_LATE)
            self._waiting.put(done, context, send)

    def _take_status(self, request: report_pb2.RqdReportStatusRequest, context: Any) -> bytes:
        """Take a host's regular report; answers before it is handled. Its ``received_at`` is in monotonic time: the
        clock of the releaser, which tests replace, does not count for it."""
        self._accept(request.host_report, context, status=request.host_report, received_at=time.monotonic())
        return NOTHING

    def _take_boot(self, request: report_pb2.RqdReportRqdStartupRequest, context: Any) -> bytes:
        """Take the report of an RQD that has started; answers before it is handled."""
        self._accept(request.boot_report, context, boot=request.boot_report)
        return NOTHING

    def _accept(self, report: Any, context: Any, **mail: Any) -> None:
        """Put a report of a host into the inbox; ends the call of an RQD whose host has no usable name
        (INVALID_ARGUMENT), or when too many reports wait (RESOURCE_EXHAUSTED)."""
        try:
            checked_name(report.host.name.strip())
        except InvalidInput as refusal:
            self.log_refusal(report.host.name, str(refusal))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        if not self.inbox.put(report.host.name, **mail):
            self.count("report_queue_full")
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many host reports wait; report again later")


_TOO_LATE = (grpc.StatusCode.UNAVAILABLE, "PostgreSQL does not answer; the completion is kept for later")
"""The answer to a completion that is not committed within ServiceBounds.answer_seconds."""


def _refusal(error: BaseException) -> Refusal:
    """What the sender of a completion is told that was not applied: CompletionRefused or NotAccepting."""
    code = grpc.StatusCode.UNAVAILABLE if isinstance(error, NotAccepting) else grpc.StatusCode.INTERNAL
    return code, str(error)


def read_completion(
    report: report_pb2.FrameCompleteReport, *, silent_seconds: float, received_at: float
) -> CompletedFrame:
    """The completion that RQD reported, as a value. Its names come from outside and are cut before they reach the logs.

    ``silent_seconds``: how long the frame's log has shown the same time. ``received_at``: when the report came, by the
    clock of the releaser.
    """
    frame = report.frame
    return CompletedFrame(
        proc_id=frame.resource_id,
        frame_id=frame.frame_id,
        host_name=report.host.name[:LONGEST_FULL_NAME],
        exit_status=report.exit_status,
        exit_signal=report.exit_signal,
        max_rss_kb=max(0, frame.max_rss),
        silent_seconds=silent_seconds,
        received_at=received_at,
        nimby_locked=report.host.nimby_locked,
        name=f"{frame.job_name}/{frame.frame_name}"[:_LONGEST_LABEL],
    )


@contextmanager
def open_service(settings: Settings, count: Callable[[str], object]) -> Iterator[ReportService]:
    """A report service with its own connections, not started yet."""
    engine = make_engine(settings, application_name="opencue-sched-report")
    client = guarded_redis(settings.redis_dsn, settings)
    ledger = Ledger(client, owner=settings.instance)
    sender = AnnouncementSender(ledger, HostChanges(client, settings.coordination.namespace), count)
    try:
        with RqdChannels(settings.rqd, full_name=full_names(engine)) as channels:
            releaser = Releaser(engine, settings.release, count=count, sender=sender)
            yield ReportService(settings, releaser, RqdKiller(channels))
    finally:
        sender.close()
        client.close()
        engine.dispose()


def serve(settings: Settings, *, count: Callable[[str], object], alive: Callable[[], None]) -> int:
    """Run a report service with its own connections until SIGTERM, SIGINT or SIGHUP. Returns a process exit status.

    ``alive`` is called every few seconds while the thread that applies completions runs, also while that thread waits
    for PostgreSQL.

    Call it from the main thread. 1 means that completions had to be given up when it was stopped.
    """
    stop_order = StopOrder()
    with open_service(settings, count) as service:
        service.start()
        alive()
        while not stop_order.wait(_PULSE_SECONDS):
            if service.completions.running:
                alive()
        return 1 if service.stop() else 0
