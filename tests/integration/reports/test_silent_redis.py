"""A Redis that accepts and never answers: RQDs are answered, and their reports handled, as if it were well."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from opencue_proto import report_pb2, report_pb2_grpc
from pydantic import SecretStr
from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.announcements import MOST_WAITING, AnnouncementSender
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.reaper import reap
from opencue_sched.reports.service import open_service
from opencue_sched.settings import Release, Settings
from tests.kit.counted import Counted
from tests.kit.polling import eventually
from tests.kit.reported_hosts import render_host
from tests.kit.runs import FarmView, ScriptedKiller, start

ANSWER_SECONDS = 15.0
"""What a call may take. An announcement to such a Redis takes twenty."""


@pytest.fixture
def silent(settings: Settings) -> Iterator[Settings]:
    """These settings, with the address of a Redis that accepts connections and reads nothing."""
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                held.append(listening.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            address = f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
            release = settings.release.model_copy(update={"port": 0})
            yield settings.model_copy(update={"redis_url": SecretStr(address), "release": release})
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def test_rqds_are_answered_and_their_reports_handled_at_once(view: FarmView, silent: Settings) -> None:
    # given a service, and five frames that run
    run = start(view, LayerSpec(frames=5), running=5, cores=0.5, memory_gb=0.5)
    counts = Counted()
    with ExitStack() as stack:
        service = stack.enter_context(open_service(silent, counts))
        service.start()
        stack.callback(service.stop)
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{service.port}"))
        stub = report_pb2_grpc.RqdReportInterfaceStub(channel)
        # when they end one after the other, and hosts report that nobody knew
        for proc, frame in zip(run.procs, run.frames, strict=True):
            report = report_pb2.FrameCompleteReport(
                host=render_host(name=run.host.name),
                frame=report_pb2.RunningFrameInfo(resource_id=proc, frame_id=frame, num_cores=50),
            )
            request = report_pb2.RqdReportRunningFrameCompletionRequest(frame_complete_report=report)
            stub.ReportRunningFrameCompletion(request, timeout=ANSWER_SECONDS)
        for number in range(50):
            boot = report_pb2.BootReport(host=render_host(name=f"new{number}"))
            stub.ReportRqdStartup(report_pb2.RqdReportRqdStartupRequest(boot_report=boot), timeout=ANSWER_SECONDS)
        # then all of it is in the database
        eventually(lambda: counts["boot_report"] == 50, ANSWER_SECONDS / 4, "all hosts")
    assert counts["completion_applied"] == 5
    assert view.states(run.frames) == ["SUCCEEDED"] * 5


class Announced:
    """A ledger and a change log that note what they are told, in order, once the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.told: list[tuple[str, list[str]]] = []
        self.begun = threading.Event()

    def release(self, proc_ids: Sequence[str]) -> int:
        self.begun.set()
        assert self.gate.wait(60)
        self.told.append(("procs", list(proc_ids)))
        return len(proc_ids)

    def publish(self, host_ids: Sequence[str]) -> None:
        self.told.append(("hosts", list(host_ids)))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    found = threading.Event()
    yield found
    found.set()


Sending = Callable[[], tuple[AnnouncementSender, Announced, Counted]]


@pytest.fixture
def sending(gate: threading.Event) -> Iterator[Sending]:
    with ExitStack() as stack:

        def make() -> tuple[AnnouncementSender, Announced, Counted]:
            announced, counts = Announced(gate), Counted()
            made: Any = announced
            sender = AnnouncementSender(made, made, counts)
            stack.callback(sender.close)
            stack.callback(gate.set)
            return sender, announced, counts

        yield make


def test_what_waits_is_told_in_order_the_ledger_first(sending: Sending, gate: threading.Event) -> None:
    sender, announced, _ = sending()
    # given an announcement that Redis does not answer
    sender.put(["p1"], ["h1"])
    assert announced.begun.wait(60)
    # when others come meanwhile, and Redis goes on
    sender.put(["p2"], ["h2"])
    sender.put(["p3"], ["h2", "h3"])
    gate.set()
    # then hosts are told of after the releases that made room on them, and each once
    eventually(lambda: len(announced.told) == 4)
    assert announced.told == [
        ("procs", ["p1"]),
        ("hosts", ["h1"]),
        ("procs", ["p2", "p3"]),
        ("hosts", ["h2", "h3"]),
    ]


def test_what_does_not_fit_is_dropped_and_counted(sending: Sending, gate: threading.Event) -> None:
    sender, announced, counts = sending()
    sender.put(["p0"], [])
    assert announced.begun.wait(60)
    fitting = [f"p{number}" for number in range(1, MOST_WAITING)]
    sender.put(fitting, ["h1", "h2"])
    sender.put(["another"], ["h1"])
    assert counts["announcement_dropped"] == 2
    gate.set()
    eventually(lambda: announced.told[-1:] == [("hosts", ["h1"])])
    assert [proc for kind, ids in announced.told[1:] if kind == "procs" for proc in ids] == fitting


def test_a_process_that_stops_sends_what_it_has_if_redis_takes_it(sending: Sending, gate: threading.Event) -> None:
    sender, announced, _ = sending()
    gate.set()
    for number in range(100):
        sender.put([f"p{number}"], [f"h{number}"])
    assert sender.close() == 0
    told = [proc for kind, ids in announced.told if kind == "procs" for proc in ids]
    assert told == [f"p{number}" for number in range(100)]


def test_a_process_that_stops_waits_for_no_redis_that_never_answers(sending: Sending) -> None:
    sender, announced, _ = sending()
    sender.put(["p1"], ["h1"])
    assert announced.begun.wait(60)
    sender.put(["p2"], ["h2"])
    assert sender.close(0.01) == 2


def test_a_reap_does_not_wait_for_redis(
    view: FarmView, engine: Engine, killer: ScriptedKiller, sending: Sending, gate: threading.Event
) -> None:
    # given a run whose host has fallen silent, and a Redis that does not answer
    run = start(view)
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '1 hour'")
    sender, announced, counts = sending()
    # when it is reaped
    reap(Releaser(engine, Release(host_down_after=0.5), count=counts, sender=sender), killer)
    # then the frame waits again, and its release is still to be told
    assert view.states(run.frames)[0] == "WAITING"
    gate.set()
    eventually(lambda: ("procs", list(run.procs)) in announced.told)
