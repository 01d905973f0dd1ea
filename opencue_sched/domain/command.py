"""A frame's command line, environment and memory limits, as RQD gets them (facts E).

Values are put in as they are: what a layer or job is called never changes the command around it, whereas OpenCue's
substitution gives ``$`` and backslashes in names a meaning of their own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opencue_sched.domain.farm import PlannedProc
from opencue_sched.domain.frame_range import FrameRange, frame_spec
from opencue_sched.domain.units import COMMAND_WIDTH
from opencue_sched.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class FrameWords:
    """What the tokens of a command stand for. ``numbers`` are the frame numbers of the chunk, in rendering order."""

    numbers: Sequence[int]
    chunk_size: int
    frame_name: str
    layer_name: str
    job_name: str

    @property
    def number(self) -> int:
        return self.numbers[0]


_WORDS: Mapping[str, Callable[[FrameWords], str]] = {
    "#ZFRAME#": lambda words: f"{words.number:04d}",
    "#IFRAME#": lambda words: str(words.number),
    "#FRAME_START#": lambda words: str(words.number),
    "#FRAME_END#": lambda words: str(words.numbers[-1]),
    "#FRAME_CHUNK#": lambda words: str(words.chunk_size),
    "#LAYER#": lambda words: words.layer_name,
    "#JOB#": lambda words: words.job_name,
    "#FRAMESPEC#": lambda words: frame_spec(words.numbers),
    "#FRAME#": lambda words: words.frame_name,
}
"""The tokens in the order in which OpenCue replaces them."""

TOKENS: tuple[str, ...] = tuple(_WORDS)

_KNOWN_TOKEN = re.compile("|".join(TOKENS))
TOKEN = re.compile(r"#[A-Za-z][A-Za-z0-9_]*#")
"""What looks like a token, whether it is one or not."""


def substitute(command: str, words: FrameWords) -> str:
    """The command with every token replaced, in OpenCue's order. Unknown tokens stay as they are."""
    for token, word in _WORDS.items():
        if token in command:
            command = command.replace(token, word(words))
    return command


def unknown_tokens(command: str) -> tuple[str, ...]:
    """What looks like a token but is none, each once, in order: ``#FRAMES#``, ``#frame#``."""
    return tuple(dict.fromkeys(TOKEN.findall(_KNOWN_TOKEN.sub("\0", command))))


def command_problems(command: str) -> list[str]:
    """What is wrong with a layer's command, as sentences for the person who submits it. Empty when nothing is."""
    problems = []
    if not command.strip():
        problems.append("is empty")
    if "\0" in command:
        problems.append("contains a NUL character")
    if len(command) > COMMAND_WIDTH:
        problems.append(f"has {len(command)} characters; {COMMAND_WIDTH} is the most OpenCue stores")
    for token in unknown_tokens(command):
        near = difflib.get_close_matches(token.upper(), TOKENS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(TOKENS)}"
        problems.append(f"uses the unknown token {token}; {hint}")
    return problems


def words_of(planned: PlannedProc) -> FrameWords:
    """The words of a planned frame. Raises InvalidInput when its layer's range or chunk size makes no sense."""
    layer = planned.layer
    frames = FrameRange.parse(layer.frame_range)
    return FrameWords(
        numbers=frames.chunk(planned.frame.number, layer.chunk_size),
        chunk_size=layer.chunk_size,
        frame_name=planned.frame.name,
        layer_name=layer.name,
        job_name=planned.job.name,
    )


def command_line(planned: PlannedProc) -> str:
    """The command RQD runs for a planned frame."""
    return substitute(planned.layer.command, words_of(planned))


RESERVED_VARIABLES: frozenset[str] = frozenset(
    {
        "CUE3",
        *("CUE_THREADS", "CUE_MEMORY", "CUE_GPUS", "CUE_GPU_MEMORY", "CUE_LOG_PATH", "CUE_RANGE", "CUE_CHUNK"),
        *("CUE_IFRAME", "CUE_LAYER", "CUE_JOB", "CUE_FRAME", "CUE_SHOW", "CUE_SHOT", "CUE_USER"),
        *("CUE_JOB_ID", "CUE_LAYER_ID", "CUE_FRAME_ID", "CUE_THREADABLE"),
    }
)
"""The variables OpenCue sets; a job's or layer's own value would never reach its frames."""


def environment(
    planned: PlannedProc, job_environment: Mapping[str, str], layer_environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a planned frame: the job's, overridden by the layer's, overridden by OpenCue's variables.

    Memory variables are in the KB the database holds (facts D, trap a), and the threads are whole cores, 1 at least.
    """
    job, layer, frame, reservation = planned.job, planned.layer, planned.frame, planned.reservation
    return {
        **job_environment,
        **layer_environment,
        "CUE3": "1",
        "CUE_THREADS": str(max(1, reservation.cores)),
        "CUE_MEMORY": str(reservation.memory_kb),
        "CUE_GPUS": str(reservation.gpus),
        "CUE_GPU_MEMORY": str(reservation.gpu_memory_kb),
        "CUE_LOG_PATH": job.log_dir,
        "CUE_RANGE": layer.frame_range,
        "CUE_CHUNK": str(layer.chunk_size),
        "CUE_IFRAME": str(frame.number),
        "CUE_LAYER": layer.name,
        "CUE_JOB": job.name,
        "CUE_FRAME": frame.name,
        "CUE_SHOW": job.show_name,
        "CUE_SHOT": job.shot,
        "CUE_USER": job.user,
        "CUE_JOB_ID": job.id,
        "CUE_LAYER_ID": layer.id,
        "CUE_FRAME_ID": frame.id,
        "CUE_THREADABLE": "1" if layer.threadable else "0",
    }


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """RunFrame's soft and hard memory limit, in KB."""

    soft_kb: int
    hard_kb: int


def memory_limits(memory_kb: int, *, soft_factor: float, hard_factor: float) -> MemoryLimits:
    """The limits of a frame that reserves ``memory_kb``: that times the two settings, truncated as in Cuebot.

    A hard limit below the reservation would kill frames that use what they were given, so neither goes below it.
    """
    if soft_factor <= 0 or hard_factor <= 0:
        raise InvalidInput(f"memory limit factors must be positive, not {soft_factor} and {hard_factor}")
    return MemoryLimits(
        soft_kb=max(memory_kb, int(memory_kb * soft_factor)), hard_kb=max(memory_kb, int(memory_kb * hard_factor))
    )
