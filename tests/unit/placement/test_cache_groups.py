"""Groups of the host cache: when they are read, kept and dropped."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import pytest

from opencue_sched.domain.hosts import Host
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.settings import HostCacheSettings
from tests.kit.frozen_clock import Clock
from tests.kit.polling import MOST_SECONDS
from tests.kit.values import make_host
from tests.unit.placement.cached_farm import Farm, find, idle_cores, make_cache


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
