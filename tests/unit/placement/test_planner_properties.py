"""What every plan must keep, whatever the farm: caps, hosts, limits, priority, verdicts, nothing stranded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from opencue_sched.domain.caps import Caps, Headroom
from opencue_sched.domain.frame_needs import MEM_RESERVED_MIN_KB, Rules, reserve, smallest_need
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.plans import Snapshot
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.plan_state import Plan
from opencue_sched.placement.policy import Policy
from opencue_sched.settings import HostBookingStrategy
from tests.kit.examples import examples
from tests.kit.values import (
    GIB,
    make_caps,
    make_cluster,
    make_host,
    make_job,
    make_layer,
    make_policy,
    make_snapshot,
    plan,
)
from tests.unit.placement.frozen_pool import FrozenPool

TAGS = ["a", "b", "c"]
ALLOCS = ["x", "y"]
LIMITS = ["nuke", "vray"]
CLUSTER = make_cluster("a", "b")

# What makes a plan empty is drawn less often than what does not: most plans are to have something in them.
tag_sets = (st.sampled_from([{"a"}, {"a", "b"}]) | st.sets(st.sampled_from(TAGS), max_size=2)).map(frozenset)
caps = st.none() | st.sampled_from([0.5, 1, 2, 3, 5, 8, 20])


@dataclass(frozen=True)
class Situation:
    snapshot: Snapshot
    hosts: tuple[Host, ...]
    policy: Policy

    def plan(self, pool: FrozenPool | None = None) -> Plan:
        return plan(self.snapshot, pool or self.pool(), cluster=CLUSTER, policy=self.policy)

    def pool(self) -> FrozenPool:
        return FrozenPool(self.hosts)


@st.composite
def hosts(draw: st.DrawFn, host_id: str) -> Host:
    cores = draw(st.integers(1, 12))
    gpus = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return make_host(
        host_id,
        cores=cores,
        memory_gib=draw(st.sampled_from([4, 8, 16, 64])),
        idle_centicores=draw(st.just(cores) | st.integers(0, cores)) * 100 + draw(st.sampled_from([0, 0, 50])),
        idle_gpus=gpus,
        idle_gpu_memory_kb=gpus * 8 * GIB,
        tags=draw(tag_sets),
        alloc_id=draw(st.sampled_from(ALLOCS)),
        thread_mode=draw(st.sampled_from(ThreadMode)),
        os_names=draw(st.sampled_from([("linux",), ("rocky9", "linux"), ("windows",)])),
    )


@st.composite
def layers(draw: st.DrawFn, layer_id: str) -> Layer:
    return make_layer(
        layer_id,
        frames=draw(st.integers(1, 4)),
        cores=draw(st.sampled_from([0, -1, -4, 0.5, 1, 1, 2, 3, 4])),
        memory_gib=draw(st.sampled_from([0.5, 1, 2, 4, 8])),
        cores_max_centicores=draw(st.sampled_from([0, 0, 0, 100, 400])),
        gpus_min=draw(st.sampled_from([0, 0, 0, 1])),
        tags=draw(tag_sets),
        threadable=draw(st.booleans()),
        services=draw(st.sampled_from([("default",), ("selfish",)])),
        limit_ids=tuple(sorted(draw(st.sets(st.sampled_from(LIMITS), max_size=2)))),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    jobs = []
    for number in range(draw(st.integers(1, 4))):
        own = [draw(layers(f"j{number}l{index}")) for index in range(draw(st.integers(1, 3) | st.integers(0, 3)))]
        jobs.append(
            make_job(
                f"j{number}",
                own,
                folder_id=draw(st.sampled_from(["f1", "f2"])),
                os_name=draw(st.sampled_from(["linux", None])),
            )
        )
    pair = st.builds(make_caps, caps, st.none() | st.integers(0, 3))
    subscribed = draw(st.just(set(ALLOCS)) | st.sets(st.sampled_from(ALLOCS)))
    limited = st.builds(Headroom, st.integers(2, 6) | st.integers(0, 6), st.integers(0, 3))
    snapshot = make_snapshot(
        *jobs,
        subscriptions={alloc: make_caps(draw(st.sampled_from([40, 9, 4, 1, 0]))) for alloc in sorted(subscribed)},
        folders=draw(st.dictionaries(st.sampled_from(["f1", "f2"]), pair)),
        job_caps=draw(st.dictionaries(st.sampled_from([job.id for job in jobs]), pair)),
        limits=draw(st.dictionaries(st.sampled_from(LIMITS), limited)),
    )
    own_hosts = tuple(draw(hosts(f"h{number}")) for number in range(draw(st.integers(2, 6) | st.integers(0, 6))))
    policy = make_policy(
        Rules(draw(st.sampled_from([-1, 2 * GIB, 64 * GIB])), frozenset({"selfish"})),
        host_booking_strategy=draw(
            st.builds(HostBookingStrategy, core_saturation=st.booleans(), memory_saturation=st.booleans())
        ),
        max_frames=draw(st.sampled_from([3, 1000])),
    )
    return Situation(snapshot, own_hosts, policy)


def within(used: Mapping[str, float], caps_of: Mapping[str, Headroom]) -> bool:
    return all(amount <= caps_of[key].left for key, amount in used.items() if key in caps_of)


def cores_by(planned: Plan, kind: str) -> Counter[str]:
    """Cores of the plan by a vertex (alloc_id, folder_id, job_id)."""
    used: Counter[str] = Counter()
    for proc in planned.procs:
        used[getattr(proc.vertices, kind)] += proc.resources.cores
    return used


def gpus_by(planned: Plan, kind: str) -> Counter[str]:
    used: Counter[str] = Counter()
    for proc in planned.procs:
        used[getattr(proc.vertices, kind)] += proc.resources.gpus
    return used


@settings(max_examples=examples(120), deadline=None)
@given(situations())
def test_a_plan_keeps_every_rule_and_is_the_same_again(situation: Situation) -> None:
    # To draw a situation costs more than to plan and judge it, so each is judged in every way.
    planned = situation.plan()
    no_cap_limit_or_host_is_passed(situation, planned)
    every_layer_has_one_verdict_that_adds_up(situation, planned)
    frames_are_planned_once_and_in_order(situation, planned)
    assert situation.plan() == planned, "ids decide every tie"


def no_cap_limit_or_host_is_passed(situation: Situation, planned: Plan) -> None:
    snapshot = situation.snapshot
    subscriptions = {alloc_id: caps for (_, alloc_id), caps in snapshot.subscriptions.items()}

    # every cap, with an absent subscription bookable by nobody
    assert set(cores_by(planned, "alloc_id")) <= set(subscriptions)
    for caps_of, kind in [
        (subscriptions, "alloc_id"),
        (snapshot.caps, "folder_id"),
        (snapshot.caps, "job_id"),
    ]:
        assert within(cores_by(planned, kind), {key: value.cores for key, value in caps_of.items()})
        if kind != "alloc_id":
            assert within(
                {key: gpus for key, gpus in gpus_by(planned, kind).items() if gpus},
                {key: value.gpus for key, value in caps_of.items()},
            )
    running: Counter[str] = Counter(limit for proc in planned.procs for limit in proc.layer.limit_ids)
    assert within(running, snapshot.limits)

    # every host, in all four dimensions
    hosts_by_id = {host.id: host for host in situation.hosts}
    left = dict(hosts_by_id)
    for proc in planned.procs:
        host = left[proc.host.id]
        left[host.id] = host.less(proc.resources, proc.layer.id)
    pool = situation.pool()
    situation.plan(pool)
    for host_id, host in left.items():
        assert host.idle_centicores >= 0
        assert min(host.idle_memory_kb, host.idle_gpus, host.idle_gpu_memory_kb) >= 0
        assert pool.get(host_id) == (host if host.tags else None)

    # and what a frame may run on
    for proc in planned.procs:
        host = hosts_by_id[proc.host.id]
        assert proc.layer.tags & set(CLUSTER.tags) & host.tags
        assert proc.job.os_name is None or proc.job.os_name in host.os_names
        assert proc.resources.cores >= 1
        assert proc.resources.memory_kb >= proc.layer.memory_min_kb


def every_layer_has_one_verdict_that_adds_up(situation: Situation, planned: Plan) -> None:
    placed = Counter(proc.layer.id for proc in planned.procs)
    every = {layer.id: layer for job in situation.snapshot.work[0].given for layer in job.layers}

    assert Counter(verdict.layer_id for verdict in planned.verdicts) == Counter(dict.fromkeys(every, 1))
    for verdict in planned.verdicts:
        layer = every[verdict.layer_id]
        assert verdict.frames == placed[layer.id]
        assert verdict.frames + verdict.waiting == layer.waiting_frames
        if verdict.verdict is not Verdict.FLOWING:
            assert verdict.waiting
            assert verdict.detail
        elif verdict.waiting:
            assert planned.full
    assert len(planned.procs) <= situation.policy.max_frames


def frames_are_planned_once_and_in_order(situation: Situation, planned: Plan) -> None:
    assert len({proc.proc_id for proc in planned.procs}) == len(planned.procs)
    by_layer: defaultdict[str, list[int]] = defaultdict(list)
    for proc in planned.procs:
        by_layer[proc.layer.id].append(proc.frame.number)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_layer.values())
    in_order = [layer.id for job in situation.snapshot.work[0].given for layer in job.layers]
    places = [in_order.index(proc.layer.id) for proc in planned.procs]
    assert places == sorted(places)


@settings(max_examples=examples(60), deadline=None)
@given(situations(), st.lists(st.none() | st.sampled_from([1, 3, 9, 30]), min_size=1, max_size=7))
def test_each_frame_reserves_what_it_asks_for_and_every_other_rule_holds(
    situation: Situation, memory_gib: list[int | None]
) -> None:
    # given layers some of whose frames ask for memory of their own
    asked = (None if gib is None else gib * GIB for gib in cycle(memory_gib))

    def asking(layer: Layer) -> Layer:
        return replace(layer, frames=tuple(replace(frame, memory_kb=next(asked)) for frame in layer.frames))

    jobs = [replace(job, layers=tuple(map(asking, job.layers))) for job in situation.snapshot.work[0].given]
    work = (replace(situation.snapshot.work[0], given=tuple(jobs)),)
    situation = replace(situation, snapshot=replace(situation.snapshot, work=work))

    # when they are planned, then each frame reserves the larger of what it and its layer ask for, and no rule is broken
    planned = situation.plan()
    layers = {layer.id: layer for job in jobs for layer in job.layers}
    for proc in planned.procs:
        own = max(layers[proc.layer.id].memory_min_kb, proc.frame.memory_kb or 0, MEM_RESERVED_MIN_KB)
        assert proc.resources.memory_kb == own
    assert len({proc.frame.id for proc in planned.procs}) == len(planned.procs)
    no_cap_limit_or_host_is_passed(situation, planned)
    every_layer_has_one_verdict_that_adds_up(situation, planned)


@settings(max_examples=examples(100), deadline=None)
@given(situations())
def test_what_is_left_is_too_little_for_every_request_waiting(situation: Situation) -> None:
    # given a plan that was not cut short
    situation = replace(situation, policy=replace(situation.policy, max_frames=1000))
    pool, snapshot = situation.pool(), situation.snapshot
    planned = situation.plan(pool)
    left = {host.id: pool.get(host.id) or host for host in situation.hosts}
    used = {kind: (cores_by(planned, kind), gpus_by(planned, kind)) for kind in ("alloc_id", "folder_id", "job_id")}
    running: Counter[str] = Counter(limit for proc in planned.procs for limit in proc.layer.limit_ids)

    def remaining(caps_of: Mapping[str, Caps], kind: str, key: str) -> tuple[float, float]:
        cores, gpus = used[kind]
        own = caps_of.get(key)
        return (inf, inf) if own is None else (own.cores.left - cores[key], own.gpus.left - gpus[key])

    def could_go_on(job: Job, layer: Layer, host: Host) -> bool:
        folder_cores, folder_gpus = remaining(snapshot.caps, "folder_id", job.folder_id)
        job_cores, job_gpus = remaining(snapshot.caps, "job_id", job.id)
        alloc_cores, _ = remaining(snapshot.subscriptions, "alloc_id", host.alloc_id)
        gpus = smallest_need(layer).gpus
        return (
            bool(layer.tags & set(CLUSTER.tags) & host.tags)
            and host.alloc_id in snapshot.subscriptions
            and (not gpus or gpus <= min(folder_gpus, job_gpus))
            and all(snapshot.limits[name].left > running[name] for name in layer.limit_ids if name in snapshot.limits)
            and isinstance(
                reserve(
                    layer,
                    host,
                    situation.policy.rules,
                    os_name=job.os_name,
                    job_cores_left=min(folder_cores, job_cores, alloc_cores),
                ),
                Resources,
            )
        )

    # then no frame that still waits could be placed anywhere
    placed = Counter(proc.layer.id for proc in planned.procs)
    for job in snapshot.work[0].given:
        for layer in job.layers:
            if placed[layer.id] < len(layer.frames):
                stuck = [host.id for host in left.values() if could_go_on(job, layer, host)]
                assert not stuck, f"{layer.id} could go on to {stuck}"


@settings(max_examples=examples(40), deadline=None)
@given(situations())
def test_undoing_a_plan_leaves_the_pool_as_it_was(situation: Situation) -> None:
    pool = situation.pool()
    planned = situation.plan(pool)

    for proc in planned.procs:
        pool.settle(proc.host.id, proc.proc_id, committed=False)

    assert {host.id: pool.get(host.id) or host for host in situation.hosts} == {it.id: it for it in situation.hosts}
    again = situation.plan(pool)
    assert [(proc.frame.id, proc.host.id) for proc in again.procs] == [
        (proc.frame.id, proc.host.id) for proc in planned.procs
    ]
