from collections.abc import Callable

import pytest

from opencue_sched.clusters.awake import AwakeSet
from opencue_sched.clusters.backoff import SleepReason
from opencue_sched.clusters.feed import (
    ALL_ASLEEP_NAP_SECONDS,
    NONE_ASLEEP_NAP_SECONDS,
    SOME_ASLEEP_NAP_SECONDS,
    ClusterFeed,
)
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.settings import Queue
from opencue_sched.store.clusters import WaitingTag

QUEUE = Queue(cluster_empty_sleep=30, cluster_saturated_sleep=5, cluster_reload_interval=120, active_scan_interval=2)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Source:
    """Stands for the database: what the next load answers, and how often it was asked."""

    def __init__(self, *clusters: Cluster) -> None:
        self.clusters = frozenset(clusters)
        self.error: Exception | None = None
        self.loads = 0

    def __call__(self) -> frozenset[Cluster]:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return self.clusters


def cluster(tag: str, show: str = "show") -> Cluster:
    return Cluster("facility", show, ClusterKind.MANUAL, (tag,))


def waiting(*clusters: Cluster) -> AwakeSet:
    return AwakeSet(WaitingTag(each.facility_id, each.show_id, tag) for each in clusters for tag in each.tags)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_feed(clock: FakeClock) -> Callable[[Source], ClusterFeed]:
    def make(source: Source) -> ClusterFeed:
        feed = ClusterFeed(source, QUEUE, clock=clock)
        feed.reload_if_due()
        return feed

    return make


A, B, C, D = (cluster(tag) for tag in "abcd")


def test_every_cluster_is_served_once_before_any_is_served_twice(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A, B, C))

    rounds = [[feed.next() for _ in range(3)] for _ in range(4)]

    assert all(set(served) == {A, B, C} for served in rounds)
    assert all(served == rounds[0] for served in rounds)


def test_ready_goes_on_after_the_cluster_served_last(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A, B, C, D))

    first, second = feed.ready(3), feed.ready(3)

    assert len(set(first)) == 3
    assert second[0] not in first
    assert set(feed.ready()) == {A, B, C, D}


def test_the_turn_survives_a_swap(make_feed: Callable[[Source], ClusterFeed], clock: FakeClock) -> None:
    source = Source(A, B, C)
    feed = make_feed(source)
    first = feed.next()

    source.clusters = frozenset({A, B, C, D})
    clock.now += 120
    assert feed.reload_if_due().added == 1
    rest = [feed.next() for _ in range(3)]

    assert first not in rest
    assert {first, *rest} == {A, B, C, D}


def test_reload_happens_at_the_interval_and_swaps_only_on_change(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A, B)
    feed = make_feed(source)

    clock.now += 119.9
    assert not feed.reload_if_due().changed
    assert source.loads == 1
    clock.now += 0.1
    assert not feed.reload_if_due().changed
    assert source.loads == 2
    source.clusters = frozenset({B, C})
    clock.now += 120
    reload = feed.reload_if_due()

    assert (reload.added, reload.removed) == (1, 1)
    assert set(feed.ready()) == {B, C}


def test_survivors_of_a_swap_keep_their_back_off_and_the_gone_lose_theirs(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A, B, C)
    feed = make_feed(source)
    clock.now += 110
    feed.sleep(A, SleepReason.EMPTY)
    feed.sleep(B, SleepReason.EMPTY)

    source.clusters = frozenset({A, C})
    clock.now += 10
    feed.reload_if_due()
    assert feed.ready() == [C]
    source.clusters = frozenset({A, B, C})
    feed.reload()

    assert set(feed.ready()) == {B, C}


def test_a_failed_reload_keeps_the_set_and_is_retried_soon(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A)
    feed = make_feed(source)
    clock.now += 120
    source.error = ConnectionError("gone")

    assert feed.reload_if_due().failed
    assert feed.ready() == [A]
    source.error, source.clusters = None, frozenset({A, B})
    assert not feed.reload_if_due().changed
    clock.now += QUEUE.active_scan_interval

    assert feed.reload_if_due().added == 1


def test_the_first_load_must_succeed(clock: FakeClock) -> None:
    source = Source()
    source.error = ConnectionError("no database")

    with pytest.raises(ConnectionError):
        ClusterFeed(source, QUEUE, clock=clock).reload_if_due()


def test_only_clusters_with_waiting_work_are_served(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A, B, C))

    feed.observe(waiting(B))
    assert feed.ready() == [B]
    feed.observe(None)

    assert set(feed.ready()) == {A, B, C}


def test_the_gate_applies_to_clusters_that_appear_later(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A)
    feed = make_feed(source)
    feed.observe(waiting(A, B))

    source.clusters = frozenset({A, B, C})
    clock.now += 120
    feed.reload_if_due()

    assert set(feed.ready()) == {A, B}


def test_new_work_wakes_a_cluster_that_slept_for_being_empty(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A, B))
    feed.observe(waiting(B))
    feed.sleep(A, SleepReason.EMPTY)
    feed.sleep(B, SleepReason.SATURATED)

    feed.observe(waiting(A, B))

    assert feed.ready() == [A]


@pytest.mark.parametrize(
    ("reason", "seconds"), [(SleepReason.EMPTY, 30), (SleepReason.SATURATED, 5), (SleepReason.QUERY_ERROR, 30)]
)
def test_a_cluster_sleeps_by_its_reason(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock, reason: SleepReason, seconds: float
) -> None:
    feed = make_feed(Source(A, B))

    assert feed.sleep(A, reason) == seconds
    clock.now += seconds - 0.01
    assert feed.ready() == [B]
    clock.now += 0.01

    assert set(feed.ready()) == {A, B}


def test_waking_a_show_or_a_cluster_ends_only_their_sleep(make_feed: Callable[[Source], ClusterFeed]) -> None:
    other = cluster("x", show="other")
    feed = make_feed(Source(A, B, other))
    for each in (A, B, other):
        feed.sleep(each, SleepReason.EMPTY)

    feed.wake([A.key])
    assert feed.ready() == [A]
    feed.wake_show("other")
    assert set(feed.ready()) == {A, other}
    feed.wake_show("show")

    assert set(feed.ready()) == {A, B, other}


def test_naps_are_longer_when_all_sleep(make_feed: Callable[[Source], ClusterFeed], clock: FakeClock) -> None:
    feed = make_feed(Source(A, B))

    assert feed.nap() == NONE_ASLEEP_NAP_SECONDS
    feed.sleep(A, SleepReason.EMPTY)
    assert feed.nap() == SOME_ASLEEP_NAP_SECONDS
    feed.sleep(B, SleepReason.EMPTY)
    assert feed.nap() == ALL_ASLEEP_NAP_SECONDS
    clock.now += 28

    assert feed.nap() == pytest.approx(2)


def test_a_feed_without_work_naps_long(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A))
    feed.observe(waiting())

    assert feed.next() is None
    assert feed.nap() == ALL_ASLEEP_NAP_SECONDS


def test_counts_tell_clusters_with_work_and_those_asleep_although_they_have(
    make_feed: Callable[[Source], ClusterFeed],
) -> None:
    feed = make_feed(Source(A, B, C))
    feed.observe(waiting(A, B))
    feed.sleep(A, SleepReason.SATURATED)
    feed.sleep(C, SleepReason.EMPTY)

    counts = feed.counts()

    assert counts.total == {ClusterKind.MANUAL: 3}
    assert (counts.active, counts.sleeping) == (2, 1)
    assert feed.find(A.key) == A
    assert feed.find("manual-none") is None
