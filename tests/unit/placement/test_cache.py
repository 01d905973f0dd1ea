"""The host cache: groups and their expiry, check-outs, holds against reads, staleness."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opencue_sched.domain.farm import Host
from opencue_sched.placement import host_cache
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.policy import Strategy
from opencue_sched.settings import HostCacheSettings
from tests.polling import eventually
from tests.unit.placement.values import GIB, Reading, make_host, make_need, take


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Farm:
    """PostgreSQL as the cache sees it: its hosts, and every query for them."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = {host.id: host for host in hosts}
        self.ages: dict[str, float] = {}
        self.queries: list[list[str]] = []
        self.failure: Exception | None = None

    def fetch(self, facility_id: str, tags: Sequence[str]) -> Mapping[str, Sequence[Reading]]:
        self.queries.append(list(tags))
        if self.failure is not None:
            raise self.failure
        return {
            tag: [
                Reading(host, self.ages.get(host.id, 0.0))
                for host in self.hosts.values()
                if host.facility_id == facility_id and tag in host.tags
            ]
            for tag in tags
        }

    def book(self, host_id: str, cores: int) -> None:
        host = self.hosts[host_id]
        self.hosts[host_id] = replace(host, idle_centicores=host.idle_centicores - cores * 100)

    def read(self, *host_ids: str) -> list[Reading]:
        return [Reading(self.hosts[host_id]) for host_id in host_ids if host_id in self.hosts]


def make_cache(farm: Farm, clock: Clock, **settings: Any) -> HostCache:
    cache = HostCache(HostCacheSettings(**settings), farm.fetch, instance="one", clock=clock)
    cache.refresh("fac", ["general"])
    return cache


def check_out(cache: HostCache, cores: int = 1, **options: Any) -> Host | None:
    accept = options.pop("accept", lambda _: True)
    return cache.check_out("fac", ["general"], make_need(cores), Strategy(), accept, **options)


def must_check_out(cache: HostCache, cores: int = 1, **options: Any) -> Host:
    host = check_out(cache, cores, **options)
    assert host is not None
    return host


def book_one(cache: HostCache, proc_id: str, cores: int) -> str:
    """Plan one proc on whatever host fits; its host."""
    host = must_check_out(cache, cores)
    cache.check_in(host, {proc_id: take(cores)})
    return host.id


def idle_cores(cache: HostCache, host_id: str = "h1") -> int | None:
    """What the cache would hand out, looked at without taking it."""
    seen: dict[str, int] = {}

    def look(host: Host) -> bool:
        seen[host.id] = host.idle_cores
        return False

    cache.check_out("fac", ["general"], make_need(1), Strategy(), look)
    return seen.get(host_id)


@pytest.fixture
def clock() -> Clock:
    return Clock()


class TestGroups:
    def test_an_absent_group_is_fetched_and_a_fresh_one_is_not(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)

        clock.advance(9)
        assert cache.refresh("fac", ["general"]) == 0
        assert len(farm.queries) == 1

        clock.advance(1)
        assert cache.refresh("fac", ["general"]) == 1
        assert len(farm.queries) == 2

    def test_expired_groups_are_fetched_once_more_each(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        cache.refresh("fac", ["other"])

        cache.expire()

        assert cache.refresh("fac", ["general"]) == 1
        assert cache.refresh("fac", ["general", "other"]) == 1
        assert cache.refresh("fac", ["general", "other"]) == 0

    def test_all_groups_of_a_cluster_are_fetched_by_one_query(self, clock: Clock) -> None:
        farm = Farm()
        cache = make_cache(farm, clock)

        assert cache.refresh("fac", [f"host{number}" for number in range(300)] + ["general"]) == 300
        assert len(farm.queries) == 2
        assert "general" not in farm.queries[1]

    def test_an_empty_group_is_not_fetched_again_at_every_miss(self, clock: Clock) -> None:
        # Upstream refetched the hosts of a fresh group for each cache miss (facts I, ca5f70fcb).
        farm = Farm()
        cache = make_cache(farm, clock)

        for _ in range(5):
            assert check_out(cache) is None
            cache.refresh("fac", ["general"])

        assert len(farm.queries) == 1

    def test_a_refresh_takes_in_new_hosts_and_forgets_those_that_left(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"))
        cache = make_cache(farm, clock)
        del farm.hosts["h1"]
        farm.hosts["h2"] = make_host("h2")

        clock.advance(10)
        cache.refresh("fac", ["general"])

        assert idle_cores(cache, "h1") is None
        assert idle_cores(cache, "h2") == 8
        assert cache.stats().size == 1

    def test_a_failed_fetch_leaves_the_group_as_it_was_and_can_be_repeated(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        clock.advance(10)
        farm.failure = ConnectionError("the database is away")

        with pytest.raises(ConnectionError):
            cache.refresh("fac", ["general"])
        assert idle_cores(cache) == 8

        farm.failure = None
        assert cache.refresh("fac", ["general"]) == 1

    def test_a_group_nobody_asked_for_is_dropped_with_its_hosts(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"), make_host("h2", tags=frozenset({"other"})))
        cache = make_cache(farm, clock)
        cache.refresh("fac", ["other"])

        clock.advance(2 * 3600)
        cache.refresh("fac", ["other"])
        clock.advance(3600 + 1)

        assert cache.evict_idle_groups() == 1
        assert cache.stats().groups == 1
        assert cache.stats().size == 1
        assert idle_cores(cache, "h1") is None

    def test_hosts_of_no_open_group_are_not_kept(self, clock: Clock) -> None:
        cache = make_cache(Farm(), clock)

        cache.apply([Reading(make_host("h9", tags=frozenset({"other"})))], [], read_at=clock())

        assert cache.stats().size == 0

    def test_one_thread_fetches_a_group_and_the_others_wait_for_it(self) -> None:
        # given a fetch that lasts until all threads have asked
        farm = Farm(make_host())
        threads = 4
        asked = threading.Semaphore(0)
        cache: HostCache

        def slow(facility_id: str, tags: Sequence[str]) -> Mapping[str, Sequence[Reading]]:
            for _ in range(threads - 1):
                assert asked.acquire(timeout=10)
            return farm.fetch(facility_id, tags)

        cache = HostCache(HostCacheSettings(), slow, instance="one")
        fetched: list[int] = []
        known: list[int] = []

        def run(announce: bool) -> None:
            if announce:
                asked.release()
            fetched.append(cache.refresh("fac", ["general"]))
            known.append(cache.stats().size)

        # when they all need it
        first = threading.Thread(target=run, args=(False,))
        first.start()
        others = [threading.Thread(target=run, args=(True,)) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        for thread in [first, *others]:
            thread.join(timeout=20)

        # then one query was made, whoever made it, and all of them had its answer
        assert sum(fetched) == 1
        assert len(farm.queries) == 1
        assert known == [1] * threads

    @pytest.mark.parametrize(
        ("settings", "permits", "most"),
        [(HostCacheSettings(concurrent_groups=2), 4, 2), (HostCacheSettings(), 1, 1)],
    )
    def test_no_more_fetches_run_at_once_than_permitted(
        self, monkeypatch: pytest.MonkeyPatch, settings: HostCacheSettings, permits: int, most: int
    ) -> None:
        monkeypatch.setattr(host_cache, "_FETCHES_AT_ONCE", permits)
        running = peak = 0
        lock = threading.Lock()
        enough, too_many = threading.Event(), threading.Event()

        def fetch(_facility_id: str, tags: Sequence[str]) -> Mapping[str, Sequence[Reading]]:
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
            return {tag: [] for tag in tags}

        cache = HostCache(settings, fetch, instance="one")
        threads = [threading.Thread(target=cache.refresh, args=("fac", [f"tag{number}"])) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)

        assert peak == most


class TestCheckOut:
    def test_a_host_is_handed_out_to_one_planner_at_a_time(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)

        host = must_check_out(cache)
        assert check_out(cache) is None

        assert cache.check_in(host, {})
        assert must_check_out(cache) == host

    def test_what_was_taken_is_gone_for_everybody_at_check_in(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)

        book_one(cache, "p1", 5)

        assert check_out(cache, 4) is None
        assert must_check_out(cache, 3).idle_cores == 3

    def test_last_updated_grows_with_every_change(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)
        versions = []
        for number in range(3):
            host = must_check_out(cache)
            versions.append(host.last_updated)
            cache.check_in(host, {f"p{number}": take(1)})

        assert versions == sorted(set(versions))

    def test_a_host_that_changes_while_it_is_looked_at_is_looked_at_again(self, clock: Clock) -> None:
        # given a predicate during which a read of the host arrives, once
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        looked_at: list[int] = []

        def accept(host: Host) -> bool:
            looked_at.append(host.idle_cores)
            if len(looked_at) == 1:
                farm.book("h1", 6)
                cache.apply(farm.read("h1"), [], read_at=clock())
            return True

        # when it is checked out
        host = must_check_out(cache, accept=accept)

        # then the planner has what it is now, not what it first saw
        assert looked_at == [8, 2]
        assert host.idle_cores == 2

    def test_hosts_of_other_allocations_are_not_even_looked_at(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host("h1", alloc_id="full"), make_host("h2", alloc_id="open")), clock)
        looked_at: list[str] = []

        def accept(host: Host) -> bool:
            looked_at.append(host.id)
            return True

        assert must_check_out(cache, accept=accept, allocs={"open"}).id == "h2"
        assert looked_at == ["h2"]

    def test_a_score_chooses_among_the_first_candidates(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_cache, "_SCORED_CANDIDATES", 3)
        hosts = [make_host(f"h{cores}", cores=cores) for cores in range(1, 9)]
        cache = make_cache(Farm(*hosts), clock)

        widest_of_three = must_check_out(cache, score=lambda host: -host.idle_cores)

        assert widest_of_three.idle_cores == 3

    def test_every_candidate_is_seen_however_many_there_are(self, clock: Clock) -> None:
        cache = make_cache(Farm(*(make_host(f"h{number}", cores=1 + number % 9) for number in range(300))), clock)
        seen: list[str] = []

        assert check_out(cache, accept=lambda host: seen.append(host.id) or False) is None

        assert len(seen) == len(set(seen)) == 300

    def test_a_check_out_that_lasts_too_long_is_taken_back(self, clock: Clock) -> None:
        # given a planner that does not come back
        cache = make_cache(Farm(make_host(cores=8)), clock)
        lost = must_check_out(cache)
        clock.advance(12.1)

        # when another one has taken the host meanwhile
        host = must_check_out(cache)

        # then the late check-in is not valid, ends nobody else's check-out, and its procs count all the same
        assert not cache.check_in(lost, {"late": take(3)})
        assert check_out(cache) is None
        assert cache.check_in(host, {"p1": take(2)})
        assert idle_cores(cache) == 3

    def test_a_search_waits_a_moment_for_a_host_another_pass_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # given a one-host farm and a pass that gives it back while another one asks
        cache = HostCache(HostCacheSettings(), Farm(make_host()).fetch, instance="one")
        cache.refresh("fac", ["general"])
        host = must_check_out(cache)
        waiting = threading.Event()
        found: list[Host | None] = []
        wait = cache._lock.wait

        def wait_for_long(_seconds: float) -> bool:
            waiting.set()
            return wait(10)

        monkeypatch.setattr(cache._lock, "wait", wait_for_long)
        thread = threading.Thread(target=lambda: found.append(check_out(cache)))
        thread.start()
        assert waiting.wait(timeout=10)
        cache.check_in(host, {})
        thread.join(timeout=20)

        assert found == [host]

    def test_hits_and_misses_are_counted(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=2)), clock)

        host = must_check_out(cache)
        assert cache.stats().checked_out == 1
        cache.check_in(host, {"p1": take(2)})
        assert check_out(cache) is None

        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.size, stats.groups, stats.checked_out) == (1, 1, 1, 1, 0)


class TestReadsAndHolds:
    def test_a_read_that_began_before_the_commit_does_not_bring_back_its_idle(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)

        # given a read that began, and saw the host, before the booking was committed
        with cache.reading() as read_at:
            readings = farm.read("h1")
        clock.advance(0.1)
        farm.book("h1", 6)
        cache.settle("h1", committed=["p1"], lost=[])

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
        cache.refresh("fac", ["general"])

        assert idle_cores(cache) == 2

    def test_cores_freed_anywhere_are_seen_by_the_next_read(self, clock: Clock) -> None:
        # Trap I-3: upstream waited for a newer host report; ts_ping does not move when a frame ends.
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)
        farm.book("h1", 6)
        cache.settle("h1", committed=["p1"], lost=[])
        clock.advance(0.1)

        farm.book("h1", -6)
        cache.apply([Reading(farm.hosts["h1"], report_age=50)], [], read_at=clock())

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

        cache.settle("h1", committed=["p1"], lost=["p2"])

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

        cache.settle("h1", committed=[], lost=["p1"])
        cache.settle("h1", committed=["p1"], lost=["p1"])
        cache.settle("unknown", committed=["p1"], lost=["p2"])

        assert idle_cores(cache) == 8

    def test_a_host_read_as_busier_than_planned_is_not_handed_out(self, clock: Clock) -> None:
        # given another instance that took what this one has planned on
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 6)
        farm.book("h1", 5)

        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert check_out(cache) is None

    def test_a_host_read_while_it_is_out_comes_back_as_read_less_what_was_taken(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        host = must_check_out(cache)
        farm.book("h1", 4)
        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert check_out(cache) is None

        assert cache.check_in(host, {"p1": take(3)})

        assert idle_cores(cache) == 1


class TestGoneAndInvalidated:
    def test_an_invalidated_host_stays_away_until_a_read_that_began_later(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        before = clock()
        clock.advance(1)

        cache.invalidate("h1")
        assert cache.invalidated_ids() == {"h1"}

        cache.apply(farm.read("h1"), [], read_at=before)
        assert check_out(cache) is None
        assert cache.invalidated_ids() == {"h1"}

        clock.advance(1)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert must_check_out(cache).id == "h1"
        assert cache.invalidated_ids() == frozenset()

    def test_a_host_that_rests_is_not_brought_back_by_a_read_before_its_time(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        cache.invalidate("h1", rest_seconds=5)
        cache.invalidate("h1")  # somebody else's refusal does not shorten it

        clock.advance(4)
        assert cache.invalidated_ids() == frozenset()
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert check_out(cache) is None

        clock.advance(2)
        assert cache.invalidated_ids() == {"h1"}
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert must_check_out(cache).id == "h1"
        assert cache.invalidated_ids() == frozenset()

    def test_the_longest_rest_counts_whichever_came_first(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)
        assert cache.back_in() is None
        cache.invalidate("h1")
        assert cache.back_in() == pytest.approx(0, abs=1e-6)
        cache.invalidate("h1", rest_seconds=5)

        clock.advance(4)
        assert cache.invalidated_ids() == frozenset()
        assert cache.back_in() == pytest.approx(1, abs=1e-6)

    def test_a_survey_tells_of_the_hosts_that_were_refused_why_first_and_no_longer_than_until_they_are_read(
        self, clock: Clock
    ) -> None:
        farm = Farm(make_host(), make_host("h2"))
        cache = make_cache(farm, clock)

        def refused(tag: str = "general") -> tuple[str, ...]:
            return cache.census("fac", [tag], make_need()).refused

        cache.invalidate("h1", rest_seconds=5, why="no answer")
        cache.invalidate("h1", rest_seconds=5, why="not sent: no answer before")
        cache.invalidate("h2")
        cache.invalidate("unknown", why="nobody has it")
        assert refused() == ("no answer", "")
        assert refused("other") == ()

        clock.advance(6)
        cache.apply(farm.read("h1"), ["h2"], read_at=clock())
        assert refused() == ()

    def test_a_check_out_of_an_invalidated_host_is_not_valid_any_more(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)
        host = must_check_out(cache)

        cache.invalidate("h1")

        assert not cache.check_in(host, {"p1": take(1)})
        assert check_out(cache) is None

    def test_an_older_read_does_not_bring_back_a_host_that_is_gone(self, clock: Clock) -> None:
        farm = Farm(make_host())
        cache = make_cache(farm, clock)
        older, older_at = farm.read("h1"), clock()
        clock.advance(1)

        cache.apply([], ["h1"], read_at=clock())
        cache.apply(older, [], read_at=older_at)

        assert check_out(cache) is None

    def test_a_group_read_does_not_bring_back_a_host_found_gone_meanwhile(self, clock: Clock) -> None:
        # given a slow read of a group this process has never seen, and a host in it that goes down meanwhile
        farm = Farm(make_host())
        cache: HostCache

        def fetch(facility_id: str, tags: Sequence[str]) -> Mapping[str, Sequence[Reading]]:
            readings = farm.fetch(facility_id, tags)
            clock.advance(1)
            cache.apply([], ["h1"], read_at=clock())
            return readings

        cache = HostCache(HostCacheSettings(), fetch, instance="one", clock=clock)
        cache.refresh("fac", ["general"])

        assert check_out(cache) is None

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


class TestBeingBooked:
    def test_a_host_is_being_booked_until_every_plan_that_took_from_it_is_settled(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=8)), clock)
        assert set(cache.being_booked()) == set()
        for proc_id in ("p1", "p2", "p3"):
            book_one(cache, proc_id, 1)

        cache.settle("h1", committed=["p1"], lost=[])
        cache.settle("h1", committed=["p1"], lost=["p2", "unknown"])
        assert set(cache.being_booked()) == {"h1"}
        cache.settle("h1", committed=["p3"], lost=[])
        assert set(cache.being_booked()) == set()

    def test_what_nobody_settles_is_under_way_as_long_as_it_is_held(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 1)
        clock.advance(11)
        cache.apply(farm.read("h1"), [], read_at=clock())
        assert set(cache.being_booked()) == {"h1"}

        clock.advance(2)
        cache.apply(farm.read("h1"), [], read_at=clock())

        assert set(cache.being_booked()) == set()
        cache.settle("h1", committed=["p1"], lost=[])
        assert set(cache.being_booked()) == set()

    def test_nothing_is_remembered_of_hosts_that_are_dropped(self, clock: Clock) -> None:
        farm = Farm(make_host(cores=8))
        cache = make_cache(farm, clock)
        book_one(cache, "p1", 1)
        cache.apply([], ["h1"], read_at=clock())

        clock.advance(140)
        cache.evict_idle_groups()

        assert set(cache.being_booked()) == set()


class TestStaleness:
    def test_a_host_that_has_not_reported_in_time_is_not_handed_out(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"), make_host("h2"))
        farm.ages["h1"] = 60.0
        cache = make_cache(farm, clock, host_staleness_threshold=120)

        clock.advance(59)
        assert idle_cores(cache, "h1") == 8
        clock.advance(2)
        assert idle_cores(cache, "h1") is None
        assert idle_cores(cache, "h2") == 8

    def test_it_comes_back_with_its_next_report(self, clock: Clock) -> None:
        farm = Farm(make_host("h1"))
        cache = make_cache(farm, clock, host_staleness_threshold=120)
        clock.advance(121)
        assert check_out(cache) is None

        cache.apply(farm.read("h1"), [], read_at=clock())

        assert must_check_out(cache).id == "h1"


class TestNews:
    def test_hosts_that_a_group_was_fetched_with_are_told_once(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host("h1"), make_host("h2")), clock)
        assert {host.id for host in cache.take_news()} == {"h1", "h2"}
        assert cache.take_news() == ()

    def test_they_are_told_although_the_refresh_failed_for_another_group(self, clock: Clock) -> None:
        # given a thread that fetches one group, waits for another and then has to fetch that itself, in vain
        farm = Farm(make_host("h1"))
        asked, answer = threading.Event(), threading.Event()

        def fetch(facility_id: str, tags: Sequence[str]) -> Mapping[str, Sequence[Reading]]:
            if tags == ["other"]:
                asked.set()
                assert answer.wait(10)
                raise ConnectionError
            return farm.fetch(facility_id, tags)

        cache = HostCache(HostCacheSettings(), fetch, instance="one", clock=clock)
        failed: list[Sequence[str]] = []

        def refresh(*tags: str) -> None:
            try:
                cache.refresh("fac", tags)
            except ConnectionError:
                failed.append(tags)

        first = threading.Thread(target=refresh, args=("other",))
        first.start()
        assert asked.wait(10)
        second = threading.Thread(target=refresh, args=("general", "other"))
        second.start()
        eventually(lambda: farm.queries == [["general"]])
        answer.set()
        for thread in (first, second):
            thread.join(20)

        assert sorted(failed) == [("general", "other"), ("other",)]
        assert [host.id for host in cache.take_news()] == ["h1"]

    def test_a_host_that_a_search_missed_because_another_pass_had_it_is_news_when_it_is_back(
        self, clock: Clock
    ) -> None:
        cache = make_cache(Farm(make_host("h1")), clock)
        cache.take_news()
        host = must_check_out(cache)
        assert check_out(cache) is None

        cache.check_in(host, {"p1": take(2)})

        (news,) = cache.take_news()
        assert news.idle_cores == host.idle_cores - 2

    def test_a_host_that_nobody_missed_is_no_news(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host("h1"), make_host("h2")), clock)
        cache.take_news()
        host = must_check_out(cache)
        assert check_out(cache) is not None

        cache.check_in(host, {})

        assert cache.take_news() == ()

    def test_a_search_that_has_others_to_look_at_does_not_wait_for_a_host_nor_miss_it(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host("h1")), clock)
        cache.take_news()
        host = must_check_out(cache)

        assert check_out(cache, patient=False) is None

        cache.check_in(host, {})
        assert cache.take_news() == ()
        assert cache.stats().misses == 0

    def test_hosts_with_which_other_passes_were_quicker_each_time_are_news(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host("h1")), clock)
        cache.take_news()

        def another_is_quicker(host: Host) -> bool:
            cache.check_in(must_check_out(cache), {f"p{host.idle_cores}": take(1)})
            return True

        assert check_out(cache, accept=another_is_quicker) is None
        assert [host.idle_cores for host in cache.take_news()] == [4]


def test_many_threads_never_hold_one_host_together_and_never_take_more_than_there_is() -> None:
    # given a small farm, and more passes than hosts
    farm = Farm(*(make_host(f"h{number}", cores=16, memory_gib=64) for number in range(3)))
    cache = HostCache(HostCacheSettings(), farm.fetch, instance="one")
    cache.refresh("fac", ["general"])
    holders: dict[str, int] = {}
    taken: dict[str, int] = {}
    lock = threading.Lock()
    problems: list[str] = []

    def plan_and_book(worker: int) -> None:
        for number in range(40):
            host = check_out(cache, 1)
            if host is None:
                continue
            with lock:
                if holders.setdefault(host.id, worker) != worker:
                    problems.append(f"{host.id} is with {holders[host.id]} and {worker}")
            proc_id = f"p{worker}-{number}"
            lost = number % 3 == 0
            with lock:
                del holders[host.id]
                taken[host.id] = taken.get(host.id, 0) + (0 if lost else 1)
            cache.check_in(host, {proc_id: take(1)})
            cache.settle(host.id, committed=[] if lost else [proc_id], lost=[proc_id] if lost else [])

    threads = [threading.Thread(target=plan_and_book, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    # then every core was taken once
    assert problems == []
    assert sum(taken.values()) == 48
    assert all(cores == 16 for cores in taken.values())
    assert check_out(cache) is None


def test_the_memory_bucket_width_is_the_setting(clock: Clock) -> None:
    # given a divisor of 64 GiB, both hosts are in one bucket and worst fit on memory has nothing to choose by
    hosts = [make_host("small", memory_gib=8), make_host("large", memory_gib=60)]
    order: dict[str, set[str]] = {}
    for divisor in ("2GiB", "64GiB"):
        firsts = set()
        for instance in map(str, range(20)):
            settings = HostCacheSettings.model_validate({"memory_key_divisor": divisor})
            cache = HostCache(settings, Farm(*hosts).fetch, instance=instance, clock=clock)
            cache.refresh("fac", ["general"])
            firsts.add(must_check_out(cache).id)
        order[divisor] = firsts

    assert order == {"2GiB": {"large"}, "64GiB": {"small", "large"}}
    assert hosts[0].total_memory_kb == 8 * GIB
