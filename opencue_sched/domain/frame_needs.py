"""What one frame of a layer takes on one host, or why the host cannot take it.

Source of the rules: OpenCue's resource arithmetic (Cuebot's behaviour where Cuebot and the Rust scheduler differ) and
the reference (docs/references.md). Where they are silent or wrong (docs/contributors/upstream-traps.md):

- A minimum of a fraction of a core rounds **up**; 50 centicores are one core. Truncated to 0 they would mean "the
  whole host". As in Cuebot, a minimum below one core never threads, so it takes exactly one.
- Zero is every core of the host and a negative minimum is all but that many. Both are taken exactly: no thread mode
  or memory rule adds cores that the layer asked to leave alone. All but a fraction leaves a whole core.
- ``int_cores_max`` is the layer's own bound on one frame, rounded like the minimum so that a minimum equal to the
  maximum stays so. It wins over the minimum, as in Cuebot.
- Memory is compared and reserved in the KB of the database.
- Tags, caps of shows, folders and licences, and the host's state are checked elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.units import CENTICORES_PER_CORE, booked_cores

MEM_RESERVED_MIN_KB = 250 * 1024
"""The least memory that a proc reserves, as with Cuebot (its ``mem_reserved_min``): a frame without an estimate needs
some."""
VARIABLE_MODE_LEAST_CORES = 2
"""The least cores of a threaded frame on a host in ThreadMode.VARIABLE."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the arithmetic depends on besides layer and host."""

    memory_stranded_threshold_kb: int
    """``queue.memory_stranded_threshold``: a frame that leaves no more memory idle takes all idle cores."""
    selfish_services: frozenset[str] = frozenset()
    """``queue.selfish_services``: their frames take all idle cores."""


class Dimension(StrEnum):
    """Why a host takes no frame of a layer: what it, or the job's cap, is short of.

    JOB_CORES speaks of this host only: a layer that wants whole hosts may fit the job's cap on a smaller one. It is
    given only when the host itself would have taken the frame.
    """

    OS = "os"
    THREAD_MODE = "thread_mode"
    CORES = "cores"
    MEMORY = "memory"
    GPUS = "gpus"
    GPU_MEMORY = "gpu_memory"
    JOB_CORES = "job_cores"


@dataclass(frozen=True, slots=True)
class Search:
    """All that decides which hosts a layer can use, but caps and admissions."""

    tags: tuple[str, ...]
    os_name: str | None
    need: Resources
    """The least that every frame of the layer takes, whatever the host."""
    threadable: bool
    cores_min_centicores: int
    cores_max_centicores: int

    @classmethod
    def of(cls, job: Job, layer: Layer, need: Resources, tags: tuple[str, ...]) -> Search:
        """What a frame of the layer that needs ``need`` looks for, on hosts with one of ``tags``."""
        return cls(tags, job.os_name, need, layer.threadable, layer.cores_min_centicores, layer.cores_max_centicores)


@dataclass(frozen=True, slots=True)
class Demand:
    """Frames that wait, of layers that can use the same hosts of a facility."""

    facility_id: str
    search: Search
    alloc_ids: frozenset[str]
    """The allocations of which the frames' show may take more."""
    frames: int
    only: frozenset[str] | None = None
    """The ids of the only hosts that may take the frames, because they hold a limit whose seats are all taken; None
    where no such limit is in the way."""

    def need_on(self, host: Host) -> Resources | None:
        """The least that a frame takes of the host when nothing else runs there; None for a host that can never take
        one."""
        search, need = self.search, self.search.need
        least = least_cores(search, host)
        could_take = (
            host.facility_id == self.facility_id
            and (self.only is None or host.id in self.only)
            and host.alloc_id in self.alloc_ids
            and not host.tags.isdisjoint(search.tags)
            and (not search.os_name or search.os_name in host.os_names)
            and (search.threadable or host.thread_mode is not ThreadMode.ALL)
            and 1 <= least <= host.total_cores
            and need.memory_kb <= host.total_memory_kb
            and need.gpus <= host.total_gpus
            and need.gpu_memory_kb <= host.total_gpu_memory_kb
        )
        return replace(need, cores=least) if could_take else None


def minimum_cores(layer: Layer | Search, host: Host) -> int:
    """The layer's minimum in whole cores of this host. Not positive when it asks to leave more than the host has."""
    if _takes_one_core(layer):
        return 1
    if layer.cores_min_centicores > 0:
        return booked_cores(layer.cores_min_centicores)
    return (host.total_centicores + layer.cores_min_centicores) // CENTICORES_PER_CORE


def fewest_cores_anywhere(layer: Layer | Search) -> int:
    """A lower bound of the cores that a frame of the layer takes, whatever the host."""
    if _takes_one_core(layer) or layer.cores_min_centicores <= 0:
        return 1
    return _at_most_the_layers_maximum(layer, booked_cores(layer.cores_min_centicores))


def smallest_need(layer: Layer) -> Resources:
    """A lower bound of what any frame of the layer takes, for a search that does not know the host yet.

    A zero or negative minimum depends on the host, so it is bounded by one core and :func:`reserve` refuses the hosts
    that are too busy. The bound is always positive: as an index key a negative minimum would find no host, and
    compared with what a job has left it would slip past the at-cap test.
    """
    return Resources(
        cores=fewest_cores_anywhere(layer),
        memory_kb=max(layer.memory_min_kb, MEM_RESERVED_MIN_KB),
        gpus=max(layer.gpus_min, 0),
        gpu_memory_kb=max(layer.gpu_memory_min_kb, 0),
    )


def reserve(
    layer: Layer, host: Host, rules: Rules, *, os_name: str | None, job_cores_left: float
) -> Resources | Dimension:
    """What a frame of ``layer`` takes on ``host`` now, or the first dimension it is short of.

    A job without an OS runs anywhere; the host's is a list, as Cuebot reads it. ``job_cores_left`` is what the job's
    cap still allows, in cores; infinity without a cap. What a frame takes never exceeds it: otherwise a threaded frame
    grabs a whole host and a small job cap rejects it for ever. Nor does it shrink below the layer's minimum, to fit
    neither the cap nor the idle cores; a thread mode's floor gives way to the cap, not to the idle cores.
    """
    if os_name and os_name not in host.os_names:
        return Dimension.OS
    if host.thread_mode is ThreadMode.ALL and not layer.threadable:
        return Dimension.THREAD_MODE
    need = smallest_need(layer)
    least = least_cores(layer, host)
    if least < 1 or least > host.idle_cores:
        return Dimension.CORES
    if need.memory_kb > host.idle_memory_kb:
        return Dimension.MEMORY
    if need.gpus > host.idle_gpus:
        return Dimension.GPUS
    if need.gpu_memory_kb > host.idle_gpu_memory_kb:
        return Dimension.GPU_MEMORY
    if fewest_cores(layer, host) > job_cores_left:
        return Dimension.JOB_CORES
    cores = max(least, min(_wanted_cores(layer, host, rules, need.memory_kb, least), host.idle_cores))
    if cores > job_cores_left:
        cores = int(job_cores_left)
    return Resources(cores, need.memory_kb, need.gpus, need.gpu_memory_kb)


def _takes_one_core(layer: Layer | Search) -> bool:
    """Whether each frame takes exactly one core, whatever the host."""
    return not layer.threadable or 0 < layer.cores_min_centicores < CENTICORES_PER_CORE


def _at_most_the_layers_maximum(layer: Layer | Search, cores: int) -> int:
    """``cores``, or the layer's own maximum where that is less."""
    return min(cores, booked_cores(layer.cores_max_centicores)) if layer.cores_max_centicores > 0 else cores


def fewest_cores(layer: Layer | Search, host: Host) -> int:
    """The layer's own minimum on this host, which no cap makes smaller."""
    return _at_most_the_layers_maximum(layer, minimum_cores(layer, host))


def least_cores(layer: Layer | Search, host: Host) -> int:
    """The fewest cores a frame runs with on this host: its minimum, the thread mode's floor, the layer's maximum. Zero
    or less where the frame never runs here."""
    least = minimum_cores(layer, host)
    if _takes_one_core(layer):
        return least
    if host.thread_mode is ThreadMode.VARIABLE and layer.cores_min_centicores > 0:
        least = max(least, VARIABLE_MODE_LEAST_CORES)
    return _at_most_the_layers_maximum(layer, least)


def _wanted_cores(layer: Layer, host: Host, rules: Rules, memory_kb: int, least: int) -> int:
    """The cores the thread mode, the services and the memory ask for; the caller fits them to what is there."""
    if _takes_one_core(layer) or layer.cores_min_centicores <= 0:
        return least
    if host.thread_mode is ThreadMode.ALL:
        wanted = host.idle_cores
    elif host.thread_mode is ThreadMode.VARIABLE and minimum_cores(layer, host) <= VARIABLE_MODE_LEAST_CORES:
        wanted = VARIABLE_MODE_LEAST_CORES
    elif (
        not rules.selfish_services.isdisjoint(layer.services)
        or host.idle_memory_kb - memory_kb <= rules.memory_stranded_threshold_kb
    ):
        # A selfish service, or no memory is left for anyone else to use the other cores.
        wanted = host.idle_cores
    else:
        # The cores whose even share of the host's memory the frame takes, rounded down.
        share_kb = round(host.total_memory_kb / max(1, host.total_cores))
        wanted = memory_kb // share_kb if share_kb > 0 else 0
    return _at_most_the_layers_maximum(layer, wanted)
