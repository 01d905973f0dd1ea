"""What a plan says of layers that wait, and which searches answer for others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from opencue_sched.domain.hosts import Host
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.host_cache import Census
from opencue_sched.placement.planner import ATTEMPTS_PER_LAYER
from tests.kit.values import GIB, make_caps, make_host, make_job, make_layer, make_policy, make_snapshot, plan
from tests.kit.wording import lacks
from tests.unit.placement.frozen_pool import FrozenPool
from tests.unit.placement.planned_layers import KEPT, only_verdict, plan_layer


class TestVerdicts:
    def test_flowing_when_only_the_pass_limit_keeps_frames_waiting(self) -> None:
        planned = plan_layer(make_layer(frames=3, waiting_frames=100), make_host())

        assert only_verdict(planned) == LayerVerdict("j1", "l1", Verdict.FLOWING, 3, 97)

    def test_no_host_when_nothing_has_the_tag(self) -> None:
        verdict = only_verdict(plan_layer(make_layer(), make_host(tags=frozenset({"other"}))))

        assert verdict.verdict is Verdict.NO_HOST
        assert "general" in verdict.detail

    def test_no_host_when_the_tags_are_not_the_clusters(self) -> None:
        verdict = only_verdict(plan_layer(make_layer(tags=frozenset({"gpu"})), make_host()))

        assert verdict.verdict is Verdict.NO_HOST
        assert "gpu" in verdict.detail

    def test_no_fit_says_what_is_needed_and_what_hosts_lack(self) -> None:
        hosts = [make_host(cores=8), make_host("h2", cores=32), make_host("h3", os_names=("windows",))]
        verdict = only_verdict(plan_layer(make_layer(cores=16, memory_gib=64), *hosts))

        assert verdict.verdict is Verdict.NO_FIT
        needed, _, lacking = verdict.detail.partition(";")
        assert "16 cores, 64.0G" in needed
        assert [int(figure) for figure in re.findall(r"\d+", lacking)] == [3, 1, 1, 1]
        assert all(lack in lacking for lack in ("linux", "cores", "memory"))

    def test_capacity_says_what_is_needed(self) -> None:
        verdict = only_verdict(
            plan_layer(
                make_layer(cores=16, memory_gib=64),
                make_host("h1", cores=32, memory_gib=128, idle_centicores=1550),
                make_host("h2", cores=32, memory_gib=128, idle_memory_kb=20 * GIB),
            )
        )

        assert verdict.verdict is Verdict.CAPACITY
        needed, _, lacking = verdict.detail.partition(";")
        assert "16 cores, 64.0G" in needed
        assert re.findall(r"\d+", lacking) == ["2"]

    @pytest.mark.parametrize(
        ("needs", "words"),
        [
            ({"cores": 1, "memory_gib": 0.5}, ["1 core, 512M"]),
            ({"cores": 0}, ["all cores", "1.0G"]),
            ({"cores": -2}, ["all cores", " 2, ", "1.0G"]),
            ({"gpus_min": 2, "gpu_memory_min_kb": 8 * GIB}, ["1 core, 1.0G, 2 GPUs, 8.0G"]),
        ],
    )
    def test_what_a_frame_needs_is_said_in_words(self, needs: dict[str, Any], words: list[str]) -> None:
        host = make_host(cores=4, idle_centicores=0, total_gpus=2, total_gpu_memory_kb=8 * GIB)
        assert not lacks(only_verdict(plan_layer(make_layer(**needs), host)).detail, *words)

    def test_hosts_that_were_refused_are_told_of_beside_those_that_are_busy(self) -> None:
        class Refusing(FrozenPool):
            def census(self, *asked: Any, **more: Any) -> Census:
                return super().census(*asked, **more)._replace(refused=("gone: no answer", ""))

        def detail(*hosts: Host) -> str:
            return only_verdict(plan(make_snapshot(make_job(layers=[make_layer(cores=16)])), Refusing(hosts))).detail

        others = ([], [make_host(cores=16, idle_centicores=100)], [make_host(cores=8)])
        for hosts in others:
            told = detail(*hosts).rpartition(";")[2]
            assert "2 hosts" in told
            assert told.endswith("gone: no answer")

    def test_capacity_is_told_for_the_rest_of_a_layer_that_was_placed_in_part(self) -> None:
        verdict = only_verdict(plan_layer(make_layer(frames=10), make_host(cores=4)))

        assert (verdict.verdict, verdict.frames, verdict.waiting) == (Verdict.CAPACITY, 4, 6)


class TestShortages:
    def test_what_no_host_has_idle_is_told_once_for_all_layers_that_need_so_much(self) -> None:
        busy = make_host("h1", cores=8, idle_centicores=200)
        wide = [make_layer(f"wide{number}", cores=4 + number) for number in range(3)]

        planned = plan(make_snapshot(make_job(layers=[*wide, make_layer("narrow", frames=9)])), FrozenPool([busy]))

        assert [proc.layer.id for proc in planned.procs] == ["narrow", "narrow"]
        (shortage,) = planned.shortages
        assert (shortage.tags, shortage.need.cores, shortage.verdict) == (("general",), 1, Verdict.CAPACITY)
        assert all(fact in shortage.detail for fact in ("general", "1 core, 1.0G"))

    @pytest.mark.parametrize(
        ("hosts", "caps", "verdict"),
        [
            ([], {}, Verdict.NO_HOST),
            ([make_host(cores=1)], {}, Verdict.NO_FIT),
            ([make_host(cores=8)], {"subscriptions": {"alloc": make_caps(cores=1)}}, Verdict.OVER_SUBSCRIPTION),
            ([make_host(cores=8, idle_centicores=100)], {}, Verdict.CAPACITY),
        ],
        ids=lambda value: value.value if isinstance(value, Verdict) else "",
    )
    def test_it_says_what_stands_between_the_hosts_and_the_most_modest_layer(
        self, hosts: list[Host], caps: dict[str, Any], verdict: Verdict
    ) -> None:
        planned = plan_layer(make_layer(cores=4), *hosts, **caps)

        assert [(shortage.need.cores, shortage.verdict) for shortage in planned.shortages] == [(4, verdict)]

    def test_where_hosts_are_idle_none_is_told(self) -> None:
        assert plan_layer(make_layer(), make_host(cores=8)).shortages == []


class TestSize:
    def test_a_full_plan_stops_and_says_that_there_is_more(self) -> None:
        job = make_job(layers=[make_layer("a", frames=5), make_layer("b", frames=5)])

        planned = plan(make_snapshot(job), FrozenPool([make_host(cores=64)]), policy=make_policy(max_frames=7))

        assert planned.full
        assert [(verdict.verdict, verdict.frames) for verdict in planned.verdicts] == [
            (Verdict.FLOWING, 5),
            (Verdict.FLOWING, 2),
        ]

    def test_a_plan_that_fits_exactly_is_not_cut_short(self) -> None:
        planned = plan_layer(make_layer(frames=7), make_host(cores=64), policy=make_policy(max_frames=7))

        assert len(planned.procs) == 7
        assert not planned.full

    def test_layers_that_look_alike_search_once(self) -> None:
        # given a full farm and many layers, some of which need even more
        jobs = [
            make_job(f"j{number}", [make_layer(f"l{number}", cores=4 + number % 3, memory_gib=2)])
            for number in range(30)
        ]
        hosts = [make_host(f"h{number}", cores=8, idle_centicores=200) for number in range(50)]

        planned = plan(make_snapshot(*jobs), FrozenPool(hosts))

        assert {verdict.verdict for verdict in planned.verdicts} == {Verdict.CAPACITY}
        assert planned.cache_misses == 1

    def test_a_failed_search_does_not_speak_for_layers_that_need_less_or_differ(self) -> None:
        hosts = [make_host("h1", cores=8, idle_centicores=200), make_host("h2", os_names=("windows",))]
        jobs = [
            make_job("a", [make_layer("wide", cores=4)]),
            make_job("b", [make_layer("narrow", cores=2)]),
            make_job("c", [make_layer("other-os", cores=4)], os_name="windows"),
            make_job("d", [make_layer("whole", cores=0)]),
        ]

        planned = plan(make_snapshot(*jobs), FrozenPool(hosts))

        assert [proc.layer.id for proc in planned.procs] == ["narrow", "other-os"]

    def test_a_search_that_failed_for_a_jobs_own_cap_does_not_speak_for_other_jobs(self) -> None:
        capped = make_job("capped", [make_layer("capped-l", cores=0)])
        free = make_job("free", [make_layer("free-l", cores=0)])

        planned = plan(make_snapshot(capped, free, job_caps={"capped": make_caps(4)}), FrozenPool([make_host(cores=8)]))

        assert [proc.job.id for proc in planned.procs] == ["free"]
        assert [verdict.verdict for verdict in planned.verdicts] == [Verdict.OVER_JOB, Verdict.FLOWING]

    def test_a_search_that_failed_for_admission_does_not_speak_for_other_jobs(self) -> None:
        jobs = [make_job(name, [make_layer(f"{name}-l")]) for name in ("unwelcome", "welcome")]
        policy = make_policy(admissions=(lambda job, *_: None if job.id == "welcome" else KEPT,))

        planned = plan(make_snapshot(*jobs), FrozenPool([make_host()]), policy=policy)

        assert [proc.job.id for proc in planned.procs] == ["welcome"]

    def test_a_host_that_gives_nothing_after_all_is_a_wasted_attempt(self) -> None:
        # given a pool that hands out hosts other passes have emptied meanwhile
        class Emptied(FrozenPool):
            def take(self, host: Host, taken: object, *, layer_id: str = "") -> bool:
                return False

        pool = Emptied([make_host(f"h{number}") for number in range(20)])

        planned = plan(make_snapshot(make_job(layers=[make_layer()])), pool)

        assert planned.procs == []
        assert planned.attempts["l1"] == planned.wasted_attempts == ATTEMPTS_PER_LAYER
        assert only_verdict(planned).verdict is Verdict.CAPACITY
