"""Frames that are unlike the others of their layer: with memory of their own, and those that failed on a host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opencue_sched.domain.jobs import Layer
from opencue_sched.domain.verdicts import Verdict
from tests.kit.values import GIB, make_cluster, make_host, make_job, make_layer, make_snapshot, plan
from tests.unit.placement.frozen_pool import FrozenPool
from tests.unit.placement.planned_layers import only_verdict, placed, plan_layer

# Frames that ask for more memory than their layer.


def asks(a_layer: Layer, **memory_gib: float) -> Layer:
    """The layer with some frames (by number, as ``f3``) that ask for so much memory by themselves."""
    own = {int(name[1:]): int(gib * GIB) for name, gib in memory_gib.items()}
    frames = tuple(replace(frame, memory_kb=own.get(frame.number)) for frame in a_layer.frames)
    return replace(a_layer, frames=frames)


def test_a_frame_with_memory_of_its_own_reserves_it_and_the_others_what_their_layer_asks_for() -> None:
    # given a layer of 2 GiB, of whose frames one asks for 6 and one for less than the layer
    layer = asks(make_layer(frames=4, memory_gib=2), f2=6, f3=1)
    pool = FrozenPool([make_host(cores=8, memory_gib=64)])
    planned = plan(make_snapshot(make_job(layers=[layer])), pool)

    # then each reserves what it asks for, and the layer has one verdict
    reserved = {proc.frame.number: proc.resources.memory_kb // GIB for proc in planned.procs}
    assert reserved == {1: 2, 2: 6, 3: 2, 4: 2}
    assert {proc.layer.id for proc in planned.procs} == {layer.id}
    (verdict,) = planned.verdicts
    assert (verdict.verdict, verdict.frames, verdict.waiting) == (Verdict.FLOWING, 4, 0)


def test_a_frame_with_memory_of_its_own_that_finds_no_host_holds_nobody_back() -> None:
    # given a layer whose first frame asks for more than any host has idle, and another that looks like the layer
    layer = asks(make_layer(frames=3, memory_gib=2, waiting_frames=10), f1=60)
    alike = make_layer("l2", frames=1, memory_gib=2)
    pool = FrozenPool([make_host(cores=8, memory_gib=64, idle_memory_kb=32 * GIB)])
    planned = plan(make_snapshot(make_job(layers=[layer, alike])), pool)

    # then all others are placed, and neither is said to have no host
    assert sorted(proc.frame.id for proc in planned.procs) == ["l1-f2", "l1-f3", "l2-f1"]
    assert [(it.frames, it.waiting) for it in planned.verdicts] == [(2, 8), (1, 0)]


def test_a_layer_of_which_only_such_a_frame_waits_says_why_it_does() -> None:
    layer = asks(make_layer(frames=1, memory_gib=2), f1=60)
    pool = FrozenPool([make_host(cores=8, memory_gib=64, idle_memory_kb=32 * GIB)])
    planned = plan(make_snapshot(make_job(layers=[layer])), pool)
    (verdict,) = planned.verdicts
    assert (verdict.verdict, verdict.waiting) == (Verdict.CAPACITY, 1)
    assert "60.0G" in verdict.detail


# Frames that failed on a host.


def failed(a_layer: Layer, **hosts: str) -> Layer:
    """The layer with some frames (by number, as ``f3``) that failed on hosts (by id, with blanks between them)."""
    names = {int(name[1:]): tuple(f"host-{it}" for it in ids.split()) for name, ids in hosts.items()}
    frames = tuple(replace(frame, failed_on=names.get(frame.number, ())) for frame in a_layer.frames)
    return replace(a_layer, frames=frames)


def test_a_frame_is_not_given_to_a_host_that_it_failed_on() -> None:
    # given two frames that failed on the host that would get them all
    layer = failed(make_layer(frames=4), f1="h1", f3="h1")
    planned = plan_layer(layer, make_host("h1", cores=8), make_host("h2", cores=16))

    # then it gets the others, and the next host these
    assert dict(placed(planned)) == {"l1-f1": "h2", "l1-f2": "h1", "l1-f3": "h2", "l1-f4": "h1"}
    assert only_verdict(planned).verdict == Verdict.FLOWING


def test_it_waits_for_a_busy_host_that_may_take_it_and_holds_nobody_back() -> None:
    # given a frame that failed on the one idle host, and a layer that looks like its own
    layer, alike = failed(make_layer(frames=2), f1="h1"), make_layer("l2", frames=1)
    pool = FrozenPool([make_host("h1"), make_host("h2", idle_centicores=0)])
    planned = plan(make_snapshot(make_job(layers=[layer, alike])), pool)

    # then all others run there, and it is said why it does not
    assert placed(planned) == [("l1-f2", "h1"), ("l2-f1", "h1")]
    first = planned.verdicts[0]
    assert (first.verdict, first.waiting) == (Verdict.CAPACITY, 1)
    assert "host-h1" in first.detail


@pytest.mark.parametrize("other", [None, {"memory_gib": 0.5}, {"os_names": ("windows",)}, {"tags": frozenset({"far"})}])
def test_it_may_go_there_again_where_no_other_host_may_take_it(other: dict[str, Any] | None) -> None:
    hosts = [make_host("h1"), *([make_host("h2", **other)] if other else [])]
    planned = plan_layer(failed(make_layer(frames=2), f1="h1", f2="h1"), *hosts)
    assert placed(planned) == [("l1-f1", "h1"), ("l1-f2", "h1")]


def test_one_that_failed_on_every_host_may_go_anywhere() -> None:
    planned = plan_layer(failed(make_layer(), f1="h1 h2"), make_host("h1"), make_host("h2"))
    assert len(planned.procs) == 1


@pytest.mark.parametrize(("shard", "others", "starts"), [("", True, True), ("w1", True, False), ("w1", False, True)])
def test_where_hosts_are_divided_those_of_other_shards_may_take_it(shard: str, others: bool, starts: bool) -> None:
    # given a frame that failed on the only host of this shard that could take it, and perhaps others elsewhere
    layer = failed(make_layer(), f1="h1")
    layer = replace(layer, frames=tuple(replace(frame, others=others) for frame in layer.frames))
    cluster, pool = replace(make_cluster(), shard=shard), FrozenPool([make_host("h1")])
    pool.refresh(cluster.facility_id, cluster.tags, shard)
    planned = plan(make_snapshot(make_job(layers=[layer])), pool, cluster=cluster)
    assert placed(planned) == ([("l1-f1", "h1")] if starts else [])
