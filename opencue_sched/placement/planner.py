"""The planner: from a frozen snapshot of the work and a pool of hosts to a plan that the committer re-validates.

Pure but for the pool: no clock, no I/O, no randomness beyond the ids it is given. For every layer, in the order of the
snapshot: the caps first, then hosts one after another, on each as many frames as fit.

What the plan takes from a host is a hold in the pool, so other passes of the process plan on the rest of the host while
this plan is being booked, and never on the same cores. Once the outcome is known, the caller passes it to
``release_plan``.

What a studio may decide differently is a ``Policy``: *admission* says which hosts a layer may use at all, *first
choice* which hosts are tried before all others, the *strategy* in which order, and a *score* replaces that order by a
choice among its first candidates.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field
from functools import partial

from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, Job, Layer, PlannedProc, Reservation, Snapshot, Vertices
from opencue_sched.domain.frames import Dimension, Need, Rules, Search, fewest_cores, reserve, smallest_need
from opencue_sched.placement.host_cache import Census, HostCache
from opencue_sched.settings import HostBookingStrategy, Queue

Admission = Callable[[Job, Layer, Host], bool]
"""Whether the layer may use the host. Asked for many hosts: cheap and pure."""
FirstChoice = Callable[[str], bool]
"""Whether a host, by id, is looked at before all others."""
Score = Callable[[Layer, Host], float]
"""What placing the layer on the host costs; the lowest wins."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one pass places frames.

    ``attempts_per_layer``: hosts that others took from meanwhile before the layer is given up for the pass.
    ``max_frames`` bounds the plan, and so the size of its commit.
    """

    rules: Rules
    strategy: HostBookingStrategy = field(default_factory=HostBookingStrategy)
    attempts_per_layer: int = 10
    max_frames: int = 500
    admit: Admission | None = None
    first: FirstChoice | None = None
    score: Score | None = None


MEM_RESERVED_MIN_KB = 250 * 1024
"""A proc reserves no less, as with Cuebot (its ``mem_reserved_min``): a frame without an estimate needs some."""


def policy_for(queue: Queue, show_name: str) -> Policy:
    """The policy the settings ask for; ``host_booking_strategy_by_show`` overrides the global strategy."""
    return Policy(
        rules=Rules(
            memory_stranded_threshold_kb=queue.memory_stranded_threshold // 1024,
            selfish_services=frozenset(queue.selfish_services),
            mem_reserved_min_kb=MEM_RESERVED_MIN_KB,
        ),
        strategy=queue.host_booking_strategy_by_show.get(show_name, queue.host_booking_strategy),
    )


@dataclass(frozen=True, slots=True)
class OverCap:
    """A cap with too little left for the next frame. ``detail`` is one sentence for an operator."""

    verdict: Verdict
    detail: str


class PlanHeadroom:
    """What a plan may still take under every cap, as it fills. The ledger and the commit check the caps again.

    Cores of subscriptions, folders and jobs, GPUs of folders and jobs, one running frame under each limit of a layer
    (design section 9: every limit must have headroom). Subscriptions have no GPU cap (facts D), and an allocation
    without a subscription may not be booked. A folder, job or limit that the snapshot has no cap of is unlimited.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._allocs = {alloc_id: caps.cores.left for alloc_id, caps in snapshot.subscriptions.items()}
        self._folder_cores = {folder_id: caps.cores.left for folder_id, caps in snapshot.folders.items()}
        self._folder_gpus = {folder_id: caps.gpus.left for folder_id, caps in snapshot.folders.items()}
        self._job_cores = {job_id: caps.cores.left for job_id, caps in snapshot.job_caps.items()}
        self._job_gpus = {job_id: caps.gpus.left for job_id, caps in snapshot.job_caps.items()}
        self._limits = {limit_id: limit.left for limit_id, limit in snapshot.limits.items()}

    def open_allocs(self, cores: int) -> frozenset[str]:
        """The allocations whose subscription still has this many cores."""
        return frozenset(alloc_id for alloc_id, left in self._allocs.items() if left >= cores)

    def cores_left(self, job: Job, alloc_id: str) -> float:
        """Cores a frame of the job may take on a host of the allocation: the least of all its caps."""
        return min(
            self._allocs.get(alloc_id, 0.0),
            self._folder_cores.get(job.folder_id, math.inf),
            self._job_cores.get(job.id, math.inf),
        )

    def over_cap(self, job: Job, layer: Layer, need: Need) -> OverCap | None:
        """The cap that no frame of the layer can pass any more, on whatever host; None if each has headroom for one.

        ``need.cores`` is the normalised minimum, so zero and negative minimums do not slip past (facts I).
        """
        if not self.open_allocs(need.cores):
            return self._over_subscriptions(need.cores)
        for verdict, whose, left, needed, what in (
            (Verdict.OVER_FOLDER, "the job's folder", self._folder_cores.get(job.folder_id), need.cores, "cores"),
            (Verdict.OVER_JOB, "its job", self._job_cores.get(job.id), need.cores, "cores"),
            (Verdict.OVER_FOLDER_GPUS, "the job's folder", self._folder_gpus.get(job.folder_id), need.gpus, "GPUs"),
            (Verdict.OVER_JOB_GPUS, "its job", self._job_gpus.get(job.id), need.gpus, "GPUs"),
        ):
            if left is not None and needed > left:
                return OverCap(verdict, f"a frame needs {needed} {what}, {whose} has {left:g} left")
        for limit_id in layer.limit_ids:
            if self._limits.get(limit_id, 1.0) < 1:
                limit = self._snapshot.limits[limit_id]
                detail = f"all {limit.cap or 0:g} of limit {limit.name or limit_id} are in use"
                return OverCap(Verdict.OVER_LIMIT, detail)
        return None

    def frames_left(self, job: Job, layer: Layer, need: Need) -> float:
        """How many more frames the GPU caps and limits allow; cores are counted as they are reserved."""
        left = min((self._limits.get(limit_id, math.inf) for limit_id in layer.limit_ids), default=math.inf)
        if need.gpus:
            folder, own = self._folder_gpus.get(job.folder_id, math.inf), self._job_gpus.get(job.id, math.inf)
            left = min(left, min(folder, own) / need.gpus)
        return left if left == math.inf else math.floor(left)

    def binding(self, job: Job, alloc_id: str, cores: int) -> OverCap:
        """The cap that kept a frame of ``cores`` off a host of the allocation, when ``cores_left`` was too little."""
        left = self.cores_left(job, alloc_id)
        if self._allocs.get(alloc_id, 0.0) <= left:
            return self.closed_alloc(alloc_id, cores)
        if self._folder_cores.get(job.folder_id, math.inf) <= left:
            return OverCap(Verdict.OVER_FOLDER, f"a frame needs {cores} cores, the job's folder has {left:g} left")
        return OverCap(Verdict.OVER_JOB, f"a frame needs {cores} cores, its job has {left:g} left")

    def take(self, job: Job, layer: Layer, alloc_id: str, taken: Reservation) -> None:
        """Count a planned frame under every cap."""
        for left, key, amount in (
            (self._allocs, alloc_id, taken.cores),
            (self._folder_cores, job.folder_id, taken.cores),
            (self._job_cores, job.id, taken.cores),
            (self._folder_gpus, job.folder_id, taken.gpus),
            (self._job_gpus, job.id, taken.gpus),
            *((self._limits, limit_id, 1) for limit_id in layer.limit_ids),
        ):
            if key in left:
                left[key] -= amount

    def closed_alloc(self, alloc_id: str, cores: int) -> OverCap:
        """The verdict when a host would do, but its allocation has no headroom for a frame of ``cores``."""
        if alloc_id not in self._allocs:
            return OverCap(Verdict.OVER_SUBSCRIPTION, "the show has no subscription to the allocation of its hosts")
        has = f"the subscription has {self._allocs[alloc_id]:g}"
        return OverCap(Verdict.OVER_SUBSCRIPTION, f"a frame needs {cores} cores, {has} left under its burst")

    def _over_subscriptions(self, cores: int) -> OverCap:
        if not self._allocs:
            return OverCap(Verdict.OVER_SUBSCRIPTION, "the show has no subscription here")
        have = f"the subscriptions have at most {max(self._allocs.values()):g}"
        return OverCap(Verdict.OVER_SUBSCRIPTION, f"a frame needs {cores} cores, {have} left under their burst")


class NegativeCache:
    """Searches of one plan that found no host, so that layers that look alike do not search again.

    Within a plan hosts only get fuller and allocations only close (sooner for more cores), so a search that failed
    keeps failing, and so does a larger one. Two kinds: a need for which the tags have no host with that much idle,
    which also answers for every larger need; and an exact search all of whose hosts said no (another OS, not wholly
    idle, ...), which answers for itself only.
    """

    def __init__(self) -> None:
        self._nothing_idle: defaultdict[tuple[str, ...], list[Need]] = defaultdict(list)
        self._refused: set[Search] = set()

    def covers(self, search: Search) -> bool:
        """Whether the search is known to find nothing."""
        if search in self._refused:
            return True
        return any(search.need.covers(need) for need in self._nothing_idle.get(search.tags, ()))

    def nothing_idle(self, search: Search) -> None:
        """No host had the need idle."""
        self._nothing_idle[search.tags].append(search.need)

    def all_refused(self, search: Search) -> None:
        """Every host that had the need idle was refused for reasons that are in the search."""
        self._refused.add(search)


_HOSTLESS = (Verdict.NO_HOST, Verdict.NO_FIT, Verdict.CAPACITY)


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
    """What one pass wants to book.

    ``attempts`` is how many hosts each layer that got to try any was given; ``wasted_attempts`` counts those that
    others took from meanwhile, ``given_up`` the layers for which that were too many. ``cache_hits`` and
    ``cache_misses`` count searches for a host. ``scores`` are those of the hosts chosen by a policy that scores.
    ``full``: ``max_frames`` was reached, so there is more to place right away. ``unschedulable`` are the layers of
    which nothing was placed, because no host would do.
    """

    procs: list[PlannedProc] = field(default_factory=list)
    verdicts: list[LayerVerdict] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    wasted_attempts: int = 0
    given_up: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    full: bool = False
    scores: list[float] = field(default_factory=list)
    unschedulable: list[UnschedulableLayer] = field(default_factory=list)


def plan_pass(
    snapshot: Snapshot,
    cluster: Cluster,
    pool: HostCache,
    policy: Policy,
    *,
    granted_layers: Container[str],
    new_id: Callable[[], str],
) -> Plan:
    """Place the snapshot's waiting frames on hosts of the cluster's tags.

    ``granted_layers`` are the layers whose permit this pass holds, the others are PERMIT_HELD. ``new_id`` makes proc
    ids.

    Every layer gets exactly one verdict: what keeps its remaining frames waiting, with how many were placed; FLOWING
    when nothing does and the rest simply come with the next pass.
    """
    planner = _Planner(snapshot, cluster, pool, policy, new_id)
    for job in snapshot.jobs:
        for layer in job.layers:
            if layer.id in granted_layers:
                planner.place(job, layer)
            else:
                held = OverCap(Verdict.PERMIT_HELD, "another pass places its frames, or just did")
                planner.judge(job, layer, 0, held)
    return planner.plan


def release_plan(
    pool: HostCache, plan: Plan, *, committed: Collection[str], unknown: Collection[str] = frozenset()
) -> None:
    """Tell the pool how the booking of a plan ended, by proc id.

    What was not committed is idle again, except on hosts the caller has invalidated. ``unknown`` (a COMMIT without an
    answer) stays taken until a read of the database that is late enough to know.
    """
    for proc in plan.procs:
        if proc.proc_id not in unknown:
            pool.settle(proc.host.id, proc.proc_id, committed=proc.proc_id in committed)


@dataclass(slots=True)
class _LayerState:
    """One layer's state: what it asks for, and why hosts said no."""

    job: Job
    layer: Layer
    need: Need
    search: Search
    open_allocs: frozenset[str] = frozenset()
    placed: int = 0
    wasted: int = 0
    asked: bool = False
    vetoed: bool = False
    hostless: bool = False
    capped: OverCap | None = None


class _Planner:
    """The state of one plan."""

    def __init__(
        self,
        snapshot: Snapshot,
        cluster: Cluster,
        pool: HostCache,
        policy: Policy,
        new_id: Callable[[], str],
    ) -> None:
        self._cluster = cluster
        self._pool = pool
        self._policy = policy
        self._new_id = new_id
        self._headroom = PlanHeadroom(snapshot)
        self.plan = Plan()
        self._used: set[str] = set()
        self._negative = NegativeCache()
        self._negative_first = NegativeCache()
        self._negative_alone = NegativeCache()
        self._shortages: dict[tuple[Search, frozenset[str]], OverCap] = {}

    def judge(self, job: Job, layer: Layer, placed: int, reason: OverCap) -> LayerVerdict:
        waiting = max(layer.waiting_frames, len(layer.frames)) - placed
        verdict = LayerVerdict(job.id, layer.id, reason.verdict, placed, waiting, reason.detail)
        self.plan.verdicts.append(verdict)
        return verdict

    def place(self, job: Job, layer: Layer) -> None:
        """Place the layer's frames until they, the caps, the hosts or the plan's size run out."""
        need = smallest_need(layer, mem_reserved_min_kb=self._policy.rules.mem_reserved_min_kb)
        tags = tuple(tag for tag in self._cluster.tags if tag in layer.tags)
        state = _LayerState(job, layer, need, Search.of(job, layer, need, tags))
        reason = self._place(state)
        verdict = self.judge(job, layer, state.placed, reason)
        if state.hostless and not state.placed and reason.verdict in _HOSTLESS:
            self.plan.unschedulable.append(UnschedulableLayer(verdict, state.search, layer.kind, state.open_allocs))

    def _place(self, state: _LayerState) -> OverCap:
        job, layer = state.job, state.layer
        if not state.search.tags:
            state.hostless = True
            tags = " and ".join(sorted(layer.tags)) or "none"
            return OverCap(Verdict.NO_HOST, f"none of its tags ({tags}) is among those of the cluster")
        while state.placed < len(layer.frames):
            if len(self.plan.procs) >= self._policy.max_frames:
                self.plan.full = True
                return OverCap(
                    Verdict.FLOWING, f"this plan is full with {len(self.plan.procs)} frames; the next goes on"
                )
            over = self._headroom.over_cap(job, layer, state.need)
            if over is not None:
                return over
            state.open_allocs = self._headroom.open_allocs(state.need.cores)
            host = self._next_host(state)
            if host is None:
                return self._shortage(state)
            self.plan.attempts[layer.id] += 1
            if not self._fill(state, host):
                state.wasted += 1
                self.plan.wasted_attempts += 1
                if state.wasted >= self._policy.attempts_per_layer:
                    self.plan.given_up += 1
                    detail = f"{state.wasted} hosts were taken by others while its frames were being placed"
                    return OverCap(Verdict.CAPACITY, detail)
        return OverCap(Verdict.FLOWING, "")

    def _next_host(self, state: _LayerState) -> Host | None:
        """A host for the layer's next frame. Searches that cannot find one are not made twice."""
        state.asked = state.vetoed = False
        state.capped = None
        if self._negative.covers(state.search):
            return None
        for choice, negative in self._choices():
            if not negative.covers(state.search):
                host = self._search(state, choice, negative)
                if host is not None:
                    self.plan.cache_hits += 1
                    if self._policy.score is not None:
                        self.plan.scores.append(self._policy.score(state.layer, host))
                    return host
        self.plan.cache_misses += 1
        return None

    def _choices(self) -> Iterator[tuple[FirstChoice | None, NegativeCache]]:
        """The hosts to look at before all others: those the policy wants first, and of these the ones from which no
        other plan under way takes, whose commit would meet ours there."""
        first = self._policy.first
        busy = self._pool.being_booked()
        if len(busy) > len(self._used):
            yield partial(self._alone, first, busy), self._negative_alone
        if first is not None:
            yield first, self._negative_first
        yield None, self._negative

    def _alone(self, first: FirstChoice | None, busy: Container[str], host_id: str) -> bool:
        return (first is None or first(host_id)) and (host_id in self._used or host_id not in busy)

    def _search(self, state: _LayerState, choice: FirstChoice | None, negative: NegativeCache) -> Host | None:
        state.asked = state.vetoed = False
        state.capped = None
        score = self._policy.score
        host = self._pool.find(
            self._cluster.facility_id,
            state.search.tags,
            state.need,
            self._policy.strategy,
            partial(self._accepts, state, choice),
            shard=self._cluster.shard,
            allocs=state.open_allocs,
            score=None if score is None else partial(score, state.layer),
        )
        if host is None and not state.asked:
            negative.nothing_idle(state.search)
        elif host is None and state.capped is None and not state.vetoed:
            negative.all_refused(state.search)
        return host

    def _accepts(self, state: _LayerState, choice: FirstChoice | None, host: Host) -> bool:
        """Whether the next frame of the layer can go to the host as it is."""
        if choice is not None and not choice(host.id):
            return False
        state.asked = True
        job = state.job
        left = self._headroom.cores_left(job, host.alloc_id)
        answer = reserve(state.layer, host, self._policy.rules, os_name=job.os_name, job_cores_left=left)
        if isinstance(answer, Reservation):
            admitted = self._policy.admit is None or self._policy.admit(job, state.layer, host)
            state.vetoed = state.vetoed or not admitted
            return admitted
        if answer is Dimension.JOB_CORES:
            state.capped = self._headroom.binding(job, host.alloc_id, fewest_cores(state.layer, host))
        return False

    def _fill(self, state: _LayerState, host: Host) -> bool:
        """Cut as many frames of the layer from the host as fit. False if another pass took from it meanwhile."""
        job, layer, rules, headroom = state.job, state.layer, self._policy.rules, self._headroom
        vertices = Vertices(job.show_id, host.alloc_id, job.folder_id, job.id, layer.id, job.dept_id, layer.limit_ids)
        procs: list[PlannedProc] = []
        cores_left = headroom.cores_left(job, host.alloc_id)
        current = host
        most = min(
            len(layer.frames) - state.placed,
            self._policy.max_frames - len(self.plan.procs),
            headroom.frames_left(job, layer, state.need),
        )
        while len(procs) < most:
            answer = reserve(layer, current, rules, os_name=job.os_name, job_cores_left=cores_left)
            if not isinstance(answer, Reservation):
                break
            frame = layer.frames[state.placed + len(procs)]
            procs.append(PlannedProc(self._new_id(), job, layer, frame, current, answer, vertices))
            cores_left -= answer.cores
            current = current.less(answer)
        if not (procs and self._pool.take(host, {proc.proc_id: proc.reservation for proc in procs})):
            return False
        for proc in procs:
            headroom.take(job, layer, host.alloc_id, proc.reservation)
        self.plan.procs += procs
        self._used.add(host.id)
        state.placed += len(procs)
        return True

    def _shortage(self, state: _LayerState) -> OverCap:
        """Why no host was found."""
        if state.capped is not None:
            return state.capped
        if state.vetoed:
            return OverCap(Verdict.CAPACITY, "the hosts that would take its frames are kept for other work")
        state.hostless = True
        reason = self._shortages.get((state.search, state.open_allocs))
        if reason is None:
            reason = self._shortages[state.search, state.open_allocs] = explain_shortage(
                self._pool.census(
                    self._cluster.facility_id,
                    state.search.tags,
                    state.need,
                    state.open_allocs,
                    shard=self._cluster.shard,
                ),
                state.layer,
                state.need,
                self._policy.rules,
                os_name=state.job.os_name,
                tags=state.search.tags,
                open_allocs=state.open_allocs,
                headroom=self._headroom,
            )
        return reason


# Why no host was found for a layer, in one verdict and one sentence.

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
