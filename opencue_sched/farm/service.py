"""The report service: what every RQD of a farm reports to when there is no Cuebot.

Completions are answered once they are committed. Boot and status reports are answered at once and handled by a few
threads, one host at a time, the latest report of each host only. Any number of services may run: whatever two of them
do about one run, the database lets one win.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import grpc
import structlog
from opencue_proto import report_pb2, report_pb2_grpc
from sqlalchemy import Engine

from opencue_sched.accounting.connection import make_redis
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.dispatch.hosts import HostChanges
from opencue_sched.dispatch.rqd import RqdChannels, RqdKiller
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.farm.completion import CompletionBatcher, NotAccepting, Releaser, database_away
from opencue_sched.farm.model import CompletedFrame, EventCounts
from opencue_sched.farm.reports import LONGEST_FULL_NAME, MOST_KB, HostReports, KillPool, check_bounds, wrong_id
from opencue_sched.settings import Settings
from opencue_sched.store.engine import make_engine

_log = structlog.get_logger(__name__)

# Boot and status reports that wait to be handled: one slot each per host, the latest status wins.

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


LARGEST_REPORT_BYTES = 1024 * 1024
"""A report of a host with hundreds of running frames and their child processes is smaller; more is refused by gRPC."""

MOST_CALLS = 4_000
_CALL_THREADS = 64
_REPORT_THREADS = 8
_ANSWER_SECONDS = 20.0
_STOP_SECONDS = 10.0
_REPEAT_REFUSAL_SECONDS = 600.0
_LONGEST_LABEL = 300
_DATABASE_AWAY_SECONDS = 0.5


class ReportService:
    """A gRPC server for RqdReportInterface with everything behind it.

    ``counts`` has an entry for every kind of event (completion_applied, report_refused, process_killed,
    lost_completion, ...), which the worker turns into metrics.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        ledger: Ledger | None,
        changes: HostChanges | None,
        killer: RqdKiller,
        *,
        counts: EventCounts | None = None,
    ) -> None:
        self._settings = settings.release
        self.counts = counts or EventCounts()
        only_on_success = self._settings.satisfy_only_on_frame_success
        releaser = Releaser(engine, only_on_success, ledger, changes, self.counts)
        self.completions = CompletionBatcher(releaser.complete, counts=self.counts)
        self.inbox = HostInbox()
        self._kills = KillPool()
        self._reports = HostReports(releaser, self._settings, killer=killer, background=self._kills.submit)
        self._workers: list[threading.Thread] = []
        self._server: grpc.Server | None = None
        self._refusals: dict[str, float] = {}
        self.port = 0

    def start(self) -> None:
        """Open the port and begin. Raises SchedulerError when the address cannot be had."""
        server = grpc.server(
            ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="report"),
            maximum_concurrent_rpcs=MOST_CALLS,
            options=[
                ("grpc.max_receive_message_length", LARGEST_REPORT_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )
        report_pb2_grpc.add_RqdReportInterfaceServicer_to_server(_Servicer(self), server)
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise SchedulerError(
                f"the report service cannot listen on {address} ({error}); set OPENCUE_SCHED_RELEASE__HOST and __PORT"
            ) from error
        self.completions.start()
        self._workers = [
            threading.Thread(target=self._work, name=f"host-reports-{number}", daemon=True)
            for number in range(_REPORT_THREADS)
        ]
        for worker in self._workers:
            worker.start()
        server.start()
        self._server = server
        _log.info("report_service_started", host=self._settings.host, port=self.port)

    def stop(self) -> int:
        """Stop taking calls, apply the completions that wait, end the threads. Returns completions given up."""
        server, self._server = self._server, None
        if server is not None:
            stopped = server.stop(grace=_STOP_SECONDS)
        abandoned = self.completions.stop(_STOP_SECONDS) if server is not None else 0
        self.inbox.close()
        for worker in self._workers:
            worker.join(timeout=_STOP_SECONDS)
        self._kills.close()
        if server is not None:
            stopped.wait(timeout=_STOP_SECONDS)
        _log.info("report_service_stopped", abandoned=abandoned)
        return abandoned

    def _work(self) -> None:
        while (mail := self.inbox.take()) is not None:
            try:
                self._serve(mail)
            finally:
                self.inbox.done(mail.host_name)

    def _serve(self, mail: HostMail) -> None:
        """Handle one host's mail. Whatever is wrong with it, only this host is affected."""
        try:
            if mail.boot is not None:
                self._reports.boot(mail.boot)
                self.counts.add("boot_report")
            if mail.status is not None:
                self._reports.status(mail.status, age=self.inbox.age(mail))
                self.counts.add("host_report")
        except InvalidInput as refusal:
            self.counts.add("report_refused")
            self.log_refusal(mail.host_name, str(refusal))
        except Exception as error:
            self.counts.add("report_failed")
            if not database_away(error):
                _log.exception("host_report_failed", host=mail.host_name)
                return
            _log.warning("host_report_failed", host=mail.host_name, error=str(error).partition("\n")[0])
            time.sleep(_DATABASE_AWAY_SECONDS)
            if mail.boot is not None:
                self.inbox.put_boot(mail.host_name, mail.boot)

    def log_refusal(self, host_name: str, message: str) -> None:
        """A host that reports nonsense does so every few seconds: say it every ten minutes. Thread-safe."""
        now = time.monotonic()
        host_name = host_name[:LONGEST_FULL_NAME]
        key = f"{host_name} {message}"
        if now - self._refusals.get(key, -_REPEAT_REFUSAL_SECONDS) < _REPEAT_REFUSAL_SECONDS:
            return
        if len(self._refusals) > 10_000:
            self._refusals.clear()
        self._refusals[key] = now
        _log.warning("report_refused", host=host_name, reason=message)


class _Servicer(report_pb2_grpc.RqdReportInterfaceServicer):  # type: ignore[misc]
    """The three calls of RQD."""

    def __init__(self, service: ReportService) -> None:
        self._service = service

    def ReportRunningFrameCompletion(  # noqa: N802
        self, request: report_pb2.RqdReportRunningFrameCompletionRequest, context: Any
    ) -> report_pb2.RqdReportRunningFrameCompletionResponse:
        report = read_completion(request.frame_complete_report)
        wrong = _what_is_wrong(report)
        if wrong:
            self._service.counts.add("report_refused")
            self._service.log_refusal(report.host_name, wrong)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        try:
            self._service.completions.submit(report).result(timeout=_ANSWER_SECONDS)
        except NotAccepting as refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(refusal))
        except FutureTimeout:
            context.abort(grpc.StatusCode.UNAVAILABLE, "PostgreSQL does not answer; the completion is kept for later")
        except Exception as error:
            context.abort(grpc.StatusCode.INTERNAL, f"the completion was refused: {error}")
        return report_pb2.RqdReportRunningFrameCompletionResponse()

    def ReportStatus(  # noqa: N802
        self, request: report_pb2.RqdReportStatusRequest, context: Any
    ) -> report_pb2.RqdReportStatusResponse:
        report = request.host_report
        self._accept(report, self._service.inbox.put_status, context)
        return report_pb2.RqdReportStatusResponse()

    def ReportRqdStartup(  # noqa: N802
        self, request: report_pb2.RqdReportRqdStartupRequest, context: Any
    ) -> report_pb2.RqdReportRqdStartupResponse:
        report = request.boot_report
        self._accept(report, self._service.inbox.put_boot, context)
        return report_pb2.RqdReportRqdStartupResponse()

    def _accept(self, report: Any, put: Callable[[str, Any], bool], context: Any) -> None:
        try:
            check_bounds(report)
        except InvalidInput as refusal:
            self._service.counts.add("report_refused")
            self._service.log_refusal(report.host.name, str(refusal))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        if not put(report.host.name, report):
            self._service.counts.add("report_queue_full")
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many host reports wait; report again later")


def read_completion(report: report_pb2.FrameCompleteReport) -> CompletedFrame:
    """The wire message as a value; names, which go to the logs, are cut."""
    frame = report.frame
    return CompletedFrame(
        proc_id=frame.resource_id,
        frame_id=frame.frame_id,
        host_name=report.host.name[:LONGEST_FULL_NAME],
        exit_status=report.exit_status,
        exit_signal=report.exit_signal,
        run_time=max(0, report.run_time),
        max_rss_kb=max(0, frame.max_rss),
        llu_time=max(0, frame.llu_time),
        nimby_locked=report.host.nimby_locked,
        name=f"{frame.job_name}/{frame.frame_name}"[:_LONGEST_LABEL],
    )


def _what_is_wrong(report: CompletedFrame) -> str:
    """Why a completion cannot be one, by field; empty when nothing is wrong with it."""
    for field, value in (("frame.resource_id", report.proc_id), ("frame.frame_id", report.frame_id)):
        wrong = wrong_id(value) or ("" if value else "'' is not an id")
        if wrong:
            return f"{field}: {wrong}"
    if report.max_rss_kb > MOST_KB:
        return f"frame.max_rss: {report.max_rss_kb} KB is more than any host has"
    return ""


def serve(settings: Settings, *, counts: EventCounts | None = None) -> int:
    """Run a report service with its own connections until SIGTERM or SIGINT. Returns a process exit status.

    Call it from the main thread. 1 means that completions had to be given up when it was stopped.
    """
    stopping = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    engine = make_engine(settings, application_name="opencue-sched-report")
    client = make_redis(settings.redis_dsn, settings)
    try:
        with RqdChannels(settings.rqd) as channels:
            service = ReportService(
                settings,
                engine,
                Ledger(client, owner=settings.instance),
                HostChanges(client, settings.coordination.namespace),
                RqdKiller(channels),
                counts=counts,
            )
            service.start()
            stopping.wait()
            return 1 if service.stop() else 0
    finally:
        client.close()
        engine.dispose()
        for number, handler in previous.items():
            signal.signal(number, handler)
