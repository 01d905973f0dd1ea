"""Frames of a layer: their numbers in a range, and the command and environment RQD gets for one (facts E).

Grammar of a range (facts E; OpenCue's FrameSet), comma-joined, numbers may be negative:

========== ==================================================== =======================
``n``      one frame                                            ``-3``
``a-b``    both ends and all between, descending when b < a     ``1-5``, ``5-1``
``a-bxs``  every s-th from a; s negative when descending        ``1-10x3``, ``10-1x-3``
``a-bys``  the others: those ``a-bxs`` leaves out               ``1-10y3``
``a-b:s``  all, interleaved: every s-th, then s/2, ... then 1   ``1-10:5``
========== ==================================================== =======================

A number given twice counts once, where it came first. OpenCue creates its frames that way, but cuts chunks from the
list with the repeats in it, which leaves frames out of ``1-5,3-8`` in chunks of 4; here both use the same list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

from opencue_sched.domain.farm import INT_MAX, PlannedProc
from opencue_sched.errors import InvalidInput

MAX_NUMBERS = 1_000_000
"""Numbers one range may have. Ten times the frames OpenCue allows a job, since a chunk makes one frame of many."""

_LONGEST = 11
_PIECE = re.compile(r"^(-?[0-9]+)(?:-(-?[0-9]+)(?:([xy:])(-?[0-9]+))?)?$")
_FORMS = "write n, a-b, a-bxs, a-bys or a-b:s"


@dataclass(frozen=True)
class FrameRange:
    """The frames of a range. ``text`` is the range without spaces; ``numbers`` are unique, in rendering order."""

    text: str
    numbers: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=32)
    def parse(text: str) -> FrameRange:
        """Reads a range; spaces around its pieces are ignored. Cached: a pass reads a few ranges for all its frames.

        Raises InvalidInput naming the piece that does not parse, or with which there are more than MAX_NUMBERS. The
        numbers are counted before anything is expanded, so ``1-2000000000`` costs nothing.
        """
        names = [piece.strip() for piece in text.split(",")]
        pieces = [_piece(name, text) for name in names]
        total = 0
        for name, (span, _) in zip(names, pieces, strict=True):
            total += len(span)
            if total > MAX_NUMBERS:
                raise _unreadable(text, name, f"makes more than {MAX_NUMBERS} frames")
        numbers = dict.fromkeys(chain.from_iterable(numbers for _, numbers in pieces))
        if not numbers:
            raise InvalidInput(f"frame range {_short(text)!r} has no frames")
        return FrameRange(",".join(names), tuple(numbers))

    def frame_numbers(self, chunk_size: int) -> tuple[int, ...]:
        """The numbers of the frames a layer with this range has: the first of every chunk."""
        return self.numbers[:: _checked_chunk_size(chunk_size)]

    def chunk(self, number: int, chunk_size: int) -> list[int]:
        """The numbers the frame ``number`` renders: itself and those after it in the range, ``chunk_size`` at most."""
        _checked_chunk_size(chunk_size)
        start = self._positions.get(number)
        if start is None:
            raise InvalidInput(f"frame {number} is not in the frame range {self.text}")
        return list(self.numbers[start : start + chunk_size])

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {number: position for position, number in enumerate(self.numbers)}


@lru_cache(maxsize=1024)
def check_frame_range(text: str) -> None:
    """Raises InvalidInput naming the piece that does not parse. Costs the same for a range of a million numbers."""
    for piece in text.split(","):
        _piece(piece.strip(), text)


def frame_spec(numbers: Iterable[int]) -> str:
    """A range that parses to exactly ``numbers`` in their order: ``1-5,10-20x2,30`` (``#FRAMESPEC#``)."""
    frames: Sequence[int] = tuple(numbers)
    pieces: list[str] = []
    start = 0
    while start < len(frames):
        step = frames[start + 1] - frames[start] if start + 1 < len(frames) else 0
        end = start
        while step != 0 and end + 1 < len(frames) and frames[end + 1] - frames[end] == step:
            end += 1
        if end - start >= 2 or step == 1:
            pieces.append(f"{frames[start]}-{frames[end]}" + ("" if step == 1 else f"x{step}"))
        else:
            pieces.append(str(frames[start]))
            end = start
        start = end + 1
    return ",".join(pieces)


def _checked_chunk_size(chunk_size: int) -> int:
    if chunk_size < 1:
        raise InvalidInput(f"a chunk size of {chunk_size} is not possible; write 1 or more")
    return chunk_size


def _piece(piece: str, text: str) -> tuple[range, Iterable[int]]:
    """The numbers between a piece's ends (of the step for ``x``, otherwise every one), and its numbers in order, some
    repeated where it is interleaved. Nothing is expanded yet."""
    match = _PIECE.match(piece)
    if match is None:
        raise _unreadable(text, piece, f"does not parse; {_FORMS}")
    digits = [part for part in match.group(1, 2, 4) if part is not None]
    if any(len(part) > _LONGEST or not -INT_MAX - 1 <= int(part) <= INT_MAX for part in digits):
        raise _unreadable(text, piece, "has a number that is too large")
    start, end = int(digits[0]), int(digits[min(1, len(digits) - 1)])
    direction = 1 if end >= start else -1
    kind, step = match.group(3), int(digits[2]) if len(digits) == 3 else direction
    if step == 0:
        raise _unreadable(text, piece, "has a step of 0")
    if step * direction < 0:
        way, sign = ("up", "positive") if direction > 0 else ("down", "negative")
        raise _unreadable(text, piece, f"counts {way}, so its step must be {sign}")

    def every(step: int) -> range:
        return range(start, end + direction, step)

    span = every(step if kind == "x" else direction)
    if kind == "y":
        stepped = every(step)
        return span, (number for number in span if number not in stepped)
    if kind == ":":
        halvings = [step]
        while abs(halvings[-1]) > 1:
            halvings.append(int(halvings[-1] / 2))
        return span, chain.from_iterable(map(every, halvings))
    return span, span


def _unreadable(text: str, piece: str, problem: str) -> InvalidInput:
    return InvalidInput(f"frame range {_short(text)!r}: {_short(piece)!r} {problem}")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


# A frame's command line, environment and memory limits. Values are put in as they are: what a layer or job is called
# never changes the command around it, whereas OpenCue's substitution gives ``$`` and backslashes in names a meaning of
# their own.

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
TOKEN = re.compile(r"#[A-Za-z][A-Za-z0-9_]*#")
"""What looks like a token, whether it is one or not."""


def unknown_tokens(command: str) -> tuple[str, ...]:
    """What looks like a token but is none, each once, in order: ``#FRAMES#``, ``#frame#``."""
    return tuple(dict.fromkeys(TOKEN.findall(_KNOWN_TOKEN.sub("\0", command))))


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
"""The variables OpenCue sets. Memory is in the KB the database holds (facts D, trap a), threads are whole cores."""

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
