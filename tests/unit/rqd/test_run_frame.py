"""The RunFrame of a booked proc, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opencue_proto import rqd_pb2

from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.frame_command import JobDetails, LaunchDetails, LayerDetails
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import ThreadMode
from opencue_sched.rqd.launch import launch_requests
from opencue_sched.rqd.run_frame import build_run_frame
from opencue_sched.settings import Queue, Settings
from tests.kit.wording import lacks

FRAME = Frame(id="F-1", name="0011-beauty", number=11, version=4)
LAYER = Layer(
    id="L-1",
    name="beauty",
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
    os_name="rocky9",
    layers=(LAYER,),
)
JOB_DETAILS = JobDetails(
    shot="sh01",
    user="artist",
    uid=1007,
    log_dir="/shots/orbit/sh01/logs/orbit-sh01-artist_light_v003--J-1",
    loki_url="http://loki:3100",
    environment={},
)
LAYER_DETAILS = LayerDetails(
    command="render #ZFRAME# #IFRAME# #FRAME_START# #FRAME_END# #FRAME_CHUNK# #LAYER# #JOB# #FRAMESPEC# #FRAME#",
    frame_range="1-31x5",
    chunk_size=3,
    environment={},
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
    resources=Resources(cores=4, memory_kb=3_355_443, gpus=1, gpu_memory_kb=2_097_152),
    vertices=Vertices("S-1", "C-1", "D-1", "J-1", "L-1", "P-1"),
)
LEFT_TO_RQD = {"job_temp_dir", "frame_temp_dir", "log_file", "log_dir_file", "gid", "attributes", "children", "pid"}


def build(
    planned: PlannedProc = PLANNED, job: JobDetails = JOB_DETAILS, layer: LayerDetails = LAYER_DETAILS
) -> rqd_pb2.RunFrame:
    return build_run_frame(planned, job, layer, Settings(), now=lambda: 1_700_000_000.1239)


def details(job: JobDetails = JOB_DETAILS, layer: LayerDetails = LAYER_DETAILS) -> LaunchDetails:
    """Of the job and layer above, and of others beside them."""
    return LaunchDetails(
        jobs={"J-1": job, "J-2": replace(JOB_DETAILS, environment={"A": "2"})},
        layers={"L-1": layer, "L-2": LAYER_DETAILS},
        unfit={},
    )


def test_every_field_and_every_variable() -> None:
    # given variables of the job and of the layer that clash with each other and with OpenCue's
    job = replace(JOB_DETAILS, environment={"LICENSE": "job", "QUALITY": "job", "CUE_FRAME": "job", "CUE3": "0"})
    layer = replace(LAYER_DETAILS, environment={"QUALITY": "layer", "CUE_THREADS": "99", "PATH": "/opt/bin"})

    # when the message is built
    message = build(PLANNED, job, layer)

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
    message = build(job=replace(JOB_DETAILS, uid=None))
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
    message = build_run_frame(PLANNED, JOB_DETAILS, LAYER_DETAILS, settings)
    assert (message.soft_memory_limit, message.hard_memory_limit) == (3_355_443, 10_066_329)


def test_a_layer_without_threads_says_so_and_an_absent_log_server_is_empty() -> None:
    message = build(replace(PLANNED, layer=replace(LAYER, threadable=False)), replace(JOB_DETAILS, loki_url=""))
    assert message.environment["CUE_THREADABLE"] == "0"
    assert message.loki_url == ""


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (details(layer=replace(LAYER_DETAILS, frame_range="1-x")), "1-x"),
        (details(layer=replace(LAYER_DETAILS, frame_range="1-10")), "11"),
        (details(job=replace(JOB_DETAILS, uid=2**40)), "0011-beauty"),
    ],
)
def test_what_makes_no_sense_fails_alone(bad: LaunchDetails, words: str) -> None:
    # given one proc that cannot be described to RQD, beside one of another job that can
    good = replace(PLANNED, job=replace(JOB, id="J-2"), layer=replace(LAYER, id="L-2"))
    # when requests are built for both
    requests, failed = launch_requests([PLANNED, good], bad, Settings())

    # then the good one goes out and the bad one is a definite failure that says why
    assert [request.run_frame.job_id for request in requests] == ["J-2"]
    (outcome,) = failed
    assert outcome.request.run_frame.job_id == "J-1"
    assert (outcome.sends, outcome.request.host_name) == (0, "render042")
    assert words in str(outcome.error)
    assert not lacks(str(outcome.error), "0011-beauty", "orbit-sh01-artist_light_v003")


def test_requests_carry_the_environment_of_their_own_job_and_layer() -> None:
    own = details(replace(JOB_DETAILS, environment={"A": "1"}), replace(LAYER_DETAILS, environment={"B": "1"}))
    (request,), failed = launch_requests([PLANNED], own, Settings())
    assert not failed
    assert (request.host_name, request.run_frame.environment["A"], request.run_frame.environment["B"]) == (
        "render042",
        "1",
        "1",
    )


def test_a_dry_run_asks_for_no_details() -> None:
    (request,), failed = launch_requests([PLANNED], None, Settings())
    assert not failed
    ref = request.ref
    assert (ref.host_name, ref.frame_id, ref.proc_id) == ("render042", "F-1", PLANNED.proc_id)
