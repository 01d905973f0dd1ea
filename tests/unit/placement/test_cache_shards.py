"""The host cache of one instance among which the hosts are divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.shards import bucket_of, buckets
from opencue_sched.placement.host_cache import HostCache, HostGroups
from opencue_sched.settings import HostCacheSettings
from tests.kit.frozen_clock import Clock
from tests.kit.values import take
from tests.unit.placement.cached_farm import DIVISION, HOSTS, Farm, find, ids_of, must_find, read_again

DIVISIONS = [DIVISION, (*DIVISION, "zero"), ()]
SHARDS = ["one", "two", "zero", ""]


def found(cache: HostCache, shard: str) -> set[str]:
    seen: set[str] = set()
    find(cache, shard=shard, accept=lambda host: seen.add(host.id) or False)
    return seen


class TestShards:
    """A cache has the hosts of the shards that it was asked for, and reads no others."""

    def ask(self, cache: HostCache, shard: str, division: tuple[str, ...] = DIVISION) -> int:
        return len(cache.refresh("fac", ["general"], shard, buckets(shard, division)))

    def cache(self, clock: Clock) -> tuple[Farm, HostCache]:
        farm = Farm(*HOSTS)
        return farm, HostCache(HostCacheSettings(), farm.fetch, instance="one", clock=clock)

    def test_only_the_hosts_of_the_shard_are_read_and_found(self, clock: Clock) -> None:
        farm, cache = self.cache(clock)

        self.ask(cache, "one")

        assert set(farm.read_ids[0]) == found(cache, "one") == ids_of("one")
        assert found(cache, "two") == found(cache, "") == set()
        clock.advance(10)
        read_again(cache)
        assert {host_id for ids in farm.read_ids[1:] for host_id in ids} == ids_of("one")

    def test_shards_are_apart(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        self.ask(cache, "one")
        self.ask(cache, "two")
        mine = must_find(cache, shard="one")

        assert cache.take(mine, {"p1": take(8)})

        assert (found(cache, "one"), found(cache, "two")) == (ids_of("one") - {mine.id}, ids_of("two"))
        assert cache.census(HostGroups("fac", ["general"], "two")).kinds[0][1] == len(ids_of("two"))

    def test_changes_of_hosts_of_other_shards_need_not_be_read(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        every = {host.id for host in HOSTS}
        assert cache.reaches(every) == set()
        self.ask(cache, "one")
        assert cache.reaches(every) == ids_of("one")
        self.ask(cache, "two")
        assert cache.reaches(every) == every

    def test_a_shard_that_grew_or_shrank_is_read_again(self, clock: Clock) -> None:
        farm, cache = self.cache(clock)
        three = (*DIVISION, "zero")
        self.ask(cache, "one", three)
        assert found(cache, "one") == ids_of("one", three)

        self.ask(cache, "one", DIVISION)
        assert found(cache, "one") == ids_of("one") > ids_of("one", three)
        assert set(farm.read_ids[1]) == ids_of("one")

        self.ask(cache, "one", three)
        assert found(cache, "one") == ids_of("one", three)

    def test_when_the_farm_is_divided_anew_the_shards_that_are_gone_are_dropped(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        self.ask(cache, "", ())
        self.ask(cache, "one")
        assert found(cache, "") == {host.id for host in HOSTS}

        cache.keep_shards(DIVISION)

        assert found(cache, "") == set()
        assert found(cache, "one") == ids_of("one")

    def test_the_hosts_of_a_shard_of_another_instance_are_kept_for_a_minute(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        self.ask(cache, "one")
        self.ask(cache, "two")

        clock.advance(61)
        cache.evict_idle_groups()

        assert (found(cache, "one"), found(cache, "two")) == (ids_of("one"), set())
        assert len(cache) == len(ids_of("one"))

    @given(st.lists(st.tuples(st.sampled_from(SHARDS), st.sampled_from(DIVISIONS)), max_size=8))
    def test_whatever_is_asked_for_in_whatever_order_is_there(self, asked: list[tuple[str, tuple[str, ...]]]) -> None:
        clock = Clock()
        _, cache = self.cache(clock)
        for shard, division in asked:
            self.ask(cache, shard, division)
            clock.advance(4)
            cache.reread()
            expected = {host.id for host in HOSTS if bucket_of(host.id) in buckets(shard, division)}
            assert found(cache, shard) == expected
