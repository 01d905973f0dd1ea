"""A layer's share of a host: on one host at most so many frames of one layer while others want the host, too.

Twenty frames of one layer that read the same scene from the same disk at the same moment are slow together, and a host
that fails takes all of them with it. So a layer spreads while there is something else to put beside it. It is a soft
admission: it holds in a plan's first round, and what is idle after that round goes to the layer all the same, so no
core idles for it.
"""

from __future__ import annotations

from opencue_sched.domain.cluster import Verdict
from opencue_sched.domain.farm import Host, Job, Layer, Reservation
from opencue_sched.placement.policies import Refusal

LEAST_FRAMES = 8
"""What a layer may always run on a host: a share of a small host would be a frame or two."""
PART_OF_CORES = 4
"""A layer may run a frame for each four cores of the host."""


def most_frames(host: Host) -> int:
    """Frames of one layer that the host runs while others want it."""
    return max(LEAST_FRAMES, host.total_cores // PART_OF_CORES)


def layer_share(_job: Job, layer: Layer, host: Host, _taken: Reservation) -> Refusal | None:
    """The admission: refuses a layer's next frame on a host that runs as many as the layer's share."""
    running, most = host.running.get(layer.id, 0), most_frames(host)
    if running < most:
        return None
    return Refusal(
        Verdict.LAYER_SHARE,
        f"{host.name} runs {running} of its frames, and takes {most} of one layer while others want the host",
    )
