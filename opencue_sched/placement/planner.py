"""The planner: from a frozen snapshot of the work and a pool of hosts to a plan that the committer re-validates.

Pure but for the pool: no clock, no I/O, no randomness beyond the ids it is given. At each step the show that uses least
of its size goes on with its next layer (`policies.order`): the caps first, then a host, and on it as many frames as
fit. Layers of a show come in the order of the snapshot.

What the plan takes from a host counts as taken in the pool, so other passes of the process plan on the rest of the host
while this plan is being booked, and never on the same cores. Once the outcome of a proc is known, the caller settles
the proc in the pool.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heapreplace, nsmallest
from itertools import islice
from operator import attrgetter

from opencue_sched.domain.caps import Caps, Vertices
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_needs import Dimension, Search, fewest_cores, reserve, smallest_need
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Frame, Job, Layer, memory_slices
from opencue_sched.domain.plans import Draw, PlannedProc, Snapshot, Waiting
from opencue_sched.domain.verdicts import LayerVerdict, Shortage, Verdict
from opencue_sched.placement.headroom import PlanHeadroom, Where
from opencue_sched.placement.host_cache import Census, HostCache, HostGroups, HostOrder
from opencue_sched.placement.plan_state import LayerState, Plan, Reach, ShowState
from opencue_sched.placement.policies import Refusal, Score
from opencue_sched.placement.policies.order import Shares, Use
from opencue_sched.placement.policies.reservations import draining
from opencue_sched.placement.policy import MAX_FRAMES, Policy
from opencue_sched.placement.shortages import shared_shortage, shortage

ATTEMPTS_PER_LAYER = 10
"""Hosts that others took from meanwhile before a layer is given up for the pass (the reference's default)."""
_SearchPlace = tuple[object, ...]
"""All that a search for a host depends on, but the amounts that are needed."""
_FLOWING = Refusal(Verdict.FLOWING, "")
_TAKEN = (Verdict.CAPACITY, Verdict.OVER_SHARE, Verdict.HELD, Verdict.KEPT_FOR_GPUS)
"""What keeps a layer waiting until some host is free for it."""


def plan_pass(snapshot: Snapshot, pool: HostCache, policy: Policy, *, new_id: Callable[[], str]) -> list[Plan]:
    """Place the snapshot's waiting frames on hosts of their clusters' tags: a plan for each cluster, in their order.

    ``new_id`` makes proc ids. Every layer that was looked at gets exactly one verdict: what keeps its remaining frames
    waiting, with how many were placed; FLOWING when nothing does and the rest simply come with the next pass.
    """
    planner = Planner(snapshot, pool, policy, new_id)
    while planner.run():
        pass
    return planner.judge()


_PORTIONS_AHEAD = 100
"""How many portions of a show are asked for at once, at most, when a plan comes to a layer whose frames were not read.
With fewer, a plan of layers with few frames is interrupted by more reads; with more, one read takes longer, and more of
its frames are out of date, or gone, when a later plan comes to them."""
_LAYERS_AHEAD = 400
"""How many layers that come next by rank are looked at for portions to ask for: four times as many as can be asked for,
because layers whose frames are known, or that a full cap or the hosts rule out, are passed over."""
_DRAWN_AHEAD = 100
"""How many jobs that come next by the draw are looked at for portions to ask for. When a plan looked at eight, and of
each job at the first layer alone, 1,200 layers of 300 jobs took 69 reads, and 36 since: each takes a millisecond of
processor time."""
_FRAMES_OF_A_TURN = 5
"""How many frames a job is taken to start each time it is drawn, for the estimate how many jobs' frames the drawn part
of a plan needs. If jobs start fewer, the plan reads once more; if they start more, frames were read for nothing."""
_CAPS_AHEAD = 400
"""How many layers that come next have the use of their jobs and folders read ahead, at most, once a cap that the plan
did not know was found full: then the next ones may be full as well, and each would cost a round trip to Redis."""
_NEEDS_TOLD = 16
"""How many needs that no host has idle a plan reports at most, for hosts of the same tags: the smallest, which explain
the larger ones too. Each costs a census, and a part of what a worker may write to Redis in a second
(verdicts.MOST_WRITTEN)."""


class Planner:
    """The plan of one pass. ``run`` may be called again, after portions were read or procs taken back. Used by the
    thread of the pass alone."""

    def __init__(
        self,
        snapshot: Snapshot,
        pool: HostCache,
        policy: Policy,
        new_id: Callable[[], str],
        *,
        idle_cores: int = MAX_FRAMES,
    ) -> None:
        """``idle_cores`` of the clusters' hosts bound how many portions are asked for ahead."""
        self.snapshot = snapshot
        self.pool = pool
        self.policy = policy
        self.new_id = new_id
        self._idle_cores = idle_cores
        self.headroom = PlanHeadroom(snapshot)
        self.shares = Shares(snapshot.subscriptions, snapshot.sizes)
        self.planned = 0
        self.booking_shows: set[str] = set()
        self.plans = {cluster: Plan() for work in snapshot.work for cluster in work.clusters}
        self._soft = True
        """Whether soft admissions count: in the first round, not in the second."""
        self._used: set[str] = set()
        """Ids of the hosts that the plan takes from."""
        self._shows = [
            ShowState(work, self.plans, frozenset(tag for cluster in work.clusters for tag in cluster.tags))
            for work in snapshot.work
        ]
        self._forget_failures()

    def _forget_failures(self) -> None:
        """Forget what did not fit, and what was learnt of hosts: at the start, and once frames were taken back."""
        for show in self._shows:
            # Where nothing failed there is nothing to forget: by now more is idle, not less.
            known = show.reaches.items()
            show.reaches = {tags: reach for tags, reach in known if not (reach.closed or reach.nothing_idle)}
        # A search that failed answers for every later search of the same place that needs at least as much.
        self._all_refused: defaultdict[_SearchPlace, list[Resources]] = defaultdict(list)
        """Needs for which hosts were found, and all of them refused."""
        self._none_apart: defaultdict[_SearchPlace, list[Resources]] = defaultdict(list)
        """Needs that no host takes but such as another plan of this process is booking."""
        # What was found out once, for layers that ask the same.
        self._shortages: dict[tuple[str, str, Search, frozenset[str]], Refusal] = {}
        self._census: dict[HostGroups, Census] = {}
        self._able: dict[tuple[str, str, Search, frozenset[str]], int] = {}
        """How many hosts could take a frame if nothing ran there."""

    def run(self) -> list[Waiting]:
        """Place what can be placed. Returns the layers at which the plan stopped because their frames were not read:
        the caller reads their portions and calls again."""
        self._soft = True
        for show in self._shows:
            for waiting in show.wanted:
                if waiting.layer.id in show.states:
                    self._take_more(show, waiting)
            show.rest = show.work.in_order(partial(self._job_may_find_host, show))
            show.drawn, show.wanted = None, []
            show.by_rank, show.later = deque(), deque()
            for states in show.states.values():
                for state in states:
                    state.second = False
        # First round: others want the hosts too.
        self._round(self._shows)
        wanted = [waiting for show in self._shows for waiting in show.wanted]
        if not wanted:
            # Second round: what is idle goes to any layer that can use it, also on hosts from which soft admissions
            # kept the layer off.
            self._soft = False
            for show in self._shows:
                # Layers of which no frame was read yet take part: frames are read when this round finds a host.
                refused = (state for states in show.states.values() for state in states if state.softly_refused)
                softly = [state for state in refused if state.frames or not state.all_read]
                show.rest, show.by_rank = None, deque(softly)
                show.draw_among(softly)
                for state in softly:
                    state.reason = None
            self._round(self._shows)
            wanted = [waiting for show in self._shows for waiting in show.wanted]
        return wanted

    def procs(self) -> list[PlannedProc]:
        """All that is planned."""
        return [proc for plan in self.plans.values() for proc in plan.procs]

    def unknown_caps(self, *, ahead: bool = False) -> set[tuple[str, str]]:
        """Pairs of a folder and a job (ids) of which nobody has read what is in use, out of those in the plan; empty
        where the use of all in the plan is known. ``ahead``: otherwise also pairs that come next."""

        def is_known(job: Job) -> bool:
            return self.headroom.knows(job.folder_id) and self.headroom.knows(job.id)

        unknown = {(proc.job.folder_id, proc.job.id) for proc in self.procs() if not is_known(proc.job)}
        if unknown and ahead:
            waiting = (waiting.job for show in self._shows for waiting in show.work if not is_known(waiting.job))
            unknown.update((job.folder_id, job.id) for job in islice(waiting, _CAPS_AHEAD))
        return unknown

    def learn(self, caps: Mapping[str, Caps]) -> list[PlannedProc]:
        """Take over the caps and use of folders and jobs (ids) that the plan has reached. Returns the procs that do not
        fit under them, the last of the plan first."""
        for vertex_id, of_vertex in caps.items():
            self.headroom.learn(vertex_id, of_vertex)
        left = {vertex_id: self.headroom.left_under(vertex_id) for vertex_id in caps}
        over = []
        for proc in reversed(self.procs()):
            mine = [vertex_id for vertex_id in (proc.job.folder_id, proc.job.id) if vertex_id in left]
            if any(left[vertex_id][0] < 0 or (left[vertex_id][1] < 0 and proc.resources.gpus) for vertex_id in mine):
                over.append(proc)
                for vertex_id in mine:
                    cores, gpus = left[vertex_id]
                    left[vertex_id] = cores + proc.resources.cores, gpus + proc.resources.gpus
        return over

    def take_back(self, procs: Collection[PlannedProc], *, again: bool = False) -> None:
        """Take procs out of the plan: their hosts and caps are free for others again. Their frames stay out of it,
        unless they may be planned ``again``."""
        gone = {proc.proc_id for proc in procs}
        for proc in procs:
            self.pool.settle(proc.host.id, proc.proc_id, committed=False)
            self.headroom.take(proc.vertices, proc.resources, proc.host.id, frames=-1)
            self.shares.take(proc.job.show_id, proc.vertices.alloc_id, -proc.resources.cores)
        for show in self._shows:
            for states in show.states.values():
                for state in states:
                    state.reason, state.second, state.most = None, False, self._first_part(state)
        for plan in self.plans.values():
            plan.procs = [proc for proc in plan.procs if proc.proc_id not in gone]
        for show in self._shows:
            for proc in procs:
                for state in show.states.get(proc.layer.id, ()):
                    if state.layer.memory_min_kb == proc.layer.memory_min_kb:
                        state.placed -= 1
                        if again:
                            state.frames.appendleft(proc.frame)
            if show.work.draw is not None:
                cores = sum(proc.resources.cores for proc in procs if proc.layer.id in show.states)
                show.work.draw.count(-cores, drawn=False)
        self.planned -= len(procs)
        booking = {proc.job.id for proc in self.procs()}
        for show in self._shows:
            show.booking_jobs &= booking
            show.bounded = len(show.booking_jobs) >= self._most_jobs(show)
            for cluster in show.work.clusters:
                self.plans[cluster].full = False
        self._forget_failures()

    def judge(self) -> list[Plan]:
        """The plans, with a verdict on each layer that the plan looked at, and on layers that no plan has looked at for
        long."""
        full = self._plan_is_full() if self.planned >= self.policy.max_frames else None
        for show in self._shows:
            for waiting in show.work.to_judge():
                if waiting.layer.id in show.states:
                    continue
                if full is not None:
                    # The same of all, and in each plan while a farm fills: only what hosts of its tags lack is found.
                    layer = waiting.layer
                    self._reach(show, layer.tags)
                    verdict = LayerVerdict(waiting.job.id, layer.id, full.verdict, 0, waiting.unplanned, full.detail)
                    self.plans[show.cluster_of(layer)].verdicts.append(verdict)
                else:
                    for state in self._states_of(show, waiting, frames=()):
                        state.reason = self._why(state)
            for states in show.states.values():
                # A layer of whose frames none can be had now gets no verdict: no search says why it waits.
                if any(state.placed or not state.all_read for state in states):
                    self._verdict(states)
            self.plans[show.work.clusters[0]].shortages = self._shared_shortages(show)
        return list(self.plans.values())

    def _shared_shortages(self, show: ShowState) -> list[Shortage]:
        """What the show's hosts lack, so that layers which need as much are explained without looking at each."""
        cluster, shortages = show.work.clusters[0], []
        for reach in {reach.tags: reach for reach in show.reaches.values() if reach.tags}.values():
            # The last needs are the smallest: each was searched for although the needs before it had failed.
            last = reach.nothing_idle[-_NEEDS_TOLD:]
            smallest = (need for place, need in enumerate(last) if not any(map(need.covers, last[place + 1 :])))
            for need in smallest:
                allocs = self.headroom.open_allocs(cluster.show_id, need.cores)
                shortages.append(shared_shortage(reach.tags, need, self._census_of(cluster, reach.tags), allocs))
        return shortages

    def _why(self, state: LayerState) -> Refusal:
        """Why a layer waits of which the plan has placed no frame."""
        if not state.search.tags:
            tags = " and ".join(sorted(state.layer.tags)) or "none"
            return Refusal(Verdict.NO_HOST, f"none of its tags ({tags}) is among those of the cluster")
        if self.planned >= self.policy.max_frames:
            return self._plan_is_full()
        over = self.headroom.over_cap(state.job, state.layer, state.search.need)
        if over is not None:
            return over
        state.open_allocs = self.headroom.open_allocs(state.job.show_id, state.search.need.cores)
        return self._shortage(state) if self._next_host(state) is None else _FLOWING

    # Who goes on next

    def _round(self, shows: Iterable[ShowState]) -> None:
        """Go from show to show until no layer has anything more to get."""
        heap = []
        for number, show in enumerate(shows):
            show.front = self._front(show)
            if show.front is not None:
                heap.append((*self._use(show.front), number, show))
        heapify(heap)
        while heap:
            *_, number, show = heap[0]
            state = show.front
            assert state is not None  # noqa: S101 - a show without a layer leaves the heap
            before = state.placed
            reason = self._step(state)
            self._count_turn(show, state, state.placed - before)
            if reason is not None:
                self._end_turn(show, state, reason)
            show.front = self._front(show)
            if show.front is not None:
                heapreplace(heap, (*self._use(show.front), number, show))
            else:
                heappop(heap)

    def _front(self, show: ShowState) -> LayerState | None:
        """The layer of the show that goes on now; None when nothing more can be had."""
        draw = show.work.draw
        if draw is not None and draw.is_due(self.policy.queue.priority_draw):
            drawn = self._drawn(show, draw)
            if drawn is not None:
                show.drawing = True
                return drawn
        show.drawing = False
        while not show.wanted:
            while show.by_rank and show.by_rank[0].reason is not None:
                show.by_rank.popleft()
            if show.by_rank:
                return show.by_rank[0]
            states = self._following(show)
            if states:
                show.by_rank.extend(states)
            elif show.later:
                show.by_rank, show.later = show.later, deque()
                show.draw_among(show.by_rank)
            else:
                return None
        return None

    def _following(self, show: ShowState) -> list[LayerState]:
        """What goes on of the next layer in the order of rank that may find a host; nothing after the last."""
        if show.rest is None:
            return []
        if self.planned >= self.policy.max_frames:
            if any(self._has_more(show, waiting) for waiting in show.rest):
                self._leave_for_the_next_plan(show)
            return []
        for waiting in show.rest:
            states = self._open_states(show, waiting)
            if states and not states[0].second:
                return states
        show.rest = None
        return []

    def _drawn(self, show: ShowState, draw: Draw) -> LayerState | None:
        """What goes on of the job with the least virtual time among those that may find a host."""
        if show.wanted or self.planned >= self.policy.max_frames:
            return None
        if show.drawn is None:
            show.drawn = draw.times(show.work.priorities())
            heapify(show.drawn)
        while show.drawn:
            job_id = show.drawn[0][1]
            if show.bounded and job_id not in show.booking_jobs:
                heappop(show.drawn)
                continue
            layers = show.work.of_job(job_id) if self._job_may_find_host(show, job_id) else ()
            for waiting in layers:
                for state in self._open_states(show, waiting):
                    if show.rest is None or not state.second:
                        return state
            heappop(show.drawn)
        return None

    def _open_states(self, show: ShowState, waiting: Waiting) -> list[LayerState]:
        """The states of a layer that may find a host, as far as is known, and may have more frames in this round."""
        if not self._may_find_host(show, waiting):
            return []
        states = show.states.get(waiting.layer.id)
        if states is None:
            if self.headroom.is_full(waiting):
                for cluster in show.work.clusters:
                    self.plans[cluster].at_cap = True
                return []
            if show.bounded and waiting.job.id not in show.booking_jobs:
                self._leave_for_the_next_plan(show)
                return []
            # Frames that were not read yet are read when a host is found: without one the read would be for nothing.
            states = self._states_of(show, waiting, show.work.portion(waiting.layer) or ())
        return [state for state in states if state.reason is None]

    def _leave_for_the_next_plan(self, show: ShowState) -> None:
        """End the plan of a show at a bound of the plan: what else may find a host comes at once with the next plan."""
        show.rest = None
        for cluster in show.work.clusters:
            self.plans[cluster].full = True

    def _look_ahead(self, show: ShowState) -> None:
        """Choose further layers whose portions will be wanted, so that they are read in one statement: of the jobs that
        come next by the draw, and of those that come next by rank."""
        most = self.policy.queue.dispatch_frames_per_layer_limit
        # The shows that go on share what the plan has left.
        shows = sum(other.front is not None or bool(other.wanted) for other in self._shows)
        frames = (min(self.policy.max_frames, self._idle_cores) - self.planned) // max(1, shows)
        frames -= sum(min(waiting.frames, most) for waiting in show.wanted)
        drawn = frames * self.policy.queue.priority_draw if show.drawn else 0.0
        self._want(show, self._drawn_next(show), drawn, min(most, _FRAMES_OF_A_TURN))
        self._want(show, islice(show.rest or (), _LAYERS_AHEAD), frames - drawn, most)

    def _drawn_next(self, show: ShowState) -> Iterator[Waiting]:
        """The layers of which the jobs that come next by the draw would start frames, one of each job."""
        for _, job_id in nsmallest(_DRAWN_AHEAD, show.drawn or ()):
            for waiting in show.work.of_job(job_id):
                states = show.states.get(waiting.layer.id)
                if states is None:
                    yield waiting
                if states is None or any(state.reason is None for state in states):
                    break

    def _want(self, show: ShowState, coming: Iterable[Waiting], frames: float, of_each: int) -> None:
        """Ask for the portions of layers that come next, for up to ``frames`` frames, of which each layer starts
        ``of_each`` at most."""
        for waiting in coming:
            if frames <= 0 or len(show.wanted) >= _PORTIONS_AHEAD:
                return
            if (
                waiting.layer.id not in show.states
                and self._may_find_host(show, waiting)
                and not self.headroom.is_full(waiting)
            ):
                frames -= min(waiting.frames, of_each)
                if not show.work.has_portion(waiting.layer):
                    show.wanted.append(waiting)

    def _may_find_host(self, show: ShowState, waiting: Waiting) -> bool:
        """Whether no search of this plan has shown that there is no host for the layer. Asked for each layer."""
        return self._may_be_idle(show, waiting.place.tags, waiting.need)

    def _job_may_find_host(self, show: ShowState, job_id: str) -> bool:
        """Whether no search of this plan has shown that there is no host for any layer of the job, as far as the least
        that its layers need tells."""
        return any(self._may_be_idle(show, tags, need) for tags, need in show.work.least_of_job(job_id))

    def _may_be_idle(self, show: ShowState, tags: frozenset[str], need: Resources) -> bool:
        """Whether a host with one of the tags may have the need idle."""
        reach = show.reaches.get(tags) or self._reach(show, tags)
        if reach.closed:
            return False
        for idle in reach.nothing_idle:  # noqa: SIM110 - any() takes twice as long, for each of 20,000 layers
            if need.covers(idle):
                return False
        return True

    def _has_more(self, show: ShowState, waiting: Waiting) -> bool:
        """Whether frames of the layer that may find a host are not in the plan, as far as is known."""
        placed = sum(state.placed for state in show.states.get(waiting.layer.id, ()))
        return waiting.frames > placed and self._may_find_host(show, waiting)

    def _ask_for_more(self, state: LayerState) -> Refusal | None:
        """All frames that were read of a layer are in the plan, and there is a host for another: the show stops here
        until more are read, so that no layer behind it has the host."""
        if state.all_read or state.waiting <= state.placed:
            return _FLOWING
        state.show.wanted.append(state.listed)
        self._look_ahead(state.show)
        return None

    def _take_more(self, show: ShowState, waiting: Waiting) -> None:
        """Go on with what was read of a layer since the plan had all of it that was there."""
        states = show.states[waiting.layer.id]
        known = {frame.id for state in states for frame in state.frames}
        known.update(proc.frame.id for proc in self.procs() if proc.layer.id == waiting.layer.id)
        frames = [frame for frame in show.work.portion(waiting.layer) or () if frame.id not in known]
        for part, part_frames, count in memory_slices(waiting.layer, frames, len(frames)):
            state = next((known for known in states if known.layer.memory_min_kb == part.memory_min_kb), None)
            if state is None:
                states.append(self._state_of(show, waiting, part, part_frames, count))
            else:
                state.frames.extend(part_frames)
                state.failed_on.update(name for frame in part_frames for name in frame.failed_on)
        for state in states:
            state.all_read = not state.frames

    def _reach(self, show: ShowState, tags: frozenset[str]) -> Reach:
        """What the plan knows of the hosts with these tags, as far as the show's clusters have the tags."""
        reach = show.reaches.get(tags)
        if reach is None:
            reached = tuple(sorted(show.tags & tags))
            known = next((other for other in show.reaches.values() if other.tags == reached), None)
            reach = show.reaches[tags] = known or Reach(reached)
            if known is None and reached:
                self._close_if_full(show, reach)
                self.plans[show.work.clusters[0]].cache_misses += reach.closed
        return reach

    def _states_of(self, show: ShowState, waiting: Waiting, frames: Sequence[Frame]) -> list[LayerState]:
        """Make the states of a listed layer's memory slices, and keep them with its show. ``frames``: those of its
        waiting frames that were read."""
        parts = memory_slices(waiting.layer, frames, waiting.unplanned)
        states = [self._state_of(show, waiting, *part) for part in parts]
        show.states[waiting.layer.id] = states
        return states

    def _state_of(
        self, show: ShowState, listed: Waiting, layer: Layer, frames: Sequence[Frame], waiting: int
    ) -> LayerState:
        """The state of a memory slice of a listed layer: the ``waiting`` frames that ask for the same memory."""
        tags = self._reach(show, layer.tags).tags
        cluster = show.cluster_of(layer)
        search = Search.of(listed.job, layer, smallest_need(layer), tags)
        plan = self.plans[cluster]
        state = LayerState(show, listed, cluster, plan, listed.job, layer, search, waiting, deque(frames), most=0)
        state.most = self._first_part(state)
        state.failed_on.update(name for frame in frames for name in frame.failed_on)
        return state

    def _first_part(self, state: LayerState) -> int:
        return min(state.waiting, self.policy.queue.dispatch_frames_per_layer_limit)

    def _count_turn(self, show: ShowState, state: LayerState, frames: int) -> None:
        """Count what the layer started in the draw of its show."""
        if not frames:
            return
        show.booking_jobs.add(state.job.id)
        show.bounded = len(show.booking_jobs) >= self._most_jobs(show)
        draw = show.work.draw
        if draw is not None:
            cores = sum(proc.resources.cores for proc in state.plan.procs[-frames:])
            draw.count(cores, drawn=show.drawing)
            if show.drawing and show.drawn:
                heapreplace(show.drawn, (draw.served(state.job.id, cores, state.job.priority), state.job.id))

    def _most_jobs(self, show: ShowState) -> int:
        """Jobs of the show of which the plan may take frames."""
        return self.policy.queue.max_jobs_per_cluster_pass * len(show.work.clusters)

    def _end_turn(self, show: ShowState, state: LayerState, reason: Refusal) -> None:
        """End the turn of a layer that has had its share of the round, or can have no more."""
        goes_on = self.policy.queue.whole_rounds and self.planned < self.policy.max_frames
        if goes_on and reason.verdict is Verdict.FLOWING and state.most < state.waiting and not state.all_read:
            # It goes on once every other layer of the show has had its share. What is left is still for this show,
            # before a show that uses more of its size gets anything.
            state.most, state.second = state.waiting, True
            if show.by_rank and show.by_rank[0] is state:
                show.by_rank.popleft()
            elif state in show.by_rank:
                show.by_rank.remove(state)
            show.later.append(state)
        else:
            state.reason = reason

    def _use(self, state: LayerState) -> Use:
        """How the layer's show stands where the layer runs; without shares all stand alike."""
        if not self.policy.queue.shares:
            return Use(False, 0.0)
        return self.shares.use(state.job.show_id, state.cluster.alloc_id)

    def _verdict(self, parts: Sequence[LayerState]) -> None:
        """One verdict for a layer: that of the part of which most frames wait."""
        full = self._plan_is_full() if self.planned >= self.policy.max_frames else _FLOWING
        verdicts = [state.verdict(state.reason or full) for state in parts]
        verdict = replace(
            max(verdicts, key=attrgetter("waiting")),
            frames=sum(verdict.frames for verdict in verdicts),
            waiting=sum(verdict.waiting for verdict in verdicts),
        )
        parts[0].plan.verdicts.append(verdict)

    def _plan_is_full(self) -> Refusal:
        return Refusal(Verdict.FLOWING, f"this plan is full with {self.planned} frames; the next goes on")

    def _step(self, state: LayerState) -> Refusal | None:
        """Place frames of the layer on one more host. None if it may go on, else why it does not in this round."""
        job, layer, plan = state.job, state.layer, state.plan
        if not state.search.tags:
            return self._why(state)
        if state.placed >= state.most:
            return _FLOWING
        if self.planned >= self.policy.max_frames:
            plan.full = True
            return self._plan_is_full()
        over = self.headroom.over_cap(job, layer, state.search.need)
        if over is not None:
            plan.at_cap = True
            return over
        state.open_allocs = self.headroom.open_allocs(job.show_id, state.search.need.cores)
        host = self._next_host(state)
        if host is None:
            return self._shortage(state)
        if not state.frames:
            return self._ask_for_more(state)
        plan.attempts[layer.id] += 1
        if not self._fill(state, host):
            state.wasted += 1
            plan.wasted_attempts += 1
            if state.wasted >= ATTEMPTS_PER_LAYER:
                detail = f"{state.wasted} hosts were taken by others while its frames were being placed"
                return Refusal(Verdict.CAPACITY, detail)
        return None

    def _next_host(self, state: LayerState) -> Host | None:
        """A host for the layer's next frame. Searches that cannot find one are not made twice."""
        # Within a plan hosts only get fuller and allocations only close (sooner for more cores), so what failed keeps
        # failing for the show. A search that met no host with the need idle answers for every larger need; one whose
        # hosts all said no for what is in the search (another OS, not wholly idle, ...) for those of its place.
        search, need = state.search, state.search.need
        reach = self._reach(state.show, state.layer.tags)
        whole = search.cores_min_centicores if search.cores_min_centicores <= 0 else 1
        search_place = (
            *state.show.place,
            search.tags,
            search.os_name,
            search.threadable,
            whole,
            search.cores_max_centicores,
            self.headroom.seat_limits(state.layer),
        )
        # Under such a limit only machines that hold it are searched. That they refuse says nothing of other layers.
        no_seat = self.headroom.seats_taken(state.layer)
        state.asked, state.refused = no_seat is not None, no_seat
        state.plan.at_cap |= state.asked
        all_refused, none_apart = self._all_refused[search_place], self._none_apart[search_place]
        if reach.closed or any(map(need.covers, (*reach.nothing_idle, *all_refused))):
            return None
        for where in self.headroom.where_seats_serve(state.layer, need):
            anywhere = where.only is None
            known_to_fail = anywhere and any(map(need.covers, none_apart))
            host = None if known_to_fail else self._find(state, where, apart=True)
            if host is None:
                if anywhere and state.refused is None:
                    none_apart.append(need)
                host = self._find(state, where, apart=False)
            if host is not None:
                return host
        state.plan.cache_misses += 1
        if not state.asked:
            reach.nothing_idle.append(need)
            self._close_if_full(state.show, reach)
        elif state.refused is no_seat:
            all_refused.append(need)
        return None

    def _close_if_full(self, show: ShowState, reach: Reach) -> None:
        """Look at no more layers with these tags where no host has what the most modest of them needs."""
        least, cluster = show.work.least_need(reach.tags), show.work.clusters[0]
        allocs = self.headroom.open_allocs(cluster.show_id, least.cores)
        groups = HostGroups(cluster.facility_id, reach.tags, cluster.shard)
        if not self.pool.has_idle(groups, least, allocs=allocs):
            reach.closed, reach.nothing_idle = True, [least]
            if not allocs:
                for cluster_at_cap in show.work.clusters:
                    self.plans[cluster_at_cap].at_cap = True
            reaches = [show.reaches.get(tags) for tags in show.work.tags()]
            if all(other is not None and other.closed for other in reaches):
                show.rest = None

    def _find(self, state: LayerState, where: Where, *, apart: bool) -> Host | None:
        """The first host of ``where`` that takes the layer's next frame. ``apart``: leave out hosts from which another
        plan of this process takes, because of its commit and ours one would wait for the other there."""
        queue, score = self.policy.queue, self.policy.score
        only, seat_score = where
        strategy = queue.host_booking_strategy_by_show.get(state.job.show_name, queue.host_booking_strategy)
        if seat_score is not None and strategy.core_saturation:
            # A few hosts are scored, the first in this order: of the best fits none may take more than a frame.
            strategy = strategy.model_copy(update={"core_saturation": False})
        order = HostOrder(
            strategy,
            known_to=state.layer.id if queue.locality and seat_score is None else None,
            score=seat_score or (partial(self._cost, state, score) if score else None),
        )
        return self.pool.find(
            HostGroups(state.cluster.facility_id, state.search.tags, state.cluster.shard),
            state.search.need,
            order,
            partial(self._accepts, state, apart),
            allocs=state.open_allocs,
            only=only,
        )

    def _reserve(self, state: LayerState, host: Host, left: float) -> Resources | Dimension | Refusal:
        """What the layer's next frame takes from the host as it is, or why it may not."""
        job, layer, policy = state.job, state.layer, self.policy
        answer = reserve(layer, host, policy.rules, os_name=job.os_name, job_cores_left=left)
        if isinstance(answer, Resources):
            for admission in policy.admissions:
                if refusal := admission(job, layer, host, answer):
                    return refusal
            for admission in policy.soft_admissions if self._soft else ():
                if refusal := admission(job, layer, host, answer):
                    state.softly_refused = True
                    return refusal
        return answer

    def _cost(self, state: LayerState, score: Score, host: Host) -> float:
        left, os_name = self.headroom.cores_left(state.job, host.alloc_id), state.job.os_name
        taken = reserve(state.layer, host, self.policy.rules, os_name=os_name, job_cores_left=left)
        return score(host, taken) if isinstance(taken, Resources) else math.inf

    def _accepts(self, state: LayerState, apart: bool, host: Host) -> bool:
        """Whether the next frame of the layer can go to the host as it is."""
        if apart and host.id not in self._used and self.pool.being_booked(host.id):
            return False
        if self.headroom.gets_no_seat(state.layer, host.id):
            return False
        state.asked = True
        if host.name in state.failed_on and state.frames and not self._frames_for(state, host):
            state.refused = Refusal(Verdict.CAPACITY, f"its frames failed on {host.name}; other hosts may take them")
            return False
        answer = self._reserve(state, host, self.headroom.cores_left(state.job, host.alloc_id))
        if isinstance(answer, Refusal):
            state.refused = answer
        elif answer is Dimension.JOB_CORES:
            need = replace(state.search.need, cores=fewest_cores(state.layer, host))
            state.refused = self.headroom.over_cap(state.job, state.layer, need, host.alloc_id) or state.refused
        return isinstance(answer, Resources)

    def _frames_for(self, state: LayerState, host: Host) -> deque[Frame]:
        """The frames of the layer that may go to the host: not those that failed there, while others may take them."""
        if host.name not in state.failed_on:
            return state.frames
        able, divided = self._hosts_able(state), bool(state.cluster.shard)
        return deque(
            frame
            for frame in state.frames
            # In a farm that is divided the hosts of this shard are not all that may take it.
            if host.name not in frame.failed_on or (able <= len(frame.failed_on) and not (divided and frame.others))
        )

    def _hosts_able(self, state: LayerState) -> int:
        """How many hosts of the layer's tags could take a frame of it if nothing ran there."""
        key = (*state.show.place, state.search, state.open_allocs)
        if key not in self._able:
            kinds = self._census_of(state.cluster, state.search.tags).kinds
            self._able[key] = sum(
                count
                for host, count in kinds
                if host.alloc_id in state.open_allocs and isinstance(self._take_idle(state, host), Resources)
            )
        return self._able[key]

    def _take_idle(self, state: LayerState, host: Host) -> Resources | Dimension:
        return reserve(state.layer, host, self.policy.rules, os_name=state.job.os_name, job_cores_left=math.inf)

    def _fill(self, state: LayerState, host: Host) -> bool:
        """Cut as many frames of the layer from the host as fit. False if another pass took from it meanwhile."""
        job, layer, headroom = state.job, state.layer, self.headroom
        vertices = Vertices(job.show_id, host.alloc_id, job.folder_id, job.id, layer.id, job.dept_id, layer.limit_ids)
        procs: list[PlannedProc] = []
        left = headroom.cores_left(job, host.alloc_id)
        current = host
        frames = self._frames_for(state, host)
        most = min(
            state.most - state.placed,
            len(frames),
            self.policy.max_frames - self.planned,
            headroom.frames_left(job, layer, state.search.need),
        )
        while len(procs) + 1 <= most:
            answer = self._reserve(state, current, left)
            if not isinstance(answer, Resources):
                break
            frame = frames[len(procs)]
            procs.append(PlannedProc(self.new_id(), job, layer, frame, current, answer, vertices))
            left -= answer.cores
            current = current.less(answer, layer.id)
        taken = {proc.proc_id: proc.resources for proc in procs}
        if not (procs and self.pool.take(host, taken, layer_id=layer.id)):
            return False
        for proc in procs:
            if frames is state.frames:
                frames.popleft()
            else:
                state.frames.remove(proc.frame)
            headroom.take(vertices, proc.resources, host.id)
            self.shares.take(job.show_id, host.alloc_id, proc.resources.cores)
        state.plan.procs += procs
        self._used.add(host.id)
        self.booking_shows.add(job.show_id)
        self.planned += len(procs)
        state.placed += len(procs)
        return True

    def _shortage(self, state: LayerState) -> Refusal:
        """Why no host was found. Where a host drains for the layer this is said, rather than that others are taken."""
        reason = state.refused
        if reason is None:
            key = (*state.show.place, state.search, state.open_allocs)
            if key not in self._shortages:
                self._shortages[key] = shortage(
                    state.job,
                    state.layer,
                    state.search,
                    self._census_of(state.cluster, state.search.tags),
                    self.policy.rules,
                    self.headroom,
                    state.open_allocs,
                )
            reason = self._over_share(state, self._shortages[key])
        if reason.verdict in _TAKEN:
            return draining(self.pool.draining_for(state.layer.id), self.snapshot.now) or reason
        return reason

    def _census_of(self, cluster: Cluster, tags: tuple[str, ...]) -> Census:
        """The hosts of a cluster's shard that have one of these tags, counted. The pool is asked once in a pass, since
        a census costs as much as there are classes of hosts."""
        groups = HostGroups(cluster.facility_id, tags, cluster.shard)
        if groups not in self._census:
            self._census[groups] = self.pool.census(groups)
        return self._census[groups]

    def _over_share(self, state: LayerState, reason: Refusal) -> Refusal:
        """``reason``, or OVER_SHARE where hosts are busy because the show uses more than its size and a show that uses
        less of its own was served first."""
        own = self.shares.use(state.job.show_id)
        over = self.policy.queue.shares and (own.sizeless or own.of_size > 1)
        others = self.booking_shows - {state.job.show_id}
        served = reason.verdict is Verdict.CAPACITY and over and any(self.shares.use(other) < own for other in others)
        if not served:
            return reason
        uses = "has no size here" if own.sizeless else f"uses {own.of_size:.2f} times its size"
        detail = f"its show {uses}, and shows that use less of theirs took what was idle; {reason.detail}"
        return Refusal(Verdict.OVER_SHARE, detail)
