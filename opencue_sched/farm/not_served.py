"""What the report service answers to calls that only a Cuebot serves.

Where there is no Cuebot, ``cueadmin``, CueGUI and everything else on pycue may still be pointed at the report service's
port: it is the port they know. Each call of an OpenCue service that is not served ends as UNIMPLEMENTED, with the
command of ours that lists and changes the same things where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from opencue_proto import cue_pb2

_NEEDS_CUEBOT = ""
_COMMANDS: Mapping[str, str] = {
    "comment.CommentInterface": _NEEDS_CUEBOT,
    "cue.CueInterface": "top",
    "department.DepartmentInterface": _NEEDS_CUEBOT,
    "depend.DependInterface": "job depends",
    "facility.AllocationInterface": "alloc",
    "facility.FacilityInterface": "alloc",
    "filter.ActionInterface": _NEEDS_CUEBOT,
    "filter.FilterInterface": _NEEDS_CUEBOT,
    "filter.MatcherInterface": _NEEDS_CUEBOT,
    "host.DeedInterface": _NEEDS_CUEBOT,
    "host.HostInterface": "host",
    "host.OwnerInterface": _NEEDS_CUEBOT,
    "host.ProcInterface": "proc",
    "job.FrameInterface": "job",
    "job.GroupInterface": "folder",
    "job.JobInterface": "job",
    "job.LayerInterface": "layer",
    "limit.LimitInterface": "limit",
    "monitoring.MonitoringInterface": _NEEDS_CUEBOT,
    "renderPartition.RenderPartitionInterface": _NEEDS_CUEBOT,
    "report.RqdReportInterface": _NEEDS_CUEBOT,
    "service.ServiceInterface": _NEEDS_CUEBOT,
    "service.ServiceOverrideInterface": _NEEDS_CUEBOT,
    "show.ShowInterface": "show",
    "subscription.SubscriptionInterface": "subscription",
    "task.TaskInterface": _NEEDS_CUEBOT,
}
"""By service, the command of ours for its things; the empty string where there is none."""


def refusal(method: str) -> str | None:
    """The text for a call of ``method`` (/service/method); None when it is of no service that a Cuebot serves."""
    service = method.lstrip("/").partition("/")[0]
    if service.startswith("rqd."):
        return f"{service} is served by the RQD of each host, and this is the service that RQDs report to"
    if service not in _COMMANDS:
        return None
    remedy = "no opencue-sched command does this; it needs a Cuebot"
    if command := _COMMANDS[service]:
        remedy = f"run: opencue-sched {command} --help (docs/cueadmin.md has the command for each of cueadmin's)"
    return f"{service} is a Cuebot's, and this is opencue-sched's report service, which serves RQDs alone; {remedy}"


class NotServed(grpc.GenericRpcHandler):
    """Refuses every call of OpenCue's that the handlers before it do not serve.

    One is answered, with zeros: pycue asks for a Cuebot's own figures to see whether anybody is there, and when that is
    refused it says that no connection could be established, and nothing of the reason.
    """

    def service(self, handler_call_details: Any) -> Any:
        """gRPC's hook: the handler of one call, or None for a call of a stranger's service."""
        if handler_call_details.method == "/cue.CueInterface/GetSystemStats":
            return grpc.unary_unary_rpc_method_handler(
                lambda _request, _context: cue_pb2.CueGetSystemStatsResponse(),
                response_serializer=cue_pb2.CueGetSystemStatsResponse.SerializeToString,
            )
        text = refusal(handler_call_details.method)
        if text is None:
            return None

        def refuse(_request: bytes, context: Any) -> None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.unary_unary_rpc_method_handler(refuse)
