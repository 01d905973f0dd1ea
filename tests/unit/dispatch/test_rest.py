"""A layer that found no host rests until a host changes in a way that could make a difference to it."""

from __future__ import annotations

import pytest

from opencue_sched.dispatch.rest import HostNews, LayerRest, Resting
from opencue_sched.domain.farm import Host
from opencue_sched.domain.reservation import Need
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.planner import Blocked
from opencue_sched.placement.searches import Search

GIB = 1024 * 1024


def blocked(layer: str = "layer", *, tags=("general",), os_name=None, threadable=True, **need: int) -> Blocked:
    wants = Need(**{"cores": 4, "memory_kb": 8 * GIB, "gpus": 0, "gpu_memory_kb": 0, **need})
    search = Search(tags, os_name, wants, threadable, 400, 0)
    return Blocked(LayerVerdict("job", layer, Verdict.CAPACITY, 0, 3), search, "1", frozenset({"alloc"}))


def looked_at(layer: str = "layer") -> Resting:
    return Resting(blocked(layer).verdict, "1")


def resting(rest: LayerRest, cluster: str = "cluster", **room: float) -> set[str]:
    """What rests when the show has cores left in the allocation of the hosts that were looked at, and in these."""
    return set(rest.resting(cluster, {"alloc": 100.0, **room}))


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
    ],
)
def test_a_layer_is_roused_by_a_host_that_has_what_it_needs(layer, freed):
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked(**layer)], roused=rest.roused)
    assert resting(rest) == {"layer"}
    rest.hosts_changed(news(host(**freed)))
    assert resting(rest) == set()


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
    ],
)
def test_a_layer_goes_on_resting_when_no_host_that_changed_could_do(layer, freed):
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked(**layer)], roused=rest.roused)
    rest.hosts_changed(news(host(**freed)))
    assert resting(rest) == {"layer"}


def test_every_layer_but_one_that_no_host_can_help_is_roused_when_any_host_may_have_changed():
    rest = LayerRest(60.0)
    bad_row = Blocked(LayerVerdict("job", "bad", Verdict.FAILED, 0, 3), None)
    rest.rest("cluster", [blocked(cores=64), bad_row], roused=rest.roused)
    rest.hosts_changed(HostNews(everything=True))
    assert resting(rest) == {"bad"}


def test_a_layer_is_roused_when_an_allocation_has_cores_for_it_that_had_none():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked("small"), blocked("large", cores=8)], roused=rest.roused)
    assert resting(rest, full=3.0) == {"small", "large"}
    assert resting(rest, full=4.0) == {"large"}
    assert resting(rest) == {"large"}
    assert resting(rest, full=8.0) == set()


def test_room_in_an_allocation_that_was_looked_at_is_no_news():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked()], roused=rest.roused)
    assert rest.resting("cluster", {"alloc": 0.0}).keys() == {"layer"}
    assert resting(rest) == {"layer"}


def test_what_rests_is_told_with_the_version_of_its_row():
    rest = LayerRest(60.0)
    bad_row = Blocked(LayerVerdict("job", "bad", Verdict.FAILED, 0, 3), None, "7")
    rest.rest("cluster", [blocked(), bad_row], roused=rest.roused)
    assert {layer: it.version for layer, it in rest.resting("cluster", {}).items()} == {"layer": "1", "bad": "7"}


def test_a_rest_ends_after_its_time():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    rest.rest("cluster", [blocked()], roused=rest.roused)
    clock.now = 19.9
    assert resting(rest) == {"layer"}
    clock.now = 20.0
    assert resting(rest) == set()
    assert rest._resting == {}


def test_a_layer_does_not_rest_when_another_pass_took_note_of_a_host_for_it_meanwhile():
    rest = LayerRest(60.0)
    before = rest.roused
    rest.hosts_changed(news(host()))
    rest.hosts_changed(news(host(idle_centicores=0)))
    rest.rest("cluster", [blocked("small"), blocked("large", cores=8)], roused=before)
    assert resting(rest) == {"large"}


def test_a_layer_does_not_rest_when_so_many_hosts_changed_meanwhile_that_nobody_remembers_all():
    rest = LayerRest(60.0)
    before = rest.roused
    for _ in range(100):
        rest.hosts_changed(news(host(idle_centicores=0)))
    rest.rest("cluster", [blocked()], roused=before)
    assert resting(rest) == set()


def test_on_a_walk_no_layer_is_looked_at_twice_whatever_changes():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked()], roused=rest.roused)
    rest.walk_on("cluster", [looked_at()])
    rest.hosts_changed(HostNews(everything=True))
    assert resting(rest) == {"layer"}
    assert resting(rest, "other") == set()
    rest.walk_ends("cluster")
    assert resting(rest) == set()


def test_a_walk_that_nobody_went_on_with_is_over():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    rest.walk_on("cluster", [looked_at("one")])
    clock.now = 10.0
    rest.walk_on("cluster", [looked_at("other")])
    clock.now = 29.9
    assert resting(rest) == {"one", "other"}
    clock.now = 30.0
    assert resting(rest) == set()


def test_only_layers_that_lose_their_frames_twice_in_a_row_have_lost_them_before():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    assert rest.lost_before("cluster", {"a", "b"}) == set()
    assert rest.lost_before("other", {"a"}) == set()
    assert rest.lost_before("cluster", {"b", "c"}) == {"b"}
    assert rest.lost_before("cluster", set()) == set()
    assert rest.lost_before("cluster", {"b"}) == set()
    clock.now = 20.0
    assert rest.lost_before("cluster", {"b"}) == set()
