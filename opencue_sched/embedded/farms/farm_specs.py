"""What a synthetic farm is asked for, and the ids it answers with.

Cores are cores (fractions allowed: 0.5 is 50 centicores), memory is GB of 1024 * 1024 KB, GPUs are whole units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class AllocIds:
    """An allocation."""

    id: str
    name: str
    tag: str
    facility_id: str


@dataclass(frozen=True, slots=True)
class ShowIds:
    """A show with its root folder and the department of its point."""

    id: str
    name: str
    folder_id: str
    dept_id: str


@dataclass(frozen=True, slots=True)
class HostIds:
    """A host."""

    id: str
    name: str
    alloc_id: str


@dataclass(frozen=True, slots=True)
class LayerIds:
    """A layer and its frames in dispatch order."""

    id: str
    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobIds:
    """A job and its layers in the order they were asked for."""

    id: str
    name: str
    show: ShowIds
    folder_id: str
    layers: tuple[LayerIds, ...]

    @property
    def frames(self) -> tuple[str, ...]:
        """Ids of all frames, layer by layer."""
        return tuple(frame for layer in self.layers for frame in layer.frames)


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host that is UP, OPEN and idle unless something else is asked for."""

    name: str | None = None
    alloc: AllocIds | None = None
    cores: float = 8
    idle_cores: float | None = None
    memory_gb: float = 16
    idle_memory_gb: float | None = None
    free_memory_gb: float | None = None
    """What the machine reports free; None: all of it."""
    gpus: int = 0
    gpu_memory_gb: float = 0
    tags: Sequence[str] = ()
    """MANUAL tags."""
    hardware_tags: Sequence[str] = ()
    """HARDWARE tags."""
    hostname_tag: bool = True
    """Whether the host has a HOSTNAME tag: its name."""
    alloc_tag: bool = True
    """Whether the host has an ALLOC tag: its allocation's."""
    os: str = "linux"
    thread_mode: int = 0
    """The number of a ThreadMode: 0 AUTO, 1 ALL, 2 VARIABLE."""
    lock: str = "OPEN"
    state: str = "UP"
    ping_age: float = 0
    """Age of the host's last report, in seconds."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer with its frames."""

    frames: int = 1
    """How many frames the layer has. They are numbered from 1 in steps of ``chunk``, unless ``numbers`` says
    otherwise."""
    cores: float = 1
    """The least cores of a frame. As in OpenCue, 0 is the whole host, and -2 all of its cores but two."""
    cores_max: float = 0
    memory_gb: float = 1
    gpus: int = 0
    gpu_memory_gb: float = 0
    name: str | None = None
    tags: str = "general"
    type: str = "RENDER"
    command: str = "echo #IFRAME#"
    range: str | None = None
    """The text of layer.str_range; None: as ``frames``, ``chunk`` and ``numbers`` have it."""
    chunk: int = 1
    numbers: Sequence[int] | None = None
    """The numbers of the frames, in place of ``frames`` and ``chunk``."""
    threadable: bool = True
    services: str = "default"
    optimize: bool = True
    timeout: int = 0
    """Minutes; 0 is no time-out."""
    timeout_llu: int = 0
    """Minutes without a new line in the log; 0 is no time-out."""
    limits: Sequence[str] = ()
    """Ids of limits."""
    env: Mapping[str, str] = field(default_factory=dict)
    start_after: datetime | None = None

    def frame_numbers(self) -> tuple[int, ...]:
        """The numbers of the frames."""
        return tuple(self.numbers or range(1, 1 + self.frames * self.chunk, self.chunk))

    def frame_range(self) -> str:
        """The text of layer.str_range."""
        if self.range is not None:
            return self.range
        if self.numbers:
            return ",".join(str(number) for number in self.numbers)
        return f"1-{self.frames * self.chunk}"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job with its layers."""

    layers: Sequence[LayerSpec]
    show: ShowIds | None = None
    folder_id: str | None = None
    facility_id: str | None = None
    name: str | None = None
    priority: int = 100
    max_cores: float = 10_000
    """The enforced cap (job_resource); -1 and 0 are written as they are."""
    max_gpus: int = 1000
    """The enforced cap of GPUs, written as it is."""
    min_cores: float = 1
    os: str | None = "linux"
    paused: bool = False
    activate: bool = True
    """Whether the job is PENDING; if not, it is in STARTUP and its frames in SETUP."""
    autoeat: bool = False
    max_retries: int = 3
    shot: str = "sh010"
    user: str = "artist"
    uid: int | None = None
    log_dir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
