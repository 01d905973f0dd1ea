"""Admissions: what may not go to a host that has room for it.

GPU guard, a firm admission. A host's GPUs are worth nothing beside cores that are all taken. So on a host with idle
GPUs that waiting frames could use, work without GPUs may take no more than what those frames leave: for as many of them
as the idle GPUs can serve, and as wait. Where no such frame waits, or no GPU is idle, the host is like any other. What
is kept is idle until the next pass that plans the waiting frames, or until the demand is read again.

A layer's share of a host, a soft admission. Twenty frames of one layer that read the same scene from the same disk at
the same moment are slow together, and a host that fails takes all of them with it. So a layer spreads while there is
something else to put beside it.

Kept apart: a layer does not go to a host whose RQD refused it a moment ago (`dispatch.refusals` says for how long).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opencue_sched.domain.frame_needs import Demand
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.units import memory_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import Admission, Refusal


def gpu_guard(demands: Iterable[Demand]) -> Admission:
    """The admission, for what waits for GPUs."""

    # The widest first: on GPUs that can serve either it is the one that needs most beside them.
    def width(demand: Demand) -> tuple[int, int]:
        return demand.search.need.cores, demand.search.need.memory_kb

    waiting = sorted(demands, key=width, reverse=True)

    def admit(_job: Job, layer: Layer, host: Host, taken: Resources) -> Refusal | None:
        if layer.gpus_min > 0 or layer.gpu_memory_min_kb > 0:
            return None
        kept = kept_for_gpus(waiting, host)
        left = host.idle_cores - taken.cores, host.idle_memory_kb - taken.memory_kb
        if not kept.cores or (left[0] >= kept.cores and left[1] >= kept.memory_kb):
            return None
        return Refusal(
            Verdict.KEPT_FOR_GPUS,
            f"{host.name} keeps {kept.cores} cores and {memory_text(kept.memory_kb)}"
            f" for waiting frames that need its {kept.gpus} idle GPUs",
        )

    return admit


def kept_for_gpus(demands: Iterable[Demand], host: Host) -> Resources:
    """What frames that wait for the host's idle GPUs will need there, at most all that the host has; nothing where no
    such frame waits."""
    if host.idle_gpus <= 0 and host.idle_gpu_memory_kb <= 0:
        return Resources(0, 0)
    cores = memory_kb = 0
    gpus, gpu_memory_kb = host.idle_gpus, host.idle_gpu_memory_kb
    for demand in demands:
        need = demand.need_on(host)
        if need is None or gpus < need.gpus or gpu_memory_kb < need.gpu_memory_kb:
            continue
        idle_and_needed = ((gpus, need.gpus), (gpu_memory_kb, need.gpu_memory_kb))
        served = min([demand.frames, *(idle // needed for idle, needed in idle_and_needed if needed)])
        cores += served * need.cores
        memory_kb += served * need.memory_kb
        gpus -= served * need.gpus
        gpu_memory_kb -= served * need.gpu_memory_kb
    return Resources(
        min(cores, host.total_cores),
        min(memory_kb, host.total_memory_kb),
        host.idle_gpus - gpus,
        host.idle_gpu_memory_kb - gpu_memory_kb,
    )


LEAST_FRAMES = 8
"""How many frames a layer may always run on a host: its share of a small host would be a frame or two."""
PART_OF_CORES = 4
"""How many cores of a host there must be for each frame of a layer that may run there while others want the host: a
layer whose frames take one core gets a quarter of a large host. With more, a layer spreads over more hosts; with less,
more of its frames read from the same disk at once, and a host that fails takes more of them with it."""


def most_of_a_layer(host: Host) -> int:
    """How many frames of one layer a host takes while others want it."""
    return max(LEAST_FRAMES, host.total_cores // PART_OF_CORES)


def layer_share(_job: Job, layer: Layer, host: Host, _taken: Resources) -> Refusal | None:
    """The admission: refuses a layer's next frame on a host that runs as many as the layer's share."""
    running, most = host.running.get(layer.id, 0), most_of_a_layer(host)
    if running < most:
        return None
    return Refusal(
        Verdict.LAYER_SHARE,
        f"{host.name} runs {running} of its frames, and takes {most} of one layer while others want the host",
    )


def kept_apart(apart: Mapping[tuple[str, str], str]) -> Admission:
    """The admission that keeps layers off hosts whose RQD refused them a moment ago. ``apart``: what the RQD said, by
    layer id and host name."""

    def admit(_job: Job, layer: Layer, host: Host, _taken: Resources) -> Refusal | None:
        said = apart.get((layer.id, host.name))
        if said is None:
            return None
        return Refusal(Verdict.BACKING_OFF, f"host {host.name} refused its frames and will be tried again: {said}")

    return admit
