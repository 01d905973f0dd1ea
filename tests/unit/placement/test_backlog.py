"""The backlog: whatever the order of reads, bookings, losses, notices and resyncs, nothing is planned twice, nothing
that waits is forgotten, and the order is that of the policy."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.jobs import BadLayer, Frame, Job, Layer
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of, buckets
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.backlog import (
    FIRST_FRAMES_OF_A_PORTION,
    JUDGED_SECONDS,
    PORTION_SECONDS,
    Backlog,
    BacklogWork,
)
from tests.kit.examples import examples
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_cluster, make_host, make_job, make_layer, make_need

CLUSTER = make_cluster()
NEXT_FRAMES = 200
"""A frame that is retried is among so many of its layer that are started next."""


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

    @pytest.mark.parametrize("overtaken", [False, True], ids=["in time", "overtaken by a later count"])
    def test_a_read_that_began_before_a_commit_brings_nothing_back(self, overtaken: bool) -> None:
        known, layer = Known(), waiting_layer(waiting=2)
        known.read(layer)
        known.read_portion("l1", 1, 2)
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        before = known.backlog.instant()
        known.backlog.settle([booked], booked={booked.proc_id})
        if overtaken:
            known.backlog.apply_counts({"l1": 1}, read_at=known.backlog.instant())

        known.backlog.apply_portion("l1", 2, frames_of("l1", 1, 2), None, read_at=before)

        assert known.frames(layer) == ["l1-f2"]

    def test_a_read_that_began_before_its_layer_was_found_anew_brings_nothing_back(self) -> None:
        known, layer = Known(), waiting_layer(waiting=1)
        known.read(layer)
        known.read_portion("l1", 1)
        before = known.backlog.instant()
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        known.backlog.settle([booked], booked={booked.proc_id})
        known.backlog.apply([], gone=["l1"], read_at=known.backlog.instant())
        known.read(layer)

        known.backlog.apply_portion("l1", 1, frames_of("l1", 1), None, read_at=before)

        assert not known.work().has_portion(layer)

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

    def test_however_many_frames_are_in_flight_no_more_than_two_hundred_others_are_read(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2_000)
        known.read(layer)
        for in_flight in (0, NEXT_FRAMES, 2 * NEXT_FRAMES):
            known.read_portion("l1", *range(1, 1_001), waiting=2_000)
            portion = known.work().portion(layer)
            assert portion is not None
            assert [frame.number for frame in portion] == list(range(in_flight + 1, in_flight + NEXT_FRAMES + 1))
            known.backlog.take([proc(layer, frame) for frame in portion])
            assert known.backlog.portion_sizes(known.work())["l1"] == in_flight + 2 * NEXT_FRAMES

    def test_the_next_read_has_as_many_frames_as_the_last_plan_booked(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2_000)
        known.read(layer)
        for booked, read in ((3 * FIRST_FRAMES_OF_A_PORTION, 3 * FIRST_FRAMES_OF_A_PORTION), (1, 20), (300, 200)):
            planned = [proc(layer, frame) for frame in frames_of("l1", *range(booked))]
            known.backlog.take(planned)
            known.backlog.settle(planned, booked={one.proc_id for one in planned})
            assert known.backlog.portion_sizes(known.work())["l1"] == read

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

    def test_what_the_count_of_a_resync_alone_tells_of_is_planned(self) -> None:
        # given a layer whose last frame was booked while the layer was being read
        known, layer = Known(), waiting_layer(waiting=1)
        known.read(layer)
        known.read_portion("l1", 1)
        before = known.backlog.instant()
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        known.backlog.settle([booked], booked={booked.proc_id})
        known.backlog.apply([(waiting_job(), layer, "v1")], read_at=before)
        assert known.layers() == []

        # when the frame waits again, of which the version says nothing
        known.backlog.apply_counts({"l1": 1}, read_at=known.backlog.instant())
        assert known.layers() == ["l1"]

    def test_a_counter_without_frames_is_a_fault_that_is_looked_at_again_after_a_minute(self) -> None:
        known = Known()
        known.read(waiting_layer(waiting=4))
        known.read_portion("l1", waiting=4)
        (verdict,) = known.backlog.bad("show")
        assert (known.layers(), verdict.verdict) == ([], Verdict.FAILED)
        assert "4 frames" in verdict.detail

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
        assert known.work(now=10.0).starts_in(CLUSTER) == 40.0
        assert known.layers(now=60.0) == ["l1"]
        assert known.layers(now=90.0) == ["l1", "l2"]

    def test_a_layer_with_several_times_to_come_starts_at_the_last(self) -> None:
        known = Known()
        known.read(waiting_layer(starts_at=80.0), job=waiting_job("j1", quarantined_until=50.0))

        assert known.work(now=10.0).starts_in(CLUSTER) == 70.0

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


class TestMemory:
    def test_twenty_thousand_layers_of_five_thousand_jobs_take_no_more_than_60_mb(self) -> None:
        # given a tenth of them, each of a memory of its own
        backlog, jobs = Backlog(Clock()), 500
        tracemalloc.start()
        try:
            for number in range(jobs):
                job = waiting_job(f"{number:036}", started_at=float(number))
                rows = [
                    (
                        job,
                        waiting_layer(f"{number:030}-{part:05}", waiting=50, memory_gib=1 + part / 64),
                        f"{number}:{part}",
                    )
                    for part in range(4)
                ]
                backlog.apply(rows, read_at=backlog.instant())
            # when they are in the order of two shards
            for shard in ("w1", "w2"):
                assert len(list(backlog.work([replace(CLUSTER, shard=shard)], own=ALL_BUCKETS, now=0.0))) == 4 * jobs
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert kept <= 60 * 1024**2 / 10


@settings(max_examples=examples(40), deadline=None)
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
    assert max(places[number] - number for number in places) <= NEXT_FRAMES
    again = len(served.started) - served.started[::-1].index(1)
    assert again - retried_at <= NEXT_FRAMES


JOB_OF = {"l1": "a", "l2": "a", "l3": "b"}
"""The job of each layer that there may be."""
FRAMES = range(2)
"""The numbers of the frames of each layer."""
STARTS_LATER_SECONDS, QUARANTINE_SECONDS, DELAY_SECONDS = 20.0, 30.0, 2.0
"""None of these is longer than JUDGED_SECONDS."""


@dataclass
class JobRow:
    """A job as PostgreSQL has it."""

    priority: int = 1
    started_at: float = 0.0
    quarantined_until: float = 0.0
    version: int = 0


@dataclass
class LayerRow:
    """A layer as PostgreSQL has it."""

    dispatch_order: int = 0
    starts_at: float = 0.0
    waiting: dict[int, int] = field(default_factory=dict)
    """How often each frame that waits was started."""
    version: int = 0


class Read(NamedTuple):
    """What a read finds of a layer that waits."""

    job: Job
    layer: Layer
    version: str
    frames: tuple[Frame, ...]


class Interleaved(RuleBasedStateMachine):
    """One process against a database that others change. Reads may end long after they began, those of layers one after
    the other, as by the feed."""

    layer_ids = st.sampled_from(sorted(JOB_OF))

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.backlog = Backlog(self.clock)
        self.jobs = {job_id: JobRow() for job_id in JOB_OF.values()}
        self.layers = {layer_id: LayerRow(waiting=dict.fromkeys(FRAMES, 0)) for layer_id in JOB_OF}
        self.reads_of_layers: list[tuple[float, dict[str, Read]]] = []
        self.reads_of_portions: list[tuple[float, dict[str, Read]]] = []
        self.planned: dict[str, list[PlannedProc]] = {}
        self.started: set[tuple[str, int | None]] = set()
        """Frames that this process booked, with their versions."""
        self.kept_until: dict[str, float] = {}
        """Until when what was found of a layer's frames may keep it waiting."""

    def work(self) -> BacklogWork:
        return self.backlog.work([CLUSTER], own=ALL_BUCKETS, now=self.clock.now)

    def order(self) -> list[str]:
        return [waiting.layer.id for waiting in self.work()]

    def what_waits(self) -> dict[str, Read]:
        """What a read that begins now will find, by layer."""
        found = {}
        for layer_id, row in self.layers.items():
            job = self.jobs[JOB_OF[layer_id]]
            until, starts_at = job.quarantined_until, row.starts_at
            ahead = {
                "quarantined_until": until if until > self.clock.now else None,
                "priority": job.priority,
                "started_at": job.started_at,
            }
            if row.waiting:
                found[layer_id] = Read(
                    waiting_job(JOB_OF[layer_id], **ahead),
                    waiting_layer(
                        layer_id,
                        waiting=len(row.waiting),
                        dispatch_order=row.dispatch_order,
                        starts_at=starts_at if starts_at > self.clock.now else None,
                    ),
                    f"{job.version}:{row.version}",
                    tuple(
                        Frame(f"{layer_id}-f{number}", str(number), number, version)
                        for number, version in sorted(row.waiting.items())
                    ),
                )
        return found

    @initialize()
    def everything_is_read(self) -> None:
        self.layers_are_read()
        self.portions_are_read()

    @rule(
        layer_id=layer_ids,
        priority=st.integers(1, 3),
        started_at=st.sampled_from([1.0, 2.0]),
        dispatch_order=st.integers(1, 2),
        ahead=st.sampled_from([(0.0, 0.0)] * 4 + [(STARTS_LATER_SECONDS, 0.0), (0.0, QUARANTINE_SECONDS)]),
    )
    def changed(
        self, layer_id: str, priority: int, started_at: float, dispatch_order: int, ahead: tuple[float, float]
    ) -> None:
        job, row, (starts_in, quarantine) = self.jobs[JOB_OF[layer_id]], self.layers[layer_id], ahead
        job.priority, job.started_at, job.version = priority, started_at, job.version + 1
        row.dispatch_order, row.version = dispatch_order, row.version + 1
        row.starts_at = self.clock.now + starts_in if starts_in else 0.0
        job.quarantined_until = self.clock.now + quarantine if quarantine else 0.0

    @rule(layer_id=layer_ids, number=st.sampled_from(FRAMES))
    def booked_by_others(self, layer_id: str, number: int) -> None:
        self.layers[layer_id].waiting.pop(number, None)

    @rule(layer_id=layer_ids, number=st.sampled_from(FRAMES))
    def retried(self, layer_id: str, number: int) -> None:
        row = self.layers[layer_id]
        started = [version or 0 for frame_id, version in self.started if frame_id == f"{layer_id}-f{number}"]
        if number not in row.waiting and not self.planned.get(layer_id):
            row.waiting[number] = max(started, default=0) + 1

    @rule(seconds=st.sampled_from([1.0, 1.0, PORTION_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def a_read_of_layers_begins(self) -> None:
        self.reads_of_layers.append((self.backlog.instant(), self.what_waits()))

    @precondition(lambda self: self.reads_of_layers)
    @rule()
    def a_read_of_layers_ends(self) -> None:
        read_at, found = self.reads_of_layers.pop(0)
        self.backlog.apply(
            [read[:3] for read in found.values()], gone=self.layers.keys() - found.keys(), read_at=read_at
        )

    @rule()
    def layers_are_read(self) -> None:
        self.a_read_of_layers_begins()
        while self.reads_of_layers:
            self.a_read_of_layers_ends()

    @rule()
    def a_read_of_portions_begins(self) -> None:
        self.reads_of_portions.append((self.backlog.instant(), self.what_waits()))

    @precondition(lambda self: self.reads_of_portions)
    @rule(which=st.integers(0, 3), most=st.integers(1, len(FRAMES)))
    def a_read_of_portions_ends(self, which: int, most: int = len(FRAMES)) -> None:
        read_at, reads = self.reads_of_portions.pop(which % len(self.reads_of_portions))
        for layer_id, read in reads.items():
            self.backlog.apply_portion(layer_id, len(read.frames), read.frames[:most], None, read_at=read_at)

    @rule()
    def portions_are_read(self) -> None:
        self.a_read_of_portions_begins()
        self.a_read_of_portions_ends(len(self.reads_of_portions) - 1)

    @rule(layer_id=layer_ids, back_in=st.sampled_from([DELAY_SECONDS, None]))
    def a_portion_has_no_frame(self, layer_id: str, back_in: float | None) -> None:
        """All its frames may still get a delay, or the layer's counter is wrong."""
        if waiting := len(self.layers[layer_id].waiting):
            self.backlog.apply_portion(layer_id, waiting, (), back_in, read_at=self.backlog.instant())
            self.kept_until[layer_id] = self.clock.now + JUDGED_SECONDS

    @rule(data=st.data())
    def a_plan_takes_frames(self, data: st.DataObject) -> None:
        for waiting in self.work():
            portion = self.work().portion(waiting.layer)
            if portion:
                frames = data.draw(st.lists(st.sampled_from(list(portion)), min_size=1, unique=True))
                of_layer = self.planned.setdefault(waiting.layer.id, [])
                assert {frame.id for frame in frames}.isdisjoint(planned.frame.id for planned in of_layer), "twice"
                assert self.started.isdisjoint((frame.id, frame.version) for frame in frames), "booked already"
                taken = [proc(waiting.layer, frame, waiting.job) for frame in frames]
                self.backlog.take(taken)
                of_layer += taken

    @rule()
    def plans_are_committed(self) -> None:
        for layer_id in list(self.planned):
            procs, row, booked = self.planned.pop(layer_id), self.layers[layer_id], set()
            for planned in procs:
                frame = planned.frame
                if row.waiting.get(frame.number) == frame.version:
                    booked.add(planned.proc_id)
                    self.started.add((frame.id, frame.version))
                    del row.waiting[frame.number]
            self.backlog.settle(procs, booked=booked, lost={planned.proc_id for planned in procs} - booked)

    @rule(data=st.data(), portions=st.booleans(), early=st.booleans())
    def a_pass_is_made_while_a_read_is_under_way(self, data: st.DataObject, portions: bool, early: bool) -> None:
        """The read begins before the plan or before the commit, and another one of portions may overtake it."""
        begins = self.a_read_of_portions_begins if portions else self.a_read_of_layers_begins
        if early:
            begins()
        self.a_plan_takes_frames(data)
        if not early:
            begins()
        self.plans_are_committed()
        if data.draw(st.booleans()):
            self.portions_are_read()
        if portions:
            self.a_read_of_portions_ends(len(self.reads_of_portions) - 1)
        while self.reads_of_layers:
            self.a_read_of_layers_ends()

    @rule(layer_id=layer_ids)
    def another_process_has_the_permits(self, layer_id: str) -> None:
        procs = self.planned.pop(layer_id, [])
        self.backlog.settle(procs, taken={planned.proc_id for planned in procs})

    @rule()
    def a_round_of_the_resync_finds_all_that_waits(self) -> None:
        # when plans and reads of layers have ended, and what differs by its version or is in doubt is read
        self.plans_are_committed()
        while self.reads_of_layers:
            self.a_read_of_layers_ends()
        read_at, found, known = self.backlog.instant(), self.what_waits(), self.backlog.versions()
        differ = {layer_id for layer_id, read in found.items() if known.get(layer_id) != read.version}
        differ |= known.keys() - found.keys()
        counts = {layer_id: len(read.frames) for layer_id, read in found.items() if layer_id not in differ}
        self.backlog.apply_counts(counts, read_at=read_at)
        named = differ | self.backlog.stale()
        self.backlog.apply(
            [read[:3] for layer_id, read in found.items() if layer_id in named],
            gone=named - found.keys(),
            read_at=self.backlog.instant(),
        )

        # then all that waits is there and nothing else, and what is not planned has something in its way
        assert self.backlog.versions().keys() == found.keys()
        wanted = sorted(found, key=self.rank)
        assert self.order() == [layer_id for layer_id in wanted if layer_id in self.order()]
        for layer_id in found:
            job, row = self.jobs[JOB_OF[layer_id]], self.layers[layer_id]
            ahead = max(job.quarantined_until, row.starts_at)
            if layer_id in self.order():
                assert ahead <= self.clock.now
            else:
                assert max(ahead, self.kept_until.get(layer_id, 0.0)) > self.clock.now

        # and when that has gone, which nobody tells, each waits in its place with all its frames
        self.clock.now += JUDGED_SECONDS
        assert self.order() == wanted
        for layer_id, read in found.items():
            self.backlog.apply_portion(layer_id, len(read.frames), read.frames, None, read_at=self.backlog.instant())
            assert self.work().portion(read.layer) == list(read.frames)

    def rank(self, layer_id: str) -> tuple[int, float, str, int, str]:
        """The place of a layer by the policy: the priority and the age of its job, then its dispatch order."""
        job, row = self.jobs[JOB_OF[layer_id]], self.layers[layer_id]
        return -job.priority, job.started_at, JOB_OF[layer_id], row.dispatch_order, layer_id

    @invariant()
    def a_walk_that_passes_by_a_job_meets_the_layers_of_all_others(self) -> None:
        work = self.work()
        everything = list(work)
        for left_out in {waiting.job.id for waiting in everything}:
            others = [waiting for waiting in everything if waiting.job.id != left_out]
            assert list(work.in_order(lambda job_id, but=left_out: job_id != but)) == others

    @invariant()
    def the_least_of_a_job_is_no_more_than_any_of_its_layers_needs(self) -> None:
        work = self.work()
        for waiting in work:
            least = dict(work.least_of_job(waiting.job.id))[waiting.layer.tags]
            assert waiting.need.covers(least)

    @invariant()
    def no_count_is_below_nothing_for_a_layer_that_is_planned(self) -> None:
        assert all(waiting.frames > 0 for waiting in self.work())


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_what_a_time_or_a_fault_keeps_waiting_is_counted_by_what_it_is() -> None:
    # given a job in quarantine, a start that lies ahead, a delay, rows that make no sense, and two that may go
    known = Known()
    known.read(waiting_layer("l1"), job=waiting_job("j1", quarantined_until=50.0))
    known.read(waiting_layer("l2", starts_at=80.0), job=waiting_job("j2"))
    for number in (3, 4, 5, 6):
        known.read(waiting_layer(f"l{number}"), job=waiting_job(f"j{number}"))
    known.read_portion("l3", waiting=3, back_in=1.5)
    known.backlog.fail("l4", "its command is empty")
    bad = BadLayer("j7", "l7", "show", 2, "no cores", "v1", "facility", frozenset({"odd"}))
    known.backlog.apply((), bad=[bad], read_at=known.backlog.instant())
    assert known.backlog.set_aside(0.0) == {"quarantined": 1, "starts_later": 1, "delayed": 1, "failed": 2}
    # and each no more once its time has come
    known.clock.now += 2
    assert known.backlog.set_aside(60.0) == {"quarantined": 0, "starts_later": 1, "delayed": 0, "failed": 2}
    # then all that wait are known
    assert known.backlog.known(["l1", "l4", "l7", "gone"]) == {"l1", "l4", "l7"}
    # and a sweep finds the clusters of all, whose passes tell why they wait
    assert {tag for *_, tag in known.backlog.waiting_tags()} == {"general", "odd"}
