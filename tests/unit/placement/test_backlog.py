"""The backlog: whatever the order of reads, bookings, losses, notices and resyncs, nothing is planned twice, nothing
that waits is forgotten, and the order is that of the policy."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.jobs import BadLayer, Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of, buckets
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.backlog import (
    FIRST_FRAMES_OF_A_PORTION,
    JUDGED_SECONDS,
    MOST_FRAMES_OF_A_PORTION,
    PORTION_SECONDS,
    Backlog,
    BacklogWork,
)
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_cluster, make_host, make_job, make_layer, make_need

CLUSTER = make_cluster()


def waiting_job(job_id: str = "j1", **changes: Any) -> Job:
    return make_job(job_id, facility_id="fac", **changes)


def waiting_layer(layer_id: str = "l1", *, waiting: int = 5, **changes: Any) -> Layer:
    return make_layer(layer_id, frames=0, waiting_frames=waiting, **changes)


def frames_of(layer_id: str, *numbers: int) -> tuple[Frame, ...]:
    return tuple(Frame(f"{layer_id}-f{number}", f"{number:04d}-{layer_id}", number, 0) for number in numbers)


def proc(layer: Layer, frame: Frame, job: Job | None = None) -> PlannedProc:
    vertices = Vertices("show", "alloc", "folder", "j1", layer.id, "dept")
    return PlannedProc(f"p-{frame.id}", job or waiting_job(), layer, frame, make_host(), make_need(), vertices)


@dataclass
class Known:
    """A backlog into which a test reads layers."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.clock)

    def read(self, *layers: Layer, job: Job | None = None, version: str = "v1", gone: tuple[str, ...] = ()) -> None:
        rows = [(job or waiting_job(), layer, version) for layer in layers]
        self.backlog.apply(rows, read_at=self.backlog.instant(), gone=gone)

    def read_portion(
        self, layer_id: str, *numbers: int, waiting: int | None = None, back_in: float | None = None
    ) -> None:
        frames = frames_of(layer_id, *numbers)
        count = len(frames) if waiting is None else waiting
        self.backlog.apply_portion(layer_id, count, frames, back_in, read_at=self.backlog.instant())

    def work(self, *clusters: Cluster, now: float = 0.0, own: frozenset[int] = ALL_BUCKETS) -> BacklogWork:
        return self.backlog.work(clusters or (CLUSTER,), own=own, now=now)

    def layers(self, **changes: Any) -> list[str]:
        return [waiting.layer.id for waiting in self.work(**changes)]

    def under(self, limit_id: str) -> list[str]:
        return [waiting.layer.id for waiting in self.work().under_limit(limit_id)]

    def frames(self, layer: Layer) -> list[str] | None:
        portion = self.work().portion(layer)
        return None if portion is None else [frame.id for frame in portion]


class TestOrder:
    def test_a_show_goes_by_priority_age_and_dispatch_order(self) -> None:
        known = Known()
        known.read(waiting_layer("low"), job=waiting_job("j-low", priority=1, started_at=1.0))
        known.read(waiting_layer("late"), job=waiting_job("j-late", priority=9, started_at=2.0))
        early = waiting_job("j-early", priority=9, started_at=1.0)
        known.read(waiting_layer("second", dispatch_order=2), waiting_layer("first", dispatch_order=1), job=early)

        assert known.layers() == ["first", "second", "late", "low"]

    def test_a_changed_priority_is_a_new_place(self) -> None:
        known = Known()
        for job_id, priority in (("a", 5), ("b", 3)):
            known.read(waiting_layer(f"{job_id}-l"), job=waiting_job(job_id, priority=priority))
        known.read(waiting_layer("a-l"), job=waiting_job("a", priority=1), version="v2")

        assert known.layers() == ["b-l", "a-l"]

    def test_shards_begin_with_different_jobs_of_equal_priority(self) -> None:
        known = Known()
        for number in range(20):
            known.read(waiting_layer(f"l{number}"), job=waiting_job(f"j{number}", started_at=float(number)))

        by_age = known.layers()
        orders = [
            [waiting.layer.id for waiting in known.work(replace(CLUSTER, shard=shard))] for shard in ("w1", "w2", "w3")
        ]

        assert by_age == [f"l{number}" for number in range(20)]
        assert len({tuple(order) for order in orders}) == 3
        assert all(sorted(order) == sorted(orders[0]) for order in orders)

    def test_only_layers_with_a_tag_of_the_clusters_are_there(self) -> None:
        known = Known()
        known.read(waiting_layer("here"), waiting_layer("there", tags=frozenset({"elsewhere"})))

        assert known.layers() == ["here"]
        assert [waiting.layer.id for waiting in known.work(CLUSTER, make_cluster("elsewhere"))] == ["here", "there"]

    def test_what_waits_under_a_limit_is_what_is_under_it_now(self) -> None:
        known = Known()
        known.read(waiting_layer("under", limit_ids=("nuke", "katana")), waiting_layer("other"))
        known.read(waiting_layer("there", limit_ids=("nuke",), tags=frozenset({"elsewhere"})))
        assert known.under("nuke") == known.under("katana") == ["under"]

        known.read(waiting_layer("under", limit_ids=("katana",)), waiting_layer("other", limit_ids=("nuke",)))
        assert (known.under("nuke"), known.under("katana")) == (["other"], ["under"])

        known.read(gone=("under", "other"))
        assert known.under("nuke") == known.under("katana") == []

    def test_where_no_layer_is_left_none_needs_less_than_a_core(self) -> None:
        known = Known()
        known.read(waiting_layer(cores=4))
        work = known.work()
        assert work.least_need(CLUSTER.tags).cores == 4

        known.read(gone=("l1",))

        assert work.least_need(CLUSTER.tags) == make_need(1)


class TestPortions:
    def test_frames_are_read_when_a_plan_comes_to_them_and_again_when_they_are_old(self) -> None:
        known, layer = Known(), waiting_layer()
        known.read(layer)
        assert known.frames(layer) is None

        known.read_portion("l1", 1, 2, waiting=5)
        assert known.frames(layer) == ["l1-f1", "l1-f2"]

        known.clock.now += PORTION_SECONDS + 1
        assert known.frames(layer) is None

    def test_what_is_in_flight_is_not_planned_again_and_what_is_not_booked_waits_as_before(self) -> None:
        known, layer = Known(), waiting_layer()
        known.read(layer)
        known.read_portion("l1", 1, 2, 3, waiting=5)
        first, second = (proc(layer, frame) for frame in frames_of("l1", 1, 2))

        known.backlog.take([first, second])
        assert known.frames(layer) == ["l1-f3"]

        known.backlog.settle([first, second], booked={first.proc_id})
        assert known.frames(layer) == ["l1-f2", "l1-f3"]

    def test_a_portion_that_is_used_up_is_read_again(self) -> None:
        known, layer = Known(), waiting_layer(waiting=5)
        known.read(layer)
        known.read_portion("l1", 1, waiting=5)
        only = proc(layer, *frames_of("l1", 1))
        known.backlog.take([only])
        known.backlog.settle([only], booked={only.proc_id})

        assert known.frames(layer) is None

    def test_a_read_that_began_before_a_commit_brings_nothing_back(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2)
        known.read(layer)
        known.read_portion("l1", 1, 2)
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        before = known.backlog.instant()
        known.backlog.settle([booked], booked={booked.proc_id})

        known.backlog.apply_portion("l1", 2, frames_of("l1", 1, 2), None, read_at=before)

        assert known.frames(layer) == ["l1-f2"]

    def test_a_frame_that_waits_again_is_planned_again(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2)
        known.read(layer)
        known.read_portion("l1", 1, 2)
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        known.backlog.settle([booked], booked={booked.proc_id})

        known.read_portion("l1", 1, 2)

        assert known.frames(layer) == ["l1-f1", "l1-f2"]

    def test_a_process_takes_the_frames_of_its_own_buckets_first_and_those_of_others_from_the_last_on(self) -> None:
        known, layer = Known(), waiting_layer(waiting=9)
        known.read(layer)
        known.read_portion("l1", *range(1, 10))
        own = frozenset({bucket_of("l1-f5"), bucket_of("l1-f7")})

        portion = known.work(own=own).portion(layer)

        assert portion is not None
        assert [frame.id for frame in portion] == [f"l1-f{number}" for number in (5, 7, 9, 8, 6, 4, 3, 2, 1)]

    def test_frames_that_others_have_the_permits_of_are_left_to_them_for_a_while(self) -> None:
        known, layer = Known(), waiting_layer(waiting=3)
        known.read(layer)
        known.read_portion("l1", 1, 2, 3)
        refused = proc(layer, *frames_of("l1", 1))

        known.backlog.settle([refused], taken={refused.proc_id})
        known.read_portion("l1", 1, 2, 3)
        assert known.frames(layer) == ["l1-f2", "l1-f3"]
        assert known.backlog.portion_sizes(known.work())["l1"] > FIRST_FRAMES_OF_A_PORTION, (
            "so that as many others are read"
        )

        known.clock.now += PORTION_SECONDS + 1
        known.read_portion("l1", 1, 2, 3)
        assert known.frames(layer) == ["l1-f1", "l1-f2", "l1-f3"]


@dataclass
class Served:
    """A layer that planners of some shards start frames of; those of the other shards have no hosts for it."""

    division: tuple[str, ...]
    serving: int
    waiting: set[int] = field(default_factory=lambda: set(range(1, 401)))
    started: list[int] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.planners = [Known(self.clock) for _ in range(self.serving)]

    def start(self, planner: int, most: int) -> None:
        """A pass of one planner, which finds hosts for so many frames. It cannot have those that another started."""
        known, layer = self.planners[planner], waiting_layer(waiting=len(self.waiting))
        own = buckets(self.division[planner], self.division)
        known.read(layer)
        for _ in range(3):
            if not self.waiting or most <= 0:
                return
            if not known.work().has_portion(layer):
                size = known.backlog.portion_sizes(known.work())["l1"]
                known.read_portion("l1", *sorted(self.waiting)[:size], waiting=len(self.waiting))
            planned = [proc(layer, frame) for frame in (known.work(own=own).portion(layer) or ())[:most]]
            had = {one.proc_id for one in planned if one.frame.number in self.waiting}
            known.backlog.take(planned)
            known.backlog.settle(planned, booked=had, taken={one.proc_id for one in planned} - had)
            for one in planned:
                if one.proc_id in had:
                    self.waiting.remove(one.frame.number)
                    self.started.append(one.frame.number)
            most -= len(had)


class TestDoubts:
    def test_a_layer_whose_frames_were_lost_is_not_planned_before_it_was_read_again(self) -> None:
        known, layer = Known(), waiting_layer()
        known.read(layer)
        known.read_portion("l1", 1, 2)
        lost = proc(layer, *frames_of("l1", 1))
        known.backlog.take([lost])
        known.backlog.settle([lost], lost={lost.proc_id})
        assert (known.layers(), known.backlog.stale()) == ([], {"l1"})

        known.read(layer)
        assert (known.layers(), known.backlog.stale()) == (["l1"], set())
        assert known.frames(layer) is None

    def test_a_layer_leaves_only_by_a_read_that_began_after_its_last_commit(self) -> None:
        known, layer = Known(), waiting_layer(waiting=1)
        known.read(layer)
        known.read_portion("l1", 1)
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        before = known.backlog.instant()
        known.backlog.settle([booked], booked={booked.proc_id})
        assert known.layers() == []

        known.backlog.apply((), gone={"l1"}, read_at=before)
        assert known.backlog.stale() == {"l1"}
        known.backlog.apply((), gone={"l1"}, read_at=known.backlog.instant())
        assert (len(known.backlog), known.backlog.stale()) == (0, set())

    def test_an_older_read_changes_nothing(self) -> None:
        known = Known()
        before = known.backlog.instant()
        known.read(waiting_layer(waiting=5), version="new")
        known.backlog.apply([(waiting_job(), waiting_layer(waiting=9), "old")], read_at=before, gone=())
        known.backlog.apply((), gone={"l1"}, read_at=before)

        assert known.backlog.versions() == {"l1": "new"}

    def test_a_counter_without_frames_is_a_fault_that_is_looked_at_again_after_a_minute(self) -> None:
        known = Known()
        known.read(waiting_layer(waiting=4))
        known.read_portion("l1", waiting=4)
        (verdict,) = known.backlog.bad("show")
        assert (known.layers(), verdict.verdict) == ([], Verdict.FAILED)
        assert "4 frames wait, and none does" in verdict.detail

        known.clock.now += JUDGED_SECONDS
        assert known.layers() == ["l1"]

    def test_rows_that_make_no_sense_cost_their_own_layer_until_they_are_mended(self) -> None:
        known = Known()
        known.read(waiting_layer("l1"), waiting_layer("l2"))
        bad = BadLayer("j1", "l1", "show", 3, "layer l1: str_cmd is empty", "v2")
        known.backlog.apply((), bad=[bad], read_at=known.backlog.instant())
        assert known.layers() == ["l2"]
        assert [verdict.layer_id for verdict in known.backlog.bad("show")] == ["l1"]
        assert known.backlog.versions() == {"l1": "v2", "l2": "v1"}

        known.read(waiting_layer("l1"))
        assert sorted(known.layers()) == ["l1", "l2"]
        assert known.backlog.bad("show") == []


class TestGoneJobs:
    def test_a_job_that_leaves_during_a_pass_has_saved_no_credit_when_it_comes_back(self) -> None:
        # given a pass that still knows a job of which nothing waits any more
        known, layer, away = Known(), waiting_layer("l1"), waiting_layer("l2")
        known.read(layer, job=waiting_job("j1", priority=1))
        known.read(away, job=waiting_job("j2", priority=1))
        draw = known.work().draw
        known.read(gone=("l2",))
        draw.times({"j1": 1, "j2": 1})

        # when the other is served for long, and then the job comes back
        for _ in range(100):
            known.work().draw.served("j1", 1, 1)
        known.read(away, job=waiting_job("j2", priority=1))
        ((back_at, _),) = known.work().draw.times({"j2": 1})

        # then it begins where the other is
        ((other_at, _),) = draw.times({"j1": 1})
        assert abs(back_at - other_at) <= 2

    def test_asking_for_jobs_that_have_gone_leaves_nothing_behind(self) -> None:
        known = Known()
        known.read(waiting_layer())
        work = known.work()
        tracemalloc.start()
        try:
            for number in range(2000):
                assert not list(work.least_of_job(f"gone-{number}"))
                assert not list(work.of_job(f"gone-{number}"))
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert kept < 20 * 2000, "bytes: an entry for each of them is more"


class TestTimes:
    def test_a_quarantine_and_a_start_that_lies_ahead_end_by_the_databases_clock(self) -> None:
        known = Known()
        known.read(waiting_layer("l1"), job=waiting_job("j1", quarantined_until=50.0))
        known.read(waiting_layer("l2", starts_at=80.0), job=waiting_job("j2"))

        assert known.layers(now=10.0) == []
        assert known.work(now=10.0).starts_in(CLUSTER) == 70.0
        assert known.layers(now=60.0) == ["l1"]
        assert known.layers(now=90.0) == ["l1", "l2"]

    def test_frames_whose_delay_may_still_come_are_back_by_themselves(self) -> None:
        known = Known()
        known.read(waiting_layer())
        known.read_portion("l1", waiting=3, back_in=1.5)
        assert (known.layers(), known.work().starts_in(CLUSTER), known.backlog.bad("show")) == ([], 1.5, [])

        known.clock.now += 2
        assert known.layers() == ["l1"]


class TestJudging:
    def test_each_layer_is_looked_at_once_in_a_while(self) -> None:
        known = Known()
        known.read(waiting_layer("l1"), waiting_layer("l2"))
        assert {waiting.layer.id for waiting in known.work().to_judge()} == {"l1", "l2"}

        known.backlog.judged(["l1"])
        assert [waiting.layer.id for waiting in known.work().to_judge()] == ["l2"]

        known.clock.now += JUDGED_SECONDS + 1
        assert [waiting.layer.id for waiting in known.work().to_judge()] == ["l2", "l1"]


@settings(max_examples=40, deadline=None)
@given(
    farm=st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 2), (8, 1)]),
    passes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=8),
)
def test_no_frame_is_behind_more_of_its_layer_than_a_portion_has(
    farm: tuple[int, int], passes: list[tuple[int, int]]
) -> None:
    # given a layer for which some shards have hosts, and the others have none or are full
    shards, serving = farm
    served = Served(tuple(f"w{number}" for number in range(shards)), serving)

    # when their planners start what they find hosts for, and the first frame is retried once
    turn, retried_at = 0, 0
    while served.waiting:
        frames, seconds = passes[turn // serving % len(passes)]
        served.start(turn % serving, frames)
        if not retried_at and 1 in served.started and len(served.started) >= 100:
            served.waiting.add(1)
            retried_at = len(served.started)
        served.clock.now += seconds
        turn += 1

    # then each starts no more than a portion later than in the order of the layer
    places = {number: place for place, number in reversed(list(enumerate(served.started, 1)))}
    assert max(places[number] - number for number in places) <= MOST_FRAMES_OF_A_PORTION
    again = len(served.started) - served.started[::-1].index(1)
    assert again - retried_at <= MOST_FRAMES_OF_A_PORTION


@dataclass
class Rows:
    """A layer as PostgreSQL has it: which frames wait, with how often each was started."""

    priority: int
    waiting: dict[int, int] = field(default_factory=dict)
    version: int = 0


class Interleaved(RuleBasedStateMachine):
    """One process against a database that others change, with reads that may end long after they began."""

    layer_ids = st.sampled_from(["l1", "l2", "l3"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.backlog = Backlog(self.clock)
        self.rows: dict[str, Rows] = {}
        self.pending: list[tuple[float, dict[str, Any]]] = []
        self.planned: dict[str, list[PlannedProc]] = {}
        self.starts: set[tuple[str, int]] = set()

    def job(self, layer_id: str) -> Job:
        return waiting_job(f"j-{layer_id}", priority=self.rows[layer_id].priority)

    def layer(self, layer_id: str) -> Layer:
        return waiting_layer(layer_id, waiting=len(self.rows[layer_id].waiting))

    def frames(self, layer_id: str) -> tuple[Frame, ...]:
        starts = self.rows[layer_id].waiting
        return tuple(
            Frame(f"{layer_id}-f{number}", str(number), number, version) for number, version in sorted(starts.items())
        )

    @rule(layer_id=layer_ids, priority=st.integers(1, 9))
    def submitted_or_changed(self, layer_id: str, priority: int) -> None:
        rows = self.rows.setdefault(layer_id, Rows(priority, dict.fromkeys(range(4), 0)))
        rows.priority, rows.version = priority, rows.version + 1

    @rule(layer_id=layer_ids, number=st.integers(0, 3))
    def booked_by_others(self, layer_id: str, number: int) -> None:
        if layer_id in self.rows:
            self.rows[layer_id].waiting.pop(number, None)

    @rule(layer_id=layer_ids, number=st.integers(0, 3))
    def retried(self, layer_id: str, number: int) -> None:
        rows = self.rows.get(layer_id)
        started = [version for frame_id, version in self.starts if frame_id == f"{layer_id}-f{number}"]
        if rows is not None and number not in rows.waiting and not self.planned.get(layer_id):
            rows.waiting[number] = max(started, default=0) + 1

    @rule()
    def a_read_begins(self) -> None:
        seen = {
            layer_id: (self.job(layer_id), self.layer(layer_id), f"v{rows.version}", self.frames(layer_id))
            for layer_id, rows in self.rows.items()
        }
        self.pending.append((self.backlog.instant(), seen))

    @rule(which=st.integers(0, 3), portions=st.booleans())
    def a_read_ends(self, which: int, portions: bool) -> None:
        if not self.pending:
            return
        read_at, seen = self.pending.pop(which % len(self.pending))
        found = {layer_id: row for layer_id, row in seen.items() if row[3]}
        self.backlog.apply([row[:3] for row in found.values()], gone=seen.keys() - found.keys(), read_at=read_at)
        if portions:
            for layer_id, row in found.items():
                self.backlog.apply_portion(layer_id, len(row[3]), row[3][:2], None, read_at=read_at)

    @rule(data=st.data())
    def a_plan_takes_frames(self, data: st.DataObject) -> None:
        for waiting in self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=0.0):
            portion = self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=0.0).portion(waiting.layer)
            if portion:
                frame = data.draw(st.sampled_from(list(portion)))
                of_layer = self.planned.setdefault(waiting.layer.id, [])
                assert frame.id not in {other.frame.id for other in of_layer}, "planned twice at once"
                of_layer.append(proc(waiting.layer, frame, waiting.job))
                self.backlog.take(of_layer[-1:])

    @rule(layer_id=layer_ids)
    def a_plan_is_committed(self, layer_id: str) -> None:
        procs = self.planned.pop(layer_id, [])
        rows = self.rows.get(layer_id)
        there = {
            one.proc_id for one in procs if rows is not None and rows.waiting.get(one.frame.number) == one.frame.version
        }
        for one in procs:
            if one.proc_id in there:
                assert (one.frame.id, one.frame.version) not in self.starts, "started twice"
                self.starts.add((one.frame.id, one.frame.version or 0))
                assert rows is not None
                del rows.waiting[one.frame.number]
        lost = {one.proc_id for one in procs} - there
        self.backlog.settle(procs, booked=there, lost=lost)

    @rule()
    def a_round_of_the_resync_finds_all_that_waits(self) -> None:
        # when all that is under way has ended, and everything is read
        for layer_id in list(self.planned):
            self.a_plan_is_committed(layer_id)
        self.a_read_begins()
        read_at, seen = self.pending.pop()
        self.pending.clear()
        found = {layer_id: row for layer_id, row in seen.items() if row[3]}
        known = self.backlog.versions().keys()
        self.backlog.apply([row[:3] for row in found.values()], gone=known - found.keys(), read_at=read_at)

        # then what waits is there, and nothing else, in the order of priority
        order = [waiting.layer.id for waiting in self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=0.0)]
        wanted = sorted(found, key=lambda it: (-self.rows[it].priority, f"j-{it}"))
        assert order == wanted
        assert len(self.backlog) == len(wanted)

    @invariant()
    def a_walk_that_passes_by_a_job_meets_the_layers_of_all_others(self) -> None:
        work = self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=0.0)
        everything = list(work)
        for left_out in {waiting.job.id for waiting in everything}:
            others = [waiting for waiting in everything if waiting.job.id != left_out]
            assert list(work.in_order(lambda job_id, but=left_out: job_id != but)) == others

    @invariant()
    def the_least_of_a_job_is_no_more_than_any_of_its_layers_needs(self) -> None:
        work = self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=0.0)
        for waiting in work:
            least = dict(work.least_of_job(waiting.job.id))[waiting.layer.tags]
            assert waiting.need.covers(least)

    @invariant()
    def no_count_is_below_nothing_for_a_layer_that_is_planned(self) -> None:
        assert all(waiting.frames > 0 for waiting in self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=0.0))


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_a_time_or_a_fault_keeps_waiting_is_counted_by_what_it_is() -> None:
    # given a job in quarantine, a start that lies ahead, a delay, rows that make no sense, and two that may go
    known = Known()
    known.read(waiting_layer("l1"), job=waiting_job("j1", quarantined_until=50.0))
    known.read(waiting_layer("l2", starts_at=80.0), job=waiting_job("j2"))
    for number in (3, 4, 5, 6):
        known.read(waiting_layer(f"l{number}"), job=waiting_job(f"j{number}"))
    known.read_portion("l3", waiting=3, back_in=1.5)
    known.backlog.fail("l4", "its command is empty")
    bad = BadLayer("j7", "l7", "show", 2, "no tags", "v1")
    known.backlog.apply((), bad=[bad], read_at=known.backlog.instant())
    assert known.backlog.set_aside(0.0) == {"quarantined": 1, "starts_later": 1, "delayed": 1, "failed": 2}
    # and each no more once its time has come
    known.clock.now += 2
    assert known.backlog.set_aside(60.0) == {"quarantined": 0, "starts_later": 1, "delayed": 0, "failed": 2}
    # then all that wait are known
    assert known.backlog.known(["l1", "l4", "l7", "gone"]) == {"l1", "l4", "l7"}
