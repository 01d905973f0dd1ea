"""The RunFrame of a booked proc, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opencue_proto import rqd_pb2

from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import ThreadMode
from opencue_sched.rqd.launch import launch_requests
from opencue_sched.rqd.run_frame import build_run_frame
from opencue_sched.settings import Queue, Settings

FRAME = Frame(id="F-1", name="0011-beauty", number=11, version=4)
LAYER = Layer(
    id="L-1",
    name="beauty",
    command="render #ZFRAME# #IFRAME# #FRAME_START# #FRAME_END# #FRAME_CHUNK# #LAYER# #JOB# #FRAMESPEC# #FRAME#",
    frame_range="1-31x5",
    chunk_size=3,
    cores_min_centicores=400,
    cores_max_centicores=0,
    memory_min_kb=3_355_443,
    gpus_min=1,
    gpu_memory_min_kb=2_097_152,
    tags=frozenset({"general"}),
    services=("arnold",),
    threadable=True,
    waiting_frames=7,
    frames=(FRAME,),
)
JOB = Job(
    id="J-1",
    name="orbit-sh01-artist_light_v003",
    show_id="S-1",
    show_name="orbit",
    folder_id="D-1",
    dept_id="P-1",
    shot="sh01",
    user="artist",
    uid=1007,
    log_dir="/shots/orbit/sh01/logs/orbit-sh01-artist_light_v003--J-1",
    os_name="rocky9",
    loki_url="http://loki:3100",
    layers=(LAYER,),
)
HOST = Host(
    id="H-1",
    name="render042",
    facility_id="A-1",
    alloc_id="C-1",
    tags=frozenset({"general"}),
    os_names=("rhel7", "rocky9"),
    thread_mode=ThreadMode.AUTO,
    total_centicores=1600,
    idle_centicores=1600,
    total_memory_kb=67_108_864,
    idle_memory_kb=67_108_864,
    total_gpus=2,
    idle_gpus=2,
)
PLANNED = PlannedProc(
    proc_id="5a0e6a2c-6b0e-4a8a-9d15-2e0c8a6e2b11",
    job=JOB,
    layer=LAYER,
    frame=FRAME,
    host=HOST,
    reservation=Reservation(cores=4, memory_kb=3_355_443, gpus=1, gpu_memory_kb=2_097_152),
    vertices=Vertices("S-1", "C-1", "D-1", "J-1", "L-1", "P-1"),
)
LEFT_TO_RQD = {"job_temp_dir", "frame_temp_dir", "log_file", "log_dir_file", "gid", "attributes", "children", "pid"}


def build(planned: PlannedProc, job_env: dict[str, str] | None = None, **layer_env: str) -> rqd_pb2.RunFrame:
    environments = {planned.job.id: job_env or {}, planned.layer.id: layer_env}
    return build_run_frame(planned, environments, Settings(), now=lambda: 1_700_000_000.1239)


def test_every_field_and_every_variable() -> None:
    # given variables of the job and of the layer that clash with each other and with OpenCue's
    job_env = {"LICENSE": "job", "QUALITY": "job", "CUE_FRAME": "job", "CUE3": "0"}

    # when the message is built
    message = build(PLANNED, job_env, QUALITY="layer", CUE_THREADS="99", PATH="/opt/bin")

    # then it is exactly this
    expected = {
        "resource_id": "5a0e6a2c-6b0e-4a8a-9d15-2e0c8a6e2b11",
        "job_id": "J-1",
        "job_name": "orbit-sh01-artist_light_v003",
        "frame_id": "F-1",
        "frame_name": "0011-beauty",
        "layer_id": "L-1",
        "command": "render 0011 11 11 21 3 beauty orbit-sh01-artist_light_v003 11-21x5 0011-beauty",
        "user_name": "artist",
        "log_dir": "/shots/orbit/sh01/logs/orbit-sh01-artist_light_v003--J-1",
        "show": "orbit",
        "shot": "sh01",
        "start_time": 1_700_000_000_123,
        "uid": 1007,
        "num_cores": 400,
        "ignore_nimby": False,
        "num_gpus": 1,
        "os": "rocky9",
        "soft_memory_limit": 5_368_708,
        "hard_memory_limit": 6_710_886,
        "loki_url": "http://loki:3100",
        "environment": {
            "LICENSE": "job",
            "QUALITY": "layer",
            "PATH": "/opt/bin",
            "CUE3": "1",
            "CUE_THREADS": "4",
            "CUE_MEMORY": "3355443",
            "CUE_GPUS": "1",
            "CUE_GPU_MEMORY": "2097152",
            "CUE_LOG_PATH": "/shots/orbit/sh01/logs/orbit-sh01-artist_light_v003--J-1",
            "CUE_RANGE": "1-31x5",
            "CUE_CHUNK": "3",
            "CUE_IFRAME": "11",
            "CUE_LAYER": "beauty",
            "CUE_JOB": "orbit-sh01-artist_light_v003",
            "CUE_FRAME": "0011-beauty",
            "CUE_SHOW": "orbit",
            "CUE_SHOT": "sh01",
            "CUE_USER": "artist",
            "CUE_JOB_ID": "J-1",
            "CUE_LAYER_ID": "L-1",
            "CUE_FRAME_ID": "F-1",
            "CUE_THREADABLE": "1",
        },
    }
    names = {field.name for field in message.DESCRIPTOR.fields}
    assert expected.keys() | LEFT_TO_RQD == names
    actual = {name: getattr(message, name) for name in expected}
    assert {**actual, "environment": dict(message.environment)} == expected
    assert not LEFT_TO_RQD & {field.name for field, _ in message.ListFields()}


def test_the_uid_is_left_out_when_the_job_has_none() -> None:
    message = build(replace(PLANNED, job=replace(JOB, uid=None)))
    assert not message.HasField("uid")


@pytest.mark.parametrize(
    ("job_os", "host_os", "expected"),
    [("rocky9", ("rhel7",), "rocky9"), (None, ("rhel7", "rocky9"), "rhel7"), (None, (), "")],
)
def test_the_operating_system_is_the_jobs_or_else_the_hosts_first(
    job_os: str | None, host_os: tuple[str, ...], expected: str
) -> None:
    planned = replace(PLANNED, job=replace(JOB, os_name=job_os), host=replace(HOST, os_names=host_os))
    assert build(planned).os == expected


def test_memory_limits_follow_the_settings() -> None:
    settings = Settings(queue=Queue(frame_memory_soft_limit=1.0, frame_memory_hard_limit=3.0))
    message = build_run_frame(PLANNED, {}, settings)
    assert (message.soft_memory_limit, message.hard_memory_limit) == (3_355_443, 10_066_329)


def test_a_layer_without_threads_says_so_and_an_absent_log_server_is_empty() -> None:
    planned = replace(PLANNED, layer=replace(LAYER, threadable=False), job=replace(JOB, loki_url=None))
    message = build(planned)
    assert message.environment["CUE_THREADABLE"] == "0"
    assert message.loki_url == ""


@pytest.mark.parametrize(
    ("planned", "words"),
    [
        (replace(PLANNED, layer=replace(LAYER, frame_range="1-x")), "1-x"),
        (replace(PLANNED, layer=replace(LAYER, frame_range="1-10")), "11"),
        (replace(PLANNED, job=replace(JOB, uid=2**40)), "0011-beauty"),
    ],
)
def test_what_makes_no_sense_fails_alone(planned: PlannedProc, words: str) -> None:
    # given one proc that cannot be described to RQD, beside one that can
    # when requests are built for both
    requests, failed = launch_requests([planned, PLANNED], {}, Settings())

    # then the good one goes out and the bad one is a definite failure that says why
    assert [request.run_frame.frame_id for request in requests] == ["F-1"]
    (outcome,) = failed
    assert (outcome.sends, outcome.request.host_name) == (0, "render042")
    assert words in str(outcome.error)
    assert str(outcome.error).startswith(
        "frame 0011-beauty of job orbit-sh01-artist_light_v003 cannot be sent to RQD: "
    )


def test_requests_carry_the_environment_of_their_own_job_and_layer() -> None:
    environments = {"J-1": {"A": "1"}, "J-2": {"A": "2"}, "L-1": {"B": "1"}}
    (request,), failed = launch_requests([PLANNED], environments, Settings())
    assert not failed
    assert (request.host_name, request.run_frame.environment["A"], request.run_frame.environment["B"]) == (
        "render042",
        "1",
        "1",
    )
