"""The reports benchmark: what one report service carries, every RQD with a connection of its own.

The memory of running frames moves from report to report. Four questions: a status report of every host, flat out, until
all of them are handled; status reports beside completions, at the rates of a farm of ten thousand hosts; the ends of
all frames that are left, flat out, each answered when it is committed; and how long it takes until every host is heard
again after the service was started anew. The RQDs are threads of this process; each sends one report after the other
and waits for its answer.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from opencue_proto import report_pb2, report_pb2_grpc
from rich.console import Console
from sqlalchemy import text

from benchmarks.figures import Spread
from benchmarks.proc_times import Reading, read, resident_mb
from benchmarks.statement_times import configuration
from benchmarks.workbench import Workbench, code_of, workbench
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, HostSpec, JobSpec, LayerSpec
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.settings import Accounting

FRAMES_OF_EACH = 8
STATUSES_A_SECOND, COMPLETIONS_A_SECOND = 570, 1_000
"""What ten thousand RQDs send, each every 5 to 30 s, and the ends of frames beside that."""
STATUS_REPORTS, COMPLETIONS, AGAIN = "status reports", "completions", "after a restart"
_REPORTS_AT_ONCE, _ENDS_AT_ONCE = 64, 256
"""Calls under way. A status report is answered before it is handled; of ends, half wait while the others are committed,
and of so many RQDs a few hundred do."""
_HANDLED_SECONDS = 120.0
_COUNTS_SECONDS = 11.0
"""After this long a session of PostgreSQL that does nothing has told what it counted."""
_AGE_SECONDS = 0.1
_HOST_MEMORY_KB = 64 * 1024 * 1024
_DESCRIPTORS_BESIDE = 200
_SERVICE = "report-service"
_STATEMENTS = text(
    """
    SELECT CAST(sum(calls) AS float8) AS statements, sum(total_plan_time) AS planning,
           sum(total_plan_time + total_exec_time) AS all
      FROM pg_stat_statements JOIN pg_database database ON database.oid = dbid
     WHERE datname = current_database() AND query !~ 'pg_stat'
    """
)


@dataclass(frozen=True)
class ReportsResult:
    """One kind of report: spreads are of rounds; ``answer_ms`` is a round's median, processor time is per report."""

    phase: str
    connections: int
    reports: int
    per_second: Spread
    answer_ms: Spread
    service_processor_ms: Spread
    postgresql_processor_ms: Spread
    service_cores: Spread
    postgresql_cores: Spread
    cpu_of_others_percent: Spread
    service_mb: Spread
    transactions_each: Spread
    rows_updated_each: Spread
    statements_each: Spread
    planning_percent: Spread


@dataclass(frozen=True)
class _Round:
    reports: int
    seconds: float
    answer_ms: float
    cpu: Reading
    counts: Counter[str]
    service_mb: int


@dataclass(frozen=True)
class _Rqd:
    """A host, its connection, and the (proc, frame) ids that run there."""

    host: HostIds
    stub: Any
    runs: Sequence[tuple[str, str]]
    reported: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def render_host(self) -> report_pb2.RenderHost:
        return report_pb2.RenderHost(
            name=self.host.name,
            num_procs=1,
            cores_per_proc=800,
            total_mem=_HOST_MEMORY_KB,
            free_mem=_HOST_MEMORY_KB // 2,
            total_mcp=_HOST_MEMORY_KB,
            free_mcp=_HOST_MEMORY_KB,
        )

    def report(self) -> None:
        """Send a status report with every frame, each with more memory than in the last."""
        number = next(self.reported)
        frames = [self._frame(proc_id, frame_id, number) for proc_id, frame_id in self.runs]
        report = report_pb2.HostReport(host=self.render_host(), frames=frames)
        self.stub.ReportStatus(report_pb2.RqdReportStatusRequest(host_report=report), timeout=60, wait_for_ready=True)

    def end(self, run: tuple[str, str]) -> None:
        """Send the end of a frame."""
        report = report_pb2.FrameCompleteReport(host=self.render_host(), frame=self._frame(*run, 1), run_time=60)
        request = report_pb2.RqdReportRunningFrameCompletionRequest(frame_complete_report=report)
        self.stub.ReportRunningFrameCompletion(request, timeout=60, wait_for_ready=True)

    def _frame(self, proc_id: str, frame_id: str, number: int) -> report_pb2.RunningFrameInfo:
        rss = 100_000 + 1_000 * number
        return report_pb2.RunningFrameInfo(
            resource_id=proc_id,
            frame_id=frame_id,
            num_cores=100,
            rss=rss,
            max_rss=rss + 500,
            vsize=2 * rss,
            max_vsize=2 * rss,
            llu_time=1_700_000_000 + number,
        )


def run_reports(*, hosts: int, rounds: int, base: str | None, console: Console) -> list[ReportsResult]:
    """All questions, ``rounds`` times each, with a ``base`` by turns also with the service of that commit. Raises
    AssertionError when a report was not applied."""
    _allow_descriptors(hosts)
    with code_of(base) if base else nullcontext() as code_of_base:
        codes: dict[str, Path | None] = {"": None, **({f", {base}": code_of_base} if base else {})}
        found: dict[str, list[_Round]] = {}
        for number in range(1, rounds + 1):
            for name, code in codes.items():
                for phase, measured in _round(hosts, code).items():
                    found.setdefault(f"{phase}{name}", []).append(measured)
                    rate = measured.reports / measured.seconds
                    console.print(f"round {number}, {phase}{name}: {rate:.0f}/s")
    return [_result(phase, hosts, measured) for phase, measured in found.items()]


def _round(hosts: int, code: Path | None) -> dict[str, _Round]:
    with (
        workbench({}, configuration=configuration(), code=code) as bench,
        _connected(bench, hosts) as (port, made, stubs),
    ):
        ledger = make_ledger(bench.engine, bench.client, owner="benchmark", accounting=Accounting())
        ensure_bootstrapped(bench.engine, ledger, wait_age=_AGE_SECONDS)
        rqds = _start_frames(bench, made, stubs)
        recompute(bench.engine, ledger, age_seconds=_AGE_SECONDS)
        # What a service, or a table, does for the first time is not measured.
        _send(bench, [rqd.report for rqd in rqds], _REPORTS_AT_ONCE)
        counts = _Counts(bench)
        rounds = {STATUS_REPORTS: _measure(bench, counts, [rqd.report for rqd in rqds], _REPORTS_AT_ONCE)}
        ends = [_ending(rqd, run) for rqd in rqds for run in rqd.runs]
        rounds |= _measure_both(bench, counts, rqds, ends[: len(ends) // 2])
        rounds[COMPLETIONS] = _measure(bench, counts, ends[len(ends) // 2 :], _ENDS_AT_ONCE)
        rounds[AGAIN] = _measure_restart(bench, port, rqds)
    return rounds


def _ending(rqd: _Rqd, run: tuple[str, str]) -> Callable[[], None]:
    return lambda: rqd.end(run)


def _allow_descriptors(hosts: int) -> None:
    """Here and, inherited, in the service: one for each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hosts + _DESCRIPTORS_BESIDE
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))


@contextlib.contextmanager
def _connected(bench: Workbench, hosts: int) -> Iterator[tuple[int, list[HostIds], list[Any]]]:
    """The port of a report service, hosts, and a connection for each of them that the service answers on."""
    port = free_port()
    bench.metrics_ports[_SERVICE] = free_port()
    _start_service(bench, port)
    with bench.engine.begin() as connection:
        if configuration():
            connection.execute(text("CREATE EXTENSION pg_stat_statements"))
        made = Farm(connection).hosts(HostSpec(f"reports{number}", memory_gb=63.5) for number in range(hosts))
    with contextlib.ExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 5_000)]
        channels = [stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=options)) for _ in made]
        for ready in [grpc.channel_ready_future(channel) for channel in channels]:
            ready.result(timeout=60)
        yield port, made, [report_pb2_grpc.RqdReportInterfaceStub(channel) for channel in channels]


def _start_service(bench: Workbench, port: int, name: str = _SERVICE) -> None:
    bench.fleet.report_service(
        name,
        OPENCUE_SCHED_RELEASE__PORT=str(port),
        OPENCUE_SCHED_QUEUE__METRICS_PORT=str(bench.metrics_ports[_SERVICE]),
    )


def _start_frames(bench: Workbench, hosts: Sequence[HostIds], stubs: Sequence[Any]) -> list[_Rqd]:
    with bench.engine.begin() as connection:
        farm = Farm(connection)
        frames = farm.jobs([JobSpec([LayerSpec(frames=FRAMES_OF_EACH * len(hosts))], show=farm.show())])[0].frames
        rqds = []
        for number, (host, stub) in enumerate(zip(hosts, stubs, strict=True)):
            here = frames[number * FRAMES_OF_EACH : (number + 1) * FRAMES_OF_EACH]
            rqds.append(_Rqd(host, stub, list(zip(farm.run(here, host), here, strict=True))))
        connection.execute(text("ANALYZE"))
    return rqds


class _Counts:
    """What PostgreSQL counted from one phase to the next."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._before = self._read()

    def since_last(self) -> Counter[str]:
        """Transactions, rows, and where it can statements and their times (ms), since this was last asked."""
        before, self._before = self._before, self._read()
        return self._before - before

    def _read(self) -> Counter[str]:
        time.sleep(_COUNTS_SECONDS)
        counts = self._bench.counters()
        if configuration():
            with self._bench.engine.connect() as connection:
                counts.update(connection.execute(_STATEMENTS).one()._asdict())
        return counts


def _send(bench: Workbench, sends: Sequence[Callable[[], None]], at_once: int) -> list[float]:
    """Send it all, so many hosts at once, and wait until the service has counted as many events; how long each answer
    took."""
    handled_before = _handled(bench)
    with ThreadPoolExecutor(at_once) as senders:
        answers = list(senders.map(_timed, sends))
    _wait_for(bench, handled_before + len(sends))
    return answers


def _measure(bench: Workbench, counts: _Counts, sends: Sequence[Callable[[], None]], at_once: int) -> _Round:
    processes = bench.processes()
    cpu_before, began = read(processes), time.monotonic()
    answers = _send(bench, sends, at_once)
    seconds, cpu = time.monotonic() - began, read(processes).since(cpu_before)
    memory = resident_mb(processes[_SERVICE][0])
    return _Round(len(sends), seconds, 1000 * median(answers), cpu, counts.since_last(), memory)


def _measure_both(
    bench: Workbench, counts: _Counts, rqds: Sequence[_Rqd], ends: Sequence[Callable[[], None]]
) -> dict[str, _Round]:
    """Send completions at their rate, and status reports of one host after the other at theirs meanwhile."""
    processes, handled_before = bench.processes(), _handled(bench)
    cpu_before, began = read(processes), time.monotonic()
    over = threading.Event()

    def reports() -> Iterator[Callable[[], None]]:
        for rqd in itertools.cycle(rqds):
            if over.is_set():
                break
            yield rqd.report

    with ThreadPoolExecutor(2) as both:
        statuses = both.submit(_paced, reports(), STATUSES_A_SECOND, _REPORTS_AT_ONCE)
        ended = _paced(ends, COMPLETIONS_A_SECOND, _ENDS_AT_ONCE)
        over.set()
        reported = statuses.result()
    sent = time.monotonic() - began
    _wait_for(bench, handled_before + len(ended) + len(reported), at_most=True)
    cpu, counted = read(processes).since(cpu_before), counts.since_last()
    memory = resident_mb(processes[_SERVICE][0])
    return {
        f"{STATUS_REPORTS}, of both": _Round(len(reported), sent, 1000 * median(reported), cpu, counted, memory),
        f"{COMPLETIONS}, of both": _Round(len(ended), sent, 1000 * median(ended), cpu, counted, memory),
    }


def _measure_restart(bench: Workbench, port: int, rqds: Sequence[_Rqd]) -> _Round:
    """Stop the service and start it again on the same port; every host then reports."""
    bench.fleet.stop(_SERVICE)
    began = time.monotonic()
    _start_service(bench, port, f"{_SERVICE}2")
    processes = bench.processes()
    cpu_before = read(processes)
    answers = _send(bench, [rqd.report for rqd in rqds], _REPORTS_AT_ONCE)
    seconds, cpu = time.monotonic() - began, read(processes).since(cpu_before)
    memory = resident_mb(processes[_SERVICE][0])
    return _Round(len(rqds), seconds, 1000 * median(answers), cpu, Counter(), memory)


def _paced(sends: Any, rate: float, at_once: int) -> list[float]:
    """Send so many a second, or as many as are answered with so many at once; how long each answer took."""
    began = time.monotonic()

    def all_sends() -> Iterator[Callable[[], None]]:
        for number, send in enumerate(sends):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
            yield send

    waiting, lock = all_sends(), threading.Lock()

    def sender() -> list[float]:
        answers: list[float] = []
        while True:
            with lock:
                send = next(waiting, None)
            if send is None:
                return answers
            answers.append(_timed(send))

    with ThreadPoolExecutor(at_once) as senders:
        return [seconds for found in [senders.submit(sender) for _ in range(at_once)] for seconds in found.result()]


def _timed(send: Callable[[], None]) -> float:
    began = time.monotonic()
    send()
    return time.monotonic() - began


def _wait_for(bench: Workbench, handled: float, *, at_most: bool = False) -> None:
    """Until so many reports are handled; or, where of a host that reports again the latest counts, no more come."""
    deadline, seen = time.monotonic() + _HANDLED_SECONDS, -1.0
    while (now := _handled(bench)) < handled and not (at_most and now == seen):
        assert time.monotonic() < deadline, "not every report was handled"
        seen = now
        time.sleep(1.0 if at_most else 0.05)


def _handled(bench: Workbench) -> float:
    """Events the service has counted; each report of this benchmark leads to one."""
    # Asked often, so it must not be what PostgreSQL counts meanwhile.
    return sum(bench.samples("scheduler_release_events_total"))


def _result(phase: str, hosts: int, rounds: Sequence[_Round]) -> ReportsResult:
    def each(*names: str) -> Spread:
        return Spread.of([sum(measured.counts[name] for name in names) / measured.reports for measured in rounds])

    def processor(group: str) -> list[float]:
        return [measured.cpu.groups[group] for measured in rounds]

    def per_report(group: str) -> Spread:
        return Spread.of([1000 * s / measured.reports for s, measured in zip(processor(group), rounds, strict=True)])

    def cores(group: str) -> Spread:
        return Spread.of([s / measured.seconds for s, measured in zip(processor(group), rounds, strict=True)])

    return ReportsResult(
        phase,
        hosts,
        rounds[0].reports,
        Spread.of([measured.reports / measured.seconds for measured in rounds], digits=0),
        Spread.of([measured.answer_ms for measured in rounds], digits=1),
        per_report(_SERVICE),
        per_report("postgresql"),
        cores(_SERVICE),
        cores("postgresql"),
        Spread.of([measured.cpu.others_percent(measured.seconds) for measured in rounds], digits=0),
        Spread.of([measured.service_mb for measured in rounds], digits=0),
        each("pg_xact_commit", "pg_xact_rollback"),
        each("pg_tup_updated"),
        each("statements"),
        Spread.of([100 * measured.counts["planning"] / (measured.counts["all"] or 1) for measured in rounds], digits=0),
    )
