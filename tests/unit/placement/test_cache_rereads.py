"""The background rereads of the host cache: which hosts, in which portions, and how often."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.hosts import Host
from opencue_sched.domain.shards import buckets
from opencue_sched.placement.host_cache import (
    FIRST_READ_HOSTS,
    HOSTS_PER_REREAD,
    REREAD_SECONDS,
    REREADS_PER_SECOND,
    HostCache,
    HostGroups,
    HostOrder,
)
from opencue_sched.settings import HostCacheSettings
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_host, make_need
from tests.unit.placement.cached_farm import DIVISION, HOSTS, Farm, idle_cores, ids_of, make_cache, read_again


def many_hosts(count: int) -> list[Host]:
    return [make_host(f"h{number}") for number in range(count)]


class TestReadingAgain:
    """In the background, so that no pass waits for it."""

    def test_hosts_are_read_again_when_it_is_time_to(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"), make_host("h2", cores=8))
        cache = make_cache(farm, clock)
        farm.book("h2", 3)

        clock.advance(9)
        assert (read_again(cache), cache.reread().pause) == ([], 1)
        assert len(farm.queries) == 1

        clock.advance(1)
        assert [host.id for host in read_again(cache)] == ["h2"]
        assert idle_cores(cache, "h2") == 5
        assert read_again(cache) == []
        assert 0 < cache.reread().pause <= 10

    def test_new_hosts_are_taken_in_and_those_that_left_are_forgotten(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"))
        cache = make_cache(farm, clock)
        del farm.hosts["h1"]
        farm.hosts["h2"] = make_host("h2")

        clock.advance(10)
        read_again(cache)

        assert idle_cores(cache, "h1") is None
        assert idle_cores(cache, "h2") == 8
        assert len(cache) == 1

    def test_the_hosts_of_all_groups_are_read_together(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"), make_host("h2", tags=frozenset({"other"})))
        cache = make_cache(farm, clock)
        cache.refresh("fac", ["other"])

        clock.advance(10)
        farm.read_ids.clear()
        read_again(cache)

        assert sorted(host_id for ids in farm.read_ids for host_id in ids) == ["h1", "h2"]

    def test_when_anything_may_have_changed_all_is_read_again_at_once(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        farm.book("h1", 3)

        cache.expire()

        assert [host.idle_cores for host in read_again(cache)] == [5]
        queries = len(farm.queries)
        assert read_again(cache) == []
        assert len(farm.queries) == queries

    def test_what_is_being_read_as_all_is_to_be_read_again_is_read_once_more(self, clock: Clock) -> None:
        # Given a portion that is read as a host changes and nobody can say which
        farm = Farm(make_host(cores=8))

        def fetch(facility_id: str, tags: Sequence[str] | None, buckets: Collection[int]) -> Sequence[Host]:
            read = farm.fetch(facility_id, tags, buckets)
            if tags is None and read and farm.hosts["h1"].idle_cores == 8:
                farm.book("h1", 3)
                cache.expire()
            return read

        cache = HostCache(HostCacheSettings(), fetch, clock=clock)
        cache.refresh("fac", ["general"])
        clock.advance(10)
        # When all is read that is to be read at once
        read_again(cache)
        # Then the portion was read again after the change
        assert idle_cores(cache) == 5

    def test_portions_without_a_host_stay_small(self, clock: Clock) -> None:
        farm = Farm(*many_hosts(8 * HOSTS_PER_REREAD))
        cache = make_cache(farm, clock)
        for _ in range(20):
            clock.advance(10)
            read_again(cache)
        # When all hosts are down for some rounds, and up again
        hosts, farm.hosts = farm.hosts, {}
        for _ in range(20):
            clock.advance(10)
            read_again(cache)
        farm.hosts = hosts
        farm.read_ids.clear()
        for _ in range(20):
            clock.advance(10)
            read_again(cache)
        # Then no query reads many of them
        assert len(cache) == 8 * HOSTS_PER_REREAD
        assert max(map(len, farm.read_ids)) < 2 * HOSTS_PER_REREAD

    def test_a_portion_that_could_not_be_read_is_tried_again_with_fewer_buckets(self, clock: Clock) -> None:
        farm = Farm(*many_hosts(2 * HOSTS_PER_REREAD))
        cache = make_cache(farm, clock)
        for _ in range(20):
            clock.advance(10)
            read_again(cache)
        usual = max(map(len, farm.read_ids[-4:]))
        farm.failure = ConnectionError("the query took too long")
        clock.advance(10)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                cache.reread()
        farm.failure = None

        cache.reread()

        assert len(farm.read_ids[-1]) < usual / 4

    def test_a_large_farm_is_read_in_portions_over_a_longer_time_each_host_once(self, clock: Clock) -> None:
        # Given a farm of which a round takes longer than that of a small one, and which was read
        round_seconds = 1.2 * REREAD_SECONDS
        hosts = round(round_seconds * REREADS_PER_SECOND)
        farm = Farm(*many_hosts(hosts))
        cache = make_cache(farm, clock)
        read_again(cache)
        clock.advance(round_seconds)
        # When the next round is made
        farm.read_ids.clear()
        began = clock()
        while sum(map(len, farm.read_ids)) < hosts:
            clock.advance(cache.reread().pause)
            assert clock() < began + 2 * round_seconds
        # Then each host was read once, in portions, over that time
        assert clock() > began + REREAD_SECONDS
        assert len({host_id for ids in farm.read_ids for host_id in ids}) == hosts
        assert max(map(len, farm.read_ids)) < 2 * HOSTS_PER_REREAD
        assert cache.reread().pause > 0, "and then there is a pause"

    def test_a_portion_that_could_not_be_read_is_read_at_the_next_try(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        clock.advance(10)
        farm.book("h1", 3)
        farm.failure = ConnectionError("the database is away")
        with pytest.raises(ConnectionError):
            cache.reread()
        assert idle_cores(cache) == 8

        farm.failure = None
        assert len(read_again(cache)) == 1

    def test_a_host_that_a_read_in_the_background_found_is_in_a_group_that_came_meanwhile(self, clock: Clock) -> None:
        farm = Farm(make_host(tags=frozenset({"general", "other"})))

        def fetch(facility_id: str, tags: Sequence[str], buckets: Collection[int]) -> Sequence[Host]:
            read = farm.fetch(facility_id, tags, buckets)
            if len(farm.queries) == 2:
                cache.refresh("fac", ["other"])
            return read

        cache = HostCache(HostCacheSettings(), fetch, clock=clock)
        cache.refresh("fac", ["general"])
        clock.advance(10)

        cache.reread()

        assert len(farm.queries) == 3
        assert cache.find(HostGroups("fac", ["other"]), make_need(), HostOrder(), lambda _: True) is not None

    def test_nothing_is_read_again_where_nothing_was_asked_for(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = HostCache(HostCacheSettings(), farm.fetch, clock=clock)
        clock.advance(100)
        assert read_again(cache) == []
        assert farm.queries == []

    def test_only_own_buckets_are_read_and_all_once_a_minute(self, clock: Clock) -> None:
        # Given a process that has hosts of its own to read, and others, and has just begun
        farm = Farm(*HOSTS)
        cache = make_cache(farm, clock)
        own = buckets("one", DIVISION)
        farm.read_ids.clear()
        # When it reads them again for most of a minute
        for _ in range(5):
            clock.advance(10)
            read_again(cache, own)
        # Then it has read its own, and those of the other one with the next round
        assert {host_id for ids in farm.read_ids for host_id in ids} == ids_of("one")
        clock.advance(10)
        read_again(cache, own)
        clock.advance(10)
        read_again(cache, own)
        assert {host_id for ids in farm.read_ids for host_id in ids} == {host.id for host in HOSTS}

    def test_what_came_is_told(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"))
        cache = make_cache(farm, clock)
        del farm.hosts["h1"]
        farm.hosts |= {name: make_host(name) for name in ("h2", "h3")} | {"h4": make_host("h4", tags=frozenset({"x"}))}
        clock.advance(10)

        rereads = []
        while not (reread := cache.reread()).pause:
            rereads.append(reread)

        # one for each set of groups here, in each portion
        assert {host.id for reread in rereads for host in reread.appeared} <= {"h2", "h3"}
        assert any(reread.appeared for reread in rereads)


class TestALargeFarm:
    """A pass waits for no more than some thousand hosts, whatever the farm's size."""

    HOSTS = FIRST_READ_HOSTS + 1000

    @pytest.fixture
    def farm(self) -> Farm:
        return Farm(*many_hosts(self.HOSTS))

    def test_some_hosts_are_read_at_first_and_the_rest_at_once(self, clock: Clock, farm: Farm) -> None:
        cache = make_cache(farm, clock)
        assert len(cache) == FIRST_READ_HOSTS

        read_again(cache)

        assert len(cache) == self.HOSTS
        assert max(map(len, farm.read_ids[1:])) < 2 * HOSTS_PER_REREAD
        assert sum(map(len, farm.read_ids)) == FIRST_READ_HOSTS + self.HOSTS, "each of them once"

    def test_idle_cores_are_counted_as_far_as_they_matter(self, clock: Clock, farm: Farm) -> None:
        cache = make_cache(farm, clock)
        read_again(cache)
        cache.refresh("fac", ["general", "other"])
        clusters = [Cluster("fac", show, ClusterKind.ALLOC, ("general", "other")) for show in ("one", "two")]

        assert cache.idle_cores(clusters) == self.HOSTS * 8
        assert 100 <= cache.idle_cores(clusters, most=100) < 100 + 8

    def test_hosts_that_were_known_stay_when_all_are_read_again(self, clock: Clock, farm: Farm) -> None:
        cache = make_cache(farm, clock)
        read_again(cache)

        cache.forget_reads()
        assert len(cache.refresh("fac", ["general"])) == FIRST_READ_HOSTS

        assert len(cache) == self.HOSTS
        del farm.hosts[f"h{self.HOSTS - 1}"]
        read_again(cache)
        assert len(cache) == self.HOSTS - 1
