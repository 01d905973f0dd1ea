"""Jobs, layers and frames as a dispatch pass sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

FRAMES_TO_RAISE_A_LAYER = 3
"""How many frames of a layer must have needed more memory before the layer itself asks for more: one or two large
frames do not make all others ask for as much."""
MEMORY_FLOOR_KB = 262_144
"""A quarter of a GiB: the least memory that a layer may ask for. The memory of a layer that allows it
(``b_optimize``) is lowered to the most that its frames used and this much more."""


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
    """The names of the hosts that the frame failed on lately (store/failed_runs.py)."""
    others: bool = False
    """Whether the whole farm, all shards together, has more hosts that could take the frame than those in
    ``failed_on``. False for a frame that failed on none, and while hosts are not divided among workers: there it is not
    looked up."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with waiting frames: what decides where its frames run. What only a launch needs, such as the command, is
    read for the frames that are booked (domain.frame_command.LaunchDetails).

    Amounts of cores are those of the row: 0, below 0 and fractions of a core mean what they mean in OpenCue (see
    domain.frame_needs).
    """

    id: str
    name: str
    cores_min_centicores: int
    cores_max_centicores: int
    memory_min_kb: int
    gpus_min: int
    gpu_memory_min_kb: int
    tags: frozenset[str]
    """The tags of hosts that may run the layer, in the form in which tags are compared (clusters.normalise_tag)."""
    services: tuple[str, ...]
    threadable: bool
    waiting_frames: int
    """How many frames of the layer waited when it was read, in ``frames`` or not."""
    frames: tuple[Frame, ...]
    """The waiting frames that were read with the layer. Empty for a layer of the backlog, because the backlog keeps
    frames apart from their layers."""
    limit_ids: tuple[str, ...] = ()
    run_seconds: float | None = None
    """Mean run time, in seconds, of the layer's frames that succeeded; None while none has."""
    dispatch_order: int = 0
    """The place of the layer within its job: the layer with the least number goes first."""
    starts_at: float | None = None
    """The moment before which no frame of the layer may start, in epoch seconds of the database's clock; infinity for
    never, None where no such moment lay ahead when the layer was read."""
    count_version: int = 0
    """A number that differs after each change of how many frames of the layer wait or run."""


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
    """The OS that the job wants of its hosts; None or empty for any."""
    layers: tuple[Layer, ...]
    facility_id: str = ""
    priority: int = 1
    """Jobs of a higher priority go first."""
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
    """The version of the layer's rows. A row that is changed has another version, and may have been mended."""
    facility_id: str = ""
    tags: frozenset[str] = frozenset()
    """The tags of hosts that may run the layer, in the form in which tags are compared. Passes over the clusters of
    these tags say why the layer waits."""


def memory_slices(layer: Layer, frames: Sequence[Frame], waiting: int) -> Iterable[tuple[Layer, Sequence[Frame], int]]:
    """Divide a layer by the amounts of memory that its frames ask for.

    Returns a slice for each amount, the largest amount first: the layer with that memory, those of ``frames`` that ask
    for it, and how many frames of the slice wait. ``frames`` may be only some of the ``waiting`` frames; the others
    count in the last slice, because few frames ask for more than their layer. Nearly always the layer itself is the
    only slice.
    """
    unread = max(0, waiting - len(frames))
    if not any(frame.memory_kb for frame in frames):
        return ((layer, frames, len(frames) + unread),)
    by_memory: defaultdict[int, list[Frame]] = defaultdict(list)
    for frame in frames:
        by_memory[max(layer.memory_min_kb, frame.memory_kb or 0)].append(frame)
    least_kb = min(by_memory)
    return [
        (
            replace(layer, memory_min_kb=memory_kb),
            asking,
            len(asking) + (unread if memory_kb == least_kb else 0),
        )
        for memory_kb, asking in sorted(by_memory.items(), reverse=True)
    ]
