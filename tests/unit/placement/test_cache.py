"""The host cache: searches, what plans take, reads that come after it, and hosts that are gone."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import pytest

from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.placement.host_cache import (
    SCORED_CANDIDATES,
    HostCache,
    HostGroups,
)
from opencue_sched.settings import HostCacheSettings
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_host, take
from tests.unit.placement.cached_farm import Farm, find, idle_cores, make_cache, must_find


def book_one(cache: HostCache, proc_id: str, cores: int) -> str:
    """Plan one proc on whatever host fits; its host."""
    host = must_find(cache, cores)
    assert cache.take(host, {proc_id: take(cores)})
    return host.id


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
