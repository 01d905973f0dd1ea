from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from opencue_sched.dispatch.clusters import ClusterFeed
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.settings import Queue
from opencue_sched.store.pending import WaitingTag

QUEUE = Queue(cluster_saturated_sleep=5, cluster_reload_interval=120, active_scan_interval=2)


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


def waiting(*clusters: Cluster) -> frozenset[WaitingTag]:
    return frozenset((each.facility_id, each.show_id, tag) for each in clusters for tag in each.tags)


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


A, B, C = (cluster(tag) for tag in "abc")


def test_reload_happens_at_the_interval_and_swaps_only_on_change(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A, B)
    feed = make_feed(source)

    clock.now += 119.9
    assert not feed.reload_if_due()
    assert source.loads == 1
    clock.now += 0.1
    with capture_logs() as said:
        assert feed.reload_if_due()
    assert source.loads == 2
    assert said == []
    source.clusters = frozenset({B, C})
    clock.now += 120
    with capture_logs() as said:
        assert feed.reload_if_due()

    assert [(line["event"], line["added"], line["removed"]) for line in said] == [("clusters_swapped", 1, 1)]
    assert set(feed.clusters.values()) == {B, C}


def test_clusters_that_cannot_be_read_are_read_with_the_next_sweep(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A)
    feed = make_feed(source)
    clock.now += 120
    source.error = ConnectionError("no database")
    with pytest.raises(ConnectionError):
        feed.reload_if_due()
    assert list(feed.clusters.values()) == [A]
    source.error = None
    assert feed.reload_if_due()


def test_only_clusters_with_waiting_work_are_served(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A, B, C))

    assert feed.ready() == [], "before anybody looked"
    feed.awake = waiting(B)
    assert feed.ready() == [B]


def test_the_gate_applies_to_clusters_that_appear_later(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A)
    feed = make_feed(source)
    feed.awake = waiting(A, B)

    source.clusters = frozenset({A, B, C})
    clock.now += 120
    feed.reload_if_due()

    assert set(feed.ready()) == {A, B}


def test_clusters_are_known_with_work_or_without(make_feed: Callable[[Source], ClusterFeed]) -> None:
    feed = make_feed(Source(A, B, C))
    feed.awake = waiting(A, B)

    assert feed.clusters == {it.key: it for it in (A, B, C)}


def test_the_clusters_are_read_soon_for_a_show_nobody_knew_but_not_time_and_again(
    make_feed: Callable[[Source], ClusterFeed], clock: FakeClock
) -> None:
    source = Source(A)
    feed = make_feed(source)
    for _ in range(2):
        assert not feed.reload_if_due(soon=True)
        clock.now += QUEUE.active_scan_interval
        assert not feed.reload_if_due()
        assert feed.reload_if_due(soon=True)
