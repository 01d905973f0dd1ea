"""Dependencies: what waits for what, and which frames of two layers belong together (facts A and F)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from opencue_sched.domain.frame_range import FrameRange


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

    @property
    def waits_for_whole(self) -> bool:
        """Whether all frames of one side wait for all, or for one, of the other: not frame with frame."""
        return not self.composite and self is not DependType.FRAME_ON_FRAME


class DependTarget(StrEnum):
    """``depend.str_target``: within one job, or between two."""

    INTERNAL = "INTERNAL"
    EXTERNAL = "EXTERNAL"


@dataclass(frozen=True, slots=True)
class ChunkedRange:
    """The frames of a layer: its range, and how many numbers each of its frames renders."""

    frames: FrameRange
    chunk_size: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each frame, in order."""
        return self.frames.frame_numbers(self.chunk_size)

    @property
    def is_one_chunk(self) -> bool:
        return self.chunk_size > 1 and len(self.numbers) == 1


def frame_by_frame(waiting: ChunkedRange, on: ChunkedRange) -> tuple[tuple[int, int], ...] | None:
    """Which frame waits for which: pairs of frame numbers (waiting, waited for).

    A frame waits for every frame whose chunk renders one of its own numbers; a frame without such waits for nothing.
    None when one side is a single chunk of several frames: then, as in OpenCue, the whole layer waits for the layer.
    """
    if waiting.is_one_chunk or on.is_one_chunk:
        return None
    renders = _frame_that_renders(on)
    pairs: dict[tuple[int, int], None] = {}
    for number in waiting.numbers:
        for own in waiting.frames.chunk(number, waiting.chunk_size):
            if own in renders:
                pairs[number, renders[own]] = None
    return tuple(pairs)


def previous_frame(waiting: ChunkedRange, on: ChunkedRange) -> tuple[tuple[int, int], ...]:
    """Pairs (waiting, waited for): every frame waits for the frame that renders the number before it in its range."""
    renders = _frame_that_renders(on)
    numbers = waiting.frames.numbers
    pairs: dict[tuple[int, int], None] = {}
    for position, number in enumerate(waiting.numbers):
        before = position * waiting.chunk_size - 1
        if before >= 0 and numbers[before] in renders:
            pairs[number, renders[numbers[before]]] = None
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class LayerEdge:
    """``waiting`` layer depends on layer ``on`` of the same job."""

    waiting: str
    on: str
    type: DependType


def waiting_circle(edges: Sequence[LayerEdge]) -> tuple[str, ...]:
    """Layers that would wait for one another for ever, first and last the same; empty when there are none.

    A circle is harmless only when it goes from frame to frame throughout and passes through the previous frame (a
    simulation step that needs the step before).
    """
    all_edges: dict[str, set[str]] = defaultdict(set)
    same_time: dict[str, set[str]] = defaultdict(set)
    for edge in edges:
        all_edges[edge.waiting].add(edge.on)
        if edge.type is not DependType.PREVIOUS_FRAME:
            same_time[edge.waiting].add(edge.on)
    if _has_no_circle(all_edges):
        return ()
    for edge in edges:
        if edge.type is DependType.PREVIOUS_FRAME:
            continue
        path = _path(all_edges if edge.type.waits_for_whole else same_time, edge.on, edge.waiting)
        if path:
            return (edge.waiting, *path)
    return ()


def _frame_that_renders(layer: ChunkedRange) -> dict[int, int]:
    """Every number of a layer, and the number of the frame whose chunk it is in."""
    return {own: number for number in layer.numbers for own in layer.frames.chunk(number, layer.chunk_size)}


def _has_no_circle(edges: dict[str, set[str]]) -> bool:
    """Whether the layers can be sorted: the usual case, and a quick answer for jobs of thousands of layers."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError:
        return False
    return True


def _path(edges: dict[str, set[str]], start: str, goal: str) -> tuple[str, ...]:
    """A shortest path along the edges, both ends included; empty when there is none."""
    came_from: dict[str, str | None] = {start: None}
    queue = [start]
    for layer in queue:
        if layer == goal:
            path: list[str] = []
            step: str | None = layer
            while step is not None:
                path.append(step)
                step = came_from[step]
            return tuple(reversed(path))
        for following in sorted(edges.get(layer, ())):
            if following not in came_from:
                came_from[following] = layer
                queue.append(following)
    return ()
