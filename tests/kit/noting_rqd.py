"""An RQD that is told to lock, reboot and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opencue_proto import rqd_pb2, rqd_pb2_grpc

from tests.kit.served_rqd import served_rqd


class NotingRqd(rqd_pb2_grpc.RqdInterfaceServicer):  # type: ignore[misc]
    """An RQD that notes what it is told, and refuses when a user is logged in."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.user_logged_in = False
        self.name = "render01"

    def ReportStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = rqd_pb2.RqdStaticReportStatusResponse()
        answer.host_report.host.name = self.name
        return answer

    def _note(self, name: str, context: Any, answer: Any) -> Any:
        self.told.append(name)
        if self.user_logged_in:
            context.abort(grpc.StatusCode.UNKNOWN, "not supported when a user is logged in")
        return answer

    def LockAll(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._note("LockAll", context, rqd_pb2.RqdStaticLockAllResponse())

    def UnlockAll(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._note("UnlockAll", context, rqd_pb2.RqdStaticUnlockAllResponse())

    def RebootIdle(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._note("RebootIdle", context, rqd_pb2.RqdStaticRebootIdleResponse())

    def RebootNow(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._note("RebootNow", context, rqd_pb2.RqdStaticRebootNowResponse())

    def ShutdownRqdIdle(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._note("ShutdownRqdIdle", context, rqd_pb2.RqdStaticShutdownIdleResponse())

    def ShutdownRqdNow(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("ShutdownRqdNow", context, None)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # as of a process that has ended


@contextmanager
def noting_rqd() -> Iterator[tuple[NotingRqd, str]]:
    """The RQD of render01, and its address."""
    rqd = NotingRqd()
    with served_rqd(rqd) as address:
        yield rqd, address
