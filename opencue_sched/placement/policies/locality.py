"""Locality: a layer goes first to hosts that run it, then to hosts that ran it last.

What a layer's frames read (scenes, textures, the program itself) is in such a host's memory and on its disk already.
The score only orders hosts that may take the frame: whether it fits, and for whom a host is held, is decided before.
What a host ran is aged by what ran there since, not by the clock: nothing else drives a layer's files from its caches.
"""

from __future__ import annotations

from opencue_sched.domain.farm import Host, Layer, Reservation

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
