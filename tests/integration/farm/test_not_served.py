"""What pycue and cueadmin get from the report service for everything that only a Cuebot serves."""

from __future__ import annotations

import importlib
import pkgutil
import re

import click
import grpc
import opencue_proto
import pytest
from opencue_proto import cue_pb2, cue_pb2_grpc, job_pb2, job_pb2_grpc, show_pb2, show_pb2_grpc

from opencue_sched.cli import cli
from opencue_sched.farm.service import ReportService, refusal
from tests.integration.farm.test_service import service

__all__ = ["service"]  # the fixture
PYCUES_GREETING = "/cue.CueInterface/GetSystemStats"
SERVED = {
    PYCUES_GREETING,
    "/report.RqdReportInterface/ReportRqdStartup",
    "/report.RqdReportInterface/ReportRunningFrameCompletion",
    "/report.RqdReportInterface/ReportStatus",
}


def calls_of_opencue() -> list[str]:
    """Every call of every service in OpenCue's protocol, as gRPC names it."""
    modules = [
        importlib.import_module(f"opencue_proto.{module.name}")
        for module in pkgutil.iter_modules(opencue_proto.__path__)
        if module.name.endswith("_pb2")
    ]
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{call.name}" for service in services for call in service.methods]


def test_every_call_that_is_not_served_says_so_with_a_remedy(service: ReportService) -> None:
    calls = [call for call in calls_of_opencue() if call not in SERVED]
    assert len(calls) > 250
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(call)(b"", timeout=10)
            answer = refused.value
            assert answer.code() == grpc.StatusCode.UNIMPLEMENTED, call  # type: ignore[attr-defined]
            text = answer.details()  # type: ignore[attr-defined]
            assert text == refusal(call), call
            assert re.search(r"run: opencue-sched \w|needs a Cuebot$|served by the RQD of each host", text), call


def test_a_request_with_something_in_it_gets_the_command_for_such_things(service: ReportService) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        with pytest.raises(grpc.RpcError, match="run: opencue-sched job --help"):
            job_pb2_grpc.JobInterfaceStub(channel).Kill(job_pb2.JobKillRequest(username="alice"), timeout=10)
        with pytest.raises(grpc.RpcError, match="run: opencue-sched show --help"):
            show_pb2_grpc.ShowInterfaceStub(channel).FindShow(show_pb2.ShowFindShowRequest(name="demo"), timeout=10)


def test_pycue_finds_somebody_there_and_so_comes_to_the_refusals(service: ReportService) -> None:
    """Before anything else it asks for a Cuebot's figures; of their refusal it tells nobody the text."""
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        stub = cue_pb2_grpc.CueInterfaceStub(channel)
        answer = stub.GetSystemStats(cue_pb2.CueGetSystemStatsRequest(), timeout=10)
    assert answer == cue_pb2.CueGetSystemStatsResponse()


def test_a_strangers_service_is_none_of_ours(service: ReportService) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    assert "opencue-sched" not in refused.value.details()  # type: ignore[attr-defined]


def remedies() -> list[str]:
    found = (re.search(r"run: opencue-sched ([^(]+)", refusal(call) or "") for call in calls_of_opencue())
    return sorted({match[1].strip() for match in found if match})


@pytest.mark.parametrize("remedy", remedies())
def test_a_remedy_is_a_command_that_there_is(remedy: str) -> None:
    *words, option = remedy.split()
    command: click.Command | None = cli
    for word in words:
        assert isinstance(command, click.Group), remedy
        _, command, _ = command.resolve_command(click.Context(command), [word])
    assert command is not None, remedy
    assert option == "--help"
