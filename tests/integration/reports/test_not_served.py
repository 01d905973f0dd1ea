"""What pycue and cueadmin get from the report service for everything that only a Cuebot serves."""

from __future__ import annotations

import importlib
import pkgutil

import grpc
import opencue_proto
import pytest
from opencue_proto import cue_pb2, cue_pb2_grpc, job_pb2, job_pb2_grpc, show_pb2, show_pb2_grpc

from opencue_sched.reports.service import ReportService
from tests.integration.reports.test_service import service
from tests.kit.wording import lacks

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
            service_name, _, method = call[1:].partition("/")
            assert not lacks(text, f"{service_name}.{method}", "docs/cueadmin.md"), call


def test_a_request_with_something_in_it_gets_the_remedy(service: ReportService) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        with pytest.raises(grpc.RpcError, match=r"job\.JobInterface\.Kill .*opencue-sched --help"):
            job_pb2_grpc.JobInterfaceStub(channel).Kill(job_pb2.JobKillRequest(username="alice"), timeout=10)
        with pytest.raises(grpc.RpcError, match=r"show\.ShowInterface\.FindShow "):
            show_pb2_grpc.ShowInterfaceStub(channel).FindShow(show_pb2.ShowFindShowRequest(name="demo"), timeout=10)


def test_pycue_finds_somebody_there_and_so_comes_to_the_refusals(service: ReportService) -> None:
    """Before anything else it asks for a Cuebot's figures; of their refusal it tells nobody the text."""
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        stub = cue_pb2_grpc.CueInterfaceStub(channel)
        answer = stub.GetSystemStats(cue_pb2.CueGetSystemStatsRequest(), timeout=10)
    assert answer == cue_pb2.CueGetSystemStatsResponse()
