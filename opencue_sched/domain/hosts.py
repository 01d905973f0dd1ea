"""Hosts as a dispatch pass sees them, the amounts a frame takes of one, and the reservation of one for a wide frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.units import CENTICORES_PER_CORE, idle_cores


@dataclass(frozen=True, slots=True)
class Resources:
    """What one frame takes from one host, or needs of one, or what is idle on it. Whole cores; memory in KB."""

    cores: int
    memory_kb: int
    gpus: int = 0
    gpu_memory_kb: int = 0

    def covers(self, other: Resources) -> bool:
        """Whether these resources are at least ``other`` in each amount."""
        return (
            self.cores >= other.cores
            and self.memory_kb >= other.memory_kb
            and self.gpus >= other.gpus
            and self.gpu_memory_kb >= other.gpu_memory_kb
        )

    @classmethod
    def least(cls, needs: Sequence[Resources]) -> Resources:
        """The least that one of ``needs``, of which there is at least one, has of each amount."""
        return cls(
            min([need.cores for need in needs]),
            min([need.memory_kb for need in needs]),
            min([need.gpus for need in needs]),
            min([need.gpu_memory_kb for need in needs]),
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """The reservation of a host for a frame of a layer. The host drains until it has these amounts idle.
    Cores are whole ones."""

    layer_id: str
    job_id: str
    cores: int
    memory_kb: int
    gpus: int
    until: float
    """The end of the reservation unless it is renewed, in epoch seconds of the database's clock."""
    free_at: float | None = None
    """The time at which enough is expected to be idle, by the same clock; None where that cannot be known."""
    owner: str = ""
    """The layer's name for people."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host with what it has idle."""

    id: str
    name: str
    facility_id: str
    alloc_id: str
    tags: frozenset[str]
    """The host's tags, in the form in which tags are compared (clusters.normalise_tag)."""
    os_names: tuple[str, ...]
    """``host_stat.str_os``, split on commas."""
    thread_mode: ThreadMode
    total_centicores: int
    idle_centicores: int
    total_memory_kb: int
    idle_memory_kb: int
    """The lesser of what no proc reserves and what the machine reports free."""
    total_gpus: int = 0
    idle_gpus: int = 0
    total_gpu_memory_kb: int = 0
    idle_gpu_memory_kb: int = 0
    """The lesser of what no proc reserves and what the machine reports free."""
    running: Mapping[str, int] = field(default_factory=dict, hash=False)
    """How many frames of each layer run on the host, by layer id. Empty where no core is idle, since nothing can be
    placed there; may count frames that ended in the last minute (host_cache.RUNNING_BELIEVED_SECONDS)."""
    recent: tuple[str, ...] = ()
    """The ids of layers that ran on the host before, the latest first."""
    reservation: Reservation | None = None
    """The wide frame for which the host drains; None for most hosts."""

    @property
    def idle_cores(self) -> int:
        """Whole cores that can be booked."""
        return idle_cores(self.idle_centicores)

    @property
    def total_cores(self) -> int:
        """Whole cores of the host."""
        return idle_cores(self.total_centicores)

    def idle(self) -> Host:
        """The same host with nothing on it."""
        return replace(
            self,
            idle_centicores=self.total_centicores,
            idle_memory_kb=self.total_memory_kb,
            idle_gpus=self.total_gpus,
            idle_gpu_memory_kb=self.total_gpu_memory_kb,
        )

    def less(self, taken: Resources, layer_id: str = "") -> Host:
        """The same host after ``taken`` was booked, for a frame of the layer if one is named."""
        running = self.running
        if layer_id:
            running = {**running, layer_id: running.get(layer_id, 0) + 1}
        return self.without(taken, running)

    def without(self, taken: Resources, running: Mapping[str, int]) -> Host:
        """The same host with ``taken`` less idle, and with ``running`` as the count of frames by layer id. Written out,
        because a plan calls this for each frame, and ``dataclasses.replace`` takes twice as long."""
        return Host(
            self.id,
            self.name,
            self.facility_id,
            self.alloc_id,
            self.tags,
            self.os_names,
            self.thread_mode,
            self.total_centicores,
            self.idle_centicores - taken.cores * CENTICORES_PER_CORE,
            self.total_memory_kb,
            self.idle_memory_kb - taken.memory_kb,
            self.total_gpus,
            self.idle_gpus - taken.gpus,
            self.total_gpu_memory_kb,
            self.idle_gpu_memory_kb - taken.gpu_memory_kb,
            running,
            self.recent,
            self.reservation,
        )
