"""A layer that found no host rests until a host changes in a way that could make a difference to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opencue_sched.dispatch.cooldown import PASSES_BEFORE_A_TURN, PAUSE_SECONDS, HostNews, LayerRest, Resting
from opencue_sched.domain.cluster import LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, ThreadMode
from opencue_sched.domain.reservation import Need
from opencue_sched.placement.planner import Search, UnschedulableLayer
from opencue_sched.store.pending import LeftOut

GIB = 1024 * 1024


def blocked(
    layer: str = "layer", *, tags=("general",), os_name=None, threadable=True, kind="", part=(400, 0), **need: int
) -> UnschedulableLayer:
    """``part``: the layer's own least and most centicores, which say more than the cores it needs anywhere."""
    wants = Need(**{"cores": 4, "memory_kb": 8 * GIB, "gpus": 0, "gpu_memory_kb": 0, **need})
    search = Search(tags, os_name, wants, threadable, *part)
    verdict = LayerVerdict("job", layer, Verdict.CAPACITY, 0, 3)
    return UnschedulableLayer(verdict, search, kind or repr(search), frozenset({"alloc"}))


def looked_at(layer: str = "layer") -> Resting:
    return Resting(blocked(layer).verdict, "1")


def resting(rest: LayerRest, cluster: str = "cluster", **room: float) -> set[str]:
    """What rests when the show has cores left in the allocation of the hosts that were looked at, and in these."""
    return set(rest.aside(cluster, {"alloc": 100.0, **room}).verdicts)


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
        ({"cores": 1, "part": (0, 0)}, {"idle_centicores": 1600}),
        ({"cores": 1, "part": (-1200, 0)}, {}),
        ({"cores": 1, "part": (0, 400)}, {}),
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
        ({"cores": 1, "part": (0, 0)}, {"idle_centicores": 1500}),
        ({"cores": 1, "part": (-1100, 0)}, {}),
        ({"cores": 1, "part": (-1600, 0)}, {"idle_centicores": 1600}),
        ({"cores": 1, "part": (0, 500)}, {}),
        ({"cores": 1, "part": (100, 0)}, {"idle_centicores": 100, "thread_mode": ThreadMode.VARIABLE}),
    ],
)
def test_a_layer_goes_on_resting_when_no_host_that_changed_could_do(layer, freed):
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked(**layer)], roused=rest.roused)
    rest.hosts_changed(news(host(**freed)))
    assert resting(rest) == {"layer"}


def test_every_layer_but_one_that_no_host_can_help_is_roused_when_any_host_may_have_changed():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked(cores=64)], roused=rest.roused)
    rest.rest_rows("cluster", [Resting(LayerVerdict("job", "bad", Verdict.FAILED, 0, 3), "7")])
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
    assert rest.aside("cluster", {"alloc": 0.0}).verdicts.keys() == {"layer"}
    assert resting(rest) == {"layer"}


def test_of_a_kind_only_what_each_of_its_layers_was_looked_up_in_counts_as_looked_at():
    rest = LayerRest(60.0)
    both = replace(blocked("first", kind="k"), open_allocs=frozenset({"alloc", "other"}))
    rest.rest("cluster", [both, blocked("second", kind="k")], roused=rest.roused)
    assert resting(rest) == {"first", "second"}
    assert resting(rest, other=4.0) == set()


def test_what_rests_is_told_by_its_kind_and_what_makes_no_sense_by_the_version_of_its_row():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked("one", kind="k"), blocked("other", kind="k")], roused=rest.roused)
    rest.rest_rows("cluster", [Resting(LayerVerdict("job", "bad", Verdict.FAILED, 0, 3), "7")])
    aside = rest.aside("cluster", {})
    assert aside.left_out == LeftOut({"bad": "7"}, ["k"])
    assert aside.verdicts.keys() == {"one", "other", "bad"}


def test_a_rest_ends_after_its_time():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    rest.rest("cluster", [blocked()], roused=rest.roused)
    clock.now = 19.9
    assert resting(rest) == {"layer"}
    clock.now = 20.0
    assert resting(rest) == set()
    assert rest.aside("cluster", {}).left_out == LeftOut({}, [])


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
    rest.walk_on("cluster", [looked_at()], 0)
    rest.hosts_changed(HostNews(everything=True))
    assert resting(rest) == {"layer"}
    assert resting(rest, "other") == set()
    assert not rest.walk_ends("cluster", 0)
    assert resting(rest) == set()


def test_who_was_passed_over_has_a_turn_at_once_if_the_cluster_was_woken_since_the_walk_began():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    assert not rest.walk_ends("cluster", 1)
    rest.walk_on("cluster", [looked_at("one")], 1)
    rest.walk_on("cluster", [looked_at("other")], 2)
    assert rest.walk_ends("cluster", 2)
    assert resting(rest) == set()
    assert not rest.walk_ends("cluster", 3), "the walk is over"
    rest.walk_on("cluster", [looked_at("one")], 3)
    assert not rest.walk_ends("cluster", 3)
    rest.walk_on("cluster", [looked_at("one")], 3)
    clock.now += 20.0
    rest.walk_on("cluster", [looked_at("one")], 4)
    assert not rest.walk_ends("cluster", 4), "nobody went on with the one before"


def test_a_walk_that_nobody_went_on_with_is_over():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    rest.walk_on("cluster", [looked_at("one")], 0)
    clock.now = 10.0
    rest.walk_on("cluster", [looked_at("other")], 0)
    clock.now = 29.9
    assert resting(rest) == {"one", "other"}
    clock.now = 30.0
    assert resting(rest) == set()


def test_on_a_walk_that_is_longer_than_a_rest_nothing_is_roused_but_by_news():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    rest.rest("cluster", [blocked("kept", cores=8)], roused=rest.roused)
    rest.rest_rows("cluster", [looked_at("bad")])
    for _ in range(2):
        rest.rest("cluster", [blocked("called")], roused=rest.roused)
    for clock.now in (15.0, 30.0, 45.0):
        rest.walk_on("cluster", [looked_at("passed")], 0)
        assert resting(rest) == {"kept", "called", "bad", "passed"}
    rest.hosts_changed(news(host()))
    assert resting(rest) == {"kept", "bad", "passed"}
    assert not rest.walk_ends("cluster", 0)
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


def test_a_host_that_has_each_of_two_things_only_with_another_rouses_nobody_who_needs_both():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked()], roused=rest.roused)
    rest.hosts_changed(news(host(idle_memory_kb=0), host(id="other", idle_centicores=0)))
    assert resting(rest) == {"layer"}


def test_what_is_looked_at_in_vain_again_is_left_alone_for_a_moment_and_its_news_are_remembered():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    for _ in range(2):
        rest.rest("cluster", [blocked()], roused=rest.roused)
        assert rest.look_again("cluster") is None
        rest.hosts_changed(news(host()))
    assert resting(rest) == {"layer"}
    assert rest.look_again("cluster") == PAUSE_SECONDS
    clock.now = PAUSE_SECONDS
    assert resting(rest) == set()


def test_news_that_came_while_it_was_looked_at_in_vain_again_are_remembered_to_the_end_of_its_pause():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    for _ in range(2):
        before = rest.roused
        rest.hosts_changed(news(host()))
        rest.rest("cluster", [blocked()], roused=before)
    assert resting(rest) == {"layer"}
    clock.now = PAUSE_SECONDS
    assert resting(rest) == set()


def test_pauses_are_of_one_length_and_none_follows_a_look_in_vain_after_a_placement_or_a_long_time():
    clock = Clock()
    rest = LayerRest(20.0, clock)

    def pauses(looks: int) -> list[float | None]:
        found = []
        for _ in range(looks):
            rest.rest("cluster", [blocked(kind="k")], roused=rest.roused)
            rest.hosts_changed(news(host()))
            left = rest.look_again("cluster")
            found.append(left if left is None else round(left, 6))
            clock.now += left or 0.0
        return found

    assert pauses(4) == [None, *3 * [PAUSE_SECONDS]]
    rest.rest("cluster", [], roused=rest.roused, placed={"k"})
    assert pauses(2) == [None, PAUSE_SECONDS]
    clock.now += 20.0
    assert pauses(2) == [None, PAUSE_SECONDS]


def test_a_smaller_host_that_is_all_idle_is_not_hidden_by_a_larger_one_with_more_idle():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked(cores=1, part=(0, 0))], roused=rest.roused)
    rest.hosts_changed(news(host(id="large", idle_centicores=1500)))
    assert resting(rest) == {"layer"}
    rest.hosts_changed(news(host(id="large", idle_centicores=1500), host(total_centicores=400)))
    assert resting(rest) == set()


def test_a_kind_for_which_there_was_a_host_in_the_plan_after_all_is_roused_and_was_not_looked_at_in_vain():
    rest = LayerRest(60.0)
    for _ in range(3):
        rest.rest("cluster", [blocked("small", kind="s"), blocked("large", kind="l", cores=8)], roused=rest.roused)
        rest.rest("other", [blocked(kind="s")], roused=rest.roused)
        assert rest.given_back("cluster", []) == set()
        assert rest.given_back("nowhere", [host()]) == set()
        assert rest.given_back("cluster", [host()]) == {"s"}
        assert resting(rest) == {"large"}
        assert resting(rest, "other") == {"layer"}
    # without a pause before the next look
    rest.rest("cluster", [blocked("small", kind="s")], roused=rest.roused)
    rest.hosts_changed(news(host()))
    assert resting(rest) == {"large"}


def test_nothing_is_kept_of_clusters_that_are_no_more():
    clock = Clock()
    rest = LayerRest(20.0, clock)
    for number in range(100):
        cluster = f"cluster {number}"
        rest.rest(cluster, [blocked()], roused=rest.roused)
        rest.rest_rows(cluster, [looked_at()])
        rest.walk_on(cluster, [looked_at()], 0)
        rest.lost_before(cluster, {"a"})
    clock.now = 1000.0
    rest.rest("cluster", [blocked()], roused=rest.roused)
    assert set(rest._clusters) == {"cluster"}


def look_in_vain(rest: LayerRest, *, crowded: bool = True, passes: int = 1) -> None:
    """Passes that place a frame of the kind, have no host left for a second layer of it, and find a third one over a
    cap."""
    for _ in range(passes):
        rest.rest("cluster", [blocked(kind="kind")], roused=rest.roused, placed={"kind"})
        rest.count_pass("cluster", [blocked(kind="kind")], [looked_at("capped")], full=crowded)
        rest.hosts_changed(news(host()))


def test_of_full_passes_in_a_row_one_leaves_out_what_was_looked_at_in_vain():
    rest = LayerRest(60.0)
    look_in_vain(rest, passes=PASSES_BEFORE_A_TURN - 1)
    assert resting(rest) == set()
    look_in_vain(rest)
    aside = rest.aside("cluster", {})
    assert aside.left_out == LeftOut({"capped": "1"}, ["kind"])
    assert aside.verdicts.keys() == {"layer", "capped"}
    # and the cluster does not go to sleep on that
    assert rest.look_again("cluster") == 0.001
    assert rest.look_again("cluster") is None
    assert resting(rest) == set()
    # nor has anybody another turn right after it
    look_in_vain(rest, passes=PASSES_BEFORE_A_TURN - 1)
    assert resting(rest) == set()


@pytest.mark.parametrize("part", ["kinds", "rows"])
def test_passes_in_which_one_thing_was_in_vain_count_and_those_in_which_nothing_was_do_not(part):
    rest = LayerRest(60.0)
    in_vain = ([blocked(kind="kind")], []) if part == "kinds" else ([], [looked_at()])
    for passes in (PASSES_BEFORE_A_TURN - 1, PASSES_BEFORE_A_TURN):
        for _ in range(passes):
            rest.count_pass("cluster", *in_vain, full=True)
        assert resting(rest) == (set() if passes < PASSES_BEFORE_A_TURN else {"layer"})
        rest.count_pass("cluster", [], [], full=True)
    assert rest.look_again("cluster") == 0.001


def test_a_turn_that_leaves_out_nothing_but_what_is_left_out_anyway_wakes_nobody():
    rest = LayerRest(60.0)
    rest.rest("cluster", [blocked("other", kind="kind")], roused=rest.roused)
    rest.walk_on("cluster", [looked_at()], 0)
    for _ in range(PASSES_BEFORE_A_TURN):
        rest.count_pass("cluster", [blocked("other", kind="kind")], [looked_at()], full=True)
    assert resting(rest) == {"layer", "other"}
    assert rest.look_again("cluster") is None


def test_nobody_has_a_turn_where_a_pass_looks_at_every_job():
    rest = LayerRest(60.0)
    for crowded in (True, True, True, False, True, True, True):
        look_in_vain(rest, crowded=crowded)
        assert resting(rest) == set()


def test_a_turn_that_nobody_took_at_once_is_over():
    clock = Clock()
    rest = LayerRest(60.0, clock)
    look_in_vain(rest, passes=PASSES_BEFORE_A_TURN)
    clock.now = 1.0
    assert resting(rest) == set()
    assert rest.look_again("cluster") is None
