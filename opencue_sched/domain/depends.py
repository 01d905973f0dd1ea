"""Dependencies: what waits for what, and which frames of two layers belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from opencue_sched.domain.frame_range import FrameRange


class DependType(StrEnum):
    """``depend.str_type``: who waits, and for whom. OpenCue has more, which a job file cannot ask for."""

    JOB_ON_JOB = "JOB_ON_JOB"
    JOB_ON_LAYER = "JOB_ON_LAYER"
    JOB_ON_FRAME = "JOB_ON_FRAME"
    LAYER_ON_JOB = "LAYER_ON_JOB"
    LAYER_ON_LAYER = "LAYER_ON_LAYER"
    LAYER_ON_FRAME = "LAYER_ON_FRAME"
    FRAME_ON_FRAME = "FRAME_ON_FRAME"
    FRAME_BY_FRAME = "FRAME_BY_FRAME"
    PREVIOUS_FRAME = "PREVIOUS_FRAME"

    @property
    def composite(self) -> bool:
        """Whether the row only groups the FRAME_ON_FRAME rows below it and is never satisfied by itself."""
        return self in (DependType.FRAME_BY_FRAME, DependType.PREVIOUS_FRAME)


@dataclass(frozen=True, slots=True)
class ChunkedRange:
    """The numbers that a layer renders, and how many of them each of its frames renders."""

    frames: FrameRange
    chunk_size: int
    """How many numbers a frame renders; its own number is the first of them."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The frames' own numbers, in order."""
        return self.frames.numbers[:: self.chunk_size]


def frame_pairs(kind: DependType, waiting: ChunkedRange, on: ChunkedRange) -> tuple[tuple[int, int], ...] | None:
    """The pairs of frame numbers (waiting, waited for) of a composite dependency.

    FRAME_BY_FRAME: a frame waits for every frame that renders a number which it renders too; if there is none, it waits
    for nothing. None when one side is a single chunk of several frames: then, as in OpenCue, the whole layer waits for
    the layer. PREVIOUS_FRAME: a frame waits for the one that renders the number before it in its range.
    """
    renders = _frame_that_renders(on)
    needs: Iterable[tuple[int, int]]
    if kind is DependType.PREVIOUS_FRAME:
        last_of_chunks = waiting.frames.numbers[waiting.chunk_size - 1 :: waiting.chunk_size]
        needs = zip(waiting.numbers[1:], last_of_chunks, strict=False)
    elif any(layer.chunk_size > 1 and len(layer.numbers) == 1 for layer in (waiting, on)):
        return None
    else:
        needs = ((frame, number) for number, frame in _frame_that_renders(waiting).items())
    return tuple(dict.fromkeys((frame, renders[number]) for frame, number in needs if number in renders))


def waiting_circle(
    layers: Mapping[str, ChunkedRange], edges: Sequence[tuple[str, str, Collection[tuple[int, int]] | None]]
) -> tuple[str, ...]:
    """Layers that would wait for one another for ever, first and last the same; empty when there are none.

    An edge is a layer, the layer of the same job it waits for, and the pairs of their frames; None: all wait for all.
    """
    # All frames of a layer wait for its start, and its end for all of them: so n frames that wait for n make 2n edges.
    start, end = "start", "end"
    graph: TopologicalSorter[tuple[str, int | str]] = TopologicalSorter()
    for waiting, on, pairs in edges:
        if pairs is None:
            graph.add((waiting, start), (on, end))
        for frame, needed in pairs or ():
            graph.add((waiting, frame), (on, needed))
    for name in dict.fromkeys(name for waiting, on, _ in edges for name in (waiting, on)):
        graph.add((name, end), *((name, number) for number in layers[name].numbers))
        for number in layers[name].numbers:
            graph.add((name, number), (name, start))
    try:
        graph.prepare()
    except CycleError as error:
        circle = tuple(name for name, _ in groupby(name for name, _ in reversed(error.args[1])))
        return circle if len(circle) > 1 else circle * 2
    return ()


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a dependency: a job, or one of its layers. Ids."""

    job: str
    layer: str | None = None


def waits_for(begin: Side, end: Side, edges: Iterable[tuple[Side, Side]]) -> bool:
    """Whether ``begin`` is over only after ``end`` has begun, by dependencies from what waits to what is waited for. A
    frame counts as its whole layer: layers whose frames wait for one another in turns count as waiting altogether."""
    on: dict[tuple[Side, str], set[tuple[Side, str]]] = defaultdict(set)
    sides = {begin, end}
    for waiting, needed in edges:
        on[waiting, "start"].add((needed, "end"))
        sides |= {waiting, needed}
    for side in sides:
        whole = Side(side.job)
        on[side, "end"].add((side, "start"))
        if side != whole:
            on[whole, "end"].add((side, "end"))  # a job is over when its layers are
            on[side, "start"].add((whole, "start"))  # and while a job waits, its layers do
    reached, left = set(), [(begin, "end")]
    while left:
        step = left.pop()
        if step not in reached:
            reached.add(step)
            left += on[step]
    return (end, "start") in reached


def _frame_that_renders(layer: ChunkedRange) -> dict[int, int]:
    """Rendered number -> number of the frame that renders it."""
    numbers, size = layer.frames.numbers, layer.chunk_size
    return {rendered: numbers[position - position % size] for position, rendered in enumerate(numbers)}
