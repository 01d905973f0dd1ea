"""Dependencies: what waits for what, and which frames of two layers belong together (facts A and F)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from opencue_sched.domain.frames import FrameRange


class DependType(StrEnum):
    """``depend.str_type``: who waits, and for whom."""

    JOB_ON_JOB = "JOB_ON_JOB"
    JOB_ON_LAYER = "JOB_ON_LAYER"
    JOB_ON_FRAME = "JOB_ON_FRAME"
    LAYER_ON_JOB = "LAYER_ON_JOB"
    LAYER_ON_LAYER = "LAYER_ON_LAYER"
    LAYER_ON_FRAME = "LAYER_ON_FRAME"
    FRAME_ON_JOB = "FRAME_ON_JOB"
    FRAME_ON_LAYER = "FRAME_ON_LAYER"
    FRAME_ON_FRAME = "FRAME_ON_FRAME"
    FRAME_BY_FRAME = "FRAME_BY_FRAME"
    PREVIOUS_FRAME = "PREVIOUS_FRAME"
    LAYER_ON_SIM_FRAME = "LAYER_ON_SIM_FRAME"

    @property
    def composite(self) -> bool:
        """Whether the row only groups the FRAME_ON_FRAME rows below it and is never satisfied by itself."""
        return self in (DependType.FRAME_BY_FRAME, DependType.PREVIOUS_FRAME)


@dataclass(frozen=True, slots=True)
class ChunkedRange:
    """The numbers that a layer renders. Each frame renders ``chunk_size`` of them, and its own number is the first."""

    frames: FrameRange
    chunk_size: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The frames' own numbers, in order."""
        return self.frames.frame_numbers(self.chunk_size)

    @property
    def is_one_chunk(self) -> bool:
        return self.chunk_size > 1 and len(self.numbers) == 1


def frame_by_frame(waiting: ChunkedRange, on: ChunkedRange) -> tuple[tuple[int, int], ...] | None:
    """Which frame waits for which: pairs of frame numbers (waiting, waited for).

    A frame waits for every frame that renders a number which it renders too; if there is none, it waits for nothing.
    None when one side is a single chunk of several frames: then, as in OpenCue, the whole layer waits for the layer.
    """
    if waiting.is_one_chunk or on.is_one_chunk:
        return None
    renders = _frame_that_renders(on)
    waits = _frame_that_renders(waiting)
    return tuple(dict.fromkeys((frame, renders[number]) for number, frame in waits.items() if number in renders))


def previous_frame(waiting: ChunkedRange, on: ChunkedRange) -> tuple[tuple[int, int], ...]:
    """Pairs (waiting, waited for): every frame waits for the frame that renders the number before it in its range."""
    renders = _frame_that_renders(on)
    last_of_chunks = waiting.frames.numbers[waiting.chunk_size - 1 :: waiting.chunk_size]
    followed = zip(waiting.numbers[1:], last_of_chunks, strict=False)
    return tuple((frame, renders[before]) for frame, before in followed if before in renders)


def frame_pairs(kind: DependType, waiting: ChunkedRange, on: ChunkedRange) -> tuple[tuple[int, int], ...] | None:
    """The pairs of a composite dependency; empty when no frame would wait, None when the layers wait as a whole."""
    return (previous_frame if kind is DependType.PREVIOUS_FRAME else frame_by_frame)(waiting, on)


def waiting_circle(edges: Sequence[tuple[str, str, DependType]]) -> tuple[str, ...]:
    """Layers that would wait for one another for ever, first and last the same; empty when there are none.

    An edge is a layer, the layer of the same job it waits for, and how. A circle is harmless only when it goes from
    frame to frame throughout and passes through the previous frame (a simulation step that needs the step before).
    """
    all_edges: dict[str, set[str]] = defaultdict(set)
    same_time: dict[str, set[str]] = defaultdict(set)
    for waiting, on, kind in edges:
        all_edges[waiting].add(on)
        if kind is not DependType.PREVIOUS_FRAME:
            same_time[waiting].add(on)
    try:
        TopologicalSorter(all_edges).prepare()  # quick for thousands of layers, and mostly all there is to do
    except CycleError:
        for waiting, on, kind in edges:
            # Where a whole layer waits, every circle is harmful; from frame to frame, one without previous frames.
            if kind is not DependType.PREVIOUS_FRAME:
                path = _path(same_time if kind is DependType.FRAME_BY_FRAME else all_edges, on, waiting)
                if path:
                    return (waiting, *path)
    return ()


def _frame_that_renders(layer: ChunkedRange) -> dict[int, int]:
    """Rendered number -> number of the frame that renders it."""
    numbers, size = layer.frames.numbers, layer.chunk_size
    return {rendered: numbers[position - position % size] for position, rendered in enumerate(numbers)}


def _path(edges: dict[str, set[str]], start: str, goal: str) -> tuple[str, ...]:
    """A shortest path along the edges, both ends included; empty when there is none."""
    paths: dict[str, tuple[str, ...]] = {start: (start,)}
    queue = [start]
    for layer in queue:
        if layer == goal:
            return paths[layer]
        for following in sorted(edges.get(layer, ())):
            if following not in paths:
                paths[following] = (*paths[layer], following)
                queue.append(following)
    return ()
