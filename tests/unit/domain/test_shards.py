"""Shards: a partition of the hosts that everybody agrees on, and of which little moves when an instance goes."""

from __future__ import annotations

import uuid
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.shards import ALL_BUCKETS, HOSTS_PER_SHARD, bucket_of, buckets, divide, shard_of, shards

names = st.sets(st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True), min_size=2, max_size=8)
host_ids = st.one_of(st.uuids().map(str), st.text("0123456789abcdef-", min_size=1, max_size=36))
MANY = 1000 * HOSTS_PER_SHARD


@given(names, host_ids)
def test_every_host_has_exactly_one_owner(instances, host_id):
    division = divide(instances, MANY)
    owners = [shard for shard in shards(division) if bucket_of(host_id) in buckets(shard, division)]
    assert owners == [shard_of(host_id, division)]


@given(names)
def test_the_shards_have_all_buckets_between_them(instances):
    division = divide(instances, MANY)
    counted = Counter(bucket for shard in shards(division) for bucket in buckets(shard, division))
    assert counted == Counter(ALL_BUCKETS)


@given(names, st.data())
def test_when_an_instance_goes_only_its_own_hosts_move(instances, data):
    gone = data.draw(st.sampled_from(sorted(instances)))
    before, after = tuple(sorted(instances)), tuple(sorted(instances - {gone}))
    for number in range(40):
        owner = shard_of(f"host-{number}", before)
        assert owner == gone or shard_of(f"host-{number}", after or (owner,)) == owner


@given(names, st.data())
def test_a_shard_that_has_gone_or_is_to_come_has_the_hosts_that_it_has_with_the_others(instances, data):
    gone = data.draw(st.sampled_from(sorted(instances)))
    division, left = tuple(sorted(instances)), tuple(sorted(instances - {gone}))
    assert buckets(gone, left) == buckets(gone, division)


@given(names, st.integers(0, 20 * HOSTS_PER_SHARD))
def test_no_shard_is_small_and_a_farm_is_divided_among_two_or_not_at_all(instances, hosts):
    division = divide(instances, hosts)
    assert len(division) != 1
    assert len(division) * HOSTS_PER_SHARD <= hosts
    assert set(division) <= instances
    if hosts >= HOSTS_PER_SHARD * len(instances):
        assert set(division) == instances


def test_a_farm_of_one_worker_is_one_shard_of_all_hosts():
    assert divide({"a"}, MANY) == divide(set(), MANY) == divide({"a", "b"}, 2 * HOSTS_PER_SHARD - 1) == ()
    assert shards(()) == ("",)
    assert buckets("", ()) == buckets("", ("a", "b")) == ALL_BUCKETS
    assert shard_of("host", ()) == ""


def test_hosts_spread_over_the_shards():
    division = ("a", "b", "c", "d")
    counted = Counter(shard_of(str(uuid.UUID(int=number)), division) for number in range(4000))
    assert min(counted.values()) > 600
