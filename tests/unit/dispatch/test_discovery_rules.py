from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.dispatch.clusters import build_clusters
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.settings import Queue

QUEUE = Queue(manual_tags_chunk_size=2, hostname_tags_chunk_size=3)


def tag(alloc: str, kind: str, name: str, facility: str = "f") -> Any:
    return SimpleNamespace(facility_id=facility, alloc_id=alloc, tag_type=kind, tag=name)


def test_each_allocation_tag_is_a_cluster_of_its_own() -> None:
    clusters = build_clusters(
        [tag("a1", "ALLOC", "general"), tag("a2", "ALLOC", "desktop")],
        [("s1", "a1"), ("s1", "a2"), ("s2", "a1")],
        ignore_tags=(),
        queue=QUEUE,
    )

    assert clusters == {
        Cluster("f", "s1", ClusterKind.ALLOC, ("general",), "a1"),
        Cluster("f", "s1", ClusterKind.ALLOC, ("desktop",), "a2"),
        Cluster("f", "s2", ClusterKind.ALLOC, ("general",), "a1"),
    }


def test_upstream_bug_allocation_tags_joined_by_text_give_no_cluster_of_a_namesake() -> None:
    tags = [tag("a1", "ALLOC", "general", "f1"), tag("a2", "ALLOC", "general", "f2")]

    clusters = build_clusters(tags, [("s1", "a1")], ignore_tags=(), queue=QUEUE)

    assert clusters == {Cluster("f1", "s1", ClusterKind.ALLOC, ("general",), "a1")}


def test_a_tag_shared_by_two_allocations_of_a_facility_is_one_cluster_of_both() -> None:
    tags = [tag("a1", "ALLOC", "general"), tag("a2", "ALLOC", "general")]

    clusters = build_clusters(tags, [("s1", "a1"), ("s1", "a2")], ignore_tags=(), queue=QUEUE)

    assert clusters == {Cluster("f", "s1", ClusterKind.ALLOC, ("general",), None)}


def test_tags_are_chunked_by_their_type_and_facility() -> None:
    names = ["t5", "t1", "t3", "t2", "t4"]
    tags = [tag("a1", kind, name) for kind in ("MANUAL", "HOSTNAME", "HARDWARE") for name in names]
    tags.append(tag("a2", "MANUAL", "t9", "g"))

    clusters = build_clusters(tags, [("s1", "a1"), ("s1", "a2")], ignore_tags=(), queue=QUEUE)

    assert clusters == {
        Cluster("f", "s1", ClusterKind.MANUAL, ("t1", "t2")),
        Cluster("f", "s1", ClusterKind.MANUAL, ("t3", "t4")),
        Cluster("f", "s1", ClusterKind.MANUAL, ("t5",)),
        Cluster("f", "s1", ClusterKind.HOSTNAME, ("t1", "t2", "t3")),
        Cluster("f", "s1", ClusterKind.HOSTNAME, ("t4", "t5")),
        Cluster("f", "s1", ClusterKind.HARDWARE, ("t1", "t2")),
        Cluster("f", "s1", ClusterKind.HARDWARE, ("t3", "t4")),
        Cluster("f", "s1", ClusterKind.HARDWARE, ("t5",)),
        Cluster("g", "s1", ClusterKind.MANUAL, ("t9",)),
    }


def test_ignored_tags_form_no_cluster_and_leave_the_others() -> None:
    tags = [tag("a1", "ALLOC", "general"), tag("a1", "MANUAL", "old"), tag("a1", "MANUAL", "new")]

    clusters = build_clusters(tags, [("s1", "a1")], ignore_tags=("general", "o l d"), queue=QUEUE)

    assert clusters == {Cluster("f", "s1", ClusterKind.MANUAL, ("new",))}


def test_a_tag_of_an_unknown_type_is_not_lost() -> None:
    clusters = build_clusters([tag("a1", "GADGET", "x")], [("s1", "a1")], ignore_tags=(), queue=QUEUE)

    assert clusters == {Cluster("f", "s1", ClusterKind.HARDWARE, ("x",))}


@given(
    names=st.lists(st.text("abc123", min_size=1, max_size=4), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
    allocs=st.integers(1, 3),
)
def test_chunking_does_not_depend_on_the_order_of_rows_and_covers_every_tag_once(
    names: list[str], order: object, allocs: int
) -> None:
    tags = [tag(f"a{index % allocs}", "MANUAL", name) for index, name in enumerate(names)]
    subscriptions = [("s1", f"a{index}") for index in range(allocs)]
    first = build_clusters(tags, subscriptions, ignore_tags=(), queue=QUEUE)
    order.shuffle(tags)  # type: ignore[attr-defined]
    order.shuffle(subscriptions)  # type: ignore[attr-defined]

    again = build_clusters(tags, subscriptions, ignore_tags=(), queue=QUEUE)

    assert again == first
    assert sorted(name for cluster in first for name in cluster.tags) == sorted(set(names))
    assert all(len(cluster.tags) <= 2 for cluster in first)
