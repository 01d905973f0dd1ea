"""Scores: which of the hosts that may take a frame it goes to. Whether it fits, and for whom a host is held, is decided
before.

``convex``: a potential of what is used on a host, the sum over cores, memory and GPUs of weight x e^(used / total). A
frame costs what it adds to that. The exponential makes the last part of a resource dearer than the first, so frames
with much memory go where much memory is idle, and hosts come to be used to the same degree in each resource: what is
left of one is left beside what is left of the others. The alternative is the order of ``queue.host_booking_strategy``
(best fit by cores, worst fit by memory, with work without GPUs on hosts with the fewest): it needs no score.

``locality``: a layer goes first to hosts that run it, then to hosts that ran it last. What its frames read (scenes,
textures, the program itself) is in such a host's memory and on its disk already. What a host ran is aged by what ran
there since, not by the clock: nothing else drives a layer's files from its caches.
"""

from __future__ import annotations

from math import exp

from opencue_sched.domain.farm import CENTICORES_PER_CORE, Host, Layer, Reservation

GPU_WEIGHT = 4.0
"""Cores and memory weigh 1: GPUs are few, and what else a host has is of no use to GPU work without them."""


def convex(_layer: Layer, host: Host, taken: Reservation) -> float:
    """The score: what taking this, which the host has idle, adds to the host's potential. Never negative."""
    return (
        _rise(host.total_centicores, host.idle_centicores, taken.cores * CENTICORES_PER_CORE)
        + _rise(host.total_memory_kb, host.idle_memory_kb, taken.memory_kb)
        + GPU_WEIGHT * _rise(host.total_gpus, host.idle_gpus, taken.gpus)
    )


def _rise(total: int, idle: int, taken: int) -> float:
    """How much e^(used / total) rises when so much more is taken; nothing on a host without the resource."""
    if total <= 0 or taken <= 0:
        return 0.0
    used = total - idle
    return exp((used + taken) / total) - exp(used / total)


RUNS = -4000.0
"""What a host that runs the layer costs. Beside it the other scores are small (``convex`` is below 11), and order hosts
that are equal in this."""
RAN_LAST = -2000.0
"""What a host costs that ran the layer last; half as much for each layer that ended there since."""


def locality(layer: Layer, host: Host, _taken: Reservation) -> float:
    """The score: how little of the layer's files this host has. 0 on a host that knows nothing of the layer."""
    if host.running.get(layer.id, 0) > 0:
        return RUNS
    if layer.id in host.recent:
        return RAN_LAST / (1 << host.recent.index(layer.id))
    return 0.0
