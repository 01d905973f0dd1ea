"""Frame ranges: which frames a layer has, in which order, and which of them one proc renders.

Grammar (facts E; OpenCue's FrameSet), comma-joined, numbers may be negative:

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

from opencue_sched.errors import InvalidInput

MAX_NUMBERS = 1_000_000
"""Numbers one range may have. Ten times the frames OpenCue allows a job, since a chunk makes one frame of many."""

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_LONGEST = 11
_PIECE = re.compile(r"^(-?[0-9]+)(?:-(-?[0-9]+)(?:([xy:])(-?[0-9]+))?)?$")
_FORMS = "write n, a-b, a-bxs, a-bys or a-b:s"


@dataclass(frozen=True)
class FrameRange:
    """The frames of a range. ``text`` is the range without spaces; ``numbers`` are unique, in rendering order."""

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, *, max_numbers: int = MAX_NUMBERS) -> FrameRange:
        """Reads a range; spaces around its pieces are ignored.

        Raises InvalidInput naming the piece that does not parse, or saying how many numbers are too many. The count is
        checked before anything is expanded, so ``1-2000000000`` costs nothing.
        """
        return _parse(text, max_numbers)

    def __len__(self) -> int:
        return len(self.numbers)

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
        _Piece.parse(piece.strip(), text)


def frame_spec(numbers: Iterable[int]) -> str:
    """A range that parses to exactly ``numbers`` in their order: ``1-5,10-20x2,30`` (``#FRAMESPEC#``)."""
    frames: Sequence[int] = tuple(numbers)
    pieces: list[str] = []
    start = 0
    while start < len(frames):
        end = _run_end(frames, start)
        step = frames[start + 1] - frames[start] if end > start else 0
        if end - start >= 2 or step == 1:
            pieces.append(f"{frames[start]}-{frames[end]}" + ("" if step == 1 else f"x{step}"))
            start = end + 1
        else:
            pieces.append(str(frames[start]))
            start += 1
    return ",".join(pieces)


def _run_end(frames: Sequence[int], start: int) -> int:
    """The last position of the longest run with one step that begins at ``start``."""
    if start + 1 >= len(frames):
        return start
    step = frames[start + 1] - frames[start]
    if step == 0:
        return start
    end = start + 1
    while end + 1 < len(frames) and frames[end + 1] - frames[end] == step:
        end += 1
    return end


def _checked_chunk_size(chunk_size: int) -> int:
    if chunk_size < 1:
        raise InvalidInput(f"a chunk size of {chunk_size} is not possible; write 1 or more")
    return chunk_size


@lru_cache(maxsize=32)
def _parse(text: str, max_numbers: int) -> FrameRange:
    """Cached: a pass reads the same few ranges once for every frame it launches."""
    pieces = [_Piece.parse(piece.strip(), text) for piece in text.split(",")]
    total = 0
    for piece in pieces:
        total += len(piece.span)
        if total > max_numbers:
            raise _unreadable(text, piece.text, f"makes more than {max_numbers} frames")
    numbers: dict[int, None] = {}
    for piece in pieces:
        numbers.update(dict.fromkeys(piece.numbers()))
    if not numbers:
        raise InvalidInput(f"frame range {_short(text)!r} has no frames")
    return FrameRange(",".join(piece.text for piece in pieces), tuple(numbers))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One piece of a range: ``kind`` is x, y, ``:`` or empty; ``step`` has the sign of the direction."""

    text: str
    start: int
    end: int
    kind: str
    step: int

    @classmethod
    def parse(cls, piece: str, text: str) -> _Piece:
        match = _PIECE.match(piece)
        if match is None:
            raise _unreadable(text, piece, f"does not parse; {_FORMS}")
        numbers = [int(digits) for digits in match.group(1, 2, 4) if digits is not None and len(digits) <= _LONGEST]
        if len(numbers) < sum(digits is not None for digits in match.group(1, 2, 4)) or any(
            not _INT_MIN <= number <= _INT_MAX for number in numbers
        ):
            raise _unreadable(text, piece, "has a number that is too large")
        start, end = numbers[0], numbers[min(1, len(numbers) - 1)]
        kind = match.group(3) or ""
        if not kind:
            return cls(piece, start, end, kind, 1 if end >= start else -1)
        step = numbers[2]
        if step == 0:
            raise _unreadable(text, piece, "has a step of 0")
        if step > 0 and end < start:
            raise _unreadable(text, piece, "counts down, so its step must be negative")
        if step < 0 and end >= start:
            raise _unreadable(text, piece, "counts up, so its step must be positive")
        return cls(piece, start, end, kind, step)

    @property
    def span(self) -> range:
        """The numbers between the ends: of the step for ``x``, otherwise every one."""
        return self._every(self.step if self.kind == "x" else (1 if self.step > 0 else -1))

    def numbers(self) -> Iterable[int]:
        """The numbers in order; an interleaved piece repeats some."""
        if self.kind == "y":
            stepped = self._every(self.step)
            return (number for number in self.span if number not in stepped)
        if self.kind == ":":
            return chain.from_iterable(self._every(step) for step in _halvings(self.step))
        return self.span

    def _every(self, step: int) -> range:
        return range(self.start, self.end + (1 if step > 0 else -1), step)


def _halvings(step: int) -> Iterable[int]:
    while step != 0:
        yield step
        step = int(step / 2)


def _unreadable(text: str, piece: str, problem: str) -> InvalidInput:
    return InvalidInput(f"frame range {_short(text)!r}: {_short(piece)!r} {problem}")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
