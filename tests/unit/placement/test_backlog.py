"""The backlog: the order of layers, doubts that reads leave, and what keeps layers waiting."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from opencue_sched.domain.jobs import BadLayer
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.backlog import JUDGED_SECONDS, Backlog
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_cluster, make_need
from tests.unit.placement.known_backlog import CLUSTER, Known, frames_of, proc, waiting_job, waiting_layer


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
