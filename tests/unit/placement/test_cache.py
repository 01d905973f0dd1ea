"""The host cache: groups and their expiry, searches, holds against reads."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of, buckets, shard_of
from opencue_sched.placement.host_cache import (
    FIRST_READ_HOSTS,
    HOSTS_PER_REREAD,
    REREAD_SECONDS,
    REREADS_PER_SECOND,
    SCORED_CANDIDATES,
    HostCache,
    HostGroups,
    HostOrder,
)
from opencue_sched.settings import HostCacheSettings
from tests.kit.frozen_clock import Clock
from tests.kit.polling import MOST_SECONDS
from tests.kit.values import make_host, make_need, take


class Farm:
    """PostgreSQL as the cache sees it: its hosts, and every query for them."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = {host.id: host for host in hosts}
        self.queries: list[list[str]] = []
        self.read_ids: list[list[str]] = []
        self.failure: Exception | None = None

    def fetch(self, facility_id: str, tags: Sequence[str] | None, buckets: Collection[int]) -> Sequence[Host]:
        self.queries.append(list(tags or ()))
        if self.failure is not None:
            raise self.failure
        read = [host for host in self.hosts.values() if host.facility_id == facility_id]
        read = [host for host in read if bucket_of(host.id) in buckets]
        if tags is not None:
            read = [host for host in read if not host.tags.isdisjoint(tags)][:FIRST_READ_HOSTS]
        self.read_ids.append([host.id for host in read])
        return read

    def book(self, host_id: str, cores: int) -> None:
        host = self.hosts[host_id]
        self.hosts[host_id] = replace(host, idle_centicores=host.idle_centicores - cores * 100)

    def read(self, *host_ids: str) -> list[Host]:
        return [self.hosts[host_id] for host_id in host_ids if host_id in self.hosts]


def many_hosts(count: int) -> list[Host]:
    return [make_host(f"h{number}") for number in range(count)]


def make_cache(farm: Farm, clock: Clock, **settings: Any) -> HostCache:
    cache = HostCache(HostCacheSettings(**settings), farm.fetch, instance="one", clock=clock)
    cache.refresh("fac", ["general"])
    return cache


def read_again(cache: HostCache, own: frozenset[int] = ALL_BUCKETS) -> list[Host]:
    """All that is to be read again now; the hosts that changed."""
    changed: list[Host] = []
    while not (reread := cache.reread(own)).pause:
        changed += reread.changed
    return changed


def find(cache: HostCache, cores: int = 1, **options: Any) -> Host | None:
    accept = options.pop("accept", lambda _: True)
    groups = HostGroups("fac", ["general"], options.pop("shard", ""))
    return cache.find(groups, make_need(cores), HostOrder(score=options.pop("score", None)), accept, **options)


def must_find(cache: HostCache, cores: int = 1, **options: Any) -> Host:
    host = find(cache, cores, **options)
    assert host is not None
    return host


def book_one(cache: HostCache, proc_id: str, cores: int) -> str:
    """Plan one proc on whatever host fits; its host."""
    host = must_find(cache, cores)
    assert cache.take(host, {proc_id: take(cores)})
    return host.id


def idle_cores(cache: HostCache, host_id: str = "h1") -> int | None:
    """What the cache would show of a host."""
    seen: dict[str, int] = {}

    def look(host: Host) -> bool:
        seen[host.id] = host.idle_cores
        return False

    find(cache, accept=look)
    return seen.get(host_id)


@pytest.fixture
def clock() -> Clock:
    return Clock()


class TestGroups:
    def test_an_absent_group_is_fetched_and_one_that_is_here_is_never_waited_for_again(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)

        clock.advance(1000)

        assert cache.refresh("fac", ["general"]) == ()
        assert len(farm.queries) == 1

    def test_all_groups_of_a_cluster_are_fetched_by_one_query(self, clock: Clock) -> None:
        farm = Farm()
        cache = make_cache(farm, clock)

        cache.refresh("fac", [f"host{number}" for number in range(300)] + ["general"])
        assert len(farm.queries) == 2
        assert len(farm.queries[1]) == 300
        assert "general" not in farm.queries[1]

    def test_an_empty_group_is_not_fetched_again_at_every_miss(self, clock: Clock) -> None:
        # Upstream refetched the hosts of a fresh group for each cache miss.
        farm = Farm()
        cache = make_cache(farm, clock)

        for _ in range(5):
            assert find(cache) is None
            cache.refresh("fac", ["general"])

        assert len(farm.queries) == 1

    def test_a_failed_fetch_leaves_the_group_as_it_was_and_can_be_repeated(self, clock: Clock) -> None:
        farm = Farm(make_host())
        farm.failure = ConnectionError("the database is away")
        cache = HostCache(HostCacheSettings(), farm.fetch, clock=clock)
        with pytest.raises(ConnectionError):
            cache.refresh("fac", ["general"])

        farm.failure = None
        assert [host.id for host in cache.refresh("fac", ["general"])] == ["h1"]

    def test_a_group_nobody_asked_for_is_dropped_with_its_hosts(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"), make_host("h2", tags=frozenset({"other"})))
        cache = make_cache(farm, clock)
        cache.refresh("fac", ["other"])

        clock.advance(2 * 3600)
        cache.refresh("fac", ["other"])
        clock.advance(3600 + 1)

        cache.evict_idle_groups()
        assert len(cache) == 1
        assert idle_cores(cache, "h1") is None

    def test_hosts_of_no_open_group_are_not_kept(self, clock: Clock) -> None:
        cache = make_cache(Farm(), clock)

        cache.apply([make_host("h9", tags=frozenset({"other"}))], [], read_at=clock())

        assert len(cache) == 0

    def test_one_thread_fetches_a_group_and_the_others_wait_for_it(self) -> None:
        # given a fetch that lasts until all threads have asked
        farm = Farm(make_host())
        threads = 4
        asked = threading.Semaphore(0)
        cache: HostCache

        def slow(facility_id: str, tags: Sequence[str], buckets: Collection[int]) -> Sequence[Host]:
            for _ in range(threads - 1):
                assert asked.acquire(timeout=MOST_SECONDS)
            return farm.fetch(facility_id, tags, buckets)

        cache = HostCache(HostCacheSettings(), slow, instance="one")
        fetched: list[int] = []
        known: list[int] = []

        def run(announce: bool) -> None:
            if announce:
                asked.release()
            fetched.append(len(cache.refresh("fac", ["general"])))
            known.append(len(cache))

        # when they all need it
        first = threading.Thread(target=run, args=(False,))
        first.start()
        others = [threading.Thread(target=run, args=(True,)) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        for thread in [first, *others]:
            thread.join(timeout=MOST_SECONDS)

        # then one query was made, whoever made it, and all of them had its answer
        assert sum(fetched) == 1
        assert len(farm.queries) == 1
        assert known == [1] * threads

    @pytest.mark.parametrize("most", [1, 2])
    def test_no_more_fetches_run_at_once_than_permitted(self, most: int) -> None:
        running = peak = 0
        lock = threading.Lock()
        enough, too_many = threading.Event(), threading.Event()

        def fetch(_facility_id: str, tags: Sequence[str], _buckets: Collection[int]) -> Sequence[Host]:
            nonlocal running, peak
            with lock:
                running += 1
                peak = max(peak, running)
                if running == most:
                    enough.set()
                if running > most:
                    too_many.set()
            # None is over before all have had the time to come that may, and one more.
            enough.wait(timeout=10)
            too_many.wait(timeout=0.1)
            with lock:
                running -= 1
            return []

        cache = HostCache(HostCacheSettings(concurrent_groups=most), fetch, instance="one")
        threads = [threading.Thread(target=cache.refresh, args=(f"fac{number}", ["tag"])) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=MOST_SECONDS)

        assert peak == most


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
        assert {host_id for ids in farm.read_ids for host_id in ids} == of("one")
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


DIVISION = ("one", "two")
DIVISIONS = [DIVISION, (*DIVISION, "zero"), ()]
SHARDS = ["one", "two", "zero", ""]
HOSTS = [make_host(f"h{number}") for number in range(60)]


def of(shard: str, division: tuple[str, ...] = DIVISION) -> set[str]:
    return {host.id for host in HOSTS if shard_of(host.id, division) == shard}


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

        assert set(farm.read_ids[0]) == found(cache, "one") == of("one")
        assert found(cache, "two") == found(cache, "") == set()
        clock.advance(10)
        read_again(cache)
        assert {host_id for ids in farm.read_ids[1:] for host_id in ids} == of("one")

    def test_shards_are_apart(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        self.ask(cache, "one")
        self.ask(cache, "two")
        mine = must_find(cache, shard="one")

        assert cache.take(mine, {"p1": take(8)})

        assert (found(cache, "one"), found(cache, "two")) == (of("one") - {mine.id}, of("two"))
        assert cache.census(HostGroups("fac", ["general"], "two")).kinds[0][1] == len(of("two"))

    def test_changes_of_hosts_of_other_shards_need_not_be_read(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        every = {host.id for host in HOSTS}
        assert cache.reaches(every) == set()
        self.ask(cache, "one")
        assert cache.reaches(every) == of("one")
        self.ask(cache, "two")
        assert cache.reaches(every) == every

    def test_a_shard_that_grew_or_shrank_is_read_again(self, clock: Clock) -> None:
        farm, cache = self.cache(clock)
        three = (*DIVISION, "zero")
        self.ask(cache, "one", three)
        assert found(cache, "one") == of("one", three)

        self.ask(cache, "one", DIVISION)
        assert found(cache, "one") == of("one") > of("one", three)
        assert set(farm.read_ids[1]) == of("one")

        self.ask(cache, "one", three)
        assert found(cache, "one") == of("one", three)

    def test_when_the_farm_is_divided_anew_the_shards_that_are_gone_are_dropped(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        self.ask(cache, "", ())
        self.ask(cache, "one")
        assert found(cache, "") == {host.id for host in HOSTS}

        cache.keep_shards(DIVISION)

        assert found(cache, "") == set()
        assert found(cache, "one") == of("one")

    def test_the_hosts_of_a_shard_of_another_instance_are_kept_for_a_minute(self, clock: Clock) -> None:
        _, cache = self.cache(clock)
        self.ask(cache, "one")
        self.ask(cache, "two")

        clock.advance(61)
        cache.evict_idle_groups()

        assert (found(cache, "one"), found(cache, "two")) == (of("one"), set())
        assert len(cache) == len(of("one"))

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


class TestFindAndTake:
    def test_what_was_taken_is_gone_for_everybody_at_once(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)

        book_one(cache, "p1", 5)

        assert find(cache, 4) is None
        assert must_find(cache, 3).idle_cores == 3

    def test_of_two_plans_that_found_a_host_as_it_was_only_the_first_takes_from_it(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)
        first, second = must_find(cache), must_find(cache)

        assert cache.take(first, {"p1": take(5)})
        assert not cache.take(second, {"p2": take(5)})

        assert idle_cores(cache) == 3
        assert cache.take(must_find(cache), {"p2": take(3)})

    def test_a_host_that_changed_since_it_was_found_is_not_taken_from(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        host = must_find(cache)
        farm.book("h1", 4)
        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert not cache.take(host, {"p1": take(3)})

        assert idle_cores(cache) == 4

    def test_a_host_that_was_read_and_found_the_same_is_taken_from(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        host = must_find(cache)
        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert cache.take(host, {"p1": take(3)})

    def test_hosts_of_other_allocations_are_not_even_looked_at(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host("h1", alloc_id="full"), make_host("h2", alloc_id="open")), clock)
        looked_at: list[str] = []

        def accept(host: Host) -> bool:
            looked_at.append(host.id)
            return True

        assert must_find(cache, accept=accept, allocs={"open"}).id == "h2"
        assert looked_at == ["h2"]

    def test_a_score_chooses_among_the_first_candidates(self, clock: Clock) -> None:
        hosts = [make_host(f"h{cores}", cores=cores) for cores in range(1, 33)]
        cache = make_cache(Farm(*hosts), clock)

        widest = must_find(cache, score=lambda host: -host.idle_cores)

        assert widest.idle_cores == SCORED_CANDIDATES == 16

    def test_every_candidate_is_seen_however_many_there_are(self, clock: Clock) -> None:
        cache = make_cache(Farm(*(make_host(f"h{number}", cores=1 + number % 9) for number in range(300))), clock)
        seen: list[str] = []

        assert find(cache, accept=lambda host: seen.append(host.id) or False) is None

        assert len(seen) == len(set(seen)) == 300


class TestReadsAndHolds:
    def test_a_read_that_began_before_the_commit_does_not_bring_back_its_idle(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)

        # given a read that began, and saw the host, before the booking was committed
        read_at = cache.instant()
        readings = farm.read("h1")
        clock.advance(0.1)
        farm.book("h1", 6)
        cache.settle("h1", "p1", committed=True)

        # when it arrives after the commit
        cache.apply(readings, [], read_at=read_at)

        # then the cores stay taken, and the next read agrees
        assert idle_cores(cache) == 2
        clock.advance(0.1)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert idle_cores(cache) == 2

    def test_a_read_during_the_booking_keeps_what_is_planned(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)

        clock.advance(10)
        cache.reread()

        assert len(farm.queries) == 2
        assert idle_cores(cache) == 2

    def test_cores_freed_anywhere_are_seen_by_the_next_read(self, clock: Clock) -> None:
        # Trap I-3: upstream waited for a newer host report; ts_ping does not move when a frame ends.
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)
        farm.book("h1", 6)
        cache.settle("h1", "p1", committed=True)
        clock.advance(0.1)

        farm.book("h1", -6)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert idle_cores(cache) == 8

    def test_an_older_read_never_overwrites_a_newer_one(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        clock.advance(1)
        older, read_older_at = farm.read("h1"), clock()
        clock.advance(1)
        farm.book("h1", 7)
        cache.apply(farm.read("h1"), [], read_at=clock())

        cache.apply(older, [], read_at=read_older_at)

        assert idle_cores(cache) == 1

    def test_a_lost_booking_gives_its_idle_back_at_once(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)
        book_one(cache, "p1", 3)
        book_one(cache, "p2", 4)

        cache.settle("h1", "p1", committed=True)
        cache.settle("h1", "p2", committed=False)

        assert idle_cores(cache) == 5

    def test_a_hold_nobody_settles_ends_with_a_read_late_enough_to_know(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)

        clock.advance(11)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert idle_cores(cache) == 2

        clock.advance(2)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert idle_cores(cache) == 8

    def test_settling_twice_or_late_changes_nothing(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)
        book_one(cache, "p1", 6)

        cache.settle("h1", "p1", committed=False)
        cache.settle("h1", "p1", committed=True)
        cache.settle("h1", "p1", committed=False)
        cache.settle("unknown", "p1", committed=True)
        cache.settle("unknown", "p2", committed=False)

        assert idle_cores(cache) == 8

    def test_a_host_read_as_busier_than_planned_is_not_handed_out(self, clock: Clock) -> None:
        # given another instance that took what this one has planned on
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)
        farm.book("h1", 5)

        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert find(cache) is None


class TestGoneAndInvalidated:
    def test_an_invalidated_host_stays_away_until_a_read_that_began_later(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        before = clock()
        clock.advance(1)

        cache.invalidate("h1")
        assert cache.invalidated_ids() == {"h1"}

        cache.apply(farm.read("h1"), [], read_at=before)
        assert find(cache) is None
        assert cache.invalidated_ids() == {"h1"}

        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert must_find(cache).id == "h1"
        assert cache.invalidated_ids() == frozenset()

    def test_a_host_that_rests_is_not_brought_back_by_a_read_before_its_time(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        cache.invalidate("h1", cooldown_seconds=5)
        cache.invalidate("h1")  # somebody else's refusal does not shorten it

        clock.advance(4)
        assert cache.invalidated_ids() == frozenset()
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert find(cache) is None

        clock.advance(2)
        assert cache.invalidated_ids() == {"h1"}
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert must_find(cache).id == "h1"
        assert cache.invalidated_ids() == frozenset()

    def test_the_longest_rest_counts_whichever_came_first(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)
        assert cache.back_in() is None
        cache.invalidate("h1")
        assert cache.back_in() == pytest.approx(0, abs=1e-6)
        cache.invalidate("h1", cooldown_seconds=5)

        clock.advance(4)
        assert cache.invalidated_ids() == frozenset()
        assert cache.back_in() == pytest.approx(1, abs=1e-6)

    def test_a_survey_tells_of_the_hosts_that_were_refused_why_first_and_no_longer_than_until_they_are_read(
        self, clock: Clock
    ) -> None:
        farm = Farm(make_host(), make_host("h2"))
        cache = make_cache(farm, clock)

        def refused(tag: str = "general") -> tuple[str, ...]:
            return cache.census(HostGroups("fac", [tag])).refused

        cache.invalidate("h1", cooldown_seconds=5, why="no answer")
        cache.invalidate("h1", cooldown_seconds=5, why="not sent: no answer before")
        cache.invalidate("h2")
        cache.invalidate("unknown", why="nobody has it")
        assert refused() == ("no answer", "")
        assert refused("other") == ()

        clock.advance(6)
        cache.apply(farm.read("h1"), ["h2"], read_at=clock())
        assert refused() == ()

    def test_an_invalidated_host_is_not_taken_from(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)
        host = must_find(cache)

        cache.invalidate("h1")

        assert not cache.take(host, {"p1": take(1)})
        assert find(cache) is None

    def test_an_older_read_does_not_bring_back_a_host_that_is_gone(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        older, older_at = farm.read("h1"), clock()
        clock.advance(1)

        cache.apply([], ["h1"], read_at=clock())
        cache.apply(older, [], read_at=older_at)

        assert find(cache) is None

    def test_a_group_read_does_not_bring_back_a_host_found_gone_meanwhile(self, clock: Clock) -> None:
        # given a slow read of a group this process has never seen, and a host in it that goes down meanwhile
        farm = Farm(make_host())
        cache: HostCache

        def fetch(facility_id: str, tags: Sequence[str], buckets: Collection[int]) -> Sequence[Host]:
            readings = farm.fetch(facility_id, tags, buckets)
            clock.advance(1)
            cache.apply([], ["h1"], read_at=clock())
            return readings

        cache = HostCache(HostCacheSettings(), fetch, instance="one", clock=clock)
        cache.refresh("fac", ["general"])

        assert find(cache) is None

    def test_holds_survive_a_host_that_comes_and_goes(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)
        clock.advance(1)
        cache.apply([], ["h1"], read_at=clock())

        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert idle_cores(cache) == 2

    def test_what_is_remembered_of_gone_hosts_is_dropped_in_time(self, clock: Clock) -> None:
        cache = make_cache(Farm(), clock)
        for number in range(50):
            cache.invalidate(f"h{number}")

        clock.advance(121)
        cache.evict_idle_groups()

        assert cache.invalidated_ids() == frozenset()


def test_many_threads_never_take_more_than_there_is() -> None:
    # given a small farm, and more passes than hosts
    farm = Farm(*(make_host(f"h{number}", cores=16, memory_gib=64) for number in range(3)))
    cache = HostCache(HostCacheSettings(), farm.fetch, instance="one")
    cache.refresh("fac", ["general"])
    taken: dict[str, int] = {}
    lock = threading.Lock()

    def plan_and_book(worker: int) -> None:
        number = 0
        while (host := find(cache, 1)) is not None:
            proc_id = f"p{worker}-{number}"
            if not cache.take(host, {proc_id: take(1)}):
                continue
            number += 1
            lost = number % 3 == 0
            with lock:
                taken[host.id] = taken.get(host.id, 0) + (0 if lost else 1)
            cache.settle(host.id, proc_id, committed=not lost)

    threads = [threading.Thread(target=plan_and_book, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    plan_and_book(6)

    # then every core was taken once
    assert taken == {"h0": 16, "h1": 16, "h2": 16}


@pytest.mark.parametrize(("divisor", "first"), [("2GiB", "large"), ("64GiB", "a-small")])
def test_the_memory_bucket_width_is_the_setting(clock: Clock, divisor: str, first: str) -> None:
    # With a divisor of 64 GiB both hosts are in one bucket, and worst fit on memory is left the id.
    farm = Farm(make_host("a-small", memory_gib=8), make_host("large", memory_gib=60))
    settings = HostCacheSettings.model_validate({"memory_key_divisor": divisor})
    cache = HostCache(settings, farm.fetch, clock=clock)
    cache.refresh("fac", ["general"])

    assert must_find(cache).id == first


def test_it_knows_which_hosts_drain_for_a_layer():
    hold = Reservation("wide", "job", 8, 0, 0, until=2000.0)
    farm, clock = Farm(make_host("a", reservation=hold), make_host("b"), make_host("c", reservation=hold)), Clock()
    cache = make_cache(farm, clock)

    def draining() -> set[str]:
        return {host.id for host in cache.draining_for("wide")}

    assert draining() == {"a", "c"}
    assert not cache.draining_for("another")
    book_one(cache, "p", 1)
    assert draining() == {"a", "c"}, "also where a plan took something"
    cache.apply([make_host("a")], ["c"], read_at=cache.instant())
    assert draining() == set()


class TestBeingBooked:
    def test_a_host_is_being_booked_until_every_plan_that_took_from_it_is_settled(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)
        assert not cache.being_booked("h1")
        for proc_id in ("p1", "p2"):
            book_one(cache, proc_id, 1)

        cache.settle("h1", "p1", committed=True)
        assert cache.being_booked("h1")
        cache.settle("h1", "p2", committed=False)
        assert not cache.being_booked("h1")
