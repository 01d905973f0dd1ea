"""What a plan costs beside a long backlog: it follows what is placed, not what waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from opencue_sched.domain.caps import Seats
from opencue_sched.domain.jobs import Frame
from opencue_sched.domain.plans import PlannedProc, Snapshot, Waiting
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.backlog import JUDGED_PER_PLAN, Backlog
from opencue_sched.placement.planner import Planner
from opencue_sched.placement.policies.admissions import layer_share
from tests.kit.values import GIB, counting_ids, make_caps, make_cluster, make_host, make_job, make_layer, make_policy
from tests.unit.placement.frozen_pool import FrozenPool

JOBS, LAYERS_OF_A_JOB = 50, 100


class CountingPool(FrozenPool):
    """Counts the searches of a plan."""

    searches = 0

    def find(self, *asked: Any, **more: Any) -> Any:
        self.searches += 1
        return super().find(*asked, **more)

    def has_idle(self, *asked: Any, **more: Any) -> bool:
        self.searches += 1
        return super().has_idle(*asked, **more)


@pytest.fixture
def backlog() -> Backlog:
    """Layers each of which asks for an amount of memory of its own, those first that ask for least."""
    backlog = Backlog(lambda: 0.0)
    rows = []
    for number in range(JOBS):
        job = make_job(f"j{number:03d}", facility_id="fac", priority=JOBS - number)
        for order in range(LAYERS_OF_A_JOB):
            memory_kb = GIB + number * LAYERS_OF_A_JOB + order
            layer = make_layer(
                f"j{number:03d}l{order:03d}", frames=0, waiting_frames=50, memory_min_kb=memory_kb, dispatch_order=order
            )
            rows.append((job, layer, "v"))
    backlog.apply(rows, read_at=backlog.instant())
    return backlog


def plan(backlog: Backlog, pool: CountingPool, *, tags: tuple[str, ...] = ("general",)) -> tuple[Planner, int]:
    """The plan on these hosts, and how often it asked for portions of frames."""
    work = backlog.work([make_cluster(*tags)], own=ALL_BUCKETS, now=0.0)
    snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
    policy = make_policy(dispatch_frames_per_layer_limit=20, soft_admissions=(layer_share,))
    planner = Planner(snapshot, pool, policy, counting_ids(), idle_cores=pool.idle_cores([make_cluster(*tags)]))
    reads = 0
    while wanted := planner.run():
        reads += 1
        for waiting in wanted:
            frames = [Frame(f"{waiting.layer.id}f{number}", "", number, 0) for number in range(40)]
            backlog.apply_portion(waiting.layer.id, 50, frames, None, read_at=backlog.instant())
    planner.judge()
    return planner, reads


def test_a_full_farm_is_seen_by_one_search_whatever_waits(backlog: Backlog) -> None:
    pool = CountingPool([make_host(f"h{number}", idle_centicores=0) for number in range(200)])

    planner, reads = plan(backlog, pool)

    assert (planner.procs(), reads) == ([], 0)
    assert pool.searches <= 5 + JUDGED_PER_PLAN


def test_what_a_plan_found_is_said_though_the_last_layer_it_looked_at_has_gone_meanwhile() -> None:
    # given a plan on a full farm, with one layer
    backlog = Backlog(lambda: 0.0)
    layer = make_layer("l1", frames=0, waiting_frames=50, cores=2)
    backlog.apply([(make_job("j1", facility_id="fac"), layer, "v")], read_at=backlog.instant())
    work = backlog.work([make_cluster()], own=ALL_BUCKETS, now=0.0)
    snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
    planner = Planner(snapshot, FrozenPool([make_host("h", idle_centicores=100)]), make_policy(), counting_ids())
    assert planner.run() == []

    # when the layer is forgotten before the plan is judged
    backlog.apply((), read_at=backlog.instant(), gone=["l1"])
    (judged,) = planner.judge()

    # then what no host has idle is what the plan looked for
    (shortage,) = judged.shortages
    assert (shortage.need.cores, shortage.verdict) == (2, Verdict.CAPACITY)


def test_a_full_plan_says_of_layers_that_it_has_not_come_to_that_the_next_goes_on() -> None:
    # given many layers on idle hosts, one that only full hosts could take, and a plan of ten frames
    backlog = Backlog(lambda: 0.0)
    first = [
        (make_job("j1", facility_id="fac"), make_layer(f"l{number}", frames=0, waiting_frames=50), "v")
        for number in range(60)
    ]
    tagged = make_layer("tagged", tags=frozenset({"large"}), frames=0, waiting_frames=50)
    backlog.apply([*first, (make_job("j2", facility_id="fac", priority=1), tagged, "v")], read_at=backlog.instant())
    pool = CountingPool(
        [
            *(make_host(f"h{number}") for number in range(9)),
            make_host("busy", tags=frozenset({"large"}), idle_centicores=0),
        ]
    )
    clusters = [make_cluster("general"), make_cluster("large")]
    work = backlog.work(clusters, own=ALL_BUCKETS, now=0.0)
    snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
    planner = Planner(snapshot, pool, make_policy(max_frames=10), counting_ids())
    for waiting in planner.run():
        frames = [Frame(f"{waiting.layer.id}f{number}", "", number, 0) for number in range(10)]
        backlog.apply_portion(waiting.layer.id, 50, frames, None, read_at=backlog.instant())
    assert planner.run() == []
    before = pool.searches

    # when the plan is judged
    general, large = planner.judge()

    # then each layer is told of for the cluster that reaches it, and what the full hosts lack is found by one search
    assert (len(general.procs), len(general.verdicts)) == (10, 60)
    (verdict,) = large.verdicts
    assert (verdict.layer_id, verdict.verdict, verdict.frames, verdict.waiting) == ("tagged", Verdict.FLOWING, 0, 50)
    assert {said.verdict for said in general.verdicts} == {Verdict.FLOWING}
    assert [shortage.tags for shortage in general.shortages] == [("large",)]
    assert pool.searches - before <= 1


def test_a_freed_core_goes_to_the_first_layer_with_few_searches(backlog: Backlog) -> None:
    hosts = [make_host(f"h{number}", idle_centicores=0) for number in range(200)]
    pool = CountingPool([*hosts, make_host("freed", idle_centicores=100, idle_memory_kb=4 * GIB)])

    planner, reads = plan(backlog, pool)

    (proc,) = planner.procs()
    assert (proc.layer.id, reads) == ("j000l000", 1)
    assert backlog.work([make_cluster()], own=ALL_BUCKETS, now=0.0).portion(make_layer("j000l001")) is None
    assert pool.searches <= 10 + JUDGED_PER_PLAN


def test_a_layer_that_has_its_share_of_the_hosts_goes_on_though_nothing_of_it_was_read(backlog: Backlog) -> None:
    # given one host, which runs more of a layer than its share
    layer = make_layer("only", frames=0, waiting_frames=50, tags=frozenset({"apart"}))
    backlog.apply([(make_job("j", facility_id="fac"), layer, "v")], read_at=backlog.instant())
    host = make_host("h", cores=32, idle_centicores=200, tags=frozenset({"apart"}), running={"only": 30})

    planner, reads = plan(backlog, CountingPool([host]), tags=("apart",))

    assert (len(planner.procs()), reads) == (2, 1)


def test_shows_that_fill_a_farm_together_read_no_more_frames_than_it_takes() -> None:
    # given five shows, each of which has enough to fill the farm, in layers of 20 frames
    backlog, cores, shows = Backlog(lambda: 0.0), 500, [f"s{number}" for number in range(5)]
    rows = []
    for show in shows:
        for number in range(200):
            job = make_job(f"{show}j{number:03d}", show_id=show, facility_id="fac", priority=200 - number)
            rows.append((job, make_layer(f"{show}l{number:03d}", frames=0, waiting_frames=20), "v"))
    backlog.apply(rows, read_at=backlog.instant())
    clusters = [replace(make_cluster(), show_id=show) for show in shows]
    pool = FrozenPool([make_host(f"h{number}", cores=10, idle_centicores=1000) for number in range(cores // 10)])
    works = tuple(backlog.work([cluster], own=ALL_BUCKETS, now=0.0) for cluster in clusters)
    sizes = {(show, "alloc"): cores / len(shows) for show in shows}
    snapshot = Snapshot(works, {pair: make_caps(10_000) for pair in sizes}, {}, sizes=sizes)
    planner = Planner(snapshot, pool, make_policy(), counting_ids(), idle_cores=pool.idle_cores(clusters))

    # when they are planned
    read = 0
    while wanted := planner.run():
        read += len(wanted)
        for waiting in wanted:
            frames = [Frame(f"{waiting.layer.id}f{number}", "", number, 0) for number in range(20)]
            backlog.apply_portion(waiting.layer.id, 20, frames, None, read_at=backlog.instant())

    # then the farm is full, and what was read is not many times what was planned
    assert planner.planned == cores
    assert 20 * read <= 2 * planner.planned


class CountingWork:
    """Counts the layers that a plan looks at for a seat's sake."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.layers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __iter__(self) -> Iterator[Waiting]:
        for waiting in self._work:
            self.layers += 1
            yield waiting

    def under_limit(self, limit_id: str) -> Iterator[Waiting]:
        for waiting in self._work.under_limit(limit_id):
            self.layers += 1
            yield waiting


@pytest.mark.parametrize(("under", "each", "most"), [(3, 2, 3), (3_000, 20, 80), (3_000, 1, 1_100)])
def test_a_new_seat_costs_no_look_at_all_that_waits(backlog: Backlog, under: int, each: int, most: int) -> None:
    # given layers under a limit of machines, before many that are under none
    job = make_job("limited", facility_id="fac", priority=JOBS + 1)
    for number in range(under):
        layer = make_layer(f"nuke{number}", frames=0, waiting_frames=each, limit_ids=("nuke",))
        backlog.apply([(job, layer, "v")], read_at=backlog.instant())
        frames = [Frame(f"{layer.id}f{frame}", "", frame, 0) for frame in range(each)]
        backlog.apply_portion(layer.id, each, frames, None, read_at=backlog.instant())
    work: Any = CountingWork(backlog.work([make_cluster()], own=ALL_BUCKETS, now=0.0))
    hosts = [make_host("small", cores=2), make_host("large", cores=64), make_host("middle", cores=8)]
    seats = {"nuke": Seats(frozenset(), 1)}
    snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {}, seats=seats)

    # when a plan gives a seat of it
    planner = Planner(snapshot, FrozenPool(hosts), make_policy(), counting_ids())
    planner.run()

    # then to the host that takes most, and few layers were looked at for that
    assert {proc.host.id for proc in planner.procs()} == {"middle" if under == 3 else "large"}
    assert work.layers <= most


def test_what_other_plans_have_in_flight_is_not_looked_at_again() -> None:
    # given layers of five frames, of which a plan of this process is booking as many as it may
    backlog = Backlog(lambda: 0.0)
    rows = [
        (make_job(f"j{number:03d}", facility_id="fac"), make_layer(f"l{number:03d}", frames=0, waiting_frames=5), "v")
        for number in range(400)
    ]
    backlog.apply(rows, read_at=backlog.instant())
    pool = CountingPool([make_host(f"h{number:03d}", cores=16, idle_centicores=1600) for number in range(200)])
    cluster = make_cluster()

    def plan_next() -> tuple[Planner, int]:
        work = backlog.work([cluster], own=ALL_BUCKETS, now=0.0)
        snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
        policy = make_policy(max_jobs_per_cluster_pass=400, priority_draw=0.25)
        planner, reads = Planner(snapshot, pool, policy, counting_ids(), idle_cores=pool.idle_cores([cluster])), 0
        while wanted := planner.run():
            reads += 1
            backlog.take(planner.procs())
            for waiting in wanted:
                frames = [Frame(f"{waiting.layer.id}f{number}", "", number, 0) for number in range(5)]
                backlog.apply_portion(waiting.layer.id, 5, frames, None, read_at=backlog.instant())
        backlog.take(planner.procs())
        return planner, reads

    first, first_reads = plan_next()
    assert first.planned == 1000

    # when a second plan is made meanwhile, then it has the other frames, and asks for them at most twice as often
    second, reads = plan_next()
    assert second.planned == 1000
    assert {proc.frame.id for proc in first.procs()}.isdisjoint(proc.frame.id for proc in second.procs())
    assert reads <= 2 * first_reads

    # when a third is made, of which nothing is left, then it asks for nothing, and one search tells what is idle
    before = pool.searches
    third, reads = plan_next()
    assert (third.planned, reads) == (0, 0)
    assert pool.searches - before <= 1


def test_a_plan_of_many_small_layers_asks_for_their_frames_a_few_times() -> None:
    # given room for all, and jobs of a few small layers, a quarter of whose cores are drawn
    backlog = Backlog(lambda: 0.0)
    rows = [
        (
            make_job(f"j{number:03d}", facility_id="fac", priority=100 + number % 5),
            make_layer(f"j{number:03d}l{order}", frames=0, waiting_frames=5, dispatch_order=order),
            "v",
        )
        for number in range(300)
        for order in range(4)
    ]
    backlog.apply(rows, read_at=backlog.instant())
    pool = FrozenPool([make_host(f"h{number:03d}", cores=16, idle_centicores=1600) for number in range(300)])
    cluster = make_cluster()
    work = backlog.work([cluster], own=ALL_BUCKETS, now=0.0)
    snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
    policy = make_policy(max_jobs_per_cluster_pass=300, priority_draw=0.25)
    planner = Planner(snapshot, pool, policy, counting_ids(), idle_cores=pool.idle_cores([cluster]))

    # when a plan is made
    reads, read = 0, set[str]()
    while wanted := planner.run():
        reads += 1
        read.update(waiting.layer.id for waiting in wanted)
        backlog.take(planner.procs())
        for waiting in wanted:
            frames = [Frame(f"{waiting.layer.id}f{number}", "", number, 0) for number in range(5)]
            backlog.apply_portion(waiting.layer.id, 5, frames, None, read_at=backlog.instant())

    # then it asked a few times, for few more layers than it has frames of
    assert planner.planned == 1000
    assert reads <= 5
    assert len(read) <= 250


@pytest.mark.parametrize("counted", ["before the commit is told of", "with the frames in flight", "after it"])
def test_frames_counted_while_a_commit_is_not_told_of_are_planned(counted: str) -> None:
    # given a layer of 60 frames, of which one plan has 25 and a second one 15
    backlog, left = Backlog(lambda: 0.0), [Frame(f"f{number}", "", number, 0) for number in range(60)]
    rows = [(make_job("job", facility_id="fac"), make_layer("layer", frames=0, waiting_frames=60), "v")]
    backlog.apply(rows, read_at=backlog.instant())
    pool = CountingPool([make_host(f"h{number:02d}", cores=16, idle_centicores=1600) for number in range(60)])

    def plan_next(most: int, *, told: Callable[[], object] = bool) -> list[PlannedProc]:
        work = backlog.work([make_cluster()], own=ALL_BUCKETS, now=0.0)
        snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
        planner = Planner(snapshot, pool, make_policy(max_frames=most), counting_ids(), idle_cores=960)
        for _ in range(40):
            wanted = planner.run()
            backlog.take(planner.procs())
            for waiting in wanted:
                read_at, most_frames = backlog.instant(), backlog.portion_sizes([waiting])["layer"]
                frames, count = left[:most_frames], len(left)
                told()
                backlog.apply_portion("layer", count, frames, None, read_at=read_at)
            if not wanted:
                return planner.procs()
        raise AssertionError("the plan asks for the same portion for ever")

    first, second = plan_next(25), plan_next(15)
    assert (len(first), len(second)) == (25, 15)

    # when the first is committed, and a third plan is made before or while its pass tells of that
    to_tell = [first]

    def tell_first() -> None:
        for procs in to_tell[:]:
            backlog.settle(procs, booked={proc.proc_id for proc in procs})
            to_tell.remove(procs)

    if counted == "with the frames in flight":
        backlog.apply_counts({"layer": 60}, read_at=backlog.instant())
    committed = {proc.frame.id for proc in first}
    left[:] = [frame for frame in left if frame.id not in committed]
    if counted == "after it":
        tell_first()
    third = plan_next(1000, told=tell_first if counted != "before the commit is told of" else bool)

    # then that has all that nobody else plans, and once all is told nothing is left
    others = committed | {proc.frame.id for proc in second}
    assert {proc.frame.id for proc in third} == {f"f{number}" for number in range(60)} - others
    tell_first()
    for procs in (second, third):
        backlog.settle(procs, booked={proc.proc_id for proc in procs})
    left.clear()
    assert plan_next(1000) == []
    assert list(backlog.work([make_cluster()], own=ALL_BUCKETS, now=0.0)) == []


def test_frames_that_are_taken_back_cost_no_search_of_what_was_seen_to_be_idle() -> None:
    # given a plan for layers of fifty sets of tags, each of which has a host with much idle
    backlog = Backlog(lambda: 0.0)
    tags = [f"tag{number}" for number in range(50)]
    rows = [
        (make_job(f"j-{tag}", facility_id="fac"), make_layer(tag, tags=frozenset({tag}), waiting_frames=1), "v")
        for tag in tags
    ]
    backlog.apply(rows, read_at=backlog.instant())
    pool = CountingPool([make_host(f"h-{tag}", tags=frozenset({tag})) for tag in tags])
    work = backlog.work([make_cluster(*tags)], own=ALL_BUCKETS, now=0.0)
    snapshot = Snapshot((work,), {("show", "alloc"): make_caps(10_000)}, {})
    planner = Planner(snapshot, pool, make_policy(max_jobs_per_cluster_pass=50), counting_ids())
    while wanted := planner.run():
        for waiting in wanted:
            frames = [Frame(f"{waiting.layer.id}f1", "", 1, 0)]
            backlog.apply_portion(waiting.layer.id, 1, frames, None, read_at=backlog.instant())
    planned = planner.procs()
    assert len(planned) == len(tags)

    # when another planner had the permit of one frame
    before = pool.searches
    planner.take_back(planned[:1])
    planner.run()

    # then only the host of that frame is searched for
    assert pool.searches - before <= 2
