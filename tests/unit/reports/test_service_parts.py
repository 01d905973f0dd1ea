"""The report service's parts that need neither a port nor a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from opencue_proto import report_pb2
from sqlalchemy import Engine
from structlog.testing import capture_logs

from opencue_sched.reports import service as service_module
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.reports.service import ReportService, read_completion
from opencue_sched.rqd.kill import RqdKiller
from opencue_sched.settings import Release, Settings
from tests.kit.counted import Counted


@pytest.fixture
def service() -> Iterator[ReportService]:
    settings = Settings(release=Release(satisfy_only_on_frame_success=False))
    releaser = Releaser(cast(Engine, None), settings.release, count=Counted())
    made = ReportService(settings, releaser, cast(RqdKiller, None))
    yield made
    made.inbox.close()


def test_a_completion_is_read_field_by_field() -> None:
    frame = report_pb2.RunningFrameInfo(resource_id="p1", frame_id="f1", job_name="job", frame_name="0001-l", max_rss=5)
    host = report_pb2.RenderHost(name="node1", nimby_locked=True)
    report = report_pb2.FrameCompleteReport(frame=frame, host=host, exit_status=1, exit_signal=9)
    expected = CompletedFrame("p1", "f1", "node1", 1, 9, 5, 70.0, 1000.0, nimby_locked=True, name="job/0001-l")
    assert read_completion(report, silent_seconds=70.0, received_at=1000.0) == expected
    frame.max_rss = -1
    report = report_pb2.FrameCompleteReport(frame=frame)
    assert read_completion(report, silent_seconds=0.0, received_at=0.0).max_rss_kb == 0
    report = report_pb2.FrameCompleteReport(
        frame=report_pb2.RunningFrameInfo(job_name="j" * 7_000_000), host=report_pb2.RenderHost(name="n" * 7_000_000)
    )
    read = read_completion(report, silent_seconds=0.0, received_at=0.0)
    assert (len(read.host_name), len(read.name)) == (128, 300)


def test_a_refusal_is_said_every_ten_minutes(service: ReportService, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: now[0])
    with capture_logs() as said:
        for host, reason in (("a", "no cores"), ("a", "no cores"), ("a", "no memory"), ("b", "no cores")):
            service.log_refusal(host, reason)
        now[0] += 601.0
        service.log_refusal("a", "no cores")
    told = [(line["host"], line["reason"]) for line in said]
    assert told == [("a", "no cores"), ("a", "no memory"), ("b", "no cores"), ("a", "no cores")]
