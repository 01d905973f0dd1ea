"""Centicores and cores: every rounding under-books, and no cap turns into 'unlimited'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.units import CENTICORES_PER_CORE, UNLIMITED, booked_cores, cap_cores, idle_cores

amounts = st.integers(0, 10**9)


@pytest.mark.parametrize(("reserved", "cores"), [(0, 0), (1, 1), (50, 1), (100, 1), (101, 2), (250, 3)])
def test_what_a_proc_occupies_rounds_up(reserved: int, cores: int) -> None:
    assert booked_cores(reserved) == cores


@pytest.mark.parametrize(("idle", "cores"), [(0, 0), (99, 0), (100, 1), (199, 1), (-50, 0)])
def test_what_a_host_has_left_rounds_down(idle: int, cores: int) -> None:
    assert idle_cores(idle) == cores


@pytest.mark.parametrize(("cap", "cores"), [(0, 0), (-1, -1), (-100, -100), (50, 0.5), (99, 0.99), (100, 1), (250, 2)])
def test_caps_round_down_keep_their_sentinels_and_never_become_zero(cap: int, cores: float) -> None:
    # 0 means "unlimited" to a folder or job, so a cap below one core stays a fraction that refuses everything.
    assert cap_cores(cap) == cores


def test_the_unlimited_sentinel_passes_through() -> None:
    assert cap_cores(UNLIMITED) == UNLIMITED


@given(amounts)
def test_rounding_never_over_books(amount: int) -> None:
    assert booked_cores(amount) * CENTICORES_PER_CORE >= amount >= idle_cores(amount) * CENTICORES_PER_CORE
    assert booked_cores(amount) - idle_cores(amount) <= 1


@given(amounts)
def test_whole_cores_survive_the_way_there_and_back(cores: int) -> None:
    assert booked_cores(cores * CENTICORES_PER_CORE) == idle_cores(cores * CENTICORES_PER_CORE) == cores


@given(st.integers(-(10**6), 10**9), amounts)
def test_a_cap_admits_exactly_what_fits_under_it(cap: int, booked: int) -> None:
    limit = cap_cores(cap)
    if cap > 0:
        assert (booked <= limit) == (booked * CENTICORES_PER_CORE <= cap)
    else:
        assert limit == cap


@given(st.lists(amounts, max_size=20))
def test_procs_rounded_one_by_one_are_never_less_than_their_sum(procs: list[int]) -> None:
    # Foreign procs of a fraction of a core are rounded per proc: the sum rounded down would under-count.
    assert sum(map(booked_cores, procs)) * CENTICORES_PER_CORE >= sum(procs)


def test_the_schema_counts_a_hundred_centicores_a_core() -> None:
    assert CENTICORES_PER_CORE == 100
