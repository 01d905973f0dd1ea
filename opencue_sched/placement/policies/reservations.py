"""Reservations with backfill: hosts drain for frames too wide to start beside a stream of narrow ones.

A layer is *wide* where one of its frames needs at least half of the largest host that could ever take it, in cores,
memory or GPUs. Its *blocked seconds* are how long it has waited with nothing placed although every cap would let it
run. A layer that has been blocked for longer than the block time is due a host. The reservation task
(dispatch/reservations.py) reserves it (``Reservation``); the plan here, and the commit under the host's lock, keep
other layers from the reserved host but for the backfill rule.

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
from opencue_sched.domain.hosts import Host, Reservation, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.units import CENTICORES_PER_CORE, duration_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import Admission, Refusal

MOST_LAYERS = 8
"""How many layers of the farm have reserved hosts at once, at most: drained cores are idle."""
MOST_HOSTS_OF_A_LAYER = 4
"""How many hosts are reserved for one layer at most; it gets one for each block time for which it was blocked."""
RESERVATION_SECONDS = 600.0
"""Life of a reservation after its last renewal: longer than any change of leaders takes."""
DRAW_SECONDS = 60.0
"""Time between two draws of the order in which layers are granted a host."""
LONGEST_ELAPSED_SECONDS = 60.0
"""The most that is added to a layer's blocked seconds for a time in which no task looked."""


# Who may use a reserved host.


def against_reservation(reservation: Reservation | None, layer: Layer, idle_centicores: int, now: float) -> bool:
    """Whether a reservation keeps a frame of ``layer`` off the reserved host, which has so much idle.

    The layer with the reservation may always use the host. Frames of other layers may where enough cores have drained,
    and only if they are expected to end before the host is free: an unknown end, of the frame or of the drain, is too
    late.
    """
    if reservation is None or reservation.layer_id == layer.id or reservation.until <= now:
        return False
    if idle_centicores < reservation.cores * CENTICORES_PER_CORE:
        return True
    if reservation.free_at is None or layer.run_seconds is None:
        return True
    return now + layer.run_seconds >= reservation.free_at


def reservations(now: float) -> Admission:
    """The firm admission that keeps reserved hosts for their layers, for a pass at ``now``."""

    def admission(_job: Job, layer: Layer, host: Host, _taken: Resources) -> Refusal | None:
        reservation = host.reservation
        if reservation is None or not against_reservation(reservation, layer, host.idle_centicores, now):
            return None
        owner = reservation.owner or f"layer {reservation.layer_id}"
        kept = f"host {host.name} is kept for a wide frame of {owner}, {_expected(reservation.free_at, now)}"
        return Refusal(Verdict.HELD, f"{kept}; only frames that end before use it")

    return admission


def draining(hosts: Iterable[Host], now: float) -> Refusal | None:
    """The verdict on a layer for which nothing fits while some of ``hosts`` are reserved for it: it names the host that
    will have drained first. None without such a host."""
    drains = [
        (_late(host.reservation.free_at), host.name)
        for host in hosts
        if host.reservation is not None and host.reservation.until > now
    ]
    if not drains:
        return None
    first, name = min(drains)
    return Refusal(Verdict.DRAINING, f"host {name} drains for it, {_expected(first, now)}")


def _expected(free_at: float | None, now: float) -> str:
    """When a host is expected to be free, in words."""
    if free_at is None or free_at == math.inf:
        return "when it is free is not known"
    return "expected free now" if free_at <= now else f"expected free in {duration_text(free_at - now)}"


# Which layers are due a host.


class WideLayer(NamedTuple):
    """A wide layer that waits."""

    layer_id: str
    job_id: str
    priority: int
    demand: Demand
    """What the layer's waiting frames need; without any allocation while a cap keeps the layer waiting."""
    blocked_seconds: float
    hosts: int
    """How many hosts could ever take one of the layer's frames."""


def hosts_of_a_wide_layer(demand: Demand, kinds: Sequence[tuple[Host, int]]) -> int:
    """How many hosts could ever take a frame of the layer, if it is wide; 0 if it is not.

    ``kinds`` are the hosts of the farm by kind, those with the most cores first, and how many there are of each.
    """

    def able(memory_kb: int = 0, gpus: int = 0) -> Iterator[tuple[Host, int, Resources]]:
        for host, hosts in kinds:
            if host.total_memory_kb >= memory_kb and host.total_gpus >= gpus and (need := demand.need_on(host)):
                yield host, hosts, need

    # Most layers are narrow, which shows at the first hosts; only for a wide layer is every host looked at.
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


def blocked_after(seconds: float, elapsed: float, *, placed: bool, may_run: bool, block_seconds: float) -> float:
    """The blocked seconds of a layer, ``elapsed`` seconds after they were ``seconds``.

    They grow while the layer waits with nothing placed, halve when something was, and stay while a cap keeps the layer
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
    """What a frame on a host gives back when it ends. Centicores, KB."""

    ends_at: float | None
    """The time at which the frame is expected to end; None while no frame of its layer has succeeded, which would
    tell."""
    centicores: int
    memory_kb: int
    gpus: int


def free_at(host: Host, runs: Iterable[RunningFrame], need: Resources, now: float) -> float | None:
    """The moment at which a host is expected to have ``need`` idle, if nothing new starts beside what ``runs`` there.

    None where that cannot be known. A frame that has run longer than expected is expected to end now.
    """
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


def due_a_host(
    layers: Iterable[WideLayer], reservations: Collection[Reservation], *, block_seconds: float, now: float
) -> list[WideLayer]:
    """The layers that may be granted another host, in the order of the draw.

    A layer may have one host for each block time for which it was blocked, but no more than frames that wait, and no
    more than MOST_HOSTS_OF_A_LAYER; and no more than MOST_LAYERS have any. ``grants`` bounds the share of the hosts. A
    layer whose frames only one host could take gets none: there is no half of one host.
    """
    reserved = Counter(reservation.layer_id for reservation in reservations)
    free = MOST_LAYERS - len(reserved)
    epoch = int(now // DRAW_SECONDS)
    due = []
    for layer in sorted(layers, key=lambda layer: (-_drawn(layer, epoch), layer.layer_id)):
        most = min(int(layer.blocked_seconds / block_seconds), layer.demand.frames, MOST_HOSTS_OF_A_LAYER)
        if layer.hosts < 2 or reserved[layer.layer_id] >= most:
            continue
        if not reserved[layer.layer_id]:
            if free <= 0:
                continue
            free -= 1
        due.append(layer)
    return due


def _drawn(layer: WideLayer, epoch: int) -> float:
    """The rank of a layer's job in the draw of an epoch, the largest first: u^(1/priority), so that chances follow
    priority (Efraimidis and Spirakis). The same for every process."""
    chance = 1 - random.Random(f"{layer.job_id} {epoch}").random()
    return math.log(chance) / max(layer.priority, 1)  # the logarithm keeps the order, and does not round to 1


def grants(
    due: Sequence[WideLayer],
    reserved: Iterable[Host],
    candidates: Mapping[str, Sequence[Host]],
    runs: Mapping[str, Sequence[RunningFrame]],
    *,
    now: float,
) -> dict[str, Reservation]:
    """Reserve one more host for each layer that is ``due`` one: host id -> reservation.

    A layer gets the host that is expected to be free first, of its ``candidates`` (by layer id); ``runs`` is what runs
    on them, by host id. ``reserved`` are the hosts that are reserved already: at most half of the hosts that could take
    a layer's frames are reserved, for whatever layers.
    """
    granted: dict[str, Reservation] = {}
    taken = {host.id: host for host in reserved}
    for layer in due:
        demand = layer.demand
        able = sum(demand.need_on(host) is not None for host in taken.values())
        if 2 * (able + 1) > layer.hosts:
            continue
        options = []
        for host in candidates.get(layer.layer_id, ()):
            need = demand.need_on(host)
            if need is not None and host.id not in taken:
                expected = free_at(host, runs.get(host.id, ()), need, now)
                reservation = Reservation(
                    layer.layer_id,
                    layer.job_id,
                    need.cores,
                    need.memory_kb,
                    need.gpus,
                    until=now + RESERVATION_SECONDS,
                    free_at=expected,
                )
                # Among hosts whose time is not known, the one that has most of the needed cores idle already is first.
                options.append((_late(expected), need.cores - host.idle_cores, host.id, host, reservation))
        if options:
            *_, host, reservation = min(options, key=itemgetter(0, 1, 2))
            taken[host.id], granted[host.id] = host, reservation
    return granted


def _late(free_at: float | None) -> float:
    """A time to sort by: one that is not known comes last."""
    return math.inf if free_at is None else free_at


def ended(reserved: Iterable[Host], demands: Mapping[str, Demand]) -> set[str]:
    """The ids of the ``reserved`` hosts that nothing asks for any more: ``demands`` by layer id.

    The layer no longer waits, may not run or is not wide, the host cannot take its frames, or the layer has more hosts
    than waiting frames; then those that are free last are given up.
    """

    def free_first(host: Host) -> tuple[float, str]:
        return _late(host.reservation.free_at if host.reservation else None), host.id

    gone, kept = set[str](), Counter[str]()
    for host in sorted(reserved, key=free_first):
        layer_id = host.reservation.layer_id if host.reservation else ""
        demand = demands.get(layer_id)
        if demand is None or kept[layer_id] >= demand.frames or demand.need_on(host) is None:
            gone.add(host.id)
        else:
            kept[layer_id] += 1
    return gone
