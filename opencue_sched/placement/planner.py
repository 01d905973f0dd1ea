"""The planner: from a frozen snapshot of the work and a pool of hosts to a plan that the committer re-validates.

Pure but for the pool: no clock, no I/O, no randomness beyond the ids it is given. For every layer, in the order of the
snapshot: the caps first, then hosts one after another, on each as many frames as fit.

What the plan takes from a host is a hold in the pool, so other passes of the process plan on the rest of the host while
this plan is being booked, and never on the same cores. Once the outcome is known, the caller passes it to
``release_plan``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field
from functools import partial

from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, Job, Layer, PlannedProc, Reservation, Snapshot, Vertices
from opencue_sched.domain.reservation import Dimension, Need, Search, fewest_cores, reserve, smallest_need
from opencue_sched.placement.headroom import OverCap, PlanHeadroom
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.policy import FirstChoice, Policy
from opencue_sched.placement.reasons import explain_shortage


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
                self._pool.census(self._cluster.facility_id, state.search.tags, state.need, state.open_allocs),
                state.layer,
                state.need,
                self._policy.rules,
                os_name=state.job.os_name,
                tags=state.search.tags,
                open_allocs=state.open_allocs,
                headroom=self._headroom,
            )
        return reason
