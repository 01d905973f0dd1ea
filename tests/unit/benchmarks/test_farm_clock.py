"""How full the benchmarks' farm was, how long freed cores stood idle, and what workers did meanwhile."""

from __future__ import annotations

import math

from benchmarks.bookings import Spent
from benchmarks.farm_clock import FarmClock, weighted_percentile
from benchmarks.frame_ends import RunningProc


def proc(number: int, booked_at: float, cores: int = 1, host: str = "h") -> RunningProc:
    return RunningProc(f"p{number}", f"f{number}", host, "s", "j", "l", 100 * cores, 1024, 0, booked_at)


def test_cores_in_use_are_weighed_by_time() -> None:
    # given 4 cores from the second 0 on, 2 more from 5 on, and 4 freed at 8
    clock = FarmClock()
    first = proc(1, 0.0, cores=4)
    clock.booked([first])
    clock.booked([proc(2, 5.0, cores=2)])
    clock.ended([first], 8.0)

    # then these are the means; what was before the window counts from its begin
    assert clock.mean_cores(0.0, 5.0) == 4
    assert clock.mean_cores(0.0, 10.0) == (5 * 4 + 3 * 6 + 2 * 2) / 10
    assert clock.mean_cores(9.0, 10.0) == 2


def test_the_cores_freed_first_on_a_host_are_refilled_first() -> None:
    # given 2 cores of a host freed at 10, 4 at 11, and cores of another host
    clock = FarmClock()
    clock.ended([proc(1, 0.0, cores=2)], 10.0)
    clock.ended([proc(2, 0.0, cores=4)], 11.0)
    clock.ended([proc(3, 0.0, cores=8, host="other")], 0.0)

    # when 3 and then 3 cores of it are booked
    clock.booked([proc(5, 14.0, cores=3), proc(4, 12.0, cores=3)])

    # then 2 cores waited 2 s, one 1 s and three 3 s, and nothing is known of what was not booked
    assert clock.refill_seconds(0.0, 20.0, 1, 17, 50, 99) == [1.0, 2.0, 2.0, 3.0]
    assert clock.refill_seconds(0.0, 13.0, 99) == [2.0]
    assert clock.refill_seconds(30.0, 40.0, 50) == [0.0]


def test_a_percentile_counts_weights() -> None:
    assert weighted_percentile([(1.0, 99), (5.0, 1)], 99) == 1.0
    assert weighted_percentile([(1.0, 98), (5.0, 2)], 99) == 5.0
    assert weighted_percentile([], 50) == 0.0


def test_losses_are_of_all_bookings_planned() -> None:
    lost, booked = "scheduler_bookings_lost_total", "scheduler_frames_dispatched_total"
    before = {booked: 100, lost: 10, f"{lost}:host_locked": 10}
    after = {booked: 190, lost: 20, f"{lost}:host_locked": 11, f"{lost}:host_exhausted": 9}
    spent = Spent.between(before, after)
    assert (spent.booked, spent.lost, spent.lost_percent) == (90, 10, 10.0)
    assert spent.lost_by_reason == "host_exhausted 9.0 %, host_locked 1.0 %"
    assert spent.per_frame(45) == 0.5
    assert Spent.between(after, after).lost_by_reason == "none"


def test_a_stage_is_bounded_by_the_bucket_its_percentile_is_in() -> None:
    name = "scheduler_plan_duration_seconds"
    buckets = {"0.01": 5, "0.1": 98, "inf": 100}
    spent = Spent({f"{name}_count": 100.0, **{f"{name}_bucket:{end}": count for end, count in buckets.items()}})
    assert spent.at_most_ms("plan", 50) == 100
    assert spent.at_most_ms("plan", 98) == 100
    assert spent.at_most_ms("plan", 99) == math.inf
