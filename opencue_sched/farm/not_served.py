"""What the report service answers to calls that only a Cuebot serves.

Where there is no Cuebot, ``cueadmin``, CueGUI and everything else on pycue may still be pointed at the report service's
port: it is the port they know. Each call of an OpenCue service that is not served ends as UNIMPLEMENTED, with the
command of ours that does the same where one does.
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
    "depend.DependInterface": "job depends --help",
    "depend.DependInterface/Satisfy": "job depends drop JOB DEPEND...",
    "facility.AllocationInterface": "alloc --help",
    "facility.AllocationInterface/Create": "alloc create FACILITY.NAME --tag TAG",
    "facility.AllocationInterface/GetAll": "alloc list",
    "facility.AllocationInterface/ReparentHosts": "host move HOST... ALLOCATION",
    "facility.AllocationInterface/SetTag": "alloc tag ALLOCATION TAG",
    "facility.FacilityInterface": "alloc --help",
    "filter.ActionInterface": _NEEDS_CUEBOT,
    "filter.FilterInterface": _NEEDS_CUEBOT,
    "filter.MatcherInterface": _NEEDS_CUEBOT,
    "host.DeedInterface": _NEEDS_CUEBOT,
    "host.HostInterface": "host --help",
    "host.HostInterface/AddTags": "host tags add HOST TAG...",
    "host.HostInterface/Delete": "host delete HOST",
    "host.HostInterface/GetHosts": "host list",
    "host.HostInterface/GetProcs": "proc list --host HOST",
    "host.HostInterface/Lock": "host lock HOST...",
    "host.HostInterface/Reboot": "host reboot HOST...",
    "host.HostInterface/RebootWhenIdle": "host reboot HOST...",
    "host.HostInterface/RemoveTags": "host tags remove HOST TAG...",
    "host.HostInterface/SetAllocation": "host move HOST... ALLOCATION",
    "host.HostInterface/Unlock": "host unlock HOST...",
    "host.OwnerInterface": _NEEDS_CUEBOT,
    "host.ProcInterface": "proc --help",
    "host.ProcInterface/GetProcs": "proc list",
    "host.ProcInterface/Kill": "proc kill PROC...",
    "job.FrameInterface": "job --help",
    "job.FrameInterface/Eat": "job eat JOB",
    "job.FrameInterface/GetFrames": "job frames JOB",
    "job.FrameInterface/Retry": "job retry JOB",
    "job.GroupInterface": "folder --help",
    "job.GroupInterface/CreateSubGroup": "folder create SHOW NAME",
    "job.GroupInterface/GetGroups": "folder list SHOW",
    "job.GroupInterface/ReparentJobs": "folder move JOB... FOLDER",
    "job.GroupInterface/SetMaxCores": "folder caps SHOW FOLDER --max-cores CORES",
    "job.JobInterface": "job --help",
    "job.JobInterface/DropDepends": "job depends drop JOB DEPEND...",
    "job.JobInterface/EatFrames": "job eat JOB",
    "job.JobInterface/GetDepends": "job depends list JOB",
    "job.JobInterface/GetFrames": "job frames JOB",
    "job.JobInterface/GetJobNames": "job list",
    "job.JobInterface/GetJobs": "job list",
    "job.JobInterface/GetLayers": "layer list JOB",
    "job.JobInterface/GetWhatThisDependsOn": "job depends list JOB",
    "job.JobInterface/Kill": "job kill JOB...",
    "job.JobInterface/LaunchSpec": "submit FILE",
    "job.JobInterface/LaunchSpecAndWait": "submit FILE",
    "job.JobInterface/Pause": "job pause JOB...",
    "job.JobInterface/Resume": "job unpause JOB...",
    "job.JobInterface/RetryFrames": "job retry JOB",
    "job.JobInterface/SetGroup": "folder move JOB... FOLDER",
    "job.JobInterface/SetMaxCores": "job max-cores JOB... CORES",
    "job.JobInterface/SetMaxGpus": "job max-gpus JOB... GPUS",
    "job.JobInterface/SetMinCores": "job min-cores JOB... CORES",
    "job.JobInterface/SetPriority": "job priority JOB... PRIORITY",
    "job.LayerInterface": "layer --help",
    "job.LayerInterface/AddLimit": "layer set JOB LAYER... --add-limit LIMIT",
    "job.LayerInterface/DropLimit": "layer set JOB LAYER... --drop-limit LIMIT",
    "job.LayerInterface/EatFrames": "job eat JOB --layer LAYER",
    "job.LayerInterface/GetFrames": "job frames JOB --layer LAYER",
    "job.LayerInterface/RetryFrames": "job retry JOB --layer LAYER",
    "job.LayerInterface/SetMinCores": "layer set JOB LAYER... --cores CORES",
    "job.LayerInterface/SetMinMemory": "layer set JOB LAYER... --memory SIZE",
    "job.LayerInterface/SetTags": "layer set JOB LAYER... --tags TAG,TAG",
    "limit.LimitInterface": "limit --help",
    "limit.LimitInterface/Create": "limit create NAME MAX",
    "limit.LimitInterface/Delete": "limit delete NAME",
    "limit.LimitInterface/GetAll": "limit list",
    "limit.LimitInterface/SetMaxValue": "limit set NAME MAX",
    "monitoring.MonitoringInterface": _NEEDS_CUEBOT,
    "renderPartition.RenderPartitionInterface": _NEEDS_CUEBOT,
    "report.RqdReportInterface": _NEEDS_CUEBOT,
    "service.ServiceInterface": _NEEDS_CUEBOT,
    "service.ServiceOverrideInterface": _NEEDS_CUEBOT,
    "show.ShowInterface": "show --help",
    "show.ShowInterface/CreateShow": "show create SHOW",
    "show.ShowInterface/CreateSubscription": "subscription create SHOW ALLOCATION SIZE BURST",
    "show.ShowInterface/EnableBooking": "show booking SHOW on|off",
    "show.ShowInterface/GetActiveShows": "show list",
    "show.ShowInterface/GetGroups": "folder list SHOW",
    "show.ShowInterface/GetJobs": "job list --show SHOW",
    "show.ShowInterface/GetShows": "show list",
    "show.ShowInterface/GetSubscriptions": "subscription list SHOW",
    "show.ShowInterface/SetActive": "show active SHOW on|off",
    "show.ShowInterface/SetDefaultMaxCores": "show default-max-cores SHOW CORES",
    "show.ShowInterface/SetDefaultMinCores": "show default-min-cores SHOW CORES",
    "show.ShowInterface/SetSchedulerManaged": "show managed SHOW on|off",
    "subscription.SubscriptionInterface": "subscription --help",
    "subscription.SubscriptionInterface/Delete": "subscription delete SHOW ALLOCATION",
    "subscription.SubscriptionInterface/SetBurst": "subscription burst SHOW ALLOCATION BURST",
    "subscription.SubscriptionInterface/SetSize": "subscription size SHOW ALLOCATION SIZE",
    "task.TaskInterface": _NEEDS_CUEBOT,
}
"""By service, and by service/method where a command does just that; the empty string where no command does it."""


def refusal(method: str) -> str | None:
    """The text for a call of ``method`` (/service/method); None when it is of no service that a Cuebot serves."""
    service, _, call = method.lstrip("/").partition("/")
    if service.startswith("rqd."):
        return f"{service} is served by the RQD of each host, and this is the service that RQDs report to"
    if service not in _COMMANDS:
        return None
    instead = _COMMANDS.get(f"{service}/{call}", _COMMANDS[service])
    if instead:
        # One of cueadmin's verbs calls Find first, and gets no farther: so the others of the noun are named as well.
        noun = instead.partition(" ")[0]
        others = "" if instead.endswith("--help") else f" (opencue-sched {noun} --help lists the others)"
        remedy = f"run: opencue-sched {instead}{others}"
    else:
        remedy = "no opencue-sched command does this; it needs a Cuebot"
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
