"""Nominal ticks."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from opencue_sched.coordination.leader import nominal_tick, tick_series


@given(now=st.floats(0, 2e9), interval=st.floats(0.5, 7200))
@example(now=8.0, interval=1.6)
def test_the_next_tick_is_ahead_and_within_one_interval(now, interval):
    wait = (nominal_tick(now, interval) + 1) * interval - now
    assert 0 < wait <= interval + 1e-6
    assert nominal_tick(now + wait + 1e-3, interval) > nominal_tick(now, interval)


@given(one=st.integers(1, 10**8), other=st.integers(1, 10**8))
def test_ticks_of_different_intervals_are_counted_apart(one, other):
    """To the millisecond."""
    assert (tick_series("sweep", one / 1000) == tick_series("sweep", other / 1000)) == (one == other)


def test_a_series_is_named_as_the_setting_is_written():
    assert [tick_series("sweep", interval) for interval in (2.0, 0.4, 7200)] == ["sweep@2", "sweep@0.4", "sweep@7200"]
