"""Says in words why no host takes a layer's next frame, by what hosts there are with the layer's tags."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from opencue_sched.domain.frame_needs import Dimension, Rules, Search, reserve
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.names import plural
from opencue_sched.domain.units import memory_text
from opencue_sched.domain.verdicts import Shortage, Verdict
from opencue_sched.placement.headroom import PlanHeadroom
from opencue_sched.placement.host_cache import Census
from opencue_sched.placement.policies import Refusal


def shortage(
    job: Job,
    layer: Layer,
    search: Search,
    census: Census,
    rules: Rules,
    headroom: PlanHeadroom,
    open_allocs: Collection[str],
) -> Refusal:
    """What stands between the layer and the hosts of its tags.

    NO_HOST: there are no such hosts, or all were refused a moment ago. NO_FIT: none could take a frame even when idle.
    OVER_SUBSCRIPTION: the hosts that could take one are of allocations without headroom. CAPACITY: they are busy.
    Where another cap is in the way, its refusal is the answer.
    """
    refused = plural(len(census.refused), "host")
    why = next((why for why in reversed(census.refused) if why), "no reason given")
    left_alone = f"left alone for a moment after a refusal: {why}"
    if not census.kinds:
        none = f"no open host that is up has the tag {' or '.join(sorted(search.tags))}"
        return Refusal(Verdict.NO_HOST, f"all with its tags, {refused}, {left_alone}" if census.refused else none)
    more = f"; {refused} more {left_alone}" if census.refused else ""
    hosts = f"no host of the {sum(count for _, count in census.kinds)} with its tags"
    needs = f"a frame needs {_need_text(search)}; {hosts} has that"
    lacks: Counter[Dimension] = Counter()
    for host, count in sorted(census.kinds, key=lambda kind: kind[0].alloc_id not in open_allocs):
        answer = reserve(layer, host, rules, os_name=job.os_name, job_cores_left=math.inf)
        if not isinstance(answer, Resources):
            lacks[answer] += count
        elif host.alloc_id in open_allocs:
            return Refusal(Verdict.CAPACITY, f"{needs} idle{more}")
        elif over := headroom.over_cap(job, layer, search.need, host.alloc_id):
            return over
    reasons = ", ".join(
        f"{lacks[dimension]} {words.format(os=job.os_name)}" for dimension, words in _LACKS.items() if lacks[dimension]
    )
    return Refusal(Verdict.NO_FIT, f"{needs} even when idle ({reasons}){more}")


def shared_shortage(tags: tuple[str, ...], need: Resources, census: Census, open_allocs: Collection[str]) -> Shortage:
    """What stands between the hosts with these tags, none of which has ``need`` idle, and each layer that needs at
    least that."""
    with_tags = f"with the tag {' or '.join(tags)}"
    hosts = f"no host of the {sum(count for _, count in census.kinds)} {with_tags}"
    large_enough = [host for host, _ in census.kinds if _size_of(host).covers(need)]
    if not census.kinds:
        verdict, detail = Verdict.NO_HOST, f"no open host that is up {with_tags} takes frames now"
    elif not large_enough:
        verdict, detail = Verdict.NO_FIT, f"{hosts} has {_amount_text(need)} even when idle"
    elif all(host.alloc_id not in open_allocs for host in large_enough):
        verdict, detail = Verdict.OVER_SUBSCRIPTION, f"its show may use no more cores of the hosts {with_tags}"
    else:
        verdict, detail = Verdict.CAPACITY, f"{hosts} has {_amount_text(need)} idle"
    return Shortage(tags, need, verdict, detail)


def _size_of(host: Host) -> Resources:
    """All that the host has, idle or not."""
    return Resources(host.total_cores, host.total_memory_kb, host.total_gpus, host.total_gpu_memory_kb)


_LACKS = {
    Dimension.OS: "without {os}",
    Dimension.THREAD_MODE: "for frames that thread",
    Dimension.CORES: "with too few cores",
    Dimension.MEMORY: "with too little memory",
    Dimension.GPUS: "with too few GPUs",
    Dimension.GPU_MEMORY: "with too little GPU memory",
}
"""What hosts are that lack something, in words after their number."""


def _need_text(search: Search) -> str:
    """What a frame needs at least, such as ``16 cores, 64.0G``; GPUs only where it needs any."""
    need, least = search.need, search.cores_min_centicores
    all_cores = "all cores" + (f" but {-least / 100:g}" if least else "")
    return _amount_text(need, plural(need.cores, "core") if least > 0 or not search.threadable else all_cores)


def _amount_text(need: Resources, cores: str = "") -> str:
    """What a frame needs, in words; ``cores`` where these are not just a number."""
    cores = cores or plural(need.cores, "core")
    gpus = [plural(need.gpus, "GPU")] if need.gpus else []
    gpu_memory = [f"{memory_text(need.gpu_memory_kb)} of GPU memory"] if need.gpu_memory_kb else []
    return ", ".join([cores, memory_text(need.memory_kb), *gpus, *gpu_memory])
