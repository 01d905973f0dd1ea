"""A real RQD, launched by launch_all: it renders, it reports, it can be killed, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from opencue_proto import report_pb2, report_pb2_grpc, rqd_pb2

from opencue_sched.embedded.demo import renderer
from opencue_sched.embedded.demo.pictures import read_png
from opencue_sched.embedded.rqds.real_rqd import RealRqd, RealRqdFarm
from opencue_sched.embedded.servers.processes import free_port, private_directory, remove_directory
from opencue_sched.errors import RqdFailure
from opencue_sched.reports.reported_host import read_report
from opencue_sched.reports.service import SERVICE_BOUNDS, ServiceBounds, server_options
from opencue_sched.rqd.channels import RqdChannels, tell
from opencue_sched.rqd.kill import Fate, RunningFrameRef, Whereabouts, kill, kill_and_confirm, look
from opencue_sched.rqd.launch import LaunchRequest, launch_all
from opencue_sched.settings import Rqd
from tests.kit.polling import eventually
from tests.kit.relay import Relay


class Reports(report_pb2_grpc.RqdReportInterfaceServicer):
    """Keeps what RQD reports."""

    def __init__(self) -> None:
        self.boots: list[report_pb2.BootReport] = []
        self.statuses: list[report_pb2.HostReport] = []
        self.completions: dict[str, report_pb2.FrameCompleteReport] = {}
        self.lock = threading.Lock()

    def ReportRqdStartup(self, request, context):  # noqa: N802
        with self.lock:
            self.boots.append(request.boot_report)
        return report_pb2.RqdReportRqdStartupResponse()

    def ReportStatus(self, request, context):  # noqa: N802
        with self.lock:
            self.statuses.append(request.host_report)
        return report_pb2.RqdReportStatusResponse()

    def ReportRunningFrameCompletion(self, request, context):  # noqa: N802
        report = request.frame_complete_report
        with self.lock:
            self.completions[report.frame.resource_id] = report
        return report_pb2.RqdReportRunningFrameCompletionResponse()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    place = private_directory("real-rqd")
    try:
        yield place
    finally:
        remove_directory(place)


@pytest.fixture(scope="module")
def reports() -> Iterator[tuple[Reports, str]]:
    servicer = Reports()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    report_pb2_grpc.add_RqdReportInterfaceServicer_to_server(servicer, server)
    port = free_port()
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.fixture(scope="module")
def rqd(directory: Path, reports: tuple[Reports, str]) -> Iterator[RealRqd]:
    with RealRqdFarm(1, report_address=reports[1], directory=directory, cores=4, tags=["test"]) as farm:
        yield farm.rqds[0]


@pytest.fixture
def channels(rqd: RealRqd) -> Iterator[RqdChannels]:
    with RqdChannels(patient(rqd)) as channels:
        yield channels


def patient(rqd: RealRqd) -> Rqd:
    """Time-outs for a machine on which RQD takes its time."""
    return Rqd(addresses={rqd.name: rqd.address}, timeout=60.0)


def frame(directory: Path, command: str) -> rqd_pb2.RunFrame:
    return rqd_pb2.RunFrame(
        resource_id=str(uuid.uuid4()),
        job_id=str(uuid.uuid4()),
        job_name="demo-sh01-artist_orbit",
        frame_id=str(uuid.uuid4()),
        frame_name="0003-render",
        layer_id=str(uuid.uuid4()),
        command=command,
        user_name="artist",
        log_dir=str(directory / "logs"),
        show="demo",
        shot="sh01",
        start_time=int(time.time() * 1000),
        num_cores=100,
        environment={"CUE_THREADABLE": "0", "CUE_THREADS": "1"},
    )


def process_with(marker: str) -> int | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in words and b"pytest" not in words:
                return int(entry.name)
    return None


def test_it_reports_at_boot_what_it_was_told_to_be(rqd: RealRqd, reports: tuple[Reports, str]) -> None:
    eventually(lambda: reports[0].boots)
    host = reports[0].boots[0].host
    assert host.name == rqd.name
    assert (host.num_procs, host.cores_per_proc) == (1, 400)
    assert "test" in host.tags
    assert host.total_mem > 0


def test_it_renders_a_frame_and_reports_its_completion(
    rqd: RealRqd, channels: RqdChannels, directory: Path, reports: tuple[Reports, str]
) -> None:
    # given a frame of the demo's renderer, small
    picture = directory / "frame.0003.png"
    command = (
        f"{sys.executable} {renderer.__file__} frame --number 3 --count 48 --width 32 --height 18 --samples 1"
        f" --output {directory}/frame.%04d.png"
    )
    request = LaunchRequest(rqd.name, frame(directory, command))

    # when it is launched
    (outcome,) = launch_all(channels, [request])

    # then its file appears and RQD reports the end of exactly this proc
    assert (outcome.sends, outcome.error) == (1, None)
    completions = reports[0].completions
    eventually(lambda: outcome.proc_id in completions)
    report = completions[outcome.proc_id]
    log = directory / "logs" / "demo-sh01-artist_orbit.0003-render.rqlog"
    assert (report.exit_status, report.exit_signal) == (0, 0), log.read_text()
    assert report.frame.frame_id == request.ref.frame_id
    assert read_png(picture).size == (32, 18)


def test_a_frame_that_runs_is_seen_and_its_duplicate_is_told_apart(
    rqd: RealRqd, channels: RqdChannels, directory: Path, reports: tuple[Reports, str]
) -> None:
    # given a frame that runs for long
    request = LaunchRequest(rqd.name, frame(directory, "sleep 321.25"))
    assert launch_all(channels, [request])[0].error is None
    eventually(lambda: look(channels, request.ref).place is Whereabouts.OURS)

    # when it is sent again, once for the same proc and once for another
    (again,) = launch_all(channels, [request])
    other = rqd_pb2.RunFrame()
    other.CopyFrom(request.run_frame)
    other.resource_id = str(uuid.uuid4())
    (foreign,) = launch_all(channels, [LaunchRequest(rqd.name, other)])

    # then the first is recognised as running, the second is not taken for it
    assert again.error is None
    assert foreign.error is not None and foreign.error.outcome_unknown

    # and killing it, once it has a process (before, RQD would kill itself), ends that, which RQD reports
    eventually(lambda: process_with("321.25"))
    fate, _ = kill_and_confirm(channels, request.ref, reason="test", timeout=60.0)
    assert fate is Fate.NOT_RUNNING
    assert process_with("321.25") is None
    eventually(lambda: request.ref.proc_id in reports[0].completions)
    report = reports[0].completions[request.ref.proc_id]
    assert (report.exit_status, report.exit_signal) == (1, 9)


def test_killing_a_frame_it_does_not_know_confirms_that_it_does_not_run(rqd: RealRqd, channels: RqdChannels) -> None:
    unknown = RunningFrameRef(rqd.name, str(uuid.uuid4()), str(uuid.uuid4()), 100)

    assert not kill(channels, rqd.name, unknown.frame_id, "test")
    fate, _ = kill_and_confirm(channels, unknown, reason="test")

    assert fate is Fate.NOT_RUNNING


@pytest.mark.parametrize(("change", "words"), [({"num_cores": 1600}, "idle cores"), ({"uid": 0}, "uid=0")])
def test_what_it_refuses_is_a_definite_failure_with_its_words(
    rqd: RealRqd, channels: RqdChannels, directory: Path, change: dict[str, int], words: str
) -> None:
    request = LaunchRequest(rqd.name, frame(directory, "true"))
    for name, value in change.items():
        setattr(request.run_frame, name, value)

    (outcome,) = launch_all(channels, [request])

    assert outcome.sends == 2
    assert outcome.error is not None
    assert not outcome.error.outcome_unknown
    assert words in str(outcome.error)


def test_a_launch_into_a_frozen_rqd_is_unknown_until_it_answers(
    rqd: RealRqd, directory: Path, reports: tuple[Reports, str]
) -> None:
    settings = Rqd(addresses={rqd.name: rqd.address}, timeout=1.0)
    with RqdChannels(settings) as channels, RqdChannels(patient(rqd)) as others:
        # given an RQD that froze with an open connection
        request = LaunchRequest(rqd.name, frame(directory, "sleep 0.2"))
        eventually(lambda: look(channels, request.ref).place is Whereabouts.ABSENT)
        rqd.pause()
        try:
            # when a frame is launched, and somebody tries to make sure that it does not run
            (outcome,) = launch_all(channels, [request])
            fate, _ = kill_and_confirm(channels, request.ref, reason="test", adopt=True)
        finally:
            rqd.resume()

        # then neither claims to know
        assert outcome.error is not None and outcome.error.outcome_unknown
        assert fate is Fate.UNREACHABLE
        # and once it answers, there is an answer
        fate, _ = kill_and_confirm(others, request.ref, reason="test", adopt=True, timeout=60.0)
        assert fate in (Fate.RUNNING, Fate.NOT_RUNNING)
        if fate is Fate.RUNNING:
            eventually(lambda: request.ref.proc_id in reports[0].completions)


def test_what_is_locked_on_it_is_in_its_next_report(
    rqd: RealRqd, channels: RqdChannels, reports: tuple[Reports, str]
) -> None:
    for call, locked in (("LockAll", 400), ("UnlockAll", 0)):
        reports[0].statuses.clear()
        # when it is told to lock all its cores, or to unlock them
        assert tell(channels, rqd.name, call) == ""
        # then it reports that at once, and what this program reads from it is that
        host = read_report(eventually(lambda: reports[0].statuses)[0])
        assert (host.locked_centicores, host.all_locked) == (locked, locked == 400)


def test_it_answers_by_its_own_name(rqd: RealRqd, channels: RqdChannels) -> None:
    channels.check_name(rqd.name)
    misled = RqdChannels(Rqd(addresses={"another": rqd.address}, timeout=60.0))
    with misled, pytest.raises(RqdFailure, match=rf" {rqd.name}\b"):
        misled.check_name("another")


@contextlib.contextmanager
def reporting_server(bounds: ServiceBounds = SERVICE_BOUNDS) -> Iterator[tuple[Reports, str]]:
    """A server with the report service's own options, and what it was told."""
    servicer = Reports()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options(bounds))
    report_pb2_grpc.add_RqdReportInterfaceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_it_goes_to_another_report_service_when_its_connection_is_old_and_loses_nothing(directory: Path) -> None:
    # given two report services behind one address, whose connections last a second
    bounds = ServiceBounds(connection_age_seconds=1.0)
    with (
        reporting_server(bounds) as (first, first_address),
        reporting_server(bounds) as (second, second_address),
        Relay(first_address, second_address) as relay,
        RealRqdFarm(1, report_address=relay.address, directory=directory, prefix="spread") as farm,
        RqdChannels(Rqd(addresses=farm.addresses, timeout=60.0)) as channels,
    ):
        name, sent = farm.rqds[0].name, list[LaunchRequest]()

        def both_told() -> bool:
            # when it renders one frame after the other, and reports between them
            sent.append(LaunchRequest(name, frame(directory, "sleep 0.1")))
            assert launch_all(channels, sent[-1:])[0].error is None
            eventually(lambda: sent[-1].ref.proc_id in first.completions | second.completions)
            return bool(first.completions and second.completions)

        # then both services get reports, and every completion comes to one of them
        eventually(both_told, seconds=30.0)
        assert first.completions.keys() | second.completions.keys() == {launch.ref.proc_id for launch in sent}
        assert relay.opened > 1


def test_nothing_of_a_stopped_rqd_stays_behind(directory: Path, reports: tuple[Reports, str]) -> None:
    # given an RQD of its own with a frame that starts a process of its own
    with RealRqdFarm(1, report_address=reports[1], directory=directory, prefix="leaving") as farm:
        (rqd,) = farm.rqds
        with RqdChannels(Rqd(addresses=farm.addresses, timeout=60.0)) as channels:
            request = LaunchRequest(rqd.name, frame(directory, "setsid sleep 654.5 & sleep 654.5"))
            assert launch_all(channels, [request])[0].error is None
            eventually(lambda: process_with("654.5"))

    # when it has been stopped, then no process is left
    eventually(lambda: process_with("654.5") is None, seconds=5.0)


_OWNER = """
import json, sys, time
from pathlib import Path
from opencue_sched.embedded.rqds.real_rqd import RealRqdFarm
farm = RealRqdFarm(1, report_address=sys.argv[1], directory=Path(sys.argv[2]), prefix="orphan").start()
print(json.dumps(farm.addresses), flush=True)
time.sleep(600)
"""


def test_nothing_stays_behind_when_the_owner_is_killed(directory: Path, reports: tuple[Reports, str]) -> None:
    # given an RQD with a running frame, owned by another process
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, reports[1], directory], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        addresses = json.loads(owner.stdout.readline())
        with RqdChannels(Rqd(addresses=addresses, timeout=60.0)) as channels:
            request = LaunchRequest("orphan1", frame(directory, "sleep 987.5"))
            assert launch_all(channels, [request])[0].error is None
            eventually(lambda: process_with("987.5"))
    finally:
        # when that process is killed without a chance to clean up
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()

    # then RQD and its frame end by themselves
    eventually(lambda: process_with("987.5") is None and process_with("orphan1.conf") is None, seconds=15.0)
