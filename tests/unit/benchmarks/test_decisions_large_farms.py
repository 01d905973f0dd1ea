"""The judges of scenarios on farms that are divided, on records of which the answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.decisions import large_farms
from benchmarks.decisions import record as of
from benchmarks.decisions import run as decisions
from benchmarks.decisions.record import Layer, Machine, Record, Run, Wait
from benchmarks.decisions.scenario import Scenario

SECONDS = 40.0


def layer_of(work: str = "work", *, show: str = "show", job: int = 0, priority: int = 100) -> Layer:
    return Layer(f"{work}-{job}", work, show, job, large_farms.CORES, priority=priority)


def run_of(layer: Layer, began: float, ended: float | None = None, *, host: str = "h1", frame: str = "frame") -> Run:
    return Run(frame, layer, host, layer.cores, began, ended)


def record_of(*runs: Run, waits: Any = (), seconds: float = SECONDS, hosts: int = 1, **how: Any) -> Record:
    farm = {f"h{number}": Machine(f"h{number}", "cpu", large_farms.CORES) for number in range(1, hosts + 1)}
    return Record(seconds, farm, runs, waits, **how)


def kept(bounds: Any) -> dict[str, bool]:
    return {bound.name: bound.kept for bound in bounds}


# Figures


def test_a_refill_is_from_an_end_to_the_next_start_on_that_host() -> None:
    layer = layer_of()
    record = record_of(
        run_of(layer, 0.0, 5.0),
        run_of(layer, 5.5, 9.0),
        run_of(layer, 9.1, 12.0),
        run_of(layer, 0.0, 6.0, host="h2"),
        run_of(layer, 8.0, host="h2"),
        hosts=2,
    )
    assert of.refill_seconds(record, 0.0, 20.0, 50) == pytest.approx(0.5)
    assert of.refill_seconds(record, 0.0, 20.0, 99) == pytest.approx(2.0)
    assert of.refill_seconds(record, 9.0, 20.0, 99) == pytest.approx(0.1), "that begin in the window"
    assert of.refill_seconds(record, 13.0, 20.0, 50) == float("inf"), "nothing was refilled"


def test_a_start_is_of_the_highest_that_waits_or_not() -> None:
    high, low = layer_of("high", priority=100), layer_of("low", priority=10)
    runs = [run_of(low, 1.0), run_of(high, 2.0), run_of(low, 3.0)]
    waits = [Wait(high, 0.0, 2.0), Wait(low, 0.0, 1.0), Wait(low, 0.0, 3.0), Wait(low, 0.0, None)]
    assert of.starts_of_the_highest(record_of(*runs, waits=waits), 0.0, 10.0) == pytest.approx(2 / 3)
    assert of.starts_of_the_highest(record_of(*runs, waits=waits), 1.5, 10.0) == 1, "the last starts when no high waits"
    assert of.starts_of_the_highest(record_of(), 0.0, 10.0) == 0


def test_frames_of_one_host_wait_from_their_submission_or_from_the_end_of_the_one_before() -> None:
    pinned = layer_of("pinned")
    record = record_of(
        run_of(pinned, 9.0, 13.0),
        run_of(pinned, 14.0, 18.0),
        waits=[Wait(pinned, 6.0, 9.0), Wait(pinned, 6.0, 14.0), Wait(pinned, 6.0, None)],
    )
    assert of.waits_in_turn(record, "pinned") == pytest.approx([3.0, 1.0, SECONDS - 18.0])
    assert of.waits_in_turn(record_of(waits=[Wait(pinned, 6.0, None)]), "pinned") == [SECONDS - 6.0]


def test_a_share_of_the_first_frame_is_due_when_so_much_was_drawn_for_each_priority() -> None:
    # given four jobs whose priorities add up to 300, and one start a second
    layers = [layer_of("high", job=job, priority=100) for job in range(2)]
    layers += [layer_of("low", job=job, priority=50) for job in range(2)]
    runs = [run_of(layers[number % 4], float(number)) for number in range(40)]
    waits = [Wait(run.layer, 0.0, run.began) for run in runs]
    waits += [Wait(layer, 0.0, None) for layer in layers]
    # then with everything drawn the third start is due to a high one, the sixth to a low one
    assert of.first_starts_due(record_of(*runs, waits=waits), 1.0) == {100: 2.0, 50: 5.0}
    # and with half of that the sixth and the twelfth
    assert of.first_starts_due(record_of(*runs, waits=waits), 0.5) == {100: 5.0, 50: 11.0}
    # and when a job has no more frames, what is left goes to the others
    fewer = [wait for wait in waits if wait.began is not None or wait.layer is not layers[0]]
    early = [replace(wait, began=min(wait.began or 0.0, 0.0)) if wait.layer is layers[0] else wait for wait in fewer]
    assert of.first_starts_due(record_of(*runs, waits=early), 1.0)[50] < 5.0


# Judges


def shares(**starts: int) -> Record:
    runs = [
        run_of(layer_of(show, show=show), 0.0, host=f"h{number}")
        for number, show in enumerate((show for show, count in starts.items() for _ in range(count)), start=1)
    ]
    return record_of(*runs, hosts=len(runs))


def test_equal_shows_have_a_fifth_each() -> None:
    equal = dict.fromkeys(large_farms.JOBS_OF_SHOWS, 20)
    assert all(kept(large_farms.judge_equal_shows(shares(**equal))).values())
    assert not kept(large_farms.judge_equal_shows(shares(**{**equal, "forty": 40})))["gap"]
    assert not kept(large_farms.judge_equal_shows(record_of()))["gap"], "nothing ran"


def classes(starts: dict[int, int]) -> Record:
    runs = [
        run_of(layer_of(f"{priority}", priority=priority), 10.0)
        for priority, count in starts.items()
        for _ in range(count)
    ]
    waits = [Wait(run.layer, 0.0, run.began) for run in runs]
    waits += [Wait(layer_of(f"{priority}", priority=priority), 0.0, None) for priority in large_farms.CLASSES]
    return record_of(*runs, waits=waits)


def test_classes_start_as_their_priorities_rank() -> None:
    ranked = {priority: priority for priority in large_farms.CLASSES}
    assert kept(large_farms.judge_rank_correlation(classes(ranked)))["rank correlation"]
    assert not kept(large_farms.judge_rank_correlation(classes(dict.fromkeys(ranked, 5))))["rank correlation"]
    assert not kept(large_farms.judge_rank_correlation(classes({100: 500})))["rank correlation"], "nine of ten starve"
    swapped = {**ranked, 10: 60, 60: 10}
    assert not kept(large_farms.judge_rank_correlation(classes(swapped)))["rank correlation"]


def test_the_highest_that_waits_starts() -> None:
    name = "starts of the highest that waits"
    assert kept(large_farms.judge_highest_first(classes({100: 96, 90: 4})))[name]
    assert not kept(large_farms.judge_highest_first(classes({100: 94, 90: 6})))[name]
    assert not kept(large_farms.judge_highest_first(record_of()))[name], "nothing started"


def lone(lone_refill: float, fifty_refill: float) -> Record:
    runs, at, marks = [], 0.0, {"the lone layer goes": 20.0}
    while at < SECONDS:
        runs.append(run_of(layer_of(), at, at + 4.0))
        at += 4.0 + (lone_refill if at + 4.0 < marks["the lone layer goes"] else fifty_refill)
    return record_of(*runs, marks=marks)


def test_a_lone_layer_is_refilled_at_most_half_as_slowly_again_as_fifty() -> None:
    name = "refill of a lone layer to that of fifty"
    assert kept(large_farms.judge_lone_layer(lone(0.14, 0.1)))[name]
    assert not kept(large_farms.judge_lone_layer(lone(0.16, 0.1)))[name]
    assert not kept(large_farms.judge_lone_layer(record_of()))[name], "nothing was refilled"


def pinned(wait: float) -> Record:
    layer, at, runs, waits = layer_of("pinned", priority=200), 6.0, [], []
    while at + wait < SECONDS - 5.0:
        runs.append(run_of(layer, at + wait, at + wait + 4.0))
        waits.append(Wait(layer, 6.0, at + wait))
        at += wait + 4.0
    return record_of(*runs, waits=waits)


def test_a_pinned_frame_waits_two_frame_times_at_most() -> None:
    name = "longest wait for the host, frame times"
    assert kept(large_farms.judge_pinned(pinned(7.9)))[name]
    assert not kept(large_farms.judge_pinned(pinned(8.1)))[name]
    assert not kept(large_farms.judge_pinned(record_of(waits=[Wait(layer_of("pinned"), 6.0, None)])))[name]


def many_jobs(latest_low: float) -> Record:
    """Ten starts a second go to jobs that have started; the others start once, in time but for the last low one."""
    every = [
        layer_of(work, job=job, priority=large_farms.PRIORITY_OF[work]) for work in ("high", "low") for job in (0, 1)
    ]
    runs = [run_of(layer, 0.1) for layer in every[:-1]] + [run_of(every[-1], latest_low)]
    runs += [run_of(every[0], number / 10) for number in range(400)]
    waits = [Wait(run.layer, 0.0, run.began) for run in runs] + [Wait(layer, 0.0, None) for layer in every]
    return record_of(*runs, waits=waits)


def test_each_job_starts_within_twice_the_time_that_its_share_is_due() -> None:
    # given jobs whose priorities add up to 300: a start of a low one is due after six that are drawn, of 24 in all
    name = "latest first start of the low, due times"
    due = of.first_starts_due(many_jobs(1.0), 0.25)[50]
    assert kept(large_farms.judge_many_jobs(many_jobs(1.9 * due)))[name]
    assert not kept(large_farms.judge_many_jobs(many_jobs(2.2 * due)))[name]
    never = many_jobs(1.0)
    starved = replace(
        never,
        runs=[run for run in never.runs if (run.layer.work, run.layer.job) != ("low", 1)],
        waits=[replace(wait, began=None) if wait.layer.id == "low-1" else wait for wait in never.waits],
    )
    assert not kept(large_farms.judge_many_jobs(starved))[name]


# Shards


def test_a_run_with_fewer_shards_than_workers_fails() -> None:
    scenario = Scenario("name", "says", (), (), (), 1, lambda _: [], sharded=True)
    assert decisions.judge(scenario, 4, record_of(shards=4)).verdict == "pass"
    assert decisions.judge(scenario, 1, record_of(shards=1)).verdict == "pass"
    assert decisions.judge(scenario, 4, record_of(shards=3)).verdict == "FAIL"
    assert decisions.judge(replace(scenario, sharded=False), 4, record_of(shards=1)).verdict == "pass"


def test_the_farms_are_large_enough_for_four_shards() -> None:
    assert all(sum(hosts.count for hosts in scenario.hosts) >= 256 for scenario in large_farms.LARGE_FARMS)
    assert all(scenario.sharded for scenario in large_farms.LARGE_FARMS)
