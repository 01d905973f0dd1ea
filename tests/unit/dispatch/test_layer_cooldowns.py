"""A layer that found no host is skipped until a host changes in a way that could make a difference to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opencue_sched.dispatch.cooldown import HostNews, LayerCooldowns
from opencue_sched.domain.frame_needs import Search
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.planner import UnschedulableLayer
from opencue_sched.store.pending import SkippedLayers

GIB = 1024 * 1024


def blocked(
    layer: str = "layer", *, tags=("general",), os_name=None, threadable=True, kind="", part=(400, 0), **need: int
) -> UnschedulableLayer:
    """Of a kind of its own, or of ``kind``. ``part``: the layer's own least and most centicores, which say more than
    the cores it needs anywhere."""
    wants = Reservation(**{"cores": 4, "memory_kb": 8 * GIB, "gpus": 0, "gpu_memory_kb": 0, **need})
    search = Search(tags, os_name, wants, threadable, *part)
    verdict = LayerVerdict("job", layer, Verdict.CAPACITY, 0, 3)
    return UnschedulableLayer(verdict, search, kind or layer, frozenset({"alloc"}))


def skipped(layers: LayerCooldowns, cluster: str = "cluster", **room: float) -> set[str]:
    """The layers and kinds that are skipped when the show has cores left in the allocation of the hosts that were
    looked at, and in these."""
    found = layers.skipped(cluster, {"alloc": 100.0, **room})
    return {*found.rows, *found.kinds}


def host(**changed: object) -> Host:
    fields: dict[str, object] = {
        "id": "host",
        "name": "host",
        "facility_id": "facility",
        "alloc_id": "alloc",
        "tags": frozenset({"general"}),
        "os_names": ("rhel9", "rocky9"),
        "thread_mode": ThreadMode.AUTO,
        "total_centicores": 1600,
        "idle_centicores": 400,
        "total_memory_kb": 64 * GIB,
        "idle_memory_kb": 8 * GIB,
        **changed,
    }
    return Host(**fields)  # type: ignore[arg-type]


def news(*hosts: Host) -> HostNews:
    return HostNews(hosts)


def end_pass(layers: LayerCooldowns, cluster: str = "cluster", **said: Any) -> bool:
    """The end of a pass that looked at every job, unless told otherwise; whether the next one comes at once."""
    nothing = {"wakes": 0, "more": False, "booked": False, "hostless": False, "got_nothing": {}, "lost": frozenset()}
    return layers.end_pass(cluster, **{**nothing, **said})


def scan_on(layers: LayerCooldowns, cluster: str, rows: dict[str, str], wakes: int) -> None:
    """A pass booked nothing and there are more jobs."""
    assert end_pass(layers, cluster, wakes=wakes, more=True, got_nothing=rows)


def end_scan(layers: LayerCooldowns, cluster: str, wakes: int) -> bool:
    """A pass looked at the last job; whether the next one comes at once."""
    return end_pass(layers, cluster, wakes=wakes)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("layer", "freed"),
    [
        ({}, {}),
        ({"os_name": "rocky9"}, {}),
        ({"threadable": False}, {}),
        ({"tags": ("gpu", "general")}, {}),
        ({"gpus": 1, "gpu_memory_kb": GIB}, {"idle_gpus": 1, "idle_gpu_memory_kb": GIB}),
        ({}, {"thread_mode": ThreadMode.ALL}),
        ({"cores": 1, "part": (0, 0)}, {"idle_centicores": 1600}),
        ({"cores": 1, "part": (-1200, 0)}, {}),
        ({"cores": 1, "part": (0, 400)}, {}),
    ],
)
def test_a_layer_is_woken_by_a_host_that_has_what_it_needs(layer, freed):
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked(**layer)], host_changes=layers.host_changes)
    assert skipped(layers) == {"layer"}
    layers.hosts_changed(news(host(**freed)))
    assert skipped(layers) == set()


@pytest.mark.parametrize(
    ("layer", "freed"),
    [
        ({}, {"idle_centicores": 300}),
        ({}, {"idle_memory_kb": 8 * GIB - 1}),
        ({}, {"tags": frozenset({"other"})}),
        ({"os_name": "windows"}, {}),
        ({"threadable": False}, {"thread_mode": ThreadMode.ALL}),
        ({"gpus": 1}, {}),
        ({"gpu_memory_kb": GIB}, {"idle_gpus": 1}),
        ({"tags": ()}, {}),
        ({"cores": 1, "part": (0, 0)}, {"idle_centicores": 1500}),
        ({"cores": 1, "part": (-1100, 0)}, {}),
        ({"cores": 1, "part": (-1600, 0)}, {"idle_centicores": 1600}),
        ({"cores": 1, "part": (0, 500)}, {}),
        ({"cores": 1, "part": (100, 0)}, {"idle_centicores": 100, "thread_mode": ThreadMode.VARIABLE}),
    ],
)
def test_a_layer_stays_skipped_when_no_host_that_changed_could_do(layer, freed):
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked(**layer)], host_changes=layers.host_changes)
    layers.hosts_changed(news(host(**freed)))
    assert skipped(layers) == {"layer"}


def test_every_layer_but_one_that_no_host_can_help_is_woken_when_any_host_may_have_changed():
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked(cores=64)], host_changes=layers.host_changes)
    layers.skip_rows("cluster", {"bad": "7"})
    layers.hosts_changed(HostNews(everything=True))
    assert skipped(layers) == {"bad"}


def test_a_layer_is_woken_when_an_allocation_has_cores_for_it_that_had_none():
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked("small"), blocked("large", cores=8)], host_changes=layers.host_changes)
    assert skipped(layers, full=3.0) == {"small", "large"}
    assert skipped(layers, full=4.0) == {"large"}
    assert skipped(layers) == {"large"}
    assert skipped(layers, full=8.0) == set()


def test_room_in_an_allocation_that_was_looked_at_is_no_news():
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked()], host_changes=layers.host_changes)
    assert set(layers.skipped("cluster", {"alloc": 0.0}).kinds) == {"layer"}
    assert skipped(layers) == {"layer"}


def test_of_a_kind_only_what_each_of_its_layers_was_looked_up_in_counts_as_looked_at():
    layers = LayerCooldowns(60.0)
    both = replace(blocked("first", kind="k"), open_allocs=frozenset({"alloc", "other"}))
    layers.found_no_host("cluster", [both, blocked("second", kind="k")], host_changes=layers.host_changes)
    assert skipped(layers) == {"k"}
    assert skipped(layers, other=4.0) == set()


def test_what_is_skipped_is_told_by_its_kind_and_what_makes_no_sense_by_the_version_of_its_row():
    layers = LayerCooldowns(60.0)
    layers.found_no_host(
        "cluster", [blocked("one", kind="k"), blocked("other", kind="k")], host_changes=layers.host_changes
    )
    layers.skip_rows("cluster", {"bad": "7"})
    assert layers.skipped("cluster", {}) == SkippedLayers({"bad": "7"}, ["k"])


def test_a_cooldown_ends_after_its_time():
    clock = Clock()
    layers = LayerCooldowns(20.0, clock)
    layers.found_no_host("cluster", [blocked()], host_changes=layers.host_changes)
    clock.now = 19.9
    assert skipped(layers) == {"layer"}
    clock.now = 20.0
    assert skipped(layers) == set()
    assert layers.skipped("cluster", {}) == SkippedLayers({}, [])


def test_a_layer_is_not_skipped_when_another_pass_took_note_of_a_host_for_it_meanwhile():
    layers = LayerCooldowns(60.0)
    before = layers.host_changes
    layers.hosts_changed(news(host()))
    layers.hosts_changed(news(host(idle_centicores=0)))
    layers.found_no_host("cluster", [blocked("small"), blocked("large", cores=8)], host_changes=before)
    assert skipped(layers) == {"large"}


def test_a_layer_is_not_skipped_when_so_many_hosts_changed_meanwhile_that_nobody_remembers_all():
    layers = LayerCooldowns(60.0)
    before = layers.host_changes
    for _ in range(100):
        layers.hosts_changed(news(host(idle_centicores=0)))
    layers.found_no_host("cluster", [blocked()], host_changes=before)
    assert skipped(layers) == set()


def test_in_a_scan_no_layer_is_looked_at_twice_whatever_changes():
    layers = LayerCooldowns(60.0)
    scan_on(layers, "cluster", {"layer": "1"}, 0)
    layers.hosts_changed(HostNews(everything=True))
    assert skipped(layers) == {"layer"}
    assert skipped(layers, "other") == set()
    assert not end_scan(layers, "cluster", 0)
    assert skipped(layers) == set()


def test_who_was_passed_over_has_a_turn_at_once_if_the_cluster_was_woken_since_the_scan_began():
    clock = Clock()
    layers = LayerCooldowns(20.0, clock)
    assert not end_scan(layers, "cluster", 1)
    scan_on(layers, "cluster", {"one": "1"}, 1)
    scan_on(layers, "cluster", {"other": "1"}, 2)
    assert end_scan(layers, "cluster", 2)
    assert skipped(layers) == set()
    assert not end_scan(layers, "cluster", 3), "the scan is over"
    scan_on(layers, "cluster", {"one": "1"}, 3)
    assert not end_scan(layers, "cluster", 3)
    scan_on(layers, "cluster", {"one": "1"}, 3)
    clock.now += 20.0
    scan_on(layers, "cluster", {"one": "1"}, 4)
    assert not end_scan(layers, "cluster", 4), "nobody went on with the one before"


def test_a_scan_that_nobody_went_on_with_is_over():
    clock = Clock()
    layers = LayerCooldowns(20.0, clock)
    scan_on(layers, "cluster", {"one": "1"}, 0)
    clock.now = 10.0
    scan_on(layers, "cluster", {"other": "1"}, 0)
    clock.now = 29.9
    assert skipped(layers) == {"one", "other"}
    clock.now = 30.0
    assert skipped(layers) == set()


def test_in_a_scan_that_is_longer_than_a_cooldown_nothing_is_woken_but_by_news():
    clock = Clock()
    layers = LayerCooldowns(20.0, clock)
    layers.found_no_host("cluster", [blocked("kept", cores=8)], host_changes=layers.host_changes)
    layers.skip_rows("cluster", {"bad": "1"})
    layers.found_no_host("cluster", [blocked("called")], host_changes=layers.host_changes)
    for clock.now in (15.0, 30.0, 45.0):
        scan_on(layers, "cluster", {"passed": "1"}, 0)
        assert skipped(layers) == {"kept", "called", "bad", "passed"}
    layers.hosts_changed(news(host()))
    assert skipped(layers) == {"kept", "bad", "passed"}
    assert not end_scan(layers, "cluster", 0)
    assert skipped(layers) == set()


def test_a_host_that_has_each_of_two_things_only_with_another_wakes_nobody_who_needs_both():
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked()], host_changes=layers.host_changes)
    layers.hosts_changed(news(host(idle_memory_kb=0), host(id="other", idle_centicores=0)))
    assert skipped(layers) == {"layer"}


def test_a_smaller_host_that_is_all_idle_is_not_hidden_by_a_larger_one_with_more_idle():
    layers = LayerCooldowns(60.0)
    layers.found_no_host("cluster", [blocked(cores=1, part=(0, 0))], host_changes=layers.host_changes)
    layers.hosts_changed(news(host(id="large", idle_centicores=1500)))
    assert skipped(layers) == {"layer"}
    layers.hosts_changed(news(host(id="large", idle_centicores=1500), host(total_centicores=400)))
    assert skipped(layers) == set()


def test_news_end_a_cooldown_as_often_as_they_come():
    layers = LayerCooldowns(20.0, Clock())
    for _ in range(3):
        layers.found_no_host("cluster", [blocked()], host_changes=layers.host_changes)
        assert skipped(layers) == {"layer"}
        layers.hosts_changed(news(host()))
        assert skipped(layers) == set()


def test_nothing_is_kept_of_clusters_that_are_no_more():
    clock = Clock()
    layers = LayerCooldowns(20.0, clock)
    for number in range(100):
        cluster = f"cluster {number}"
        layers.found_no_host(cluster, [blocked()], host_changes=layers.host_changes)
        layers.skip_rows(cluster, {"layer": "1"})
        scan_on(layers, cluster, {"layer": "1"}, 0)
    clock.now = 1000.0
    layers.found_no_host("cluster", [blocked()], host_changes=layers.host_changes)
    assert set(layers._clusters) == {"cluster"}


@pytest.mark.parametrize(
    ("said", "goes_on"),
    [({"hostless": True}, True), ({}, False), ({"hostless": True, "booked": True}, False)],
)
def test_a_scan_goes_on_from_a_pass_that_had_layers_without_a_host_and_booked_nothing(said, goes_on):
    layers = LayerCooldowns(60.0)
    assert end_pass(layers, more=True, **said) == goes_on
    assert not end_pass(layers, **said), "it was the last job"
