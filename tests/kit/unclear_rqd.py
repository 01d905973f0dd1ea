"""An RQD whose answers to launches leave open whether the frame runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import grpc
from opencue_proto import rqd_pb2_grpc

from tests.kit.served_rqd import rqd_before


class UnclearRqd(rqd_pb2_grpc.RqdInterfaceServicer):  # type: ignore[misc]
    """Stands before another RQD, and ends one launch for each of ``starts`` with ``code``: such a launch is passed on
    where that is true, and kept where not. All other calls are passed on and answered."""

    def __init__(self, rqd: rqd_pb2_grpc.RqdInterfaceStub, code: grpc.StatusCode, starts: Sequence[bool]) -> None:
        self._rqd = rqd
        self._code = code
        self._starts = list(starts)
        self._lock = threading.Lock()

    def ReportStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._rqd.ReportStatus(request)

    def LaunchFrame(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:  # two launches may come at once
            starts = self._starts.pop(0) if self._starts else None
        if starts is None:
            return self._rqd.LaunchFrame(request)
        if starts:
            self._rqd.LaunchFrame(request)
        return context.abort(self._code, "no words of RQD's")


def unclear_rqd(address: str, code: grpc.StatusCode, starts: Sequence[bool]) -> AbstractContextManager[str]:
    """The address of such an RQD before that of another one."""
    return rqd_before(address, lambda rqd: UnclearRqd(rqd, code, starts))
