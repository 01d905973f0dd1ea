"""What the host cache knows of layers: what runs on a host, what ran there last, and finding those hosts again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opencue_sched.domain.hosts import Host
from opencue_sched.placement.host_cache import RECENT_LAYERS, Accept, HostCache, HostGroups, HostOrder
from tests.kit.frozen_clock import Clock
from tests.kit.values import make_host, make_need, take
from tests.unit.placement.cached_farm import Farm, make_cache, must_find


def read_again(cache: HostCache, clock: Clock, *hosts: Host) -> None:
    clock.advance(1)
    cache.apply(hosts, [], read_at=cache.instant())


class TestRecent:
    def test_a_layer_that_ran_and_does_no_more_is_recent_the_latest_first(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(running={"a": 2, "b": 1})), clock)

        read_again(cache, clock, make_host(running={"b": 1}))
        assert must_find(cache).recent == ("a",)
        read_again(cache, clock, make_host(running={"c": 1}))
        assert must_find(cache).recent == ("b", "a")

        # and one that runs again is not
        read_again(cache, clock, make_host(running={"a": 1}))
        assert must_find(cache).recent == ("c", "b")

    def test_what_ran_is_remembered_while_the_host_is_full_and_no_read_says_what_runs(self, clock: Clock) -> None:
        layers = [f"l{number}" for number in range(3 * RECENT_LAYERS)]
        cache = make_cache(Farm(make_host(running=dict.fromkeys(layers, 1))), clock)

        for _ in range(3):
            read_again(cache, clock, make_host(idle_centicores=0))
        read_again(cache, clock, make_host(idle_centicores=100, running=dict.fromkeys(layers[:-1], 1)))

        assert must_find(cache).recent == (layers[-1],)

    def test_no_more_than_the_last_eight_are_remembered(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)

        for number in range(20):
            read_again(cache, clock, make_host(running={f"l{number}": 1}))

        assert must_find(cache).recent == tuple(f"l{number}" for number in range(18, 18 - RECENT_LAYERS, -1))

    def test_time_forgets_nothing(self, clock: Clock) -> None:
        farm = Farm(make_host(running={"a": 1}))
        cache = make_cache(farm, clock)
        read_again(cache, clock, make_host())

        clock.advance(100_000)
        cache.refresh("fac", ["general"])
        read_again(cache, clock, make_host())

        assert must_find(cache).recent == ("a",)

    def test_a_frame_that_was_placed_and_ended_before_the_next_read_ran_there(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)
        assert cache.take(must_find(cache), {"p1": take(1)}, layer_id="a")
        assert must_find(cache).running == {"a": 1}
        cache.settle("h1", "p1", committed=True)

        read_again(cache, clock, make_host())

        assert (must_find(cache).running, must_find(cache).recent) == ({}, ("a",))

    def test_a_booking_that_came_to_nothing_did_not(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host()), clock)
        assert cache.take(must_find(cache), {"p1": take(1)}, layer_id="a")
        cache.settle("h1", "p1", committed=False)

        read_again(cache, clock, make_host())

        assert (must_find(cache).running, must_find(cache).recent) == ({}, ())

    def test_an_invalidated_host_comes_back_with_what_it_ran(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(running={"a": 1})), clock)
        cache.invalidate("h1", why="locked")

        read_again(cache, clock, make_host(running={"b": 1}))

        assert must_find(cache).recent == ("a",)


class TestKnown:
    def far_and_near(self, clock: Clock) -> HostCache:
        """Forty hosts that fit better, and one that runs the layer."""
        best = [make_host(f"b{number:02}", cores=4) for number in range(40)]
        return make_cache(Farm(*best, make_host("runs", cores=16, running={"mine": 1})), clock)

    def find(
        self,
        cache: HostCache,
        *,
        cores: int = 1,
        known_to: str | None = "mine",
        tag: str = "general",
        accept: Accept = lambda _: True,
    ) -> str:
        host = cache.find(HostGroups("fac", [tag]), make_need(cores), HostOrder(known_to=known_to), accept)
        return "" if host is None else host.id

    def test_a_host_that_runs_the_layer_comes_first_wherever_the_strategy_ranks_it(self, clock: Clock) -> None:
        assert self.find(self.far_and_near(clock)) == "runs"

    def test_running_comes_before_recent_and_the_latest_recent_first(self, clock: Clock) -> None:
        names = [f"h{number}" for number in range(4)]
        cache = make_cache(Farm(*(make_host(name, cores=4) for name in names)), clock)
        for ran in ({"h1": "mine", "h2": "mine"}, {"h1": "other"}, {"h3": "mine"}):
            running = {name: {ran[name]: 1} if name in ran else {} for name in names}
            read_again(cache, clock, *(make_host(name, cores=4, running=running[name]) for name in names))

        found: list[str] = []
        for _ in range(3):
            found.append(self.find(cache, accept=lambda host: host.id not in found))

        assert found == ["h3", "h2", "h1"]

    def test_it_is_none_without_the_layer(self, clock: Clock) -> None:
        assert self.find(self.far_and_near(clock), known_to=None).startswith("b")
        assert self.find(self.far_and_near(clock), known_to="another").startswith("b")

    def test_it_must_have_the_need_idle_and_the_tag(self, clock: Clock) -> None:
        cache = self.far_and_near(clock)
        assert self.find(cache, tag="other") == ""
        assert cache.take(must_find(cache, 16), {"p1": take(14)})

        assert self.find(cache, cores=3).startswith("b")
        assert self.find(cache, cores=2) == "runs"

    def test_a_host_without_an_idle_core_is_forgotten_until_it_has_one(self, clock: Clock) -> None:
        cache = self.far_and_near(clock)
        assert cache.take(must_find(cache, 16), {"p1": take(16)})
        assert self.find(cache).startswith("b")

        cache.settle("runs", "p1", committed=False)
        assert self.find(cache) == "runs"

    def test_of_several_the_strategy_chooses(self, clock: Clock) -> None:
        hosts = [make_host(f"r{cores}", cores=cores, running={"mine": 1}) for cores in (32, 8, 16)]
        cache = make_cache(Farm(*hosts, make_host("b", cores=4)), clock)

        assert self.find(cache) == "r8"

    def test_hosts_that_are_gone_are_none(self, clock: Clock) -> None:
        cache = self.far_and_near(clock)
        clock.advance(1)
        cache.apply([], ["runs"], read_at=cache.instant())

        assert self.find(cache).startswith("b")

    def test_a_host_that_moved_to_other_tags_is_found_there(self, clock: Clock) -> None:
        moved = make_host("runs", cores=16, running={"mine": 1})
        cache = make_cache(Farm(make_host("b", cores=4), moved), clock)

        read_again(cache, clock, replace(moved, tags=frozenset({"other"})))

        assert self.find(cache) == "b"


class TestRunningNotRead:
    """What runs on a host was read a moment ago, and the host is read again without that."""

    def read_again(self, cache: HostCache, clock: Clock, *, idle_centicores: int, cores: int = 8) -> None:
        clock.advance(1)
        host = make_host(cores=cores, idle_centicores=idle_centicores)
        cache.apply([host], [], read_at=cache.instant(), but_running={"h1"})

    def test_what_was_read_stays_with_what_was_booked_since(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(idle_centicores=400, running={"a": 2})), clock)
        assert cache.take(must_find(cache), {"p1": take(1), "p2": take(1)}, layer_id="a")
        assert cache.take(must_find(cache), {"p3": take(1)}, layer_id="b")
        for proc_id in ("p1", "p2", "p3"):
            cache.settle("h1", proc_id, committed=True)

        for _ in range(2):
            self.read_again(cache, clock, idle_centicores=100)

            assert must_find(cache).idle_cores == 1
            assert must_find(cache).running == {"a": 4, "b": 1}

    def test_it_stays_while_the_host_is_full(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(idle_centicores=100, running={"a": 2})), clock)
        assert cache.take(must_find(cache), {"p1": take(1)}, layer_id="b")
        cache.settle("h1", "p1", committed=True)

        read_again(cache, clock, make_host(idle_centicores=0))
        self.read_again(cache, clock, idle_centicores=100)

        assert must_find(cache).running == {"a": 2, "b": 1}

    def test_nothing_runs_where_all_is_idle(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(idle_centicores=100, running={"a": 2})), clock)

        self.read_again(cache, clock, idle_centicores=800)

        assert (must_find(cache).running, must_find(cache).recent) == ({}, ("a",))

    def test_it_is_known_for_a_minute(self, clock: Clock) -> None:
        cache = make_cache(Farm(make_host(cores=32, idle_centicores=100, running={"a": 2})), clock)
        for _ in range(59):
            self.read_again(cache, clock, idle_centicores=100, cores=32)
            assert cache.running_known(["h1", "h2"]) == {"h1"}
        clock.advance(1.5)
        assert cache.running_known(["h1"]) == frozenset()

        read_again(cache, clock, make_host(cores=32, idle_centicores=100, running={"b": 1}))

        assert cache.running_known(["h1"]) == {"h1"}
        assert must_find(cache).running == {"b": 1}

    @pytest.mark.parametrize(("cores", "half"), [(8, 4), (32, 4), (128, 16)])
    def test_it_is_not_known_where_a_layer_with_frames_that_ended_might_seem_to_have_its_share(
        self, clock: Clock, cores: int, half: int
    ) -> None:
        farm = Farm(make_host(cores=cores, idle_centicores=100, running={"a": half, "b": 1}))
        cache = make_cache(farm, clock)
        assert cache.running_known(["h1"]) == {"h1"}
        # What a plan has taken since counts as well.
        assert cache.take(must_find(cache), {"p1": take(1)}, layer_id="a")
        assert cache.running_known(["h1"]) == frozenset()
        cache.settle("h1", "p1", committed=True)
        self.read_again(cache, clock, idle_centicores=100, cores=cores)
        assert cache.running_known(["h1"]) == frozenset()

    def test_it_is_not_known_of_a_host_that_was_full_when_it_was_read_first_or_that_was_invalidated(
        self, clock: Clock
    ) -> None:
        cache = make_cache(Farm(make_host(idle_centicores=0), make_host("h2", idle_centicores=100)), clock)
        assert cache.running_known(["h1", "h2"]) == {"h2"}
        cache.invalidate("h2", why="locked")
        assert cache.running_known(["h1", "h2"]) == frozenset()
