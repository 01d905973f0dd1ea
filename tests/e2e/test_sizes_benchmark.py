"""``benchmarks scale --part large`` on small farms, judged by its counts: how fast it is depends on what else runs."""

from __future__ import annotations

import pytest

from benchmarks.figures import console
from benchmarks.sizes import GROWTH_PARTS, IDLE_PARTS, run_growth, run_idle_farms
from benchmarks.steady import MOST_ROWS_PER_FRAME
from benchmarks.warm_start import WarmFleet

IDLE_HOSTS = 6_000
"""Of fewer hosts PostgreSQL rather reads whole tables."""
GROWN = 20_000
"""Farms of 240 and 2,000 hosts with 1,200 and 40,000 frames waiting."""


@pytest.mark.long(120)
def test_hosts_that_do_nothing_cost_a_few_rows_each_and_a_new_job_no_more_the_more_there_are() -> None:
    # Given farms of 600 and 6,000 hosts, and two workers that share them: what grows with hosts shows on the larger
    sizes = (IDLE_PARTS[0], IDLE_PARTS[-1])
    found = run_idle_farms([2], most_hosts=IDLE_HOSTS, seconds=5, console=console, parts=sizes, fleet_type=WarmFleet)
    # Then each host is read again once in a round by one of them, and a new job reads what it needs
    assert len(found) == len(sizes)
    assert all(result.new_job_rows > 0 and result.reread_rows_per_second > 0 for result in found), "the meter is silent"
    wrong = [(it.phase, it.idle_read, it.new_job_read) for it in found if not it.passed]
    assert wrong == []


@pytest.mark.long(70)
def test_a_frame_has_few_rows_read_on_a_larger_farm_and_beside_more_work() -> None:
    # Given the least farm and the one that is larger and has more work: what grows with either shows there
    sizes = (GROWTH_PARTS[0], GROWTH_PARTS[-1])
    found = run_growth([1], most_hosts=GROWN, console=console, rest_seconds=3, parts=sizes, fleet_type=WarmFleet)
    assert len(found) == len(sizes)
    # What periodic tasks read meanwhile is a good part of so few frames. A pass that looked at all that waits, or at
    # all hosts, had hundreds of rows read for each, or thousands.
    assert max(result.rows for result in found) <= 2 * MOST_ROWS_PER_FRAME, found
    assert max(result.wal_bytes for result in found) <= 2 * min(result.wal_bytes for result in found), found
