"""Jobs, layers and frames as a dispatch pass sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

FRAMES_TO_RAISE_A_LAYER = 3
"""How many frames of a layer must have needed more memory before the layer itself asks for more."""
MEMORY_FLOOR_KB = 262_144
"""The least memory that a layer asks for, and the margin above the most that was used, when the memory of a layer is
lowered to what its frames used (``b_optimize``)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A WAITING frame."""

    id: str
    name: str
    number: int
    version: int | None
    """frame.int_version, which may be NULL."""
    memory_kb: int | None = None
    """The memory that the frame asks for by itself, where that may be more than its layer's."""
    waiting_since: float | None = None
    """The moment at which the frame last became eligible to run, in epoch seconds of the database's clock; None where
    the database has no such time."""
    failed_on: tuple[str, ...] = ()
    """The names of the hosts that the frame failed on lately."""
    others: bool = False
    """Whether more hosts of the farm may take the frame than it failed on, in whichever shard. Read only for a frame
    that failed on a host, and only while hosts are divided among workers; else False."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with waiting frames: what decides where its frames run. What a launch needs besides is read with what is
    booked (domain.frame_command.LaunchDetails).

    Cores are raw: zero, negative and fractional values keep OpenCue's meaning (see domain.frame_needs).
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
    """How many frames of the layer waited when it was read, in ``frames`` or not."""
    frames: tuple[Frame, ...]
    """The waiting frames that were read with the layer: none of a layer of the backlog, which keeps them apart."""
    limit_ids: tuple[str, ...] = ()
    run_seconds: float | None = None
    """Mean run time, in seconds, of the layer's frames that succeeded; None while none has."""
    dispatch_order: int = 0
    starts_at: float | None = None
    """The moment before which no frame of the layer may start, in epoch seconds of the database's clock; infinity for
    never, None where no such moment lay ahead when the layer was read."""
    count_version: int = 0
    """A number that is another after each change of how many of the layer's frames wait or run."""


@dataclass(frozen=True, slots=True)
class Job:
    """A pending job with its bookable layers in dispatch order."""

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
    """Epoch seconds of the database's clock; 0 where it has no such time."""
    quarantined_until: float | None = None
    """Epoch seconds of the database's clock; None where no quarantine's end lay ahead when the job was read."""


@dataclass(frozen=True, slots=True)
class BadLayer:
    """A layer with waiting frames whose row, or whose job's, makes no sense."""

    job_id: str
    layer_id: str
    show_id: str
    waiting: int
    """How many frames of the layer wait."""
    why: str
    """One sentence for an operator."""
    version: str
    """The version of the layer's rows: once it is another text, the rows may have been mended."""
    facility_id: str = ""
    tags: frozenset[str] = frozenset()
    """The tags of the hosts that may run the layer: its clusters have passes, which tell why it waits."""


def memory_slices(layer: Layer, frames: Sequence[Frame], waiting: int) -> Iterable[tuple[Layer, Sequence[Frame], int]]:
    """Divide a layer by the amounts of memory that its frames ask for.

    Returns a slice for each amount, the most first: the layer with that memory, those of ``frames`` that ask for it,
    and how many frames of the slice wait. Of the ``waiting`` frames those that were not read count in the last slice,
    as frames that ask for no more than the layer. Nearly always the layer itself is the only slice.
    """
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
