"""Why no host was found for a layer, in one verdict and one sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from opencue_sched.domain.cluster import Verdict
from opencue_sched.domain.farm import Host, Layer, Reservation
from opencue_sched.domain.reservation import Dimension, Need, Rules, reserve
from opencue_sched.placement.headroom import OverCap, PlanHeadroom
from opencue_sched.placement.host_cache import Census

_KB_PER_GIB = 1024 * 1024
_LACKS = {
    Dimension.OS: "with another OS",
    Dimension.THREAD_MODE: "for threaded frames only",
    Dimension.CORES: "with too few cores",
    Dimension.MEMORY: "with too little memory",
    Dimension.GPUS: "with too few GPUs",
    Dimension.GPU_MEMORY: "with too little GPU memory",
    Dimension.JOB_CORES: "with more cores than the job may use",
}


def explain_shortage(
    census: Census,
    layer: Layer,
    need: Need,
    rules: Rules,
    *,
    os_name: str | None,
    tags: Collection[str],
    open_allocs: Collection[str],
    headroom: PlanHeadroom,
) -> OverCap:
    """What stands between the layer and the hosts of ``census``.

    NO_HOST: there are none, or all were refused a moment ago. NO_FIT: none could take a frame even when idle.
    OVER_SUBSCRIPTION: those that could are of allocations without headroom. CAPACITY: they are busy.
    """
    refused = _counted(len(census.refused), "host")
    if not census.kinds:
        if census.refused:
            return OverCap(Verdict.NO_HOST, f"all with its tags, {refused}, {_left_alone(census)}")
        return OverCap(Verdict.NO_HOST, f"no open host that is up has the tag {' or '.join(sorted(tags))}")
    more = f"; {refused} more {_left_alone(census)}" if census.refused else ""
    refusals: Counter[Dimension] = Counter()
    for host, count in sorted(census.kinds, key=lambda kind: kind[0].alloc_id not in open_allocs):
        answer = reserve(layer, host, rules, os_name=os_name, job_cores_left=math.inf)
        if isinstance(answer, Reservation):
            if host.alloc_id in open_allocs:
                return OverCap(Verdict.CAPACITY, _capacity(census, layer, need) + more)
            return headroom.closed_alloc(host.alloc_id, need.cores)
        refusals[answer] += count
    return OverCap(Verdict.NO_FIT, _no_fit(census, layer, need, os_name, refusals) + more)


def describe_need(layer: Layer, need: Need) -> str:
    """``16 cores, 64 GiB``: what a frame needs at least, GPUs only where it needs them."""
    if layer.threadable and layer.cores_min_centicores == 0:
        cores = "all cores"
    elif layer.threadable and layer.cores_min_centicores < 0:
        cores = f"all but {-layer.cores_min_centicores / 100:g} cores"
    else:
        cores = _counted(need.cores, "core")
    return _amounts(cores, need.memory_kb, need.gpus, need.gpu_memory_kb, gpus_wanted=need)


def _no_fit(census: Census, layer: Layer, need: Need, os_name: str | None, refusals: Counter[Dimension]) -> str:
    hosts = _count(census)
    if set(refusals) == {Dimension.OS}:
        return f"a frame needs the OS {os_name}; no host of {hosts} has it"
    if set(refusals) <= {Dimension.OS, Dimension.THREAD_MODE}:
        return f"its frames do not thread; no host of {hosts} takes such frames" + (f" on {os_name}" if os_name else "")
    largest = max((host for host, _ in census.kinds), key=lambda host: (host.total_centicores, host.total_memory_kb))
    size = _idle(largest, need)
    reasons = ", ".join(f"{refusals[lack]} {words}" for lack, words in _LACKS.items() if refusals[lack])
    needs = f"a frame needs {describe_need(layer, need)}"
    return f"{needs}; no host of {hosts} has that even when idle ({reasons}; largest: {size})"


def _capacity(census: Census, layer: Layer, need: Need) -> str:
    needs = f"a frame needs {describe_need(layer, need)}"
    host = census.roomiest
    if host is None:
        return f"{needs}; no host of {_count(census)} can be booked now"
    return f"{needs}; no host of {_count(census)} has that idle, the closest ({host.name}) has {_idle(host, need)}"


def _left_alone(census: Census) -> str:
    why = next((why for why in reversed(census.refused) if why), "no reason given")
    return f"left alone for a moment after a refusal: {why}"


def _count(census: Census) -> str:
    return f"the {sum(count for _, count in census.kinds)} with its tags"


def _amounts(cores: str, memory_kb: int, gpus: int, gpu_memory_kb: int, *, gpus_wanted: Need) -> str:
    parts = [cores, f"{max(0, memory_kb) / _KB_PER_GIB:.4g} GiB"]
    if gpus_wanted.gpus:
        parts.append(_counted(gpus, "GPU"))
    if gpus_wanted.gpu_memory_kb:
        parts.append(f"{max(0, gpu_memory_kb) / _KB_PER_GIB:.4g} GiB of GPU memory")
    return ", ".join(parts)


def _counted(amount: int, noun: str) -> str:
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def _idle(host: Host, need: Need) -> str:
    cores = _counted(host.idle_cores, "core")
    return _amounts(cores, host.idle_memory_kb, host.idle_gpus, host.idle_gpu_memory_kb, gpus_wanted=need)
