"""The reports benchmark: what one report service carries, every RQD with a connection of its own.

Two questions, each flat out: a status report of every fourth host, which names the frames that run there, until all of
them are handled; then the ends of all frames, each answered when it is committed. The RQDs are threads of this process;
each sends one report after the other and waits for its answer.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import grpc
from opencue_proto import report_pb2, report_pb2_grpc
from rich.console import Console
from sqlalchemy import text

from benchmarks.figures import Spread
from benchmarks.proc_times import Reading, read
from benchmarks.workbench import Workbench, workbench
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, HostSpec, JobSpec, LayerSpec
from opencue_sched.embedded.servers.processes import free_port

FRAMES_OF_EACH = 2
_SENDERS = 64
_HANDLED_SECONDS = 120.0
_AGE_SECONDS = 0.1
_HOST_MEMORY_KB = 16 * 1024 * 1024
_DESCRIPTORS_BESIDE = 200


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
    cpu_of_others_percent: Spread


@dataclass(frozen=True)
class _Round:
    per_second: float
    answer_ms: float
    cpu: Reading
    seconds: float
    reports: int


@dataclass(frozen=True)
class _Rqd:
    """A host, its connection, and the (proc, frame) ids that run there."""

    host: HostIds
    stub: Any
    runs: Sequence[tuple[str, str]]

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

    def status(self) -> report_pb2.RqdReportStatusRequest:
        frames = [self._frame(proc_id, frame_id) for proc_id, frame_id in self.runs]
        return report_pb2.RqdReportStatusRequest(
            host_report=report_pb2.HostReport(host=self.render_host(), frames=frames)
        )

    def completions(self) -> list[report_pb2.RqdReportRunningFrameCompletionRequest]:
        return [
            report_pb2.RqdReportRunningFrameCompletionRequest(
                frame_complete_report=report_pb2.FrameCompleteReport(
                    host=self.render_host(), frame=self._frame(proc_id, frame_id), run_time=60
                )
            )
            for proc_id, frame_id in self.runs
        ]

    def _frame(self, proc_id: str, frame_id: str) -> report_pb2.RunningFrameInfo:
        return report_pb2.RunningFrameInfo(
            resource_id=proc_id, frame_id=frame_id, num_cores=100, rss=500_000, max_rss=600_000
        )


def run_reports(*, hosts: int, rounds: int, console: Console) -> list[ReportsResult]:
    """Both questions, ``rounds`` times each. Raises AssertionError when a report was not applied."""
    _allow_descriptors(hosts)
    with workbench({}) as bench, _connected(bench, hosts) as (hosts_there, stubs):
        ledger = make_ledger(bench.engine, bench.client, owner="benchmark")
        ensure_bootstrapped(bench.engine, ledger, wait_age=_AGE_SECONDS)
        statuses, completions = [], []
        for number in range(rounds):
            rqds = _start_frames(bench, hosts_there, stubs)
            recompute(bench.engine, ledger, age_seconds=_AGE_SECONDS)
            statuses.append(_measure(bench, [(rqd.stub.ReportStatus, [rqd.status()]) for rqd in rqds[::4]]))
            ends = [(rqd.stub.ReportRunningFrameCompletion, rqd.completions()) for rqd in rqds]
            completions.append(_measure(bench, ends))
            console.print(
                f"round {number + 1}: {statuses[-1].per_second:.0f} status reports/s,"
                f" {completions[-1].per_second:.0f} completions/s"
            )
    return [_result("status reports", hosts, statuses), _result("completions", hosts, completions)]


def _allow_descriptors(hosts: int) -> None:
    """Here and, inherited, in the service: one for each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hosts + _DESCRIPTORS_BESIDE
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))


@contextlib.contextmanager
def _connected(bench: Workbench, hosts: int) -> Iterator[tuple[list[HostIds], list[Any]]]:
    """A report service, hosts, and a connection for each of them that the service answers on."""
    port, metrics_port = free_port(), free_port()
    bench.fleet.report_service(
        OPENCUE_SCHED_RELEASE__PORT=str(port), OPENCUE_SCHED_QUEUE__METRICS_PORT=str(metrics_port)
    )
    bench.metrics_ports["report-service"] = metrics_port
    with bench.engine.begin() as connection:
        made = Farm(connection).hosts(HostSpec(f"reports{number}") for number in range(hosts))
    with contextlib.ExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=options)) for _ in made]
        for ready in [grpc.channel_ready_future(channel) for channel in channels]:
            ready.result(timeout=30)
        yield made, [report_pb2_grpc.RqdReportInterfaceStub(channel) for channel in channels]


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


def _measure(bench: Workbench, work: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> _Round:
    """Send it all, many hosts at once, and wait until the service has counted as many events."""
    reports = sum(len(requests) for _, requests in work)

    def send(call: Callable[..., Any], requests: Sequence[Any]) -> list[float]:
        times = []
        for request in requests:
            began = time.monotonic()
            call(request, timeout=60)
            times.append(time.monotonic() - began)
        return times

    processes, handled_before = bench.processes(), _handled(bench)
    cpu_before, began = read(processes), time.monotonic()
    with ThreadPoolExecutor(_SENDERS) as senders:
        answers = [seconds for times in senders.map(lambda each: send(*each), work) for seconds in times]
    while _handled(bench) - handled_before < reports:
        assert time.monotonic() < began + _HANDLED_SECONDS, "not every report was handled"
        time.sleep(0.05)
    seconds = time.monotonic() - began
    return _Round(reports / seconds, 1000 * median(answers), read(processes).since(cpu_before), seconds, reports)


def _handled(bench: Workbench) -> float:
    """Events the service has counted; each report of this benchmark leads to one."""
    return bench.counters()["scheduler_release_events_total"]


def _result(phase: str, hosts: int, rounds: Sequence[_Round]) -> ReportsResult:
    def processor(group: str) -> Spread:
        return Spread.of([1000 * it.cpu.groups[group] / it.reports for it in rounds])

    return ReportsResult(
        phase,
        hosts,
        rounds[0].reports,
        Spread.of([it.per_second for it in rounds], digits=0),
        Spread.of([it.answer_ms for it in rounds], digits=1),
        processor("report-service"),
        processor("postgresql"),
        Spread.of([it.cpu.others_percent(it.seconds) for it in rounds], digits=0),
    )
