"""What the status of a LaunchFrame call tells, and what a host report tells about a frame."""

from __future__ import annotations

import grpc
import pytest
from opencue_proto import report_pb2

from opencue_sched.rqd.kill import RunningFrameRef, Whereabouts, frame_seen
from opencue_sched.rqd.launch import Answer, classify

CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "answer"),
    [
        (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", Answer.NOT_SENT),
        (CODE.UNAVAILABLE, "errors resolving render1:8444: Domain name not found", Answer.NOT_SENT),
        (CODE.UNAVAILABLE, "DNS resolution failed for render1:8444", Answer.NOT_SENT),
        (CODE.UNAVAILABLE, "Socket closed", Answer.LOST),
        (CODE.UNAVAILABLE, "", Answer.LOST),
        (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", Answer.LOST),
        (CODE.CANCELLED, "Channel closed!", Answer.LOST),
        (CODE.UNAUTHENTICATED, "", Answer.REFUSED),
        (CODE.PERMISSION_DENIED, "", Answer.REFUSED),
        (CODE.UNKNOWN, "Exception calling application: Not launching, insufficient idle cores", Answer.REFUSED),
        (CODE.ABORTED, "Nimby Locked", Answer.REFUSED),
        (
            CODE.UNKNOWN,
            "Exception calling application: Not launching, frame is already running on this proc F",
            Answer.DUPLICATE,
        ),
        (CODE.INVALID_ARGUMENT, "Not lauching, frame is already running on this host F", Answer.DUPLICATE),
        (CODE.ALREADY_EXISTS, "", Answer.DUPLICATE),
        (CODE.UNKNOWN, "h2 protocol error", Answer.UNCLEAR),
        (CODE.ABORTED, "", Answer.UNCLEAR),
        (CODE.INTERNAL, "Failed to serialize response!", Answer.UNCLEAR),
        (CODE.DATA_LOSS, "", Answer.UNCLEAR),
        (CODE.INVALID_ARGUMENT, "num_cores must be positive", Answer.REFUSED_FOR_GOOD),
        (CODE.FAILED_PRECONDITION, "host HardwareState is not Up", Answer.REFUSED_FOR_GOOD),
        (CODE.UNIMPLEMENTED, "", Answer.REFUSED_FOR_GOOD),
        (CODE.RESOURCE_EXHAUSTED, "", Answer.REFUSED_FOR_GOOD),
    ],
)
def test_a_failed_call_is_read_as(code: grpc.StatusCode, details: str, answer: Answer) -> None:
    assert classify(code, details) is answer


def test_every_code_is_read_and_only_a_lost_call_may_start_later() -> None:
    may_start_later = {code for code in CODE if code is not CODE.OK and classify(code, "") is Answer.LOST}
    assert may_start_later == {CODE.UNAVAILABLE, CODE.DEADLINE_EXCEEDED, CODE.CANCELLED}


@pytest.mark.parametrize(
    ("listed", "booked", "place"),
    [
        ([("F", "P", 200)], 200, Whereabouts.OURS),
        ([("F", "other", 200)], 200, Whereabouts.ANOTHERS),
        ([("G", "Q", 100)], 100, Whereabouts.ABSENT),
        ([], 0, Whereabouts.ABSENT),
        ([("G", "Q", 100)], 300, Whereabouts.SETTING_UP),
        ([("G", "Q", 100)], 200, Whereabouts.ABSENT),
        ([("G", "Q", 100)], 0, Whereabouts.ABSENT),
    ],
)
def test_a_host_report_tells_where_a_frame_is(
    listed: list[tuple[str, str, int]], booked: int, place: Whereabouts
) -> None:
    report = report_pb2.HostReport(
        frames=[
            report_pb2.RunningFrameInfo(frame_id=frame, resource_id=proc, num_cores=cores)
            for frame, proc, cores in listed
        ],
        core_info=report_pb2.CoreDetail(booked_cores=booked),
    )
    assert frame_seen(report, RunningFrameRef("render1", "F", "P", 200)).place is place
