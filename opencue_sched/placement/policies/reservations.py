"""Reservations with backfill: hosts drain for frames too wide to start beside a stream of narrow ones.

A layer is *wide* where one of its frames needs at least half of the largest host that could ever take it, in cores,
memory or GPUs. Its *blocked seconds* grow while it waits with nothing placed although every cap would let it run
(blocked_after). A layer that has as many as the *block time* (queue.reservation_block_time) is due a host, which the
reservation task reserves for it (dispatch/reservations.py). Plans, and the commit under the host's lock, then keep the
frames of other layers off the reserved host, except those that the *backfill rule* admits (against_reservation).

All times are seconds since 1970 by the database's clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from opencue_sched.domain.frame_needs import Demand
from opencue_sched.domain.hosts import Host, Reservation, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.units import CENTICORES_PER_CORE, duration_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import Admission, Refusal

MOST_LAYERS = 8
"""How many layers of the farm have reserved hosts at once, at most: cores that have drained are idle meanwhile."""
MOST_HOSTS_OF_A_LAYER = 4
"""How many hosts are reserved for one layer at most, for the same reason. A layer gets one for each block time for
which it was blocked."""
RESERVATION_SECONDS = 600.0
"""Life of a reservation after its last renewal: longer than any change of leaders takes."""
DRAW_SECONDS = 60.0
"""Time between two draws of the order in which layers are granted a host. Within it, every run of the task draws the
same order."""
LONGEST_ELAPSED_SECONDS = 60.0
"""The most that one run of the task adds to a layer's blocked seconds, however long no task ran: what became of the
layer in that time is not known."""


# Who may use a reserved host.


def against_reservation(reservation: Reservation | None, layer: Layer, idle_centicores: int, now: float) -> bool:
    """Whether a reservation keeps a frame of ``layer`` off the reserved host, which has ``idle_centicores``.

    The layer with the reservation may always use the host. The backfill rule: a frame of another layer may use it once
    the reserved cores are idle, so that the host drains of memory or GPUs only, and if the frame is expected to end
    before these are idle too. Where the end of the frame or of the drain is not known, the frame may not.
    """
    if reservation is None or reservation.layer_id == layer.id or reservation.until <= now:
        return False
    if idle_centicores < reservation.cores * CENTICORES_PER_CORE:
        return True
    if reservation.free_at is None or layer.run_seconds is None:
        return True
    return now + layer.run_seconds >= reservation.free_at


def reservations(now: float) -> Admission:
    """The admission that keeps reserved hosts for their layers, for a pass at ``now``. It is firm: it holds in every
    round of a plan (placement/policies/__init__.py)."""

    def admission(_job: Job, layer: Layer, host: Host, _taken: Resources) -> Refusal | None:
        reservation = host.reservation
        if reservation is None or not against_reservation(reservation, layer, host.idle_centicores, now):
            return None
        owner = reservation.owner or f"layer {reservation.layer_id}"
        kept = f"host {host.name} is kept for a wide frame of {owner}, {_expected(reservation.free_at, now)}"
        return Refusal(Verdict.HELD, f"{kept}; only frames that end before use it")

    return admission


def draining(hosts: Iterable[Host], now: float) -> Refusal | None:
    """The verdict on a layer that no host takes now, but for which ``hosts`` are reserved: the verdict names the host
    that will have drained first. None when none of the reservations counts any more."""
    drains = [
        (_unknown_last(host.reservation.free_at), host.name)
        for host in hosts
        if host.reservation is not None and host.reservation.until > now
    ]
    if not drains:
        return None
    first, name = min(drains)
    return Refusal(Verdict.DRAINING, f"host {name} drains for it, {_expected(first, now)}")


def _expected(moment: float | None, now: float) -> str:
    """The words for the time at which a host is expected to be free; None and infinity: it is not known."""
    if moment is None or moment == math.inf:
        return "when it is free is not known"
    return "expected free now" if moment <= now else f"expected free in {duration_text(moment - now)}"


# Which layers are due a host.


class WideLayer(NamedTuple):
    """A wide layer that waits."""

    layer_id: str
    job_id: str
    priority: int
    demand: Demand
    """What the layer's waiting frames need. Its ``alloc_ids`` are empty while a cap keeps the layer waiting, so that no
    host can take the frames."""
    blocked_seconds: float
    hosts: int
    """How many hosts could ever take one of the layer's frames."""


def hosts_of_a_wide_layer(demand: Demand, kinds: Sequence[tuple[Host, int]]) -> int:
    """How many hosts could ever take a frame of the layer, if it is wide; 0 if it is not.

    ``kinds`` are the hosts of the farm by kind, those with the most cores first, and how many there are of each.
    """

    def could_take(host: Host) -> bool:
        return demand.need_on(host) is not None

    largest = next((host for host, _ in kinds if could_take(host)), None)
    # What a frame needs may depend on the host. Whether it is wide is judged by what it needs of the largest.
    need = None if largest is None else demand.need_on(largest)
    if largest is None or need is None:
        return 0
    # Most layers are narrow, which shows at the first hosts; only for a wide layer is every host looked at.
    narrow = (
        2 * need.cores < largest.total_cores
        and any(2 * need.memory_kb < host.total_memory_kb and could_take(host) for host, _ in kinds)
        and (need.gpus == 0 or any(2 * need.gpus < host.total_gpus and could_take(host) for host, _ in kinds))
    )
    return 0 if narrow else sum(count for host, count in kinds if could_take(host))


def blocked_after(seconds: float, elapsed: float, *, placed: bool, may_run: bool, block_seconds: float) -> float:
    """The blocked seconds of a layer, ``elapsed`` seconds after they were ``seconds``.

    They grow while the layer waits with nothing placed, up to as many as get it MOST_HOSTS_OF_A_LAYER hosts. They halve
    when frames of the layer were placed. They stay while a cap keeps the layer waiting, because its frames could not
    use a host then.
    """
    if placed:
        return seconds / 2
    if not may_run:
        return seconds
    elapsed = min(max(0.0, elapsed), LONGEST_ELAPSED_SECONDS)
    return min(seconds + elapsed, MOST_HOSTS_OF_A_LAYER * block_seconds)


# Which hosts.


class RunningFrame(NamedTuple):
    """What a frame gives back to its host when it ends."""

    ends_at: float | None
    """The time at which the frame is expected to end, by the mean run time of its layer; None while no frame of the
    layer has succeeded."""
    centicores: int
    memory_kb: int
    gpus: int


def free_at(host: Host, runs: Iterable[RunningFrame], need: Resources, now: float) -> float | None:
    """The time at which a host is expected to have ``need`` idle, if nothing starts beside the frames in ``runs``.

    None where that cannot be known. A frame that has run longer than expected is expected to end now.
    """
    missing_centicores = need.cores * CENTICORES_PER_CORE - host.idle_centicores
    missing_memory_kb = need.memory_kb - host.idle_memory_kb
    missing_gpus = need.gpus - host.idle_gpus
    at = now
    for run in sorted(runs, key=lambda run: _unknown_last(run.ends_at)):
        if max(missing_centicores, missing_memory_kb, missing_gpus) <= 0:
            break
        if run.ends_at is None:
            return None
        at = max(at, run.ends_at)
        missing_centicores -= run.centicores
        missing_memory_kb -= run.memory_kb
        missing_gpus -= run.gpus
    return at if max(missing_centicores, missing_memory_kb, missing_gpus) <= 0 else None


def due_a_host(
    layers: Iterable[WideLayer], present: Collection[Reservation], *, block_seconds: float, now: float
) -> list[WideLayer]:
    """The layers that may be granted another host, in the order of the draw.

    A layer may have one host for each block time for which it was blocked, but not more hosts than waiting frames, and
    not more than MOST_HOSTS_OF_A_LAYER. ``present`` are the reservations that go on; at most MOST_LAYERS layers have
    any. A layer whose frames only one host could take gets none, because `grants` reserves at most half of the hosts
    that could take a layer's frames.
    """
    hosts_of = Counter(reservation.layer_id for reservation in present)
    further_layers = MOST_LAYERS - len(hosts_of)
    draw = int(now // DRAW_SECONDS)
    due = []
    for layer in sorted(layers, key=lambda layer: (-_drawn(layer, draw), layer.layer_id)):
        most = min(int(layer.blocked_seconds / block_seconds), layer.demand.frames, MOST_HOSTS_OF_A_LAYER)
        if layer.hosts < 2 or hosts_of[layer.layer_id] >= most:
            continue
        if not hosts_of[layer.layer_id]:
            if further_layers <= 0:
                continue
            further_layers -= 1
        due.append(layer)
    return due


def _drawn(layer: WideLayer, draw: int) -> float:
    """The rank of a layer's job in the draw of this number, the largest first; the same in every process.

    Chances follow priority (Efraimidis and Spirakis): the order is that of u^(1/priority), with a random u above 0 and
    up to 1 for each job.
    """
    u = 1 - random.Random(f"{layer.job_id} {draw}").random()
    return math.log(u) / max(layer.priority, 1)  # the logarithm keeps the order, and does not round to 1


def grants(
    due: Sequence[WideLayer],
    reserved: Iterable[Host],
    candidates: Mapping[str, Sequence[Host]],
    runs: Mapping[str, Sequence[RunningFrame]],
    *,
    now: float,
) -> dict[str, Reservation]:
    """Reserve one more host for each layer that is ``due`` one, where there is a host: host id -> reservation.

    A layer gets the host that is expected to be free first, of its ``candidates`` (by layer id); ``runs`` is what runs
    on the candidates, by host id. ``reserved`` are the hosts that are reserved already: of the hosts that could take a
    layer's frames at most half are reserved, for this layer and all others together.
    """
    granted: dict[str, Reservation] = {}
    taken = {host.id: host for host in reserved}
    for layer in due:
        taken_of_its_hosts = sum(layer.demand.need_on(host) is not None for host in taken.values())
        if 2 * (taken_of_its_hosts + 1) > layer.hosts:
            continue
        options: list[tuple[Host, Reservation]] = []
        for host in candidates.get(layer.layer_id, ()):
            need = layer.demand.need_on(host)
            if need is not None and host.id not in taken:
                expected = free_at(host, runs.get(host.id, ()), need, now)
                options.append((host, _reservation(layer, need, expected, now)))
        if options:
            host, reservation = min(options, key=_rank_of_option)
            taken[host.id] = host
            granted[host.id] = reservation
    return granted


def _reservation(layer: WideLayer, need: Resources, expected: float | None, now: float) -> Reservation:
    """A reservation for a frame of the layer on a host of which it needs ``need``, ``expected`` to be idle there
    then."""
    until = now + RESERVATION_SECONDS
    return Reservation(
        layer.layer_id, layer.job_id, need.cores, need.memory_kb, need.gpus, until=until, free_at=expected
    )


def _rank_of_option(option: tuple[Host, Reservation]) -> tuple[float, int, str]:
    """Ranks hosts that a layer may be granted, the lowest first: by the time at which a host is free. Where that is the
    same, or not known, the host that lacks the fewest of the needed cores comes first."""
    host, reservation = option
    return _unknown_last(reservation.free_at), reservation.cores - host.idle_cores, host.id


def _unknown_last(moment: float | None) -> float:
    """The moment as a number to sort by: one that is not known comes last."""
    return math.inf if moment is None else moment


def ended(reserved: Iterable[Host], demands: Mapping[str, Demand]) -> set[str]:
    """The ids of the ``reserved`` hosts whose reservation ends. ``demands`` has those of the wide layers that wait, by
    layer id.

    A reservation ends when its layer has no demand any more, when the host cannot take the layer's frames (none can
    while a cap keeps the layer waiting), and when the layer has more hosts than waiting frames: of its hosts, those
    that will be free last are given up then. A host without a reservation, whose row no longer counts, is given up too.
    """

    def free_first(host: Host) -> tuple[float, str]:
        return _unknown_last(host.reservation.free_at if host.reservation else None), host.id

    given_up: set[str] = set()
    kept_hosts: Counter[str] = Counter()
    for host in sorted(reserved, key=free_first):
        layer_id = host.reservation.layer_id if host.reservation else ""
        demand = demands.get(layer_id)
        if demand is None or kept_hosts[layer_id] >= demand.frames or demand.need_on(host) is None:
            given_up.add(host.id)
        else:
            kept_hosts[layer_id] += 1
    return given_up
