"""The work of the benchmarks' farm: how it is cut, and how long it runs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.farm_load import HOSTS_1553, HOSTS_10000, FarmLoad, Work, cut, hosts_of, parts_of, workload
from benchmarks.frame_ends import RunningProc


def test_the_farms_have_the_hosts_and_cores_of_the_issue() -> None:
    sizes = [(sum(hosts.values()), sum(c * n for c, n in hosts.items())) for hosts in (HOSTS_1553, HOSTS_10000)]
    assert sizes == [(1_553, 57_248), (10_000, 360_000)]


def test_a_farm_of_any_number_of_hosts_has_hosts_of_every_size() -> None:
    assert hosts_of(1_553) == HOSTS_1553
    assert hosts_of(10_000) == HOSTS_10000
    assert {count: sum(hosts_of(count).values()) for count in (100, 256, 3_001)} == {100: 100, 256: 256, 3_001: 3_001}
    assert hosts_of(100) == {128: 15, 32: 20, 16: 65}


@pytest.mark.parametrize("frames", [1, 7, 1_000, 99_750])
def test_every_frame_belongs_to_a_class_in_its_part(frames: int) -> None:
    assert sum(parts_of(frames).values()) == frames
    assert parts_of(99_750) == {1: 23_000, 2: 26_000, 4: 34_000, 8: 14_500, 16: 1_900, 32: 300, 64: 50}


def test_a_workload_has_its_frames_in_layers_no_longer_than_asked_for() -> None:
    layers = workload(20_000, random.Random(1), frames_of_a_layer=30)
    by_cores: Counter[float] = Counter()
    for layer in layers:
        by_cores[layer.cores] += layer.frames
        assert 0 < layer.frames <= 30
        assert 0.5 * layer.cores <= layer.memory_gb <= 230
        assert 2 <= layer.minutes <= 52
    assert by_cores == parts_of(20_000)


def test_layers_are_as_many_as_asked_for_and_each_has_a_memory_of_its_own() -> None:
    layers = workload(200_000, random.Random(1), frames_of_a_layer=50)
    # Each class of cores has its last layer cut short.
    assert 4_000 <= len(layers) <= 4_000 + 7
    assert len({layer.memory_gb for layer in layers}) == len(layers)


def test_layers_are_dealt_to_all_jobs_and_none_is_lost() -> None:
    layers = [Work(number + 1, 1, 1, 2) for number in range(10)]
    jobs = cut(layers, 3, priorities=(50, 100))
    assert sorted(work.frames for job in jobs for work in job.layers) == list(range(1, 11))
    assert [job.priority for job in jobs] == [50, 100, 50]
    assert len(cut(layers, 30)) == 10, "no job without layers"


def test_a_frame_runs_as_long_each_time_within_a_fifth_of_its_layer() -> None:
    load = FarmLoad(time_scale=0.1, minutes={"l": 10.0})
    procs = [RunningProc("p", f"frame{n}", "h", "s", "j", "l", 100, 1, 0, 0.0) for n in range(100)]
    seconds = [load.seconds_of(proc) for proc in procs]
    assert seconds == [load.seconds_of(proc) for proc in procs]
    assert 48 <= min(seconds) < 55
    assert 65 < max(seconds) <= 72
