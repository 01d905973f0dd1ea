"""Rendezvous hashing: everybody agrees, and little moves when an instance comes or goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.shards import rendezvous

names = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True), min_size=1, max_size=8, unique=True)


@given(instances=names, key=st.text(max_size=20))
def test_the_choice_depends_on_nothing_but_the_set(instances, key):
    assert rendezvous(key, instances) == rendezvous(key, list(reversed(instances)))
    assert rendezvous(key, instances) in instances


@given(instances=names, keys=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30, unique=True))
def test_when_an_instance_goes_only_its_own_keys_move(instances, keys):
    gone, left = instances[0], instances[1:]
    for key in keys:
        before = rendezvous(key, instances)
        if before != gone:
            assert rendezvous(key, left) == before


def test_keys_spread_over_the_instances():
    chosen = [rendezvous(f"alloc-{number}", ["a", "b", "c", "d"]) for number in range(400)]
    assert min(chosen.count(name) for name in "abcd") > 60


def test_nobody_is_chosen_from_nobody():
    assert rendezvous("key", []) is None
