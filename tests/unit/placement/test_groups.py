"""Host groups: who belongs where, and one order over several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.placement.host_cache import HostCache, HostGroups, HostOrder
from opencue_sched.settings import HostBookingStrategy, HostCacheSettings
from tests.kit.values import make_host, make_need

TAGS = ["a", "b", "c"]


def groups_of(*hosts: Host, tags: tuple[str, ...] = tuple(TAGS)) -> HostCache:
    """A cache of these hosts with the groups of ``tags``."""
    cache = HostCache(HostCacheSettings(), lambda *_: hosts, instance="one", clock=lambda: 0.0)
    cache.refresh("fac", tags)
    return cache


def put(cache: HostCache, host: Host) -> None:
    cache.apply([host], [], read_at=cache.instant())


def found(cache: HostCache, *tags: str, allocs: set[str] | None = None, cores: int = 1) -> list[str]:
    return candidates(cache, tags, make_need(cores), HostBookingStrategy(), allocs)


def candidates(
    cache: HostCache,
    tags: Sequence[str],
    need: Resources,
    strategy: HostBookingStrategy,
    allocs: set[str] | None = None,
) -> list[str]:
    """Every host in the order in which a search looks at them."""
    seen: list[str] = []

    def look(host: Host) -> bool:
        seen.append(host.id)
        return False

    cache.find(HostGroups("fac", tags), need, HostOrder(strategy), look, allocs=allocs)
    return seen


@given(
    rows=st.lists(
        st.tuples(st.sets(st.sampled_from(TAGS)), st.sampled_from(["x", "y"]), st.integers(0, 6), st.integers(0, 8)),
        max_size=20,
    ),
    tags=st.sets(st.sampled_from(TAGS), min_size=1),
    allocs=st.none() | st.sets(st.sampled_from(["x", "y"])),
    strategy=st.builds(HostBookingStrategy, core_saturation=st.booleans(), memory_saturation=st.booleans()),
)
def test_several_groups_give_each_host_once_in_one_order(
    rows: list[tuple[set[str], str, int, int]], tags: set[str], allocs: set[str] | None, strategy: HostBookingStrategy
) -> None:
    hosts = [
        make_host(f"h{number}", idle_centicores=cores * 100, memory_gib=gib, tags=frozenset(own), alloc_id=alloc)
        for number, (own, alloc, cores, gib) in enumerate(rows)
    ]
    need = make_need(2, memory_gib=3)
    in_one_group = [replace(host, tags=frozenset({"a"}), alloc_id="x") for host in hosts]
    expected_order = candidates(groups_of(*in_one_group), ["a"], need, strategy)
    wanted = {host.id for host in hosts if host.tags & tags and (allocs is None or host.alloc_id in allocs)}

    ids = candidates(groups_of(*hosts), sorted(tags), need, strategy, allocs)

    assert ids == [host_id for host_id in expected_order if host_id in wanted]
    assert groups_of(*hosts).has_idle(HostGroups("fac", sorted(tags)), need, allocs=allocs) is bool(ids)


def test_a_host_joins_the_groups_of_its_tags_that_are_open() -> None:
    groups = groups_of(make_host("h1", tags=frozenset({"a", "z"})), tags=("a", "b"))

    assert found(groups, "a") == ["h1"]
    assert found(groups, "b") == []
    assert found(groups, "z") == []


def test_a_group_opened_later_takes_in_the_hosts_already_known() -> None:
    groups = groups_of(make_host("h1", tags=frozenset({"a", "b"})), tags=("a",))

    groups.refresh("fac", ["b"])

    assert found(groups, "b") == ["h1"]


def test_a_host_of_another_facility_is_not_found() -> None:
    groups = groups_of(tags=("a",))
    put(groups, make_host("h1", tags=frozenset({"a"}), facility_id="elsewhere"))

    assert found(groups, "a") == []
    assert len(groups) == 0


def test_a_host_that_lost_a_tag_or_moved_leaves_nothing_behind() -> None:
    # given a host in two groups
    groups = groups_of(make_host("h1", tags=frozenset({"a", "b"}), alloc_id="x"))

    # when it loses a tag and moves to another allocation
    put(groups, make_host("h1", tags=frozenset({"b"}), alloc_id="y"))

    # then it is only where it belongs now
    assert found(groups, "a") == []
    assert found(groups, "b", allocs={"x"}) == []
    assert found(groups, "b", allocs={"y"}) == ["h1"]
    assert not groups.census(HostGroups("fac", ["a"])).kinds
    census = groups.census(HostGroups("fac", ["a", "b"]))
    assert [host.alloc_id for host, _ in census.kinds] == ["y"]


def test_a_host_that_was_rebuilt_is_surveyed_as_it_is_now() -> None:
    groups = groups_of(make_host("h1", cores=8, tags=frozenset({"a"})))
    rebuilt = make_host("h1", cores=16, tags=frozenset({"a"}))

    put(groups, rebuilt)

    assert groups.census(HostGroups("fac", ["a"])).kinds == [(rebuilt, 1)]


def test_a_survey_counts_a_host_with_two_of_the_tags_once() -> None:
    host = make_host("h1", tags=frozenset({"a", "b"}))
    groups = groups_of(host, make_host("h2", tags=frozenset({"b"})))

    ((kind, count),) = groups.census(HostGroups("fac", ["a", "b"])).kinds
    assert (kind.total_cores, count) == (host.total_cores, 2)
