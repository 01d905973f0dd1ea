"""How long is left alone what fails: here, hosts that other transactions have locked."""

from __future__ import annotations

from itertools import pairwise

from opencue_sched.dispatch.cooldown import FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, Cooldowns
from tests.kit.frozen_clock import Clock


def hosts(clock: Clock) -> Cooldowns[str]:
    return Cooldowns(FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, clock)


def test_a_host_that_is_found_locked_again_rests_longer_each_time_and_never_too_long() -> None:
    clock = Clock(100.0)
    locked = hosts(clock)
    rests = []
    for _ in range(8):
        rests.append(locked.failed("h1"))
        clock.now += rests[-1]
    assert rests[0] == FIRST_LOCKED_SECONDS
    assert all(later == min(2 * earlier, LONGEST_LOCKED_SECONDS) for earlier, later in pairwise(rests))
    assert rests[-2:] == [LONGEST_LOCKED_SECONDS] * 2


def test_each_host_rests_for_its_own_locks() -> None:
    locked = hosts(Clock(100.0))
    locked.failed("h1")
    assert [locked.failed(host) for host in ("h1", "h2")] == [2 * FIRST_LOCKED_SECONDS, FIRST_LOCKED_SECONDS]


def test_a_host_nobody_had_for_a_while_begins_with_the_shortest_rest() -> None:
    clock = Clock(100.0)
    locked = hosts(clock)
    locked.failed("h1")
    locked.failed("h1")
    clock.now += 2 * LONGEST_LOCKED_SECONDS
    assert locked.failed("h1") == FIRST_LOCKED_SECONDS


def test_a_host_found_locked_once_is_planned_again_at_once_and_one_that_stays_locked_is_not() -> None:
    clock = Clock(100.0)
    locked = Cooldowns[str](FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, clock, free=1)
    assert [locked.failed("h1") for _ in range(3)] == [0.0, FIRST_LOCKED_SECONDS, 2 * FIRST_LOCKED_SECONDS]
    locked.worked("h1")
    assert [locked.failed("h1") for _ in range(2)] == [0.0, FIRST_LOCKED_SECONDS], "a booking in between ends the row"
