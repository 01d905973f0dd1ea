"""The report service over the wire: real gRPC, real database."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opencue_proto import report_pb2, report_pb2_grpc
from sqlalchemy import Engine, create_engine, text
from structlog.testing import capture_logs

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import SchedulerError
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.service import LARGEST_REPORT_BYTES, SERVICE_BOUNDS, ReportService, ServiceBounds
from opencue_sched.settings import Settings
from tests.kit.counted import Counted
from tests.kit.listening import nobody_hears
from tests.kit.polling import eventually
from tests.kit.relay import Relay
from tests.kit.reported_hosts import GB, render_host
from tests.kit.runs import FarmView, RecordedChanges, RecordedLedger, Running, ScriptedKiller, start


@contextmanager
def running_service(
    settings: Settings,
    engine: Engine,
    ledger: RecordedLedger,
    killer: ScriptedKiller | None = None,
    bounds: ServiceBounds = SERVICE_BOUNDS,
) -> Iterator[ReportService]:
    releaser = Releaser(engine, settings.release, ledger, RecordedChanges(), Counted())
    with serving(settings, releaser, killer, bounds) as service:
        yield service


@contextmanager
def serving(
    settings: Settings,
    releaser: Releaser,
    killer: ScriptedKiller | None = None,
    bounds: ServiceBounds = SERVICE_BOUNDS,
) -> Iterator[ReportService]:
    release = settings.release.model_copy(update={"port": 0, "workers": 2})
    service = ReportService(
        settings.model_copy(update={"release": release}),
        replace(releaser, settings=release),
        killer or ScriptedKiller(),
        bounds=bounds,
    )
    service.start()
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def service(settings: Settings, engine: Engine, ledger: RecordedLedger) -> Iterator[ReportService]:
    with running_service(settings, engine, ledger) as service:
        yield service


@contextmanager
def stub_of(service: ReportService) -> Iterator[Any]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{service.port}", options=options) as channel:
        yield report_pb2_grpc.RqdReportInterfaceStub(channel)


@pytest.fixture
def stub(service: ReportService) -> Iterator[Any]:
    with stub_of(service) as stub:
        yield stub


def completion(run: Running, index: int = 0, **fields: Any) -> report_pb2.RqdReportRunningFrameCompletionRequest:
    frame = report_pb2.RunningFrameInfo(
        resource_id=run.procs[index], frame_id=run.frames[index], max_rss=500_000, num_cores=200
    )
    report = report_pb2.FrameCompleteReport(host=render_host(name=run.host.name), frame=frame, run_time=5, **fields)
    return report_pb2.RqdReportRunningFrameCompletionRequest(frame_complete_report=report)


def status(name: str, **fields: Any) -> report_pb2.RqdReportStatusRequest:
    return report_pb2.RqdReportStatusRequest(host_report=report_pb2.HostReport(host=render_host(name=name, **fields)))


def test_a_completion_is_answered_once_it_is_committed(
    view: FarmView, stub: Any, service: ReportService, ledger: RecordedLedger
) -> None:
    run = start(view, LayerSpec(frames=1))
    stub.ReportRunningFrameCompletion(completion(run, exit_status=0), timeout=20)
    assert view.states(run.frames) == ["SUCCEEDED"]
    assert view.job_state(run.job) == "FINISHED"
    assert ledger.released == list(run.procs)
    assert service.count["completion_applied"] == 1
    view.assert_consistent()


def test_the_end_of_a_frame_whose_log_was_silent_for_too_long_is_no_end_to_try_again(
    settings: Settings, engine: Engine, view: FarmView
) -> None:
    # given a frame that has run for an hour, and whose log has shown one time for nine minutes of ten
    now = [5000.0]
    run = start(view, LayerSpec(frames=2, timeout_llu=10), running=2)
    view.run_sql("UPDATE frame SET ts_started = clock_timestamp() - interval '1 hour'")
    releaser = Releaser(engine, settings.release, None, None, Counted(), clock=lambda: now[0])
    with serving(settings, releaser) as service, stub_of(service) as stub:
        named = status(run.host.name)
        for proc, frame in zip(run.procs, run.frames, strict=True):
            named.host_report.frames.add(resource_id=proc, frame_id=frame, llu_time=7)
        stub.ReportStatus(named, timeout=20)
        eventually(lambda: service.count["host_report"] == 1)
        # when it fails then, and another a minute later
        for index in range(2):
            now[0] += 540 - 480 * index
            ended = completion(run, index, exit_status=1)
            ended.frame_complete_report.frame.llu_time = 7
            stub.ReportRunningFrameCompletion(ended, timeout=20)
    # then the first is tried again, and the other is not
    assert view.states(run.frames) == ["WAITING", "DEAD"]


CALLS = ("ReportRqdStartup", "ReportStatus", "ReportRunningFrameCompletion")


def test_messages_that_cannot_be_read_are_counted_and_told_once_a_minute_and_peer(
    settings: Settings, engine: Engine, view: FarmView, caplog: pytest.LogCaptureFixture
) -> None:
    # given something at an address that sends what is no message, on two connections
    now = [5000.0]
    releaser = Releaser(engine, settings.release, None, None, Counted(), clock=lambda: now[0])
    with serving(settings, releaser) as service, capture_logs() as logs:
        for minutes in (0, 1):
            now[0] += minutes * 60
            for _ in range(2):
                with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
                    for call in CALLS:
                        with pytest.raises(grpc.RpcError) as refused:
                            channel.unary_unary(f"/report.RqdReportInterface/{call}")(b"\xff\xff", timeout=20)
                        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        # then each is counted, two lines name the peer and what it called, and no traceback stands anywhere
        assert service.count["report_unreadable"] == 12
        told = [(line["event"], line["peer"], line["call"]) for line in logs if line["log_level"] == "warning"]
        assert told == [("report_unreadable", "127.0.0.1", f"/report.RqdReportInterface/{CALLS[0]}")] * 2
        assert "Traceback" not in caplog.text
        # and a message that can be read is
        with view.farm() as farm:
            farm.alloc()
        with stub_of(service) as stub:
            stub.ReportStatus(status("readable"), timeout=20)
            eventually(lambda: service.count["host_report"] == 1)


def startup(name: str) -> report_pb2.RqdReportRqdStartupRequest:
    return report_pb2.RqdReportRqdStartupRequest(boot_report=report_pb2.BootReport(host=render_host(name=name)))


def test_a_boot_report_is_kept_while_the_database_is_away(
    engine: Engine, view: FarmView, stub: Any, service: ReportService
) -> None:
    with view.farm() as farm:
        farm.alloc()
    beside = engine.execution_options(isolation_level="AUTOCOMMIT")
    with beside.connect() as connection, nobody_hears(connection):
        stub.ReportRqdStartup(startup("node1"), timeout=20)
        eventually(lambda: service.count["report_failed"] >= 1)
        assert service.count["boot_report"] == 0
    eventually(lambda: service.count["boot_report"] == 1)
    assert [row.str_name for row in view.rows("SELECT str_name FROM host")] == ["node1"]


def test_a_boot_report_that_the_database_refuses_is_not_kept(view: FarmView, stub: Any, service: ReportService) -> None:
    # given a database that takes no host of one name
    with view.farm() as farm:
        farm.alloc()
    view.run_sql("ALTER TABLE host ADD CONSTRAINT refused CHECK (str_name <> 'node1')")
    # when that host boots, and reports once the database would take it
    with capture_logs() as said:
        stub.ReportRqdStartup(startup("node1"), timeout=20)
        eventually(lambda: service.count["report_failed"] == 1)
    view.run_sql("ALTER TABLE host DROP CONSTRAINT refused")
    stub.ReportStatus(status("node1"), timeout=20)
    eventually(lambda: service.count["host_report"] == 1)
    # then the refusal was said once, and the report of the boot is gone
    assert [(line["event"], line["host"]) for line in said] == [("host_report_failed", "node1")]
    assert (service.count["report_failed"], service.count["boot_report"]) == (1, 0)


def test_many_completions_at_once(view: FarmView, stub: Any, service: ReportService) -> None:
    run = start(view, LayerSpec(frames=40), running=40, cores=0.25, memory_gb=0.5)
    calls = [stub.ReportRunningFrameCompletion.future(completion(run, index), timeout=30) for index in range(40)]
    for call in calls:
        call.result()
    assert service.count["completion_applied"] == 40
    assert view.job_state(run.job) == "FINISHED"
    view.assert_consistent()


def test_two_services_side_by_side(
    view: FarmView, settings: Settings, engine: Engine, service: ReportService, stub: Any, ledger: RecordedLedger
) -> None:
    # given two services, and an RQD that reports each end to both
    run = start(view, LayerSpec(frames=10), running=10, cores=1)
    with running_service(settings, engine, ledger) as second, stub_of(second) as other:
        calls = [
            each.ReportRunningFrameCompletion.future(completion(run, index), timeout=30)
            for index in range(10)
            for each in (stub, other)
        ]
        for call in calls:
            call.result()
        applied = service.count["completion_applied"] + second.count["completion_applied"]
        stale = service.count["completion_stale"] + second.count["completion_stale"]
    assert (applied, stale) == (10, 10)
    assert sorted(ledger.released) == sorted(run.procs)
    view.assert_consistent()


def test_hosts_spread_over_services_behind_one_address_again(
    settings: Settings, engine: Engine, ledger: RecordedLedger, view: FarmView
) -> None:
    # given two services behind one address, and an RQD that keeps one channel for good
    bounds = ServiceBounds(connection_age_seconds=1.0)
    run = start(view)
    with (
        running_service(settings, engine, ledger, bounds=bounds) as first,
        running_service(settings, engine, ledger, bounds=bounds) as second,
        Relay(*(f"127.0.0.1:{service.port}" for service in (first, second))) as relay,
        grpc.insecure_channel(relay.address) as channel,
    ):
        stub = report_pb2_grpc.RqdReportInterfaceStub(channel)

        def reported() -> bool:
            stub.ReportStatus(status(run.host.name), timeout=20)  # none of them fails
            return bool(first.count["host_report"] and second.count["host_report"])

        # when its connection has reached its age, then it goes to the other service
        eventually(reported)


def test_a_completion_that_waits_outlives_the_age_of_its_connection(
    settings: Settings, engine: Engine, ledger: RecordedLedger, view: FarmView
) -> None:
    bounds = ServiceBounds(connection_age_seconds=1.0)
    run = start(view)
    with (
        running_service(settings, engine, ledger, bounds=bounds) as service,
        Relay(f"127.0.0.1:{service.port}") as relay,
        grpc.insecure_channel(relay.address) as channel,
        engine.connect() as connection,
    ):
        stub = report_pb2_grpc.RqdReportInterfaceStub(channel)
        # given a completion that waits for a frame which somebody has locked
        connection.execute(text("SELECT pk_frame FROM frame FOR UPDATE"))
        waiting = stub.ReportRunningFrameCompletion.future(completion(run), timeout=60)
        # when its connection has reached its age, and others have been opened
        eventually(lambda: stub.ReportStatus(status(run.host.name), timeout=20) is not None and relay.opened > 1)
        assert not waiting.done()
        connection.rollback()
        # then it is answered
        waiting.result()
    assert view.procs() == []


def begin_call(port: int, path: str) -> socket.socket:
    """A connection on which a call has begun, in HTTP/2, and nothing of its message has come. It answers nothing."""
    texts = [
        (b"\x04", path.encode()),
        (b"\x01", b"farm"),
        (b"\x0f\x10", b"application/grpc"),
        (b"\x00\x02te", b"trailers"),
    ]
    headers = b"\x83\x86" + b"".join(name + bytes([len(value)]) + value for name, value in texts)
    frames = [(4, 0, 0, b""), (1, 4, 1, headers)]  # SETTINGS; HEADERS, the last, of stream 1
    opened = socket.create_connection(("127.0.0.1", port))
    opened.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + b"".join(
            len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
            for kind, flags, stream, body in frames
        )
    )
    acknowledged = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"  # SETTINGS, read by the server with all behind them
    said = b""
    while acknowledged not in said:
        said += opened.recv(4096)
    return opened


def test_hosts_that_vanish_within_their_reports_keep_no_other_waiting(
    settings: Settings, engine: Engine, ledger: RecordedLedger, view: FarmView
) -> None:
    bounds = ServiceBounds(vanished_peer_seconds=0.5)
    with view.farm() as farm:
        farm.alloc()
    with (
        running_service(settings, engine, ledger, bounds=bounds) as service,
        contextlib.ExitStack() as vanished,
        stub_of(service) as stub,
    ):
        # given more hosts than threads of which nothing comes after the beginning of a report
        for call in ("ReportStatus", "ReportRunningFrameCompletion"):
            for _ in range(8):
                vanished.enter_context(begin_call(service.port, f"/report.RqdReportInterface/{call}"))
        # when another one reports, then it is answered, and its reports are handled
        stub.ReportStatus(status("good"), timeout=30)
        eventually(lambda: service.count["host_report"] == 1)
        nobody = report_pb2.RunningFrameInfo(resource_id="p", frame_id="f")
        ended = report_pb2.FrameCompleteReport(frame=nobody, host=render_host(name="good"))
        request = report_pb2.RqdReportRunningFrameCompletionRequest(frame_complete_report=ended)
        stub.ReportRunningFrameCompletion(request, timeout=30)
        assert service.count["completion_unknown"] == 1


def test_a_completion_that_waits_for_too_long_is_refused_and_kept(
    settings: Settings, engine: Engine, ledger: RecordedLedger, view: FarmView
) -> None:
    bounds = ServiceBounds(answer_seconds=0.5)
    run = start(view)
    with (
        running_service(settings, engine, ledger, bounds=bounds) as service,
        stub_of(service) as stub,
        engine.connect() as somebody,
    ):
        # given a frame that somebody has locked
        somebody.execute(text("SELECT pk_frame FROM frame FOR UPDATE"))
        # when its end waits for longer than an answer may take
        with pytest.raises(grpc.RpcError) as refused:
            stub.ReportRunningFrameCompletion(completion(run), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert "PostgreSQL" in refused.value.details()  # type: ignore[attr-defined]
        assert view.states(run.frames) == ["RUNNING"]
        # then it is applied once the frame is free
        somebody.rollback()
        eventually(lambda: view.states(run.frames) == ["SUCCEEDED"])


def test_of_too_many_completions_those_that_come_last_are_kept_and_not_answered(
    settings: Settings, engine: Engine, ledger: RecordedLedger, view: FarmView
) -> None:
    bounds = ServiceBounds(most_calls=2)
    run = start(view, LayerSpec(frames=3), running=3, cores=0.5, memory_gb=0.5)
    with (
        running_service(settings, engine, ledger, bounds=bounds) as service,
        stub_of(service) as stub,
        engine.connect() as somebody,
    ):
        # given as many completions as may wait, of frames that somebody has locked
        somebody.execute(text("SELECT pk_frame FROM frame FOR UPDATE"))
        calls = [stub.ReportRunningFrameCompletion.future(completion(run, index), timeout=60) for index in range(2)]
        eventually(lambda: service.completions.waiting == 2)
        # when another one comes, then its call does not wait
        with pytest.raises(grpc.RpcError) as refused:
            stub.ReportRunningFrameCompletion(completion(run, 2), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        # and it is applied like the others
        somebody.rollback()
        for call in calls:
            call.result()
        eventually(lambda: view.states(run.frames) == ["SUCCEEDED"] * 3)


def test_a_completion_whose_caller_has_gone_is_applied_and_harms_no_other(
    view: FarmView, stub: Any, service: ReportService
) -> None:
    # given completions that wait for frames which somebody has locked, together
    run = start(view, LayerSpec(frames=3), running=3, cores=0.5, memory_gb=0.5)
    with view.engine.connect() as somebody:
        somebody.execute(text("SELECT pk_frame FROM frame FOR UPDATE"))
        calls = [stub.ReportRunningFrameCompletion.future(completion(run, index), timeout=60) for index in range(2)]
        eventually(lambda: service.completions.waiting == 2)
        view.wait_for_waiters(1)
        # when one RQD goes away before it is answered
        calls[0].cancel()
        somebody.rollback()
    # then both are applied, the other is answered, and so is the next
    calls[1].result()
    stub.ReportRunningFrameCompletion(completion(run, 2), timeout=20)
    assert service.count["completion_applied"] == 3
    assert view.states(run.frames) == ["SUCCEEDED"] * 3


@pytest.mark.parametrize("field", ["resource_id", "frame_id"])
@pytest.mark.parametrize("value", ["", "x" * 37, "a\0b"])
def test_a_completion_without_ids_is_refused_by_field(stub: Any, field: str, value: str) -> None:
    ids = {"resource_id": "p", "frame_id": "f", field: value}
    host = report_pb2.RenderHost(name="node7")
    report = report_pb2.FrameCompleteReport(frame=report_pb2.RunningFrameInfo(**ids), host=host)
    with capture_logs() as said, pytest.raises(grpc.RpcError) as error:
        stub.ReportRunningFrameCompletion(
            report_pb2.RqdReportRunningFrameCompletionRequest(frame_complete_report=report), timeout=10
        )
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.value.details()
    assert [(line["host"], field in line["reason"]) for line in said if line["event"] == "report_refused"] == [
        ("node7", True)
    ]


def test_a_completion_with_more_memory_than_any_host_has_is_refused(view: FarmView, stub: Any) -> None:
    run = start(view)
    request = completion(run)
    request.frame_complete_report.frame.max_rss = 2**62
    with pytest.raises(grpc.RpcError, match=r"frame\.max_rss") as error:
        stub.ReportRunningFrameCompletion(request, timeout=20)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert view.states(run.frames) == ["RUNNING"]


def test_a_completion_that_the_database_refuses_is_answered_with_what_is_wrong_and_where(
    view: FarmView, stub: Any
) -> None:
    # given a frame whose row the database does not let end
    run = start(view)
    view.run_sql("ALTER TABLE frame ADD CONSTRAINT endless CHECK (str_state = 'RUNNING') NOT VALID")
    # when its RQD tells of its end
    with pytest.raises(grpc.RpcError) as refused:
        stub.ReportRunningFrameCompletion(completion(run), timeout=20)
    # then the answer names constraint, frame and host, and nothing of what we send to the database
    answer: Any = refused.value
    assert answer.code() is grpc.StatusCode.INTERNAL
    for name in ("endless", run.frames[0], run.host.name):
        assert name in answer.details()
    assert "UPDATE" not in answer.details()
    assert len(answer.details()) < 500


@pytest.mark.parametrize(
    "host",
    [{"name": "a\0b"}, {"name": "n" * 1_000_000}, {"facility": "\0"}],
    ids=["NUL in the name", "long name", "NUL in the facility"],
)
def test_nonsense_of_a_host_is_said_once_and_never_as_a_traceback(
    view: FarmView, stub: Any, service: ReportService, host: dict[str, Any]
) -> None:
    # given a host that reports nonsense again and again
    with view.farm() as farm:
        farm.alloc()
    with capture_logs() as said:
        for sent in range(3):
            with contextlib.suppress(grpc.RpcError):
                stub.ReportStatus(status(**{"name": "node7", **host}), timeout=10)
            eventually(lambda sent=sent: service.count["report_refused"] == sent + 1)
    # then it is said once, briefly, and no row is written
    assert [line["event"] for line in said] == ["report_refused"]
    assert len(str(said[0])) < 1_000
    assert view.rows("SELECT str_name FROM host") == []


def test_hosts_boot_and_report(view: FarmView, stub: Any, service: ReportService) -> None:
    with view.farm() as farm:
        farm.alloc()
    boot = report_pb2.BootReport(host=render_host(facility="local"))
    stub.ReportRqdStartup(report_pb2.RqdReportRqdStartupRequest(boot_report=boot), timeout=10)
    eventually(lambda: service.count["boot_report"] == 1)
    stub.ReportStatus(status("node1.studio.example", free_mem=GB), timeout=10)
    eventually(lambda: service.count["host_report"] == 1)
    assert view.one("SELECT int_mem_free FROM host_stat").int_mem_free == GB


def test_a_bad_report_harms_no_other(view: FarmView, stub: Any, service: ReportService) -> None:
    # given hosts that report nonsense of every kind
    with view.farm() as farm:
        farm.alloc()
    for name, fields in (("a", {"num_procs": 0}), ("b", {"total_mem": -1}), ("d", {"free_mem": -7})):
        stub.ReportStatus(status(name, **fields), timeout=10)
    with pytest.raises(grpc.RpcError) as unnamed:
        stub.ReportStatus(status(""), timeout=10)
    with pytest.raises(grpc.RpcError, match=r"\b60\b.*\b45\b"):
        stub.ReportStatus(status("c" * 60), timeout=10)
    with pytest.raises(grpc.RpcError) as huge:
        stub.ReportStatus(status("e", attributes={"x": "y" * (LARGEST_REPORT_BYTES + 1)}), timeout=10)

    # when a good one comes
    stub.ReportStatus(status("good"), timeout=10)

    # then it alone is there, and each of the others was refused and counted
    eventually(lambda: service.count["host_report"] == 1 and service.count["report_refused"] == 5)
    assert [row.str_name for row in view.rows("SELECT str_name FROM host")] == ["good"]
    assert unnamed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert huge.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_no_report_waits_for_an_rqd_that_does_not_answer(
    view: FarmView, settings: Settings, engine: Engine, ledger: RecordedLedger
) -> None:
    # given more hosts than threads, each with 500 processes nobody owns and an RQD that never answers a kill
    with view.farm() as farm:
        farm.alloc()
    over = threading.Event()

    class Hanging(ScriptedKiller):
        def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
            super().ask(host_name, frame_id, reason)
            over.wait(60)
            return False

    killer = Hanging()
    with running_service(settings, engine, ledger, killer) as service, stub_of(service) as stub:
        try:
            for number in range(8):
                request = status(f"bad{number}")
                names = (f"{number}-{frame}" for frame in range(500))
                request.host_report.frames.extend(report_pb2.RunningFrameInfo(frame_id=name) for name in names)
                stub.ReportStatus(request, timeout=10)
            # when another host reports, again and again
            for sent in range(3):
                stub.ReportStatus(status("good"), timeout=10)
                # then each report is handled
                eventually(lambda sent=sent: service.count["host_report"] >= 9 + sent)
            assert len(killer.asked) <= 8
        finally:
            over.set()


def test_no_status_report_waits_for_completions_that_wait(view: FarmView, stub: Any, service: ReportService) -> None:
    # given more completions than are answered at once, of frames that somebody has locked
    run = start(view, LayerSpec(frames=80), running=80, cores=0.1, memory_gb=0.1)
    with view.engine.connect() as somebody:
        somebody.execute(text("SELECT pk_frame FROM frame FOR UPDATE"))
        calls = [stub.ReportRunningFrameCompletion.future(completion(run, index), timeout=60) for index in range(80)]
        view.wait_for_waiters(1)
        # when a host reports, then it is answered, and its report is handled
        stub.ReportStatus(status(run.host.name), timeout=10)
        eventually(lambda: service.count["host_report"] == 1)
        assert not any(call.done() for call in calls)
        somebody.rollback()
    for call in calls:
        call.result()


def test_a_completion_survives_the_absence_of_the_database(
    view: FarmView, stub: Any, service: ReportService, engine: Engine, postgres_server: Any
) -> None:
    # given a database that lets nobody in
    run = start(view)
    name = engine.url.database
    admin = create_engine(postgres_server.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'))
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :n"), {"n": name}
        )

    # when a frame ends meanwhile
    call = stub.ReportRunningFrameCompletion.future(completion(run), timeout=60)
    eventually(lambda: service.count["completion_retry"] >= 2)
    assert service.completions.waiting == 1
    with admin.connect() as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'))
    admin.dispose()

    # then it is applied once the database is back
    call.result()
    assert view.states(run.frames) == ["SUCCEEDED"]
    assert service.completions.waiting == 0


def test_a_port_that_is_taken_is_a_clear_error(settings: Settings, engine: Engine, service: ReportService) -> None:
    release = settings.release.model_copy(update={"port": service.port})
    second = ReportService(
        settings.model_copy(update={"release": release}), Releaser(engine, release), ScriptedKiller()
    )
    with pytest.raises(SchedulerError, match=f"127.0.0.1:{service.port}.*OPENCUE_SCHED_RELEASE__HOST"):
        second.start()


def test_stopping_applies_what_was_accepted(
    view: FarmView, settings: Settings, engine: Engine, ledger: RecordedLedger
) -> None:
    run = start(view, LayerSpec(frames=20), running=20, cores=0.5, memory_gb=0.5)
    with running_service(settings, engine, ledger) as service, stub_of(service) as stub:
        calls = [stub.ReportRunningFrameCompletion.future(completion(run, index), timeout=30) for index in range(20)]
        eventually(lambda: service.count["completion_applied"] > 0)
        assert service.stop() == 0
        answered = sum(call.exception() is None for call in calls)
    succeeded = view.states(run.frames).count("SUCCEEDED")
    assert succeeded >= answered > 0
    view.assert_consistent()
