"""Launches of frames that no farm has booked."""

from __future__ import annotations

import uuid
from typing import Any

from opencue_proto import rqd_pb2

from opencue_sched.rqd.launch import LaunchRequest


def request(host: str, *, cores: int = 1, command: str = "true", **fields: Any) -> LaunchRequest:
    """A launch of a new frame for a new proc."""
    values = {"frame_id": str(uuid.uuid4()), "resource_id": str(uuid.uuid4()), **fields}
    return LaunchRequest(host, rqd_pb2.RunFrame(num_cores=cores * 100, command=command, **values))


def for_another_proc(original: LaunchRequest) -> LaunchRequest:
    """The same frame, booked again."""
    frame = rqd_pb2.RunFrame()
    frame.CopyFrom(original.run_frame)
    frame.resource_id = str(uuid.uuid4())
    return LaunchRequest(original.host_name, frame)
