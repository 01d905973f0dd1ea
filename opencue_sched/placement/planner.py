"""The planner: from a frozen snapshot of the work and a pool of hosts to a plan that the committer re-validates.

Pure but for the pool: no clock, no I/O, no randomness beyond the ids it is given. At each step the show that uses least
of its size goes on with its next layer (`policies.order`): the caps first, then a host, and on it as many frames as
fit. Layers of a show come in the order of the snapshot.

What the plan takes from a host is a hold in the pool, so other passes of the process plan on the rest of the host while
this plan is being booked, and never on the same cores. Once the outcome is known, the caller settles it there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter

from opencue_sched.domain.caps import Vertices, cores_left
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_needs import Demand, Dimension, Rules, Search, fewest_cores, reserve, smallest_need
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.names import counted
from opencue_sched.domain.plans import PlannedProc, Snapshot
from opencue_sched.domain.units import memory_text
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.policies import Admission, Refusal, Score
from opencue_sched.placement.policies.admissions import gpu_guard, layer_share
from opencue_sched.placement.policies.order import Shares, Use, convex
from opencue_sched.placement.policies.reservations import draining
from opencue_sched.settings import Queue

ATTEMPTS_PER_LAYER = 10
"""Hosts that others took from meanwhile before a layer is given up for the pass (the reference's default)."""
MAX_FRAMES = 1000
"""Of a plan, and so of a commit: what a pass costs whatever it books is shared by so many frames."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one pass places frames: as the settings say; which hosts a frame may use, by the admissions; and a score that
    chooses among the first candidates. ``max_frames`` bounds the plan, and so the size of its commit."""

    queue: Queue
    rules: Rules
    admissions: tuple[Admission, ...] = ()
    soft_admissions: tuple[Admission, ...] = ()
    score: Score | None = None
    max_frames: int = MAX_FRAMES


def policy_for(queue: Queue, *, gpu_demands: Collection[Demand] = ()) -> Policy:
    """The policy the settings ask for, while this waits for GPUs."""
    return Policy(
        queue,
        Rules(queue.memory_stranded_threshold // 1024, frozenset(queue.selfish_services)),
        admissions=(gpu_guard(gpu_demands),) if queue.gpu_guard and gpu_demands else (),
        soft_admissions=(layer_share,) if queue.layer_host_share else (),
        score=convex if queue.host_score == "convex" else None,
    )


class PlanHeadroom:
    """What a plan may still take under every cap, as it fills. The ledger and the commit check the caps again.

    Cores of subscriptions, folders and jobs, GPUs of folders and jobs, one running frame under each limit of a layer
    (every limit must have headroom). Subscriptions have no GPU cap, and an allocation without a subscription may not
    be booked. A folder, job or limit that the snapshot has no cap of is unlimited.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._allocs = cores_left(snapshot.subscriptions)
        self._cores = defaultdict(lambda: math.inf, {key: caps.cores.left for key, caps in snapshot.caps.items()})
        self._gpus = defaultdict(lambda: math.inf, {key: caps.gpus.left for key, caps in snapshot.caps.items()})
        self._limits = defaultdict(lambda: math.inf, {key: limit.left for key, limit in snapshot.limits.items()})

    def open_allocs(self, show_id: str, cores: int) -> frozenset[str]:
        """The allocations of which the show's subscription still has this many cores."""
        return frozenset(alloc_id for alloc_id, left in self._allocs[show_id].items() if left >= cores)

    def cores_left(self, job: Job, alloc_id: str) -> float:
        """Cores a frame of the job may take on a host of the allocation: the least of all its caps."""
        return min(self._allocs[job.show_id].get(alloc_id, 0.0), self._cores[job.folder_id], self._cores[job.id])

    def over_cap(self, job: Job, layer: Layer, need: Reservation, alloc_id: str | None = None) -> Refusal | None:
        """The cap that a frame of the layer cannot pass any more, on hosts of the allocation or, without one, on
        whatever host; None if each has headroom for it.

        ``need.cores`` is the normalised minimum, so zero and negative minimums do not slip past.
        """
        allocs = [left for key, left in self._allocs[job.show_id].items() if alloc_id in (None, key)]
        if not allocs:
            return Refusal(Verdict.OVER_SUBSCRIPTION, "the show has no subscription to an allocation of its hosts")
        if max(allocs) < need.cores:
            has = f"its show has at most {max(allocs):g} left under its burst"
            return Refusal(Verdict.OVER_SUBSCRIPTION, f"a frame needs {counted(need.cores, 'core')}, {has}")
        for verdict, whose, left, needed, what in (
            (Verdict.OVER_FOLDER, "the job's folder", self._cores[job.folder_id], need.cores, "core"),
            (Verdict.OVER_JOB, "its job", self._cores[job.id], need.cores, "core"),
            (Verdict.OVER_FOLDER_GPUS, "the job's folder", self._gpus[job.folder_id], need.gpus, "GPU"),
            (Verdict.OVER_JOB_GPUS, "its job", self._gpus[job.id], need.gpus, "GPU"),
        ):
            if needed > left:
                return Refusal(verdict, f"a frame needs {counted(needed, what)}, {whose} has {left:g} left")
        for limit_id in layer.limit_ids:
            if self._limits[limit_id] < 1:
                limit = self._snapshot.limits[limit_id]
                detail = f"all {limit.cap or 0:g} of limit {limit.name or limit_id} are in use"
                return Refusal(Verdict.OVER_LIMIT, detail)
        return None

    def frames_left(self, job: Job, layer: Layer, need: Reservation) -> float:
        """How many more frames the GPU caps and limits allow, maybe with a fraction; cores are counted as they are
        reserved."""
        left = [self._limits[limit_id] for limit_id in layer.limit_ids]
        if need.gpus:
            left += [self._gpus[key] / need.gpus for key in (job.folder_id, job.id)]
        return min(left, default=math.inf)

    def take(self, job: Job, layer: Layer, alloc_id: str, taken: Reservation) -> None:
        """Count a planned frame under every cap."""
        self._allocs[job.show_id][alloc_id] -= taken.cores
        for key in (job.folder_id, job.id):
            self._cores[key] -= taken.cores
            self._gpus[key] -= taken.gpus
        for limit_id in layer.limit_ids:
            self._limits[limit_id] -= 1


_FLOWING = Refusal(Verdict.FLOWING, "")
_HOSTLESS = (Verdict.NO_HOST, Verdict.NO_FIT, Verdict.CAPACITY, Verdict.OVER_SHARE, Verdict.DRAINING)
_TAKEN = (Verdict.CAPACITY, Verdict.OVER_SHARE, Verdict.HELD, Verdict.KEPT_FOR_GPUS)
"""What keeps a layer waiting until some host is free for it."""


@dataclass(frozen=True, slots=True)
class UnschedulableLayer:
    """A layer that cannot be placed for want of a host that satisfies its ``search``, and with it all of its ``kind``
    (of ``Layer``). Hosts of other allocations than ``open_allocs`` were not looked at, because the show has no cores
    left there."""

    verdict: LayerVerdict
    search: Search
    kind: str
    open_allocs: frozenset[str] = frozenset()


@dataclass(slots=True)
class Plan:
    """What one pass wants to book for one of its clusters.

    ``attempts`` is how many hosts each layer that got to try any was given; ``wasted_attempts`` counts those that
    others took from meanwhile, ``cache_misses`` the searches that found none. ``full``: ``max_frames`` was reached, so
    there is more to place right away. ``unschedulable`` are the layers of which nothing was placed, because no host
    would do.
    """

    procs: list[PlannedProc] = field(default_factory=list)
    verdicts: list[LayerVerdict] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    wasted_attempts: int = 0
    cache_misses: int = 0
    full: bool = False
    unschedulable: list[UnschedulableLayer] = field(default_factory=list)


def plan_pass(
    snapshot: Snapshot,
    pool: HostCache,
    policy: Policy,
    *,
    granted_layers: Container[str],
    new_id: Callable[[], str],
) -> list[Plan]:
    """Place the snapshot's waiting frames on hosts of their cluster's tags: a plan for each cluster, in their order.

    ``granted_layers`` are the layers whose permit this pass holds, the others are PERMIT_HELD. ``new_id`` makes proc
    ids.

    Every layer of a cluster gets exactly one verdict: what keeps its remaining frames waiting, with how many were
    placed; FLOWING when nothing does and the rest simply come with the next pass.
    """
    shares = Shares(snapshot.subscriptions, snapshot.sizes)
    return _Planner(snapshot, pool, policy, granted_layers, new_id, PlanHeadroom(snapshot), shares).run()


@dataclass(slots=True)
class _LayerState:
    """One layer in one cluster: what it asks for, how far it is, and why hosts said no."""

    cluster: Cluster
    plan: Plan
    job: Job
    layer: Layer
    search: Search
    most: int
    open_allocs: frozenset[str] = frozenset()
    placed: int = 0
    wasted: int = 0
    asked: bool = False
    refused: Refusal | None = None
    softly_refused: bool = False
    hostless: bool = False
    reason: Refusal = _FLOWING
    """Why the round ended for it."""

    @property
    def part(self) -> tuple[str, int]:
        """The layer's frames that ask for the same memory."""
        return self.layer.id, self.layer.memory_min_kb


@dataclass(slots=True)
class _Planner:
    """The state of the plans of one pass. ``placed`` counts frames by part of a layer: one that several clusters reach
    goes on where the cluster before it ended. ``used``: hosts it takes from."""

    snapshot: Snapshot
    pool: HostCache
    policy: Policy
    granted: Container[str]
    new_id: Callable[[], str]
    headroom: PlanHeadroom
    shares: Shares
    planned: int = 0
    soft: bool = True
    placed: Counter[tuple[str, int]] = field(default_factory=Counter)
    booking_shows: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    # By facility and show: hosts only get fuller for all, but which allocations are open is a show's own.
    nothing_idle: defaultdict[tuple[str, str, tuple[str, ...]], list[Reservation]] = field(
        default_factory=lambda: defaultdict(list)
    )
    all_refused: set[tuple[str, str, Search]] = field(default_factory=set)
    none_apart: set[tuple[str, str, Search]] = field(default_factory=set)
    shortages: dict[tuple[str, str, Search, frozenset[str]], Refusal] = field(default_factory=dict)

    def run(self) -> list[Plan]:
        plans = [Plan() for _ in self.snapshot.work]
        states = self._states(plans)
        # First round: others want the hosts too.
        self._round(states)
        # Second round: what is idle goes to whoever can use it, also on hosts from which soft admissions kept it off.
        self.soft = False
        self._round([it for it in states if it.softly_refused and self.planned < self.policy.max_frames])
        for _, parts in groupby(states, lambda state: (id(state.plan), state.layer.id)):
            self._judge(list(parts))
        return plans

    def _states(self, plans: Iterable[Plan]) -> list[_LayerState]:
        """Every layer that may be placed; those of which another pass has the permit are judged at once."""
        states = []
        for work, plan in zip(self.snapshot.work, plans, strict=True):
            for job in work.jobs:
                for layer in job.layers:
                    if layer.id not in self.granted:
                        held = Refusal(Verdict.PERMIT_HELD, "another pass places its frames, or just did")
                        plan.verdicts.append(_verdict(job, layer, 0, held))
                        continue
                    tags = tuple(tag for tag in work.cluster.tags if tag in layer.tags)
                    for part in _parts(layer):
                        search = Search.of(job, part, smallest_need(part), tags)
                        most = min(len(part.frames), self.policy.queue.dispatch_frames_per_layer_limit)
                        states.append(_LayerState(work.cluster, plan, job, part, search, most))
        return states

    def _round(self, states: Sequence[_LayerState]) -> None:
        """Go from show to show until no layer has anything more to get."""
        shows: dict[str, deque[_LayerState]] = {}
        for state in states:
            # Without shares, clusters follow each other.
            key = state.job.show_id if self.policy.queue.shares else state.cluster.key
            shows.setdefault(key, deque()).append(state)
        heap = [(*self._use(layers[0]), number, layers) for number, layers in enumerate(shows.values())]
        heapify(heap)
        while heap:
            *_, number, layers = heap[0]
            state = layers[0]
            reason = self._step(state)
            if reason is not None:
                layers.popleft()
                state.reason = reason
                every, goes_on = len(state.layer.frames), self.policy.queue.whole_rounds and not state.plan.full
                if goes_on and reason.verdict is Verdict.FLOWING and state.most < every:
                    # It has its part of the round; it goes on after every other layer of the show had its own. The rest
                    # is still the show's, before one that uses more of its size has anything.
                    state.most = every
                    layers.append(state)
            if layers:
                heapreplace(heap, (*self._use(layers[0]), number, layers))
            else:
                heappop(heap)

    def _use(self, state: _LayerState) -> Use:
        """How the layer's show stands where the layer runs; without shares all stand alike."""
        if not self.policy.queue.shares:
            return Use(False, 0.0)
        return self.shares.use(state.job.show_id, state.cluster.alloc_id)

    def _judge(self, parts: Sequence[_LayerState]) -> None:
        """One verdict for a layer: that of the part of which most frames wait."""
        verdicts = [_verdict(it.job, it.layer, it.placed, it.reason) for it in parts]
        verdict = replace(
            max(verdicts, key=attrgetter("waiting")),
            frames=sum(it.frames for it in verdicts),
            waiting=sum(it.waiting for it in verdicts),
        )
        # The last part asks for least: where it has no host, no other has.
        least = parts[-1]
        least.plan.verdicts.append(verdict)
        if least.hostless and not verdict.frames and verdicts[-1].verdict in _HOSTLESS:
            unschedulable = UnschedulableLayer(verdict, least.search, least.layer.kind, least.open_allocs)
            least.plan.unschedulable.append(unschedulable)

    def _step(self, state: _LayerState) -> Refusal | None:
        """Place frames of the layer on one more host. None if it may go on, else why it does not in this round."""
        job, layer, plan = state.job, state.layer, state.plan
        if not state.search.tags:
            state.hostless = True
            tags = " and ".join(sorted(layer.tags)) or "none"
            return Refusal(Verdict.NO_HOST, f"none of its tags ({tags}) is among those of the cluster")
        if self.placed[state.part] >= state.most:
            return _FLOWING
        if self.planned >= self.policy.max_frames:
            plan.full = True
            return Refusal(Verdict.FLOWING, f"this plan is full with {self.planned} frames; the next goes on")
        over = self.headroom.over_cap(job, layer, state.search.need)
        if over is not None:
            return over
        state.open_allocs = self.headroom.open_allocs(job.show_id, state.search.need.cores)
        host = self._next_host(state)
        if host is None:
            return self._shortage(state)
        plan.attempts[layer.id] += 1
        if not self._fill(state, host):
            state.wasted += 1
            plan.wasted_attempts += 1
            if state.wasted >= ATTEMPTS_PER_LAYER:
                detail = f"{state.wasted} hosts were taken by others while its frames were being placed"
                return Refusal(Verdict.CAPACITY, detail)
        return None

    def _next_host(self, state: _LayerState) -> Host | None:
        """A host for the layer's next frame. Searches that cannot find one are not made twice."""
        state.asked, state.refused = False, None
        # Within a plan hosts only get fuller and allocations only close (sooner for more cores), so what failed keeps
        # failing for the show. A search that met no host with the need idle answers for every larger need; one whose
        # hosts all said no for what is in the search (another OS, not wholly idle, ...) answers for itself.
        place = state.cluster.facility_id, state.job.show_id
        nothing_idle, search = self.nothing_idle[*place, state.search.tags], (*place, state.search)
        if search in self.all_refused or any(map(state.search.need.covers, nothing_idle)):
            return None
        host = self._find(state, apart=True) if search not in self.none_apart else None
        if host is None:
            self.none_apart.add(search)
            host = self._find(state, apart=False)
        if host is not None:
            return host
        state.plan.cache_misses += 1
        if not state.asked:
            nothing_idle.append(state.search.need)
        elif state.refused is None:
            self.all_refused.add(search)
        return None

    def _find(self, state: _LayerState, *, apart: bool) -> Host | None:
        """The first host that takes the layer's next frame. With ``apart`` none from which another plan of this process
        takes: its commit would meet ours there, and wait."""
        queue, score = self.policy.queue, self.policy.score
        return self.pool.find(
            state.cluster.facility_id,
            state.search.tags,
            state.search.need,
            queue.host_booking_strategy_by_show.get(state.job.show_name, queue.host_booking_strategy),
            partial(self._accepts, state, apart),
            shard=state.cluster.shard,
            allocs=state.open_allocs,
            score=partial(self._cost, state, score) if score else None,
            known_to=state.layer.id if queue.locality else None,
        )

    def _reserve(self, state: _LayerState, host: Host, left: float) -> Reservation | Dimension | Refusal:
        """What the layer's next frame takes from the host as it is, or why it may not."""
        job, layer, policy = state.job, state.layer, self.policy
        answer = reserve(layer, host, policy.rules, os_name=job.os_name, job_cores_left=left)
        if isinstance(answer, Reservation):
            for admission in policy.admissions:
                if refusal := admission(job, layer, host, answer):
                    return refusal
            for admission in policy.soft_admissions if self.soft else ():
                if refusal := admission(job, layer, host, answer):
                    state.softly_refused = True
                    return refusal
        return answer

    def _cost(self, state: _LayerState, score: Score, host: Host) -> float:
        left, os_name = self.headroom.cores_left(state.job, host.alloc_id), state.job.os_name
        taken = reserve(state.layer, host, self.policy.rules, os_name=os_name, job_cores_left=left)
        return score(host, taken) if isinstance(taken, Reservation) else math.inf

    def _accepts(self, state: _LayerState, apart: bool, host: Host) -> bool:
        """Whether the next frame of the layer can go to the host as it is."""
        if apart and host.id not in self.used and self.pool.being_booked(host.id):
            return False
        state.asked = True
        answer = self._reserve(state, host, self.headroom.cores_left(state.job, host.alloc_id))
        if isinstance(answer, Refusal):
            state.refused = answer
        elif answer is Dimension.JOB_CORES:
            need = replace(state.search.need, cores=fewest_cores(state.layer, host))
            state.refused = self.headroom.over_cap(state.job, state.layer, need, host.alloc_id) or state.refused
        return isinstance(answer, Reservation)

    def _fill(self, state: _LayerState, host: Host) -> bool:
        """Cut as many frames of the layer from the host as fit. False if another pass took from it meanwhile."""
        job, layer, headroom = state.job, state.layer, self.headroom
        vertices = Vertices(job.show_id, host.alloc_id, job.folder_id, job.id, layer.id, job.dept_id, layer.limit_ids)
        procs: list[PlannedProc] = []
        left = headroom.cores_left(job, host.alloc_id)
        current = host
        before = self.placed[state.part]
        most = min(
            state.most - before,
            self.policy.max_frames - self.planned,
            headroom.frames_left(job, layer, state.search.need),
        )
        while len(procs) + 1 <= most:
            answer = self._reserve(state, current, left)
            if not isinstance(answer, Reservation):
                break
            frame = layer.frames[before + len(procs)]
            procs.append(PlannedProc(self.new_id(), job, layer, frame, current, answer, vertices))
            left -= answer.cores
            current = current.less(answer, layer.id)
        taken = {proc.proc_id: proc.reservation for proc in procs}
        if not (procs and self.pool.take(host, taken, layer_id=layer.id)):
            return False
        for proc in procs:
            headroom.take(job, layer, host.alloc_id, proc.reservation)
            self.shares.take(job.show_id, host.alloc_id, proc.reservation.cores)
        state.plan.procs += procs
        self.used.add(host.id)
        self.booking_shows.add(job.show_id)
        self.planned += len(procs)
        self.placed[state.part] += len(procs)
        state.placed += len(procs)
        return True

    def _shortage(self, state: _LayerState) -> Refusal:
        """Why no host was found; that one drains for the layer says more than that the others are taken."""
        reason = state.refused
        if reason is None:
            state.hostless = True
            key = state.cluster.facility_id, state.job.show_id, state.search, state.open_allocs
            if key not in self.shortages:
                self.shortages[key] = self._among_hosts(state)
            reason = self._over_share(state, self.shortages[key])
        if reason.verdict in _TAKEN:
            return draining(self.pool.draining_for(state.layer.id), self.snapshot.now) or reason
        return reason

    def _among_hosts(self, state: _LayerState) -> Refusal:
        """What stands between the layer and the hosts of its tags.

        NO_HOST: there are none, or all were refused a moment ago. NO_FIT: none could take a frame even when idle.
        OVER_SUBSCRIPTION: those that could are of allocations without headroom. CAPACITY: they are busy.
        """
        census = self.pool.census(state.cluster.facility_id, state.search.tags, state.cluster.shard)
        refused = counted(len(census.refused), "host")
        why = next((why for why in reversed(census.refused) if why), "no reason given")
        left_alone = f"left alone for a moment after a refusal: {why}"
        if not census.kinds:
            none = f"no open host that is up has the tag {' or '.join(sorted(state.search.tags))}"
            return Refusal(Verdict.NO_HOST, f"all with its tags, {refused}, {left_alone}" if census.refused else none)
        more = f"; {refused} more {left_alone}" if census.refused else ""
        hosts = f"no host of the {sum(count for _, count in census.kinds)} with its tags"
        needs = f"a frame needs {_need_text(state.search)}; {hosts} has that"
        lacks: Counter[Dimension] = Counter()
        for host, count in sorted(census.kinds, key=lambda kind: kind[0].alloc_id not in state.open_allocs):
            rules, os_name = self.policy.rules, state.job.os_name
            answer = reserve(state.layer, host, rules, os_name=os_name, job_cores_left=math.inf)
            if not isinstance(answer, Reservation):
                lacks[answer] += count
            elif host.alloc_id in state.open_allocs:
                return Refusal(Verdict.CAPACITY, f"{needs} idle{more}")
            elif over := self.headroom.over_cap(state.job, state.layer, state.search.need, host.alloc_id):
                return over
        reasons = ", ".join(
            f"{lacks[it]} {words.format(os=state.job.os_name)}" for it, words in _LACKS.items() if lacks[it]
        )
        return Refusal(Verdict.NO_FIT, f"{needs} even when idle ({reasons}){more}")

    def _over_share(self, state: _LayerState, reason: Refusal) -> Refusal:
        """Of hosts that are busy: whether because the show uses more than its size, and one that uses less was served
        before it."""
        own = self.shares.use(state.job.show_id)
        over = self.policy.queue.shares and (own.sizeless or own.of_size > 1)
        others = self.booking_shows - {state.job.show_id}
        served = reason.verdict is Verdict.CAPACITY and over and any(self.shares.use(other) < own for other in others)
        if not served:
            return reason
        uses = "has no size here" if own.sizeless else f"uses {own.of_size:.2f} times its size"
        detail = f"its show {uses}, and shows that use less of theirs took what was idle; {reason.detail}"
        return Refusal(Verdict.OVER_SHARE, detail)


def _parts(layer: Layer) -> Iterable[Layer]:
    """The layer as one for each amount of memory that frames of it ask for, the most first. Nearly always itself."""
    if not any(frame.memory_kb for frame in layer.frames):
        return (layer,)
    frames: defaultdict[int, list[Frame]] = defaultdict(list)
    for frame in layer.frames:
        frames[max(layer.memory_min_kb, frame.memory_kb or 0)].append(frame)
    parts = []
    waiting = max(layer.waiting_frames, len(layer.frames))
    for memory_kb in sorted(frames, reverse=True):
        own = len(frames[memory_kb]) if memory_kb > min(frames) else waiting
        waiting -= own
        # A kind of its own: what finds no host for it says nothing of layers that ask for less.
        kind = layer.kind if memory_kb == layer.memory_min_kb else f"{layer.kind} {memory_kb} KB"
        part = replace(layer, memory_min_kb=memory_kb, kind=kind, waiting_frames=own)
        parts.append(replace(part, frames=tuple(frames[memory_kb])))
    return parts


def _verdict(job: Job, layer: Layer, placed: int, reason: Refusal) -> LayerVerdict:
    waiting = max(layer.waiting_frames, len(layer.frames)) - placed
    return LayerVerdict(job.id, layer.id, reason.verdict, placed, waiting, reason.detail)


_LACKS = {
    Dimension.OS: "without {os}",
    Dimension.THREAD_MODE: "for frames that thread",
    Dimension.CORES: "with too few cores",
    Dimension.MEMORY: "with too little memory",
    Dimension.GPUS: "with too few GPUs",
    Dimension.GPU_MEMORY: "with too little GPU memory",
}


def _need_text(search: Search) -> str:
    """``16 cores, 64.0G``: what a frame needs at least, GPUs only where it needs them."""
    need, least = search.need, search.cores_min_centicores
    all_cores = "all cores" + (f" but {-least / 100:g}" if least else "")
    cores = counted(need.cores, "core") if least > 0 or not search.threadable else all_cores
    gpus = [counted(need.gpus, "GPU")] if need.gpus else []
    gpu_memory = [f"{memory_text(need.gpu_memory_kb)} of GPU memory"] if need.gpu_memory_kb else []
    return ", ".join([cores, memory_text(need.memory_kb), *gpus, *gpu_memory])
