"""An RQD that takes its time to say what it runs."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from opencue_proto import rqd_pb2_grpc

from tests.kit.served_rqd import rqd_before

_LONGEST_SILENCE_SECONDS = 60.0


class SlowRqd(rqd_pb2_grpc.RqdInterfaceServicer):  # type: ignore[misc]
    """Stands before another RQD, and says nothing to a caller who does not give it ``needs_seconds``. It answers the
    first ``answers`` calls, or all."""

    def __init__(self, rqd: rqd_pb2_grpc.RqdInterfaceStub, needs_seconds: float, answers: int | None) -> None:
        self._rqd = rqd
        self._needs_seconds = needs_seconds
        self._answers = answers
        self._lock = threading.Lock()

    def ReportStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:
            silent = self._answers == 0 or context.time_remaining() < self._needs_seconds
            if self._answers:
                self._answers -= 1
        if silent:
            over = threading.Event()
            if context.add_callback(over.set):
                over.wait(_LONGEST_SILENCE_SECONDS)
        return self._rqd.ReportStatus(request)


def slow_rqd(address: str, *, needs_seconds: float = 0.0, answers: int | None = None) -> AbstractContextManager[str]:
    """The address of such an RQD before that of another one."""
    return rqd_before(address, lambda rqd: SlowRqd(rqd, needs_seconds, answers))
