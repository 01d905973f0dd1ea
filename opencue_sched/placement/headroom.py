"""What a plan may still take under every cap, as it fills.

A *seat* belongs to a limit that counts machines instead of frames: a machine holds one as long as frames under the
limit run there, however many they are. While the limit has no seat left, only machines that hold one take more frames.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from opencue_sched.domain.caps import Caps, Vertices, cores_left
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.names import plural
from opencue_sched.domain.plans import Snapshot, Waiting
from opencue_sched.domain.units import INT_MAX
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import Refusal

MOST_FRAMES_FOR_A_SEAT = 1_000
"""Up to how many frames that wait for a seat are counted. Hosts have fewer cores, so more would change no choice."""


class Where(NamedTuple):
    """The hosts among which one look for a host goes, and which of them it prefers."""

    only: Collection[str] | None = None
    """The ids of the hosts; None for all hosts."""
    seat_score: Callable[[Host], float] | None = None
    """The host with the lowest score is preferred; None for the order of the show's strategy."""


_ANYWHERE = Where()


def _frames_left_out(need: Resources, waiting: int, host: Host) -> float:
    """The score of a host that would take a seat: how many of the ``waiting`` frames do not fit on it.

    Of hosts on which as many fit, the one with the fewest idle cores is better: these are the fraction of the score.
    """
    fit = min(host.idle_cores // max(1, need.cores), host.idle_memory_kb // max(1, need.memory_kb))
    return waiting - min(waiting, fit) + host.idle_cores / INT_MAX


class PlanHeadroom:
    """What a plan may still take under every cap, as it fills. The ledger and the commit check the caps again.

    The caps are cores of subscriptions, folders and jobs; GPUs of folders and jobs; and running frames, or machines,
    under each limit of a layer. Subscriptions have no GPU cap, and an allocation without a subscription may not be
    booked. A folder, job or limit that the snapshot has no cap of is unlimited.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._allocs = cores_left(snapshot.subscriptions)
        """Cores left under subscriptions, by show id and then by allocation id."""
        self._most_left: dict[str, float] = {}
        """The most cores that a show has left in any allocation, by show id. Dropped by ``take``."""
        self._cores = {key: caps.cores.left for key, caps in snapshot.caps.items()}
        self._gpus = {key: caps.gpus.left for key, caps in snapshot.caps.items()}
        """Cores and GPUs left, by the id of a folder or job."""
        self._taken: dict[str, tuple[int, int]] = {}
        """Cores and GPUs of the plan under each folder and job."""
        self._seats_left = {limit_id: seats.left for limit_id, seats in snapshot.seats.items()}
        """Seats left, by the id of a limit that counts machines."""
        self._holding = {limit_id: set(seats.holding) for limit_id, seats in snapshot.seats.items()}
        """Machines that hold a seat, those of the plan too, by the id of a limit that counts machines."""
        self._frames_on = Counter[tuple[str, str]]()
        """Frames of the plan under each limit that counts machines, by host."""
        self._waiting_under = Counter[str]()
        """Frames of the layers that were counted by now under each limit that counts machines, which waited for it."""
        self._not_counted: dict[str, Iterator[Waiting]] = {}
        """The layers under each such limit that were not counted yet; without those of which nobody has asked how many
        frames wait."""
        self._planned_under = Counter[str]()
        """Frames of the plan under each limit that counts machines."""
        self._limits = defaultdict(lambda: math.inf, {key: limit.left for key, limit in snapshot.limits.items()})
        """Frames left under each limit, by its id."""

    def open_allocs(self, show_id: str, cores: int) -> frozenset[str]:
        """The allocations of which the show's subscription still has this many cores."""
        return frozenset(alloc_id for alloc_id, left in self._allocs[show_id].items() if left >= cores)

    def cores_left(self, job: Job, alloc_id: str) -> float:
        """Cores a frame of the job may take on a host of the allocation: the least of all its caps."""
        return min(
            self._allocs[job.show_id].get(alloc_id, 0.0),
            self._cores.get(job.folder_id, math.inf),
            self._cores.get(job.id, math.inf),
        )

    def over_cap(self, job: Job, layer: Layer, need: Resources, alloc_id: str | None = None) -> Refusal | None:
        """The first cap that leaves too little for a frame of the layer; None if every cap leaves enough.

        ``alloc_id``: of all subscriptions of the show, look at that to this allocation alone. ``need.cores`` is the
        normalised minimum, so zero and negative minimums do not slip past.
        """
        allocs = [left for key, left in self._allocs[job.show_id].items() if alloc_id in (None, key)]
        if not allocs:
            return Refusal(Verdict.OVER_SUBSCRIPTION, "the show has no subscription to an allocation of its hosts")
        if max(allocs) < need.cores:
            has = f"its show has at most {max(allocs):g} left under its burst"
            return Refusal(Verdict.OVER_SUBSCRIPTION, f"a frame needs {plural(need.cores, 'core')}, {has}")
        for verdict, whose, left, needed, what in (
            (Verdict.OVER_FOLDER, "the job's folder", self._cores.get(job.folder_id, math.inf), need.cores, "core"),
            (Verdict.OVER_JOB, "its job", self._cores.get(job.id, math.inf), need.cores, "core"),
            (Verdict.OVER_FOLDER_GPUS, "the job's folder", self._gpus.get(job.folder_id, math.inf), need.gpus, "GPU"),
            (Verdict.OVER_JOB_GPUS, "its job", self._gpus.get(job.id, math.inf), need.gpus, "GPU"),
        ):
            if needed > left:
                return Refusal(verdict, f"a frame needs {plural(needed, what)}, {whose} has {left:g} left")
        for limit_id in layer.limit_ids:
            if self._limits[limit_id] < 1:
                limit = self._snapshot.limits[limit_id]
                detail = f"all {limit.cap or 0:g} of limit {limit.name or limit_id} are in use"
                return Refusal(Verdict.OVER_LIMIT, detail)
        return None

    def frames_left(self, job: Job, layer: Layer, need: Resources) -> float:
        """How many more frames the GPU caps and limits allow, maybe with a fraction. Caps of cores are not among them:
        what a frame takes of cores is known only once it is placed."""
        left = [self._limits[limit_id] for limit_id in layer.limit_ids]
        if need.gpus:
            left += [self._gpus.get(key, math.inf) / need.gpus for key in (job.folder_id, job.id)]
        return min(left, default=math.inf)

    def seats_taken(self, layer: Layer) -> Refusal | None:
        """The first limit of the layer whose seats are all taken; None where each has one left."""
        for limit_id in self._without_seats(layer):
            name, held = self._snapshot.seats[limit_id].name or limit_id, len(self._holding[limit_id])
            detail = f"limit {name} is held by {plural(held, 'machine')}, as many as may, and none takes this frame"
            return Refusal(Verdict.OVER_LIMIT, detail)
        return None

    def gets_no_seat(self, layer: Layer, host_id: str) -> bool:
        """Whether a limit of the layer has no seat left and the host holds none of it. Asked for each host."""
        return bool(self._seats_left) and any(
            host_id not in self._holding[limit_id] for limit_id in self._without_seats(layer)
        )

    def _without_seats(self, layer: Layer) -> Sequence[str]:
        """The limits of the layer that count machines and have no seat left."""
        if not self._seats_left:
            return ()
        return [limit_id for limit_id in layer.limit_ids if self._seats_left.get(limit_id, 1) < 1]

    def seat_limits(self, layer: Layer) -> tuple[str, ...]:
        """The limits of the layer that count machines."""
        return tuple(limit_id for limit_id in layer.limit_ids if limit_id in self._holding) if self._holding else ()

    def where_seats_serve(self, layer: Layer, need: Resources) -> Iterator[Where]:
        """Where to look for a host for the layer's frames, one look after the other.

        A layer under no limit that counts machines has one look, at all hosts. Any other has up to two:

        1. The hosts that hold a seat of each of its limits: a frame there takes no new one.
        2. Hosts that would take a new seat. Where a limit has none left, they are those that hold one of it. A new seat
           goes to the host that takes most of the frames which wait for it, as if each needed what this layer's do.
        """
        held = [self._holding[limit_id] for limit_id in self.seat_limits(layer)]
        if not held:
            yield _ANYWHERE
            return
        holding = set.intersection(*held)
        yield Where(holding)
        full = [self._holding[limit_id] for limit_id in self._without_seats(layer)]
        others = set.intersection(*full) - holding if full else None
        if others is None or others:
            waiting = max(map(self._waiting_for, self.seat_limits(layer)))
            yield Where(others, partial(_frames_left_out, need, waiting))

    def _waiting_for(self, limit_id: str) -> int:
        """How many frames wait under a limit that counts machines, or a number of at least MOST_FRAMES_FOR_A_SEAT.

        Looks at no more layers than that takes, and at each once a plan.
        """
        if limit_id not in self._not_counted:
            under = (work.under_limit(limit_id) for work in self._snapshot.work)
            self._not_counted[limit_id] = chain.from_iterable(under)
        while (waiting := self._waiting_under[limit_id] - self._planned_under[limit_id]) < MOST_FRAMES_FOR_A_SEAT:
            layer = next(self._not_counted[limit_id], None)
            if layer is None:
                break
            self._waiting_under[limit_id] += layer.frames
        return waiting

    def take(self, vertices: Vertices, taken: Resources, host_id: str, *, frames: int = 1) -> None:
        """Count a planned frame under every cap. ``frames`` is -1 to take back a frame that is not planned any more."""
        self._most_left.pop(vertices.show_id, None)
        self._allocs[vertices.show_id][vertices.alloc_id] -= frames * taken.cores
        for key in (vertices.folder_id, vertices.job_id):
            cores, gpus = self._taken.get(key, (0, 0))
            self._taken[key] = cores + frames * taken.cores, gpus + frames * taken.gpus
            if key in self._cores:
                self._cores[key] -= frames * taken.cores
                self._gpus[key] -= frames * taken.gpus
        for limit_id in vertices.limit_ids:
            self._limits[limit_id] -= frames
            if limit_id in self._holding:
                self._planned_under[limit_id] += frames
            if limit_id in self._holding and host_id not in self._snapshot.seats[limit_id].holding:
                self._take_seat(limit_id, host_id, frames)

    def _take_seat(self, limit_id: str, host_id: str, frames: int) -> None:
        """Count frames of the plan on a machine that held no seat before. Its first takes a seat, its last gives it
        back."""
        before = self._frames_on[limit_id, host_id]
        after = self._frames_on[limit_id, host_id] = before + frames
        self._seats_left[limit_id] += (before > 0) - (after > 0)
        (self._holding[limit_id].add if after > 0 else self._holding[limit_id].discard)(host_id)

    def knows(self, vertex_id: str) -> bool:
        """Whether the snapshot, or ``learn``, has said what is in use under a folder or job."""
        return vertex_id in self._cores

    def learn(self, vertex_id: str, caps: Caps) -> None:
        """Take over what a folder or job has left by now; what the plan has taken of it is subtracted."""
        taken_cores, taken_gpus = self._taken.get(vertex_id, (0, 0))
        self._cores[vertex_id] = caps.cores.left - taken_cores
        self._gpus[vertex_id] = caps.gpus.left - taken_gpus

    def left_under(self, vertex_id: str) -> tuple[float, float]:
        """Cores and GPUs left under a folder or job; below 0 where the plan has too many."""
        return self._cores[vertex_id], self._gpus[vertex_id]

    def is_full(self, waiting: Waiting) -> bool:
        """Whether a cap of cores or a limit has too little left for any frame of the layer, on whatever host.

        Asked for each layer, so it is made to be quick. GPUs are left to ``over_cap``, which is asked once a layer has
        its turn.
        """
        job, cores, limit_ids = waiting.job, waiting.need.cores, waiting.layer.limit_ids
        most = self._most_left.get(job.show_id)
        if most is None:
            most = self._most_left[job.show_id] = max(self._allocs[job.show_id].values(), default=0)
        return (
            most < cores
            or self._cores.get(job.id, math.inf) < cores
            or self._cores.get(job.folder_id, math.inf) < cores
            or (bool(limit_ids) and any(self._limits[limit_id] < 1 for limit_id in limit_ids))
        )
