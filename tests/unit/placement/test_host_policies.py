"""Policies that look at one host: the layer's share, the GPU guard, and the convex score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.frame_needs import Demand, Search, smallest_need
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Layer
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies.admissions import gpu_guard, kept_for_gpus, layer_share
from opencue_sched.placement.policies.order import convex
from tests.kit.values import GIB, make_host, make_job, make_layer, take

JOB = make_job()
LAYER = make_layer("mine")
ONE_CORE = take(1, 1)

hosts = st.builds(
    lambda cores, idle, memory, idle_memory, gpus, idle_gpus: make_host(
        cores=cores,
        memory_gib=memory,
        idle_centicores=int(cores * idle) * 100,
        idle_memory_kb=int(memory * GIB * idle_memory),
        total_gpus=gpus,
        idle_gpus=int(gpus * idle_gpus),
    ),
    st.integers(1, 128),
    st.floats(0, 1),
    st.integers(4, 512),
    st.floats(0, 1),
    st.integers(0, 8),
    st.floats(0, 1),
)
takes = st.builds(take, st.integers(1, 32), st.floats(0.25, 64))


class TestLayerShare:
    @pytest.mark.parametrize(("cores", "most"), [(1, 8), (16, 8), (32, 8), (36, 9), (128, 32)])
    def test_it_is_a_quarter_of_the_cores_and_never_less_than_eight(self, cores: int, most: int) -> None:
        assert layer_share(JOB, LAYER, make_host(cores=cores, running={"mine": most - 1}), ONE_CORE) is None
        assert layer_share(JOB, LAYER, make_host(cores=cores, running={"mine": most}), ONE_CORE) is not None

    @given(cores=st.integers(1, 256), running=st.integers(0, 300), others=st.integers(0, 300))
    def test_only_the_layers_own_frames_count_and_only_beyond_its_share(
        self, cores: int, running: int, others: int
    ) -> None:
        host = make_host(cores=cores, running={"mine": running, "other": others})

        refusal = layer_share(JOB, LAYER, host, ONE_CORE)

        assert (refusal is not None) == (running >= max(8, cores // 4))

    def test_frames_that_the_plan_put_there_count_as_well(self) -> None:
        host = make_host(cores=16, running={"mine": 7})

        assert layer_share(JOB, LAYER, host, ONE_CORE) is None
        refusal = layer_share(JOB, LAYER, host.less(ONE_CORE, "mine"), ONE_CORE)
        assert refusal is not None
        assert refusal.verdict is Verdict.LAYER_SHARE
        assert "8 " in refusal.detail


class TestConvex:
    @given(host=hosts, taken=takes)
    def test_it_is_never_negative_and_grows_with_what_is_taken(self, host: Host, taken: Resources) -> None:
        taken = _fitted(taken, host)
        less = Resources(taken.cores // 2, taken.memory_kb // 2, taken.gpus)

        assert 0 <= convex(host, less) <= convex(host, taken)

    @given(host=hosts, taken=takes)
    def test_it_does_not_matter_whether_it_is_taken_at_once(self, host: Host, taken: Resources) -> None:
        taken = _fitted(taken, host)
        first = Resources(taken.cores // 2, taken.memory_kb // 3)
        then = Resources(taken.cores - first.cores, taken.memory_kb - first.memory_kb)

        steps = convex(host, first) + convex(host.less(first), then)

        assert steps == pytest.approx(convex(host, taken))

    def test_much_memory_goes_where_memory_is_idle(self) -> None:
        short_of_memory = make_host(cores=16, memory_gib=64, idle_centicores=800, idle_memory_kb=20 * GIB)
        short_of_cores = make_host(cores=16, memory_gib=64, idle_centicores=400, idle_memory_kb=48 * GIB)

        assert convex(short_of_cores, take(1, 16)) < convex(short_of_memory, take(1, 16))
        assert convex(short_of_memory, take(4, 1)) < convex(short_of_cores, take(4, 1))

    def test_a_gpu_weighs_more_than_cores_and_memory_together(self) -> None:
        host = make_host(cores=16, memory_gib=64, idle_gpus=4)
        quarter = take(4, 16)

        assert convex(host, replace(quarter, gpus=1)) == pytest.approx(3 * convex(host, quarter))


class TestGpuGuard:
    def test_work_without_gpus_leaves_what_the_idle_gpus_frames_need(self) -> None:
        # given two idle GPUs and ten frames that need one of them, four cores and 16 GB
        admit = gpu_guard([demand(frames=10, cores=4, memory_gib=16)])
        host = gpu_host(cores=16, memory_gib=64, gpus=2)

        # then eight cores and 32 GB are free for others
        assert admit(JOB, LAYER, host, take(8, 32)) is None
        too_many, too_much = admit(JOB, LAYER, host, take(9, 32)), admit(JOB, LAYER, host, take(8, 33))
        assert too_many is not None
        assert too_much is not None
        assert too_many.verdict is too_much.verdict is Verdict.KEPT_FOR_GPUS
        assert all(fact in too_many.detail for fact in (host.name, "8 cores", "32.0G", "2 idle GPUs"))

    def test_it_keeps_for_no_more_frames_than_wait(self) -> None:
        host = gpu_host(cores=16, memory_gib=64, gpus=4)

        assert kept_for_gpus([demand(frames=1, cores=4, memory_gib=16)], host) == Resources(4, 16 * GIB, 1)

    def test_it_keeps_for_the_widest_on_gpus_that_can_serve_either(self) -> None:
        admit = gpu_guard([demand(frames=10, cores=1), demand(frames=1, cores=8)])
        host = gpu_host(cores=16, gpus=2)

        assert admit(JOB, LAYER, host, take(7)) is None
        assert admit(JOB, LAYER, host, take(8)) is not None

    @pytest.mark.parametrize(
        "change",
        [
            {"idle_gpus": 0},
            {"tags": frozenset({"other"})},
            {"os_names": ("windows",)},
            {"facility_id": "elsewhere"},
            {"alloc_id": "of others"},
            {"total_centicores": 300, "idle_centicores": 300},
            {"total_memory_kb": GIB, "idle_memory_kb": GIB},
        ],
    )
    def test_a_host_that_the_waiting_frames_cannot_use_is_like_any_other(self, change: dict[str, Any]) -> None:
        host = replace(gpu_host(cores=8, gpus=2), **change)

        assert kept_for_gpus([demand(frames=5, cores=4, memory_gib=4)], host).cores == 0
        assert gpu_guard([demand(frames=5, cores=4, memory_gib=4)])(JOB, LAYER, host, take(host.idle_cores)) is None

    def test_frames_that_do_not_thread_are_not_kept_for_on_hosts_for_threaded_ones(self) -> None:
        host = gpu_host(cores=8, gpus=1, thread_mode=ThreadMode.ALL)

        assert kept_for_gpus([demand(frames=5, threadable=False)], host).cores == 0
        assert kept_for_gpus([demand(frames=5)], host).cores == 1

    def test_gpu_memory_alone_is_a_gpu_need(self) -> None:
        host = gpu_host(cores=8, gpus=0, total_gpu_memory_kb=16 * GIB, idle_gpu_memory_kb=16 * GIB)
        wanted = demand(frames=9, cores=2, gpus_min=0, gpu_memory_min_kb=8 * GIB)

        assert kept_for_gpus([wanted], host).cores == 4

    @given(host=hosts, taken=takes, frames=st.integers(0, 20), cores=st.sampled_from([0, -2, 1, 4, 16]))
    def test_gpu_work_is_never_kept_out_and_other_work_only_while_gpus_idle_and_are_waited_for(
        self, host: Host, taken: Resources, frames: int, cores: int
    ) -> None:
        taken = _fitted(taken, host)
        waiting = [demand(frames=frames, cores=cores)] if frames else []
        admit = gpu_guard(waiting)
        kept = kept_for_gpus(waiting, host)

        assert admit(JOB, make_layer(gpus_min=1), host, taken) is None
        refused = admit(JOB, LAYER, host, taken)
        if not frames or not host.idle_gpus:
            assert (kept.cores, refused) == (0, None)
        left = host.less(taken)
        leaves_enough = left.idle_cores >= kept.cores and left.idle_memory_kb >= kept.memory_kb
        assert (refused is None) == (leaves_enough or not kept.cores)
        assert kept.cores <= host.total_cores
        assert kept.gpus <= host.idle_gpus


def gpu_host(**spec: Any) -> Host:
    gpus = spec.pop("gpus")
    return make_host(**{"total_gpus": gpus, "idle_gpus": gpus, **spec})


def demand(*, frames: int, **layer: Any) -> Demand:
    """Frames that wait for one GPU, unless said otherwise."""
    wanted: Layer = make_layer("gpu", **{"gpus_min": 1, **layer})
    search = Search.of(JOB, wanted, smallest_need(wanted), tuple(wanted.tags))
    return Demand("fac", search, frozenset({"alloc"}), frames)


def _fitted(taken: Resources, host: Host) -> Resources:
    """As much of it as the host has idle."""
    return replace(
        taken, cores=min(taken.cores, host.idle_cores), memory_kb=min(taken.memory_kb, max(0, host.idle_memory_kb))
    )
