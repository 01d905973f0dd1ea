"""Frames of a layer: their numbers in a range.

Grammar of a range (OpenCue's FrameSet), comma-joined, numbers may be negative:

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

from opencue_sched.domain.units import INT_MAX
from opencue_sched.errors import InvalidInput

MAX_NUMBERS = 1_000_000
"""Numbers one range may have. Ten times the frames OpenCue allows a job, since a chunk makes one frame of many."""
_PIECE = re.compile(r"^(-?[0-9]{1,10})(?:-(-?[0-9]{1,10})(?:([xy:])(-?[0-9]{1,10}))?)?$")
_FORMS = "write n, a-b, a-bxs, a-bys or a-b:s"


@dataclass(frozen=True)
class FrameRange:
    """The frames of a range."""

    text: str
    """The range without spaces."""
    numbers: tuple[int, ...]
    """The numbers, each once, in rendering order."""

    @staticmethod
    @lru_cache(maxsize=32)
    def parse(text: str) -> FrameRange:
        """Reads a range; spaces around its pieces are ignored. Cached: a pass reads a few ranges for all its frames.

        Raises InvalidInput naming the piece that does not parse, or when there are more than MAX_NUMBERS. They are
        counted before anything is expanded, so ``1-2000000000`` costs nothing.
        """
        names = [piece.strip() for piece in text.split(",")]
        pieces = [_piece(name, text) for name in names]
        if sum(len(span) for span, _ in pieces) > MAX_NUMBERS:
            raise InvalidInput(f"frame range {text[:60]!r} makes more than {MAX_NUMBERS} frames")
        numbers = dict.fromkeys(chain.from_iterable(numbers for _, numbers in pieces))
        if not numbers:
            raise InvalidInput(f"frame range {text[:60]!r} has no frames")
        return FrameRange(",".join(names), tuple(numbers))

    def chunk(self, number: int, chunk_size: int) -> list[int]:
        """The numbers the frame ``number`` renders: itself and those after it in the range, ``chunk_size`` at most."""
        start = self._positions.get(number)
        if start is None:
            raise InvalidInput(f"frame {number} is not in the frame range {self.text}")
        return list(self.numbers[start : start + chunk_size])

    @cached_property
    def _positions(self) -> dict[int, int]:
        """The place of each frame number in the range, from 0."""
        return {number: position for position, number in enumerate(self.numbers)}


@lru_cache(maxsize=1024)
def check_frame_range(text: str) -> None:
    """Refuse a frame range that cannot be read, by InvalidInput, which names the piece. Costs the same for a range of a
    million numbers."""
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


def _piece(piece: str, text: str) -> tuple[range, Iterable[int]]:
    """The numbers between a piece's ends (of the step for ``x``, otherwise every one), and its numbers in order, some
    repeated where it is interleaved. Nothing is expanded yet."""
    match = _PIECE.match(piece)
    if match is None:
        raise _unreadable(text, piece, f"does not parse; {_FORMS}")
    start = int(match[1])
    end = int(match[2] or start)
    direction = 1 if end >= start else -1
    kind, step = match[3], int(match[4] or direction)
    if not all(-INT_MAX - 1 <= number <= INT_MAX for number in (start, end, step)):
        raise _unreadable(text, piece, "has a number that is too large")
    if step * direction <= 0:
        raise _unreadable(text, piece, f"has the step {step}, which does not lead from {start} to {end}")

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
    """The error for a piece of a range that cannot be used; long texts are cut to 60 characters."""
    return InvalidInput(f"frame range {text[:60]!r}: {piece[:60]!r} {problem}")
