"""The simulated farm itself: what it reports, what it records, what can be done to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opencue_proto import report_pb2, report_pb2_grpc

from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.launch import LaunchRequest, launch_all
from opencue_sched.settings import Rqd
from tests.kit.launches import request
from tests.kit.polling import eventually


class Sink(report_pb2_grpc.RqdReportInterfaceServicer):
    """A report service that keeps everything."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.boots: list[str] = []
        self.statuses: list[report_pb2.HostReport] = []
        self.completions: list[report_pb2.FrameCompleteReport] = []
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        report_pb2_grpc.add_RqdReportInterfaceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()

    def ReportRqdStartup(self, request, context):  # noqa: N802
        with self._lock:
            self.boots.append(request.boot_report.host.name)
        return report_pb2.RqdReportRqdStartupResponse()

    def ReportStatus(self, request, context):  # noqa: N802
        with self._lock:
            self.statuses.append(request.host_report)
        return report_pb2.RqdReportStatusResponse()

    def ReportRunningFrameCompletion(self, request, context):  # noqa: N802
        with self._lock:
            self.completions.append(request.frame_complete_report)
        return report_pb2.RqdReportRunningFrameCompletionResponse()


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    sink.start()
    yield sink
    sink.stop()


def reporting(sink: Sink, count: int = 2) -> SimulatedFarm:
    return SimulatedFarm(
        host_specs(count, cores=4, tags=("general", "fast")), report_address=sink.address, report_seconds=(0.1, 0.2)
    )


def launch(farm: SimulatedFarm, *requests: LaunchRequest) -> None:
    with RqdChannels(Rqd(addresses=farm.addresses)) as channels:
        outcomes = launch_all(channels, requests)
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)


def test_hosts_report_their_boot_their_state_and_every_end(sink: Sink) -> None:
    with reporting(sink) as farm:
        # given a frame that succeeds, one that fails and one that runs on
        good = request("sim0001", command="simulate seconds=0.1")
        bad = request("sim0002", command="simulate seconds=0.1 exit=3 signal=11")
        long = request("sim0001", command="simulate hang", cores=2)

        # when they run
        launch(farm, good, bad, long)

        # then the ends arrive with their proc, status and signal
        eventually(lambda: len(sink.completions) == 2 and len(sink.boots) == 2)
        ends = {it.frame.resource_id: (it.host.name, it.exit_status, it.exit_signal) for it in sink.completions}
        assert ends == {good.ref.proc_id: ("sim0001", 0, 0), bad.ref.proc_id: ("sim0002", 3, 11)}
        # and a report made now shows what is left, and nothing that is not
        assert farm.report_now("sim0001")
        report = [it for it in sink.statuses if it.host.name == "sim0001"][-1]
        assert [frame.resource_id for frame in report.frames] == [long.ref.proc_id]
        assert (report.core_info.total_cores, report.core_info.idle_cores, report.core_info.booked_cores) == (
            400,
            200,
            200,
        )
        assert (report.host.num_procs, report.host.cores_per_proc, list(report.host.tags)) == (
            1,
            400,
            ["general", "fast"],
        )


def test_a_completion_nobody_took_is_lost_for_good(sink: Sink) -> None:
    with reporting(sink) as farm:
        eventually(lambda: len(sink.boots) == 2)
        # given a report service that is away when a frame ends
        sink.stop()
        quick = request("sim0001", command="simulate seconds=0")
        launch(farm, quick)
        eventually(lambda: farm.runs(quick.ref.frame_id)[0].completion_delivered is False)

        # when it is back, then hosts report, and that frame is in none of it
        sink.start()
        seen = len(sink.statuses)
        eventually(lambda: len(sink.statuses) > seen + 4)
        assert sink.completions == []
        assert all(not report.frames for report in sink.statuses[seen:])


def test_a_frame_running_twice_is_found(sink: Sink) -> None:
    with reporting(sink) as farm:
        # given one frame on two hosts at once, and another frame on two hosts one after the other
        first = request("sim0001", command="simulate hang")
        second = request("sim0002", command="simulate hang", frame_id=first.ref.frame_id)
        before = request("sim0001", command="simulate seconds=0")
        launch(farm, first, second, before)
        eventually(lambda: farm.runs(before.ref.frame_id)[0].ended is not None)
        launch(farm, request("sim0002", command="simulate seconds=0", frame_id=before.ref.frame_id))
        eventually(lambda: all(run.ended is not None for run in farm.runs(before.ref.frame_id)))

        # then the overlap is the first one's only
        ((earlier, later),) = farm.overlaps()
        assert {earlier.proc_id, later.proc_id} == {first.ref.proc_id, second.ref.proc_id}


def test_a_crashed_host_forgets_its_frames_and_boots_again(sink: Sink) -> None:
    with reporting(sink, count=1) as farm:
        lost = request("sim0001", command="simulate hang")
        launch(farm, lost)
        eventually(lambda: sink.boots)

        farm.crash("sim0001")
        farm.restart("sim0001")

        eventually(lambda: sink.boots == ["sim0001", "sim0001"])
        assert farm.running() == {}
        (run,) = farm.runs(lost.ref.frame_id)
        assert (run.crashed, run.completion_delivered) == (True, None)
        launch(farm, request("sim0001", command="simulate hang"))


def test_faults_come_by_ratio_and_the_same_seed_gives_the_same_ones() -> None:
    def statuses() -> list[int | None]:
        with SimulatedFarm(host_specs(1, cores=100), seed=7) as farm:
            farm.behave(run_seconds=(0.0, 0.0), failure_ratio=0.5, failure_status=2)
            launch(farm, *(request("sim0001", frame_id=str(number)) for number in range(60)))
            eventually(lambda: all(run.ended is not None for run in farm.runs()))
            return [run.exit_status for run in farm.runs()]

    first = statuses()
    assert set(first) == {0, 2}
    assert statuses() == first


def test_the_program_prints_its_addresses_and_at_the_end_what_ran() -> None:
    command = [
        sys.executable,
        "-m",
        "opencue_sched.embedded.rqds.simulated_rqd",
        "--hosts",
        "2",
        "--run-seconds",
        "0",
        "0",
    ]
    program = subprocess.Popen([*command, "--runs"], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        addresses = json.loads(program.stdout.readline())
        with RqdChannels(Rqd(addresses=addresses)) as channels:
            (outcome,) = launch_all(channels, [request("sim0002")])
        program.send_signal(signal.SIGTERM)
        run, summary = (json.loads(line) for line in program.communicate(timeout=20)[0].splitlines())
    finally:
        program.kill()
        program.wait()
    assert outcome.error is None
    assert (run["proc_id"], run["host_name"]) == (outcome.proc_id, "sim0002")
    assert (summary["runs"], summary["overlaps"], program.returncode) == (1, 0, 0)
