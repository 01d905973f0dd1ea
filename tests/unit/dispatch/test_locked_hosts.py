"""How long hosts rest that other transactions have."""

from __future__ import annotations

from itertools import pairwise

from opencue_sched.dispatch.cooldown import FIRST_REST_SECONDS, LONGEST_REST_SECONDS, LockedHosts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_host_that_is_found_locked_again_rests_longer_each_time_and_never_too_long() -> None:
    clock = Clock()
    locked = LockedHosts(clock)
    rests = []
    for _ in range(8):
        rests.append(locked.found({"h1"})["h1"])
        clock.now += rests[-1]
    assert rests[0] == FIRST_REST_SECONDS
    assert all(later == min(2 * earlier, LONGEST_REST_SECONDS) for earlier, later in pairwise(rests))
    assert rests[-2:] == [LONGEST_REST_SECONDS] * 2


def test_each_host_rests_for_its_own_locks() -> None:
    locked = LockedHosts(Clock())
    locked.found({"h1"})
    assert locked.found({"h1", "h2"}) == {"h1": 2 * FIRST_REST_SECONDS, "h2": FIRST_REST_SECONDS}
    assert locked.found(()) == {}


def test_a_host_nobody_had_for_a_while_begins_with_the_shortest_rest() -> None:
    clock = Clock()
    locked = LockedHosts(clock)
    locked.found({"h1"})
    locked.found({"h1"})
    clock.now += 2 * LONGEST_REST_SECONDS
    assert locked.found({"h1"}) == {"h1": FIRST_REST_SECONDS}
