"""Reservations with backfill: hosts drain for frames too wide to start beside a stream of narrow ones.

A layer is *wide* where one of its frames needs at least half of the largest host that could ever take it, in cores,
memory or GPUs. Its *debt* is how long it has waited with nothing placed although every cap would let it run. One that
owes more than the block time asks for a host. The task (dispatch/reservations.py) grants it as a ``Hold``; the plan
here, and the commit under the host's lock, keep everybody else from the host but for the backfill rule.

Times are epoch seconds of the database's clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from opencue_sched.domain.frame_needs import Demand
from opencue_sched.domain.hosts import Hold, Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.units import CENTICORES_PER_CORE, duration_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import Admission, Refusal

MOST_LAYERS = 8
"""Layers of the farm that hosts are held for at once. Drained cores are idle, so the bounds come first."""
MOST_HOSTS_OF_A_LAYER = 4
"""A layer gets one host for each block time that it owes, and no more than these."""
HOLD_SECONDS = 600.0
"""A hold lives so long after its last renewal: longer than any change of leaders."""
DRAW_SECONDS = 60.0
"""Who is granted a host first is drawn anew each time this has passed."""
LONGEST_ELAPSED_SECONDS = 60.0
"""What a layer owes for the time in which no task looked is bounded by this."""


# Everybody else: who may use a held host.


def against_hold(hold: Hold | None, layer: Layer, idle_centicores: int, now: float) -> bool:
    """Whether a hold keeps a frame of ``layer`` off its host, which has so much idle.

    The owner's layer always may use it. Others may where the host has drained, and only if they are expected to end
    before the host is: an unknown end, of the frame or of the drain, is too late.
    """
    if hold is None or hold.layer_id == layer.id or hold.until <= now:
        return False
    if idle_centicores < hold.cores * CENTICORES_PER_CORE or hold.free_at is None or layer.run_seconds is None:
        return True
    return now + layer.run_seconds >= hold.free_at


def reservations(now: float) -> Admission:
    """The firm admission that keeps held hosts for their owners, for a pass at ``now``."""

    def admission(_job: Job, layer: Layer, host: Host, _taken: Resources) -> Refusal | None:
        hold = host.hold
        if hold is None or not against_hold(hold, layer, host.idle_centicores, now):
            return None
        owner = hold.owner or f"layer {hold.layer_id}"
        kept = f"host {host.name} is kept for a wide frame of {owner}, {_expected(hold.free_at, now)}"
        return Refusal(Verdict.HELD, f"{kept}; only frames that end before use it")

    return admission


def draining(hosts: Iterable[Host], now: float) -> Refusal | None:
    """What the owner is told when nothing fits: which of the hosts held for it is the first to drain; None if none
    does."""
    mine = [(_late(it.hold.free_at), it.name) for it in hosts if it.hold is not None and it.hold.until > now]
    if not mine:
        return None
    free_at, name = min(mine)
    return Refusal(Verdict.DRAINING, f"host {name} drains for it, {_expected(free_at, now)}")


def _expected(free_at: float | None, now: float) -> str:
    if free_at is None or free_at == math.inf:
        return "when it is free is not known"
    return "expected free now" if free_at <= now else f"expected free in {duration_text(free_at - now)}"


# Who asks.


class Asked(NamedTuple):
    """A layer that waits, with what it owes, and how many hosts could ever take one of its frames. A layer that a cap
    keeps waiting has a demand of no allocation."""

    layer_id: str
    job_id: str
    priority: int
    demand: Demand
    debt_seconds: float
    hosts: int


def hosts_of_a_wide_layer(demand: Demand, kinds: Sequence[tuple[Host, int]]) -> int:
    """How many hosts could ever take a frame of the layer, if it is wide; 0 if it is not.

    ``kinds`` are the hosts of the farm by kind, those with the most cores first, and how many there are of each.
    """

    def able(memory_kb: int = 0, gpus: int = 0) -> Iterator[tuple[Host, int, Resources]]:
        larger = (it for it in kinds if it[0].total_memory_kb >= memory_kb and it[0].total_gpus >= gpus)
        return ((host, hosts, need) for host, hosts in larger if (need := demand.need_on(host)))

    # Most layers are narrow, which the first hosts tell; only for a wide one is every host looked at.
    first = next(able(), None)
    if first is None:
        return 0
    largest, _, need = first
    # What a layer needs may depend on the host: judged on the largest.
    narrow = (
        2 * need.cores < largest.total_cores
        and any(able(memory_kb=2 * need.memory_kb + 1))
        and (need.gpus == 0 or any(able(gpus=2 * need.gpus + 1)))
    )
    return 0 if narrow else sum(hosts for _, hosts, _ in able())


def debt_after(seconds: float, elapsed: float, *, placed: bool, may_run: bool, block_seconds: float) -> float:
    """The debt of a layer, ``elapsed`` seconds after it was ``seconds``.

    It grows while the layer waits with nothing placed, halves when something was, and stays while a cap keeps the layer
    waiting: demand that cannot run is no demand. Bounded by what gets a layer all hosts it may have.
    """
    if placed:
        return seconds / 2
    if not may_run:
        return seconds
    elapsed = min(max(0.0, elapsed), LONGEST_ELAPSED_SECONDS)
    return min(seconds + elapsed, MOST_HOSTS_OF_A_LAYER * block_seconds)


# Which hosts.


class RunningFrame(NamedTuple):
    """What a frame on a host gives back when it ends, and when that is expected; None: nobody knows. Centicores, KB."""

    ends_at: float | None
    centicores: int
    memory_kb: int
    gpus: int


def free_at(host: Host, runs: Iterable[RunningFrame], need: Resources, now: float) -> float | None:
    """When the host, with what runs on it, is expected to have so much idle, if nothing new starts on it; None: nobody
    knows. A frame that has run longer than expected is expected to end now."""
    left = (need.cores * CENTICORES_PER_CORE - host.idle_centicores, need.memory_kb - host.idle_memory_kb)
    missing = [*left, need.gpus - host.idle_gpus]
    at = now
    for run in sorted(runs, key=lambda run: _late(run.ends_at)):
        if max(missing) <= 0:
            break
        if run.ends_at is None:
            return None
        at = max(at, run.ends_at)
        missing = [lacks - gives for lacks, gives in zip(missing, run[1:], strict=True)]
    return at if max(missing) <= 0 else None


def who_asks(asked: Iterable[Asked], holds: Collection[Hold], *, block_seconds: float, now: float) -> list[Asked]:
    """Those that may be granted another host, in the order of the draw.

    Within the bounds on layers of the farm and on hosts of a layer: one for each block time that it owes, none more
    than frames that wait. The bound on the share of the hosts is ``grants``'. A layer that only one host could take has
    no half of them.
    """
    held = Counter(hold.layer_id for hold in holds)
    free = MOST_LAYERS - len(held)
    epoch = int(now // DRAW_SECONDS)
    asking = []
    for it in sorted(asked, key=lambda it: (-_drawn(it, epoch), it.layer_id)):
        owed = min(int(it.debt_seconds / block_seconds), it.demand.frames, MOST_HOSTS_OF_A_LAYER)
        if it.hosts < 2 or held[it.layer_id] >= owed:
            continue
        if not held[it.layer_id]:
            if free <= 0:
                continue
            free -= 1
        asking.append(it)
    return asking


def _drawn(asked: Asked, epoch: int) -> float:
    """The place of a job in the draw of an epoch, the largest first: u^(1/priority), so that chances follow priority
    (Efraimidis and Spirakis). The same for every process."""
    chance = 1 - random.Random(f"{asked.job_id} {epoch}").random()
    return math.log(chance) / max(asked.priority, 1)  # the logarithm keeps the order, and does not round to 1


def grants(
    asking: Sequence[Asked],
    held: Iterable[Host],
    candidates: Mapping[str, Sequence[Host]],
    runs: Mapping[str, Sequence[RunningFrame]],
    *,
    now: float,
) -> dict[str, Hold]:
    """One more host for each of those ``asking`` (see ``who_asks``), by its id: of the candidates, by layer id, the one
    that is expected to be free first. ``runs``: what runs on them, by host id.

    At most half of the hosts that could take a layer's frames are held, for whomever. ``held`` are the hosts with a
    hold.
    """
    granted: dict[str, Hold] = {}
    taken = {host.id: host for host in held}
    for it in asking:
        demand = it.demand
        able = sum(demand.need_on(host) is not None for host in taken.values())
        if 2 * (able + 1) > it.hosts:
            continue
        options = []
        for host in candidates.get(it.layer_id, ()):
            need = demand.need_on(host)
            if need is not None and host.id not in taken:
                expected = free_at(host, runs.get(host.id, ()), need, now)
                held_for = it.layer_id, it.job_id, need.cores, need.memory_kb, need.gpus
                hold = Hold(*held_for, until=now + HOLD_SECONDS, free_at=expected)
                # Of hosts of which nobody knows it, the one that has most of the cores already.
                options.append((_late(expected), need.cores - host.idle_cores, host.id, host, hold))
        if options:
            *_, host, hold = min(options, key=itemgetter(0, 1, 2))
            taken[host.id], granted[host.id] = host, hold
    return granted


def _late(free_at: float | None) -> float:
    return math.inf if free_at is None else free_at


def ended(holds: Iterable[Host], demands: Mapping[str, Demand]) -> set[str]:
    """The ids of the hosts whose hold has no demand any more: ``demands`` by layer id.

    The layer no longer waits, may not run or is not wide, the host cannot take its frames, or the layer has more hosts
    than waiting frames; then those that are free last are given up.
    """
    gone, kept = set[str](), Counter[str]()
    for host in sorted(holds, key=lambda host: (_late(host.hold.free_at if host.hold else None), host.id)):
        layer_id = host.hold.layer_id if host.hold else ""
        demand = demands.get(layer_id)
        if demand is None or kept[layer_id] >= demand.frames or demand.need_on(host) is None:
            gone.add(host.id)
        else:
            kept[layer_id] += 1
    return gone
