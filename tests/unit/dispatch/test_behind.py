"""Why frames wait: by the verdict of their layer, or by what keeps passes from looking at it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opencue_sched.dispatch.waiting_frames import waiting_by_verdict
from opencue_sched.domain.clusters import Cluster, ClusterKind

ALLOC = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
MANUAL = Cluster("fac", "show", ClusterKind.MANUAL, ("fast", "slow"))


def work(frames: int, *tags: str, layer: str = "layer", why: str = "behind", show: str = "show") -> Any:
    tags = tags or ("general",)
    place = {"pk_facility": "fac", "pk_show": show, "tags": "|".join(tags)}
    return SimpleNamespace(**place, why=why, layers=[layer], waiting=[frames])


def test_frames_of_a_layer_that_no_pass_looked_at_are_behind() -> None:
    said = {"full": "capacity", "going": "flowing"}
    waiting = [work(3, layer="full"), work(4, layer="going"), work(13, layer="later")]
    assert waiting_by_verdict([ALLOC], waiting, said) == {"capacity": 3, "flowing": 4, "behind": 13}
    assert waiting_by_verdict([ALLOC], waiting, {}) == {"behind": 20}


def test_layers_that_need_the_same_are_counted_each_by_its_verdict() -> None:
    both = work(0)
    both.layers, both.waiting = ["one", "other"], [3, 4]
    assert waiting_by_verdict([ALLOC], [both], {"one": "no_fit"}) == {"no_fit": 3, "behind": 4}


def test_frames_at_a_cap_of_their_job_or_folder_are_not_called_behind() -> None:
    waiting = [work(5, why="over_job"), work(6, why="over_folder"), work(20)]
    assert waiting_by_verdict([ALLOC], waiting, {}) == {"over_job": 5, "over_folder": 6, "behind": 20}
    assert waiting_by_verdict([ALLOC], waiting, {"layer": "no_host"}) == {
        "over_job": 5,
        "over_folder": 6,
        "no_host": 20,
    }


def test_frames_of_quarantined_jobs_and_cooled_down_clusters_are_called_that() -> None:
    waiting = [work(5, why="quarantined"), work(20), work(3, "slow")]
    assert waiting_by_verdict([ALLOC, MANUAL], waiting, {}) == {"quarantined": 5, "behind": 23}
    found = waiting_by_verdict([ALLOC, MANUAL], waiting, {"layer": "capacity"}, cooled_down={ALLOC.key})
    assert found == {"quarantined": 5, "cooled_down": 20, "capacity": 3}


def test_what_one_cluster_can_look_at_is_not_cooled_down_with_another() -> None:
    both = work(3, "general", "slow")
    assert waiting_by_verdict([ALLOC, MANUAL], [both], {}, cooled_down={ALLOC.key}) == {"behind": 3}


def test_frames_that_no_cluster_reaches_have_no_host_unless_their_tags_are_somebody_elses() -> None:
    mistyped, elsewhere = work(50, "genral"), work(7, show="other")
    assert waiting_by_verdict([ALLOC, MANUAL], [work(2), mistyped, elsewhere], {}) == {"behind": 2, "no_host": 57}
    ignored = frozenset({"genral", "gpu"})
    assert waiting_by_verdict([ALLOC], [mistyped, work(9, "gpu", "genral")], {}, ignored=ignored) == {}
    assert waiting_by_verdict([ALLOC], [work(9, "gpu", "genral")], {}, ignored=frozenset({"gpu"})) == {"no_host": 9}
