"""The RunFrame message RQD gets for a booked proc (facts E; Cuebot's dispatch support and the Rust dispatcher)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from opencue_proto import rqd_pb2

from opencue_sched.dispatch.launch import LaunchOutcome, LaunchRequest, LaunchState
from opencue_sched.domain.command import command_line, environment, memory_limits
from opencue_sched.domain.errors import InvalidInput, RqdFailure
from opencue_sched.domain.farm import PlannedProc
from opencue_sched.domain.units import centicores
from opencue_sched.settings import Settings
from opencue_sched.store.environment import Environments


def build_run_frame(
    planned: PlannedProc,
    *,
    job_env: Mapping[str, str],
    layer_env: Mapping[str, str],
    settings: Settings,
    now: Callable[[], float] = time.time,
) -> rqd_pb2.RunFrame:
    """Every field RQD reads. ``num_cores`` is centicores, memory limits are KB, ``start_time`` epoch milliseconds.

    ``uid`` is set only when the job has one: RQD refuses 0. ``os`` is the job's, which is the image a containerised RQD
    runs the frame in, or else the host's first. gid, attributes, temp dir and pid are RQD's to fill in.
    Raises InvalidInput when the layer's range or command, or a value that does not fit its field, makes no sense.
    """
    job, layer, frame, host, reservation = planned.job, planned.layer, planned.frame, planned.host, planned.reservation
    limits = memory_limits(
        reservation.memory_kb,
        soft_factor=settings.queue.frame_memory_soft_limit,
        hard_factor=settings.queue.frame_memory_hard_limit,
    )
    try:
        message = rqd_pb2.RunFrame(
            resource_id=planned.proc_id,
            job_id=job.id,
            job_name=job.name,
            frame_id=frame.id,
            frame_name=frame.name,
            layer_id=layer.id,
            command=command_line(planned),
            user_name=job.user,
            log_dir=job.log_dir,
            show=job.show_name,
            shot=job.shot,
            start_time=int(now() * 1000),
            num_cores=centicores(reservation.cores),
            num_gpus=reservation.gpus,
            ignore_nimby=False,
            environment=environment(planned, job_env, layer_env),
            os=job.os_name or next(iter(host.os_names), ""),
            soft_memory_limit=limits.soft_kb,
            hard_memory_limit=limits.hard_kb,
            loki_url=job.loki_url or "",
        )
        if job.uid is not None:
            message.uid = job.uid
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"frame {frame.name} of job {job.name} cannot be sent to RQD: {error}") from error
    return message


def launch_requests(
    procs: Sequence[PlannedProc],
    environments: Environments,
    settings: Settings,
    *,
    now: Callable[[], float] = time.time,
) -> tuple[list[LaunchRequest], list[LaunchOutcome]]:
    """The launches of booked procs, and a FAILED outcome for each whose RunFrame cannot be built."""
    requests: list[LaunchRequest] = []
    failed: list[LaunchOutcome] = []
    for planned in procs:
        host = planned.host.name
        try:
            message = build_run_frame(
                planned,
                job_env=environments.jobs.get(planned.job.id, {}),
                layer_env=environments.layers.get(planned.layer.id, {}),
                settings=settings,
                now=now,
            )
        except InvalidInput as invalid:
            error = RqdFailure(str(invalid), outcome_unknown=False, proc_id=planned.proc_id, host=host)
            failed.append(LaunchOutcome(planned.proc_id, host, planned.frame.id, LaunchState.FAILED, 0, error))
        else:
            requests.append(LaunchRequest(host, message))
    return requests, failed
