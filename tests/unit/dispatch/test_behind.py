"""Frames that wait and that no pass has said anything of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opencue_sched.dispatch.report import frames_not_looked_at
from opencue_sched.domain.cluster import Cluster, ClusterKind

ALLOC = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
MANUAL = Cluster("fac", "show", ClusterKind.MANUAL, ("fast", "slow"))


def work(frames: int, *tags: str, why: str = "behind", show: str = "show") -> Any:
    tags = tags or ("general",)
    return SimpleNamespace(pk_facility="fac", pk_show=show, tags="|".join(tags), why=why, frames=frames)


def test_what_no_pass_left_waiting_is_behind() -> None:
    judged = {ALLOC.key: {"capacity": 3, "flowing": 4}}
    assert frames_not_looked_at([ALLOC], [work(20)], judged) == {"behind": 13}
    assert frames_not_looked_at([ALLOC], [work(20)], {}) == {"behind": 20}
    assert frames_not_looked_at([ALLOC], [work(7)], judged) == {}


def test_passes_that_looked_a_moment_earlier_at_more_frames_leave_none_behind() -> None:
    assert frames_not_looked_at([ALLOC], [work(2)], {ALLOC.key: {"flowing": 9}}) == {}


def test_frames_at_a_cap_of_their_job_or_folder_are_not_called_behind() -> None:
    waiting = [work(5, why="over_job"), work(6, why="over_folder"), work(20)]
    assert frames_not_looked_at([ALLOC], waiting, {}) == {"over_job": 5, "over_folder": 6, "behind": 20}
    seen = {ALLOC.key: {"over_job": 4, "no_host": 20}}
    assert frames_not_looked_at([ALLOC], waiting, seen) == {"over_job": 1, "over_folder": 6}


def test_frames_of_quarantined_jobs_and_cooled_down_clusters_are_called_that() -> None:
    waiting = [work(5, why="quarantined"), work(20), work(3, "slow")]
    assert frames_not_looked_at([ALLOC, MANUAL], waiting, {}) == {"quarantined": 5, "behind": 23}
    cooled = {ALLOC.key}
    assert frames_not_looked_at([ALLOC, MANUAL], waiting, {ALLOC.key: {"capacity": 4}}, cooled_down=cooled) == {
        "quarantined": 5,
        "cooled_down": 16,
        "behind": 3,
    }


def test_frames_count_in_every_cluster_that_reaches_them_and_in_no_other() -> None:
    both, others = work(3, "general", "slow"), work(50, "general", "nowhere")
    judged = {MANUAL.key: {"capacity": 3}, ALLOC.key: {"capacity": 50}}
    assert frames_not_looked_at([ALLOC, MANUAL], [both, others], judged) == {"behind": 3}


def test_frames_that_no_cluster_reaches_have_no_host_unless_their_tags_are_somebody_elses() -> None:
    mistyped, elsewhere = work(50, "genral"), work(7, show="other")
    assert frames_not_looked_at([ALLOC, MANUAL], [work(2), mistyped, elsewhere], {}) == {"behind": 2, "no_host": 57}
    ignored = frozenset({"genral", "gpu"})
    assert frames_not_looked_at([ALLOC], [mistyped, work(9, "gpu", "genral")], {}, ignored=ignored) == {}
    assert frames_not_looked_at([ALLOC], [work(9, "gpu", "genral")], {}, ignored=frozenset({"gpu"})) == {"no_host": 9}
