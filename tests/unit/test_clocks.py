"""By which clock ticks are named, when those of the two stores differ."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opencue_sched.coordination.leader import AGREE_SECONDS, Clocks

NOON = 1_700_000_000.0
HOUR = 3600.0


@pytest.mark.parametrize("apart", [0.0, 4.9, -4.9])
def test_clocks_that_agree_are_that_of_redis(apart: float) -> None:
    assert Clocks(NOON + apart, NOON).now(NOON - 2) == NOON + apart


def test_without_a_record_there_is_only_the_clock_of_redis() -> None:
    assert Clocks(NOON + HOUR).now(NOON) == NOON + HOUR
    assert Clocks(NOON + HOUR).apart == 0


@pytest.mark.parametrize(
    ("redis", "postgresql", "wrong"),
    [
        (NOON + HOUR, NOON, "redis ahead"),
        (NOON - HOUR, NOON, "redis put back, or failed over to a host that is behind"),
        (NOON, NOON + HOUR, "postgresql ahead"),
        (NOON, NOON - HOUR, "postgresql put back"),
    ],
)
def test_of_two_that_differ_the_wrong_one_is_found(redis: float, postgresql: float, wrong: str) -> None:
    assert Clocks(redis, postgresql).now(NOON - 2) == NOON, wrong


def test_of_what_was_never_fired_nothing_is_named_that_is_to_come_by_either_clock() -> None:
    assert Clocks(NOON + HOUR, NOON).now(None) == Clocks(NOON, NOON + HOUR).now(None) == NOON


@given(
    error=st.floats(-1e6, 1e6),
    since_fired=st.none() | st.floats(0.1 - AGREE_SECONDS, 1e5),
    redis_is_right=st.booleans(),
)
@example(error=HOUR, since_fired=0.1 - AGREE_SECONDS, redis_is_right=False)
@example(error=-AGREE_SECONDS, since_fired=0.1 - AGREE_SECONDS, redis_is_right=False)
def test_with_one_right_clock_no_tick_is_of_the_future_and_none_waits_for_the_wrong_one(
    error: float, since_fired: float | None, redis_is_right: bool
) -> None:
    """The last tick may have been named by a clock that was ahead by as much as clocks may be that agree, and that of
    Redis may be behind by as much now."""
    clocks = Clocks(NOON, NOON + error) if redis_is_right else Clocks(NOON + error, NOON)
    last = None if since_fired is None else NOON - since_fired
    now = clocks.now(last)
    assert now <= NOON + AGREE_SECONDS
    assert last is None or now >= last - 2 * AGREE_SECONDS
