"""Host groups: who belongs where, and one order over several of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.farm import Host
from opencue_sched.placement.host_groups import HostClass, HostGroups
from opencue_sched.placement.policy import Fit, Strategy
from tests.unit.placement.values import GIB, make_host, make_need

TAGS = ["a", "b", "c"]


def groups_of(*hosts: Host, tags: tuple[str, ...] = tuple(TAGS)) -> HostGroups:
    groups = HostGroups(memory_key_divisor_kb=2 * GIB, instance="one")
    for tag in tags:
        groups.open(("fac", tag))
    for host in hosts:
        groups.put(host)
    return groups


def found(groups: HostGroups, *tags: str, allocs: set[str] | None = None, cores: int = 1) -> list[str]:
    hosts = groups.candidates("fac", tags, make_need(cores), Strategy(), allocs)
    return [host.id for host in hosts]


@given(
    rows=st.lists(
        st.tuples(st.sets(st.sampled_from(TAGS)), st.sampled_from(["x", "y"]), st.integers(0, 6), st.integers(0, 8)),
        max_size=20,
    ),
    tags=st.sets(st.sampled_from(TAGS), min_size=1),
    allocs=st.none() | st.sets(st.sampled_from(["x", "y"])),
    strategy=st.sampled_from([Strategy(cores, memory) for cores, memory in product(Fit, Fit)]),
)
def test_several_groups_give_each_host_once_in_one_order(
    rows: list[tuple[set[str], str, int, int]], tags: set[str], allocs: set[str] | None, strategy: Strategy
) -> None:
    hosts = [
        make_host(f"h{number}", idle_centicores=cores * 100, memory_gib=gib, tags=frozenset(own), alloc_id=alloc)
        for number, (own, alloc, cores, gib) in enumerate(rows)
    ]
    need = make_need(2, memory_gib=3)
    in_one_group = [replace(host, tags=frozenset({"a"}), alloc_id="x") for host in hosts]
    expected_order = [host.id for host in groups_of(*in_one_group).candidates("fac", ["a"], need, strategy)]
    wanted = {host.id for host in hosts if host.tags & tags and (allocs is None or host.alloc_id in allocs)}

    ids = [host.id for host in groups_of(*hosts).candidates("fac", sorted(tags), need, strategy, allocs)]

    assert ids == [host_id for host_id in expected_order if host_id in wanted]


def test_a_host_joins_the_groups_of_its_tags_that_are_open() -> None:
    groups = groups_of(make_host("h1", tags=frozenset({"a", "z"})), tags=("a", "b"))

    assert found(groups, "a") == ["h1"]
    assert found(groups, "b") == []
    assert found(groups, "z") == []


def test_a_group_opened_later_takes_in_the_hosts_already_known() -> None:
    groups = groups_of(make_host("h1", tags=frozenset({"a", "b"})), tags=("a",))

    groups.open(("fac", "b"))

    assert found(groups, "b") == ["h1"]


def test_a_host_of_another_facility_is_not_found() -> None:
    groups = groups_of(tags=("a",))
    groups.put(make_host("h1", tags=frozenset({"a"}), facility_id="elsewhere"))

    assert found(groups, "a") == []
    assert len(groups) == 0


def test_a_host_that_lost_a_tag_or_moved_leaves_nothing_behind() -> None:
    # given a host in two groups
    groups = groups_of(make_host("h1", tags=frozenset({"a", "b"}), alloc_id="x"))

    # when it loses a tag and moves to another allocation
    groups.put(make_host("h1", tags=frozenset({"b"}), alloc_id="y"))

    # then it is only where it belongs now
    assert found(groups, "a") == []
    assert found(groups, "b", allocs={"x"}) == []
    assert found(groups, "b", allocs={"y"}) == ["h1"]
    assert groups.members(("fac", "a")) == []
    census = groups.census("fac", ["a", "b"], make_need(1), None)
    assert [host_class.alloc_id for host_class in census.host_classes] == ["y"]


def test_a_host_that_was_rebuilt_is_surveyed_as_it_is_now() -> None:
    groups = groups_of(make_host("h1", cores=8, tags=frozenset({"a"})))
    rebuilt = make_host("h1", cores=16, tags=frozenset({"a"}))

    groups.put(rebuilt)

    assert groups.census("fac", ["a"], make_need(1), None).host_classes == {HostClass.of(rebuilt): 1}


def test_a_hidden_host_is_known_but_not_bookable() -> None:
    host = make_host("h1", tags=frozenset({"a"}))
    groups = groups_of(host)

    groups.hide("h1")

    assert found(groups, "a") == []
    assert groups.get("h1") == host
    census = groups.census("fac", ["a"], make_need(1), None)
    assert census.host_classes == {HostClass.of(host): 1}
    assert census.roomiest is None
    groups.put(host)
    assert found(groups, "a") == ["h1"]


def test_a_hidden_host_stays_hidden_in_a_group_opened_meanwhile() -> None:
    host = make_host("h1", tags=frozenset({"a", "b"}))
    groups = groups_of(host, tags=("a",))
    groups.hide("h1")

    groups.open(("fac", "b"))

    assert found(groups, "b") == []
    groups.put(host)
    assert found(groups, "b") == ["h1"]


def test_closing_a_group_forgets_the_hosts_that_are_in_no_other() -> None:
    groups = groups_of(make_host("h1", tags=frozenset({"a"})), make_host("h2", tags=frozenset({"a", "b"})))

    groups.close(("fac", "a"))

    assert groups.get("h1") is None
    assert groups.get("h2") is not None
    assert found(groups, "b") == ["h2"]
    assert len(groups) == 1


def test_a_survey_counts_a_host_with_two_of_the_tags_once() -> None:
    host = make_host("h1", tags=frozenset({"a", "b"}))
    groups = groups_of(host, make_host("h2", tags=frozenset({"b"})))

    assert groups.census("fac", ["a", "b"], make_need(1), None).host_classes == {HostClass.of(host): 2}


def test_a_survey_names_the_host_that_comes_closest() -> None:
    groups = groups_of(
        make_host("cores", cores=16, memory_gib=8, tags=frozenset({"a"})),
        make_host("memory", cores=8, memory_gib=64, tags=frozenset({"b"})),
    )

    short_of_memory = groups.census("fac", ["a", "b"], make_need(8, memory_gib=128), None).roomiest
    short_of_cores = groups.census("fac", ["a", "b"], make_need(32, memory_gib=1), None).roomiest

    assert short_of_memory is not None
    assert short_of_memory.id == "memory"
    assert short_of_cores is not None
    assert short_of_cores.id == "cores"
