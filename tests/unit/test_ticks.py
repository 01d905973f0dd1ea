"""Nominal ticks and catch-up policies."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opencue_sched.coordination.leader import (
    CatchUp,
    due_tick,
    nominal_tick,
    seconds_to_next,
    tick_series,
)


@given(now=st.floats(0, 2e9), interval=st.floats(0.5, 7200))
@example(now=8.0, interval=1.6)
def test_the_next_tick_is_ahead_and_within_one_interval(now, interval):
    wait = seconds_to_next(now, interval)
    assert 0 < wait <= interval + 1e-6
    assert nominal_tick(now + wait + 1e-3, interval) > nominal_tick(now, interval)


@given(last=st.none() | st.integers(0, 2000), now=st.floats(0, 200_000), policy=st.sampled_from(list(CatchUp)))
def test_no_policy_repeats_a_tick_or_fires_one_of_the_future(last, now, policy):
    tick = due_tick(last, now, 100.0, policy)
    assert tick is None or ((last is None or tick > last) and tick <= nominal_tick(now, 100.0))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(CatchUp.SKIP, None), (CatchUp.LATEST, 9)],
)
def test_after_a_gap_each_policy_does_what_it_says(policy, expected):
    assert due_tick(5, 950.0, 100.0, policy) == expected


def test_skip_resumes_with_the_next_tick_that_begins():
    assert due_tick(5, 1000.2, 100.0, CatchUp.SKIP) == 10


@given(one=st.integers(1, 10**8), other=st.integers(1, 10**8))
def test_ticks_of_different_intervals_are_counted_apart(one, other):
    """To the millisecond."""
    assert (tick_series("sweep", one / 1000) == tick_series("sweep", other / 1000)) == (one == other)


def test_a_series_is_named_as_the_setting_is_written():
    assert [tick_series("sweep", interval) for interval in (2.0, 0.4, 7200)] == ["sweep@2", "sweep@0.4", "sweep@7200"]
