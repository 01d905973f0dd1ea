"""Jobs, layers and frames as a dispatch pass sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

FRAMES_TO_RAISE_A_LAYER = 3
"""So many frames of a layer needed more memory before the layer asks for more."""
MEMORY_FLOOR_KB = 262_144
"""The least memory a layer asks for, and the margin the optimizer leaves above the most that was used."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A WAITING frame. ``version`` is frame.int_version, which may be NULL.

    ``memory_kb``: what it asks for by itself, where that may be more than its layer does. ``waiting_since``: when it
    last became eligible to run, in epoch seconds of the database's clock; None where the database has no such time.
    """

    id: str
    name: str
    number: int
    version: int | None
    memory_kb: int | None = None
    waiting_since: float | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with waiting frames: what decides where its frames run. What a launch needs besides is read with what is
    booked (domain.frame_command.LaunchDetails).

    ``cores_min_centicores`` and ``cores_max_centicores`` are raw: zero, negative and fractional values keep OpenCue's
    meaning (see domain.frame_needs). ``waiting_frames`` counts all waiting frames as of its read. ``frames`` are those
    that were read with it: none of a layer of the backlog, which keeps them apart.
    ``run_seconds`` is the mean run time of its frames that succeeded; None while none has. ``starts_at``: when it may
    start, in epoch seconds of the database's clock, where that lay ahead when it was read; infinity for never.
    """

    id: str
    name: str
    cores_min_centicores: int
    cores_max_centicores: int
    memory_min_kb: int
    gpus_min: int
    gpu_memory_min_kb: int
    tags: frozenset[str]
    services: tuple[str, ...]
    threadable: bool
    waiting_frames: int
    frames: tuple[Frame, ...]
    limit_ids: tuple[str, ...] = ()
    run_seconds: float | None = None
    dispatch_order: int = 0
    starts_at: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A pending job with its bookable layers in dispatch order.

    ``started_at`` and ``quarantined_until`` are epoch seconds of the database's clock: 0 where it has no such time, and
    None where no quarantine's end lay ahead when the job was read.
    """

    id: str
    name: str
    show_id: str
    show_name: str
    folder_id: str
    dept_id: str
    os_name: str | None
    layers: tuple[Layer, ...]
    facility_id: str = ""
    priority: int = 1
    started_at: float = 0.0
    quarantined_until: float | None = None


@dataclass(frozen=True, slots=True)
class BadLayer:
    """A layer with waiting frames whose row, or whose job's, makes no sense."""

    job_id: str
    layer_id: str
    show_id: str
    waiting: int
    """Frames that wait."""
    why: str
    version: str
    """Another text once the rows may have been mended."""


def memory_slices(layer: Layer, frames: Sequence[Frame], waiting: int) -> Iterable[tuple[Layer, Sequence[Frame], int]]:
    """The layer as one for each amount of memory that frames of it ask for, the most first, with these frames and how
    many of them wait. Nearly always itself."""
    waiting = max(waiting, len(frames))
    if not any(frame.memory_kb for frame in frames):
        return ((layer, frames, waiting),)
    by_memory: defaultdict[int, list[Frame]] = defaultdict(list)
    for frame in frames:
        by_memory[max(layer.memory_min_kb, frame.memory_kb or 0)].append(frame)
    slices = []
    for memory_kb in sorted(by_memory, reverse=True):
        own = len(by_memory[memory_kb]) if memory_kb > min(by_memory) else waiting
        waiting -= own
        slices.append((replace(layer, memory_min_kb=memory_kb), by_memory[memory_kb], own))
    return slices
