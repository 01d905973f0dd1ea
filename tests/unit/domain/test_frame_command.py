"""Command tokens, the environment of a frame and its memory limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.frame_command import (
    RESERVED_VARIABLES,
    TOKENS,
    JobDetails,
    LayerDetails,
    command_line,
    environment,
    memory_limit,
    unknown_tokens,
)
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import ThreadMode
from opencue_sched.errors import InvalidInput

COMMAND = "render -f #ZFRAME# -s #FRAMESPEC# -e #FRAME_END# -o #LAYER#.#IFRAME#"


JOB = JobDetails("shot", "user", 1000, "/shots/show/shot/logs", "", environment={})


def details(command: str = COMMAND, *, frame_range: str = "1-19x2", chunk_size: int = 3) -> LayerDetails:
    return LayerDetails(command, frame_range, chunk_size, environment={})


def planned(*, number: int = 11, layer_name: str = "render") -> PlannedProc:
    layer = Layer(
        id="layer-id",
        name=layer_name,
        cores_min_centicores=100,
        cores_max_centicores=0,
        memory_min_kb=4_194_304,
        gpus_min=1,
        gpu_memory_min_kb=2_097_152,
        tags=frozenset(),
        services=(),
        threadable=True,
        waiting_frames=1,
        frames=(),
    )
    job = Job(
        id="job-id",
        name="show-shot-user_test",
        show_id="show-id",
        show_name="show",
        folder_id="folder-id",
        dept_id="dept-id",
        os_name=None,
        layers=(layer,),
    )
    host = Host("host-id", "host", "facility-id", "alloc-id", frozenset(), (), ThreadMode.AUTO, 800, 800, 1, 1)
    return PlannedProc(
        proc_id="proc-id",
        job=job,
        layer=layer,
        frame=Frame(id="frame-id", name=f"{number:04d}-render", number=number, version=1),
        host=host,
        resources=Resources(cores=3, memory_kb=4_194_304, gpus=1, gpu_memory_kb=2_097_152),
        vertices=Vertices("show-id", "alloc-id", "folder-id", "job-id", "layer-id", "dept-id"),
    )


@pytest.mark.parametrize(
    ("token", "word"),
    [
        ("#ZFRAME#", "0011"),
        ("#IFRAME#", "11"),
        ("#FRAME_START#", "11"),
        ("#FRAME_END#", "15"),
        ("#FRAME_CHUNK#", "3"),
        ("#LAYER#", "render"),
        ("#JOB#", "show-shot-user_test"),
        ("#FRAMESPEC#", "11-15x2"),
        ("#FRAME#", "0011-render"),
    ],
)
def test_every_token(token: str, word: str) -> None:
    assert command_line(planned(), details(f"a {token} b{token}")) == f"a {word} b{word}"


def test_all_tokens_are_tested_above() -> None:
    assert len(TOKENS) == 9


def test_a_negative_frame_is_padded_like_its_name() -> None:
    layer = details("#ZFRAME# #IFRAME# #FRAME#", frame_range="-1")
    assert command_line(planned(number=-1), layer) == "-001 -1 -001-render"


def test_names_are_put_in_literally() -> None:
    # Upstream reads the replacement as a pattern: "$1" and backslashes in a name break the command.
    assert command_line(planned(layer_name=r"a$1\2"), details("#LAYER#")) == r"a$1\2"


def test_a_command_without_tokens_and_an_unknown_token_stay_as_they_are() -> None:
    assert command_line(planned(), details("echo '#nothing' #FRAMES# 100%")) == "echo '#nothing' #FRAMES# 100%"


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("render #FRAME# #LAYER#", ()),
        ("#FRAME##LAYER#", ()),
        ("render #FRAMES# #frame# #FRAMES#", ("#FRAMES#", "#frame#")),
        ("#FRAME_START#-#FRAME_STOP#", ("#FRAME_STOP#",)),
        ("echo '# a comment' #1#", ()),
        ("#A#FRAME#", ()),
    ],
)
def test_unknown_tokens(command: str, unknown: tuple[str, ...]) -> None:
    assert unknown_tokens(command) == unknown


@given(st.lists(st.sampled_from(TOKENS), max_size=6))
def test_no_token_is_left_after_substitution(tokens: list[str]) -> None:
    assert "#" not in command_line(planned(), details(" ".join(tokens)))


def test_the_command_line_of_a_planned_frame() -> None:
    assert command_line(planned(), details()) == "render -f 0011 -s 11-15x2 -e 15 -o render.11"
    one_by_one = details(frame_range="-1-3", chunk_size=1)
    assert command_line(planned(number=-1), one_by_one) == "render -f -001 -s -1 -e -1 -o render.-1"


def test_a_frame_outside_its_layers_range_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"\b12\b"):
        command_line(planned(number=12), details())


def test_the_environment_of_a_frame() -> None:
    assert environment(planned(), JOB, details()) == {
        "CUE3": "1",
        "CUE_THREADS": "3",
        "CUE_MEMORY": "4194304",
        "CUE_GPUS": "1",
        "CUE_GPU_MEMORY": "2097152",
        "CUE_LOG_PATH": "/shots/show/shot/logs",
        "CUE_RANGE": "1-19x2",
        "CUE_CHUNK": "3",
        "CUE_IFRAME": "11",
        "CUE_LAYER": "render",
        "CUE_JOB": "show-shot-user_test",
        "CUE_FRAME": "0011-render",
        "CUE_SHOW": "show",
        "CUE_SHOT": "shot",
        "CUE_USER": "user",
        "CUE_JOB_ID": "job-id",
        "CUE_LAYER_ID": "layer-id",
        "CUE_FRAME_ID": "frame-id",
        "CUE_THREADABLE": "1",
    }


def test_the_reserved_variables_are_those_that_are_set() -> None:
    assert set(environment(planned(), JOB, details())) == RESERVED_VARIABLES


def test_the_layers_environment_overrides_the_jobs_and_opencues_overrides_both() -> None:
    job = replace(JOB, environment={"A": "job", "B": "job", "CUE3": "job"})
    layer = replace(details(), environment={"B": "layer", "CUE_JOB": "layer"})
    names = environment(planned(), job, layer)
    assert (names["A"], names["B"], names["CUE3"], names["CUE_JOB"]) == ("job", "layer", "1", "show-shot-user_test")


def test_memory_limits_are_in_real_kb() -> None:
    # Upstream divides a KB of 1000 bytes by 1024 and hands out 97.7 %.
    assert memory_limit(4_194_304, 1.6) == 6_710_886
    assert memory_limit(4_194_304, 2.0) == 8_388_608


@pytest.mark.parametrize("factor", [0.5, 0, -1])
def test_memory_limits_never_fall_below_the_reservation(factor: float) -> None:
    assert memory_limit(1000, factor) == 1000
