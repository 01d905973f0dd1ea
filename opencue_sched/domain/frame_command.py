"""A frame's command line, environment and memory limits.

Values are put in as they are: what a layer or job is called never changes the command around it, whereas OpenCue's
substitution gives ``$`` and backslashes in names a meaning of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opencue_sched.domain.frame_range import FrameRange, check_frame_range, frame_spec
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class JobDetails:
    """What the frames of a job are launched with: columns of its row, and the environment that its user has set."""

    shot: str
    user: str
    uid: int | None
    """The number of the OS user; None where RQD is to find the number, or to choose one."""
    log_dir: str
    loki_url: str
    """The address of the Loki server that RQD sends the log to; empty for a log in a file."""
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LayerDetails:
    """What the frames of a layer are launched with."""

    command: str
    """The command with its tokens."""
    frame_range: str
    """The text of layer.str_range."""
    chunk_size: int
    """How many numbers of the range a frame renders."""
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LaunchDetails:
    """What frames that are about to be booked are launched with: all that no plan depends on."""

    jobs: Mapping[str, JobDetails]
    """Details of jobs, by job id."""
    layers: Mapping[str, LayerDetails]
    """Details of the layers whose frames can be launched, by layer id."""
    unfit: Mapping[str, str]
    """Why the frames of a layer cannot be launched, by layer id: rows of it make no sense, or are gone."""


def check_layer(layer_id: str, layer: LayerDetails) -> None:
    """Refuse a layer whose frames cannot be launched, by InvalidInput, which names the column."""
    if layer.chunk_size < 1:
        raise InvalidInput(f"layer {layer_id}: int_chunk_size is {layer.chunk_size}, it must be 1 or more")
    if not layer.command.strip():
        raise InvalidInput(f"layer {layer_id}: str_cmd is empty")
    check_frame_range(layer.frame_range)


_WORDS: Mapping[str, Callable[[PlannedProc, LayerDetails, Sequence[int]], str]] = {
    "#ZFRAME#": lambda _planned, _layer, numbers: f"{numbers[0]:04d}",
    "#IFRAME#": lambda _planned, _layer, numbers: str(numbers[0]),
    "#FRAME_START#": lambda _planned, _layer, numbers: str(numbers[0]),
    "#FRAME_END#": lambda _planned, _layer, numbers: str(numbers[-1]),
    "#FRAME_CHUNK#": lambda _planned, layer, _numbers: str(layer.chunk_size),
    "#LAYER#": lambda planned, _layer, _numbers: planned.layer.name,
    "#JOB#": lambda planned, _layer, _numbers: planned.job.name,
    "#FRAMESPEC#": lambda _planned, _layer, numbers: frame_spec(numbers),
    "#FRAME#": lambda planned, _layer, _numbers: planned.frame.name,
}
"""The tokens in the order in which OpenCue replaces them, and what each becomes for a planned frame and the numbers of
its chunk, in rendering order."""
TOKENS: tuple[str, ...] = tuple(_WORDS)
_KNOWN_TOKEN = re.compile("|".join(TOKENS))
_TOKEN = re.compile(r"#[A-Za-z][A-Za-z0-9_]*#")
"""What looks like a token, whether it is one or not."""


def unknown_tokens(command: str) -> tuple[str, ...]:
    """What looks like a token but is none, each once, in order: ``#FRAMES#``, ``#frame#``."""
    return tuple(dict.fromkeys(_TOKEN.findall(_KNOWN_TOKEN.sub("\0", command))))


def command_line(planned: PlannedProc, layer: LayerDetails) -> str:
    """The command RQD runs for a planned frame: every token replaced, in OpenCue's order; unknown ones stay.

    Raises InvalidInput when its layer's range or chunk size makes no sense.
    """
    command = layer.command
    numbers = FrameRange.parse(layer.frame_range).chunk(planned.frame.number, layer.chunk_size)
    for token, word in _WORDS.items():
        if token in command:
            command = command.replace(token, word(planned, layer, numbers))
    return command


def log_path(log_dir: str, job: str, frame: str) -> str:
    """The file that RQD writes a frame's output to. RQD moves the file of an earlier run to the same name with a
    number.
    """
    return f"{log_dir.rstrip('/')}/{job}.{frame}.rqlog"


# The variables OpenCue sets. Memory is in the KB the database holds, threads are whole cores.
_OF_THE_PLAN: Mapping[str, Callable[[PlannedProc], str]] = {
    "CUE3": lambda _: "1",
    "CUE_THREADS": lambda planned: str(max(1, planned.resources.cores)),
    "CUE_MEMORY": lambda planned: str(planned.resources.memory_kb),
    "CUE_GPUS": lambda planned: str(planned.resources.gpus),
    "CUE_GPU_MEMORY": lambda planned: str(planned.resources.gpu_memory_kb),
    "CUE_IFRAME": lambda planned: str(planned.frame.number),
    "CUE_LAYER": lambda planned: planned.layer.name,
    "CUE_JOB": lambda planned: planned.job.name,
    "CUE_FRAME": lambda planned: planned.frame.name,
    "CUE_SHOW": lambda planned: planned.job.show_name,
    "CUE_JOB_ID": lambda planned: planned.job.id,
    "CUE_LAYER_ID": lambda planned: planned.layer.id,
    "CUE_FRAME_ID": lambda planned: planned.frame.id,
    "CUE_THREADABLE": lambda planned: "1" if planned.layer.threadable else "0",
}
_OF_THE_JOB: Mapping[str, Callable[[JobDetails], str]] = {
    "CUE_LOG_PATH": lambda job: job.log_dir,
    "CUE_SHOT": lambda job: job.shot,
    "CUE_USER": lambda job: job.user,
}
_OF_THE_LAYER: Mapping[str, Callable[[LayerDetails], str]] = {
    "CUE_RANGE": lambda layer: layer.frame_range,
    "CUE_CHUNK": lambda layer: str(layer.chunk_size),
}
RESERVED_VARIABLES: frozenset[str] = frozenset({*_OF_THE_PLAN, *_OF_THE_JOB, *_OF_THE_LAYER})
"""Variables that OpenCue sets. A value that a job or layer gives them never reaches its frames."""


def environment(planned: PlannedProc, job: JobDetails, layer: LayerDetails) -> dict[str, str]:
    """The environment of a planned frame: the job's, overridden by the layer's, overridden by OpenCue's variables."""
    return {
        **job.environment,
        **layer.environment,
        **{name: read(planned) for name, read in _OF_THE_PLAN.items()},
        **{name: read(job) for name, read in _OF_THE_JOB.items()},
        **{name: read(layer) for name, read in _OF_THE_LAYER.items()},
    }


def memory_limit(memory_kb: int, factor: float) -> int:
    """RunFrame's soft or hard limit, in KB, of a frame that reserves ``memory_kb``: truncated as in Cuebot.

    It is never below the memory that the frame reserves: such a limit would kill frames that use what they were given.
    """
    return max(memory_kb, int(memory_kb * factor))
