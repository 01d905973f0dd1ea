"""The RunFrame message RQD gets for a booked proc (as Cuebot and OpenCue's own Rust scheduler make it)."""

from __future__ import annotations

import time
from collections.abc import Callable

from opencue_proto import rqd_pb2

from opencue_sched.domain.frame_command import JobDetails, LayerDetails, command_line, environment, memory_limit
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.settings import Settings


def build_run_frame(
    planned: PlannedProc,
    job_details: JobDetails,
    layer_details: LayerDetails,
    settings: Settings,
    now: Callable[[], float] = time.time,
) -> rqd_pb2.RunFrame:
    """The message that has RQD run a planned frame, with every field that RQD reads. Pure, but for ``now``.

    ``now`` gives seconds since the epoch. In the message ``num_cores`` is centicores, memory limits are KB and
    ``start_time`` is milliseconds since the epoch. ``uid`` is set only when the job has one: RQD refuses 0. ``os`` is
    the job's operating system, which names the image in which a containerised RQD runs the frame; for a job without one
    it is the host's first operating system. RQD itself fills in gid, attributes, the temporary directory and pid.
    Raises InvalidInput when the layer's range or command cannot be read, ValueError or TypeError when a value does not
    fit its field.
    """
    job, layer, frame, host, resources = planned.job, planned.layer, planned.frame, planned.host, planned.resources
    message = rqd_pb2.RunFrame(
        resource_id=planned.proc_id,
        job_id=job.id,
        job_name=job.name,
        frame_id=frame.id,
        frame_name=frame.name,
        layer_id=layer.id,
        command=command_line(planned, layer_details),
        user_name=job_details.user,
        log_dir=job_details.log_dir,
        show=job.show_name,
        shot=job_details.shot,
        start_time=int(now() * 1000),
        num_cores=resources.cores * CENTICORES_PER_CORE,
        num_gpus=resources.gpus,
        ignore_nimby=False,
        environment=environment(planned, job_details, layer_details),
        os=job.os_name or next(iter(host.os_names), ""),
        soft_memory_limit=memory_limit(resources.memory_kb, settings.queue.frame_memory_soft_limit),
        hard_memory_limit=memory_limit(resources.memory_kb, settings.queue.frame_memory_hard_limit),
        loki_url=job_details.loki_url,
    )
    if job_details.uid is not None:
        message.uid = job_details.uid
    return message
