"""The key of a cluster, and the values of the farm."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.caps import Headroom
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.states import ThreadMode
from opencue_sched.errors import (
    AllocationOverBurst,
    BookingError,
    CapExceeded,
    FrameLost,
    HostExhausted,
    HostLocked,
    LayerChanged,
    RqdFailure,
)

ids = st.text(alphabet="0123456789abcdef-", min_size=1, max_size=36)
clusters = st.builds(
    Cluster,
    facility_id=ids,
    show_id=ids,
    kind=st.sampled_from(ClusterKind),
    tags=st.lists(st.text(alphabet="abc_.-", min_size=1, max_size=8), max_size=4).map(lambda tags: tuple(sorted(tags))),
    alloc_id=st.one_of(st.none(), ids),
    shard=st.sampled_from(["", "render-01.0", "b"]),
)


@given(clusters)
def test_a_key_is_short_and_safe_everywhere(cluster: Cluster) -> None:
    assert re.fullmatch(r"(alloc|manual|hostname|hardware)-[0-9a-f]{16}(@[a-z0-9_.-]+)?", cluster.key)
    assert replace(cluster, shard="").key == cluster.key.partition("@")[0]


@given(clusters, clusters)
def test_different_clusters_have_different_keys(one: Cluster, other: Cluster) -> None:
    assert (one.key == other.key) == (one == other)


def test_tags_do_not_run_into_each_other_in_the_key() -> None:
    cluster = Cluster("facility", "show", ClusterKind.MANUAL, ("ab", "c"))
    assert cluster.key != replace(cluster, tags=("a", "bc")).key
    assert cluster.key != replace(cluster, tags=("ab", "c", "")).key


def test_the_key_does_not_change_between_releases() -> None:
    # Postings in Redis are kept under it.
    cluster = Cluster("facility", "show", ClusterKind.ALLOC, ("general",), "alloc")
    assert cluster.key == "alloc-3773a6c032589546"


def test_allocations_that_share_a_tag_are_clusters_of_their_own_and_sort() -> None:
    # Cuebot's alloc clusters join on the text of the tag, so two allocations called "general" give two rows.
    one = Cluster("facility", "show", ClusterKind.ALLOC, ("general",), "alloc-1")
    other = replace(one, alloc_id="alloc-2")
    assert one.key != other.key
    assert sorted([other, one]) == [one, other]


def test_a_host_is_less_by_what_was_taken() -> None:
    host = Host("id", "name", "facility", "alloc", frozenset(), (), ThreadMode.AUTO, 850, 850, 64, 64, 2, 2, 16, 16)
    after = host.less(Resources(cores=3, memory_kb=10, gpus=1, gpu_memory_kb=8))
    assert (after.idle_centicores, after.idle_memory_kb, after.idle_gpus, after.idle_gpu_memory_kb) == (550, 54, 1, 8)
    assert (after.idle_cores, after.total_cores) == (5, 8)
    assert after.total_centicores == host.total_centicores


@pytest.mark.parametrize(
    ("headroom", "left"),
    [
        (Headroom(None, 99), math.inf),
        (Headroom(10, 4), 6),
        (Headroom(10, 12), 0),
        (Headroom(0, 0), 0),
        (Headroom(0.5, 0), 0.5),
    ],
)
def test_headroom_is_never_negative_and_infinite_only_without_a_cap(headroom: Headroom, left: float) -> None:
    assert headroom.left == left


@pytest.mark.parametrize(
    ("error", "retriable", "reason"),
    [
        (HostLocked("x"), True, "host_locked"),
        (HostExhausted("x"), True, "host_exhausted"),
        (RqdFailure("x", outcome_unknown=True), True, "rqd_failure"),
        (AllocationOverBurst("x"), False, "allocation_over_burst"),
        (CapExceeded("x"), False, "cap_exceeded"),
        (FrameLost("x"), False, "frame_lost"),
        (LayerChanged("x"), False, "layer_changed"),
    ],
)
def test_only_what_another_host_can_mend_is_retriable(error: BookingError, retriable: bool, reason: str) -> None:
    assert error.retriable is retriable
    assert error.reason == reason
