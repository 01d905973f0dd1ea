"""A frame's command line, environment and memory limits. Values are put in as they are: what a layer or job is called
never changes the command around it, whereas OpenCue's substitution gives ``$`` and backslashes in names a meaning of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from opencue_sched.domain.frame_range import FrameRange, frame_spec
from opencue_sched.domain.plans import PlannedProc

_WORDS: Mapping[str, Callable[[PlannedProc, Sequence[int]], str]] = {
    "#ZFRAME#": lambda _, numbers: f"{numbers[0]:04d}",
    "#IFRAME#": lambda _, numbers: str(numbers[0]),
    "#FRAME_START#": lambda _, numbers: str(numbers[0]),
    "#FRAME_END#": lambda _, numbers: str(numbers[-1]),
    "#FRAME_CHUNK#": lambda planned, _: str(planned.layer.chunk_size),
    "#LAYER#": lambda planned, _: planned.layer.name,
    "#JOB#": lambda planned, _: planned.job.name,
    "#FRAMESPEC#": lambda _, numbers: frame_spec(numbers),
    "#FRAME#": lambda planned, _: planned.frame.name,
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


def command_line(planned: PlannedProc) -> str:
    """The command RQD runs for a planned frame: every token replaced, in OpenCue's order; unknown ones stay.

    Raises InvalidInput when its layer's range or chunk size makes no sense.
    """
    layer, command = planned.layer, planned.layer.command
    numbers = FrameRange.parse(layer.frame_range).chunk(planned.frame.number, layer.chunk_size)
    for token, word in _WORDS.items():
        if token in command:
            command = command.replace(token, word(planned, numbers))
    return command


def log_path(log_dir: str, job: str, frame: str) -> str:
    """The file that RQD writes a frame's output to; it moves that of an earlier run to the same name with a number."""
    return f"{log_dir.rstrip('/')}/{job}.{frame}.rqlog"


_VARIABLES: Mapping[str, Callable[[PlannedProc], str]] = {
    "CUE3": lambda _: "1",
    "CUE_THREADS": lambda it: str(max(1, it.reservation.cores)),
    "CUE_MEMORY": lambda it: str(it.reservation.memory_kb),
    "CUE_GPUS": lambda it: str(it.reservation.gpus),
    "CUE_GPU_MEMORY": lambda it: str(it.reservation.gpu_memory_kb),
    "CUE_LOG_PATH": lambda it: it.job.log_dir,
    "CUE_RANGE": lambda it: it.layer.frame_range,
    "CUE_CHUNK": lambda it: str(it.layer.chunk_size),
    "CUE_IFRAME": lambda it: str(it.frame.number),
    "CUE_LAYER": lambda it: it.layer.name,
    "CUE_JOB": lambda it: it.job.name,
    "CUE_FRAME": lambda it: it.frame.name,
    "CUE_SHOW": lambda it: it.job.show_name,
    "CUE_SHOT": lambda it: it.job.shot,
    "CUE_USER": lambda it: it.job.user,
    "CUE_JOB_ID": lambda it: it.job.id,
    "CUE_LAYER_ID": lambda it: it.layer.id,
    "CUE_FRAME_ID": lambda it: it.frame.id,
    "CUE_THREADABLE": lambda it: "1" if it.layer.threadable else "0",
}
"""The variables OpenCue sets. Memory is in the KB the database holds, threads are whole cores."""
RESERVED_VARIABLES: frozenset[str] = frozenset(_VARIABLES)
"""A job's or layer's own value of these would never reach its frames."""


def environment(
    planned: PlannedProc, job_environment: Mapping[str, str], layer_environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a planned frame: the job's, overridden by the layer's, overridden by OpenCue's variables."""
    return {**job_environment, **layer_environment, **{name: read(planned) for name, read in _VARIABLES.items()}}


def memory_limit(memory_kb: int, factor: float) -> int:
    """RunFrame's soft or hard limit, in KB, of a frame that reserves ``memory_kb``: truncated as in Cuebot.

    A limit below the reservation would kill frames that use what they were given, so it never goes below it.
    """
    return max(memory_kb, int(memory_kb * factor))


Environments = Mapping[str, Mapping[str, str]]
"""The variables of jobs and of layers, by the id of either."""
