"""The planner's decisions, one by one, and the upstream traps it must not repeat (docs/upstream-traps.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from opencue_sched.domain.caps import Caps, Headroom, Seats
from opencue_sched.domain.frame_needs import Rules
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.plans import Snapshot
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.host_cache import Census
from opencue_sched.placement.plan_state import Plan
from opencue_sched.placement.planner import ATTEMPTS_PER_LAYER, plan_pass
from opencue_sched.placement.policies import Refusal, Score
from opencue_sched.placement.policies.order import convex
from opencue_sched.placement.policy import policy_for
from opencue_sched.settings import HostBookingStrategy, Queue
from tests.kit.values import (
    GIB,
    GivenWork,
    counting_ids,
    make_caps,
    make_cluster,
    make_host,
    make_job,
    make_layer,
    make_policy,
    make_snapshot,
    plan,
)
from tests.kit.wording import lacks
from tests.unit.placement.frozen_pool import FrozenPool

KEPT = Refusal(Verdict.HELD, "kept for others")


def placed(planned: Plan) -> list[tuple[str, str]]:
    """(frame, host) of every planned proc, in order."""
    return [(proc.frame.id, proc.host.id) for proc in planned.procs]


def only_verdict(planned: Plan) -> LayerVerdict:
    assert len(planned.verdicts) == 1
    return planned.verdicts[0]


def plan_layer(layer: Layer, *hosts: Host, job: Job | None = None, **changes: object) -> Plan:
    """Plan one layer of one job; changes named as fields of the snapshot go there, the rest to ``plan``."""
    in_snapshot = {
        name: changes.pop(name) for name in ("subscriptions", "folders", "job_caps", "limits") if name in changes
    }
    job = replace(job or make_job(), layers=(layer,))
    return plan(make_snapshot(job, **in_snapshot), FrozenPool(hosts), **changes)  # type: ignore[arg-type]


class TestOrder:
    def test_jobs_go_by_their_place_in_the_snapshot(self) -> None:
        jobs = [make_job(name, [make_layer(f"{name}-l")]) for name in ("high", "first", "second", "low")]

        planned = plan(make_snapshot(*jobs), FrozenPool([make_host(cores=64)]))

        assert [proc.job.id for proc in planned.procs] == ["high", "first", "second", "low"]

    def test_layers_and_frames_go_as_given(self) -> None:
        job = make_job(layers=[make_layer("sooner", frames=2), make_layer("later", frames=2)])

        planned = plan(make_snapshot(job), FrozenPool([make_host(cores=64)]))

        assert [frame for frame, _ in placed(planned)] == ["sooner-f1", "sooner-f2", "later-f1", "later-f2"]

    def test_a_lower_priority_gets_what_the_higher_one_cannot_use(self) -> None:
        wide = make_job("wide", [make_layer("wide-l", cores=64)])
        narrow = make_job("narrow", [make_layer("narrow-l", cores=1)])

        planned = plan(make_snapshot(wide, narrow), FrozenPool([make_host(cores=8)]))

        assert [proc.job.id for proc in planned.procs] == ["narrow"]
        assert [verdict.verdict for verdict in planned.verdicts] == [Verdict.NO_FIT, Verdict.FLOWING]


class TestHosts:
    def test_a_host_is_filled_before_the_next_is_tried(self) -> None:
        planned = plan_layer(make_layer(frames=6, cores=2), make_host("h1", cores=8), make_host("h2", cores=9))

        assert [host for _, host in placed(planned)] == ["h1"] * 4 + ["h2"] * 2
        assert planned.attempts == {"l1": 2}

    @pytest.mark.parametrize(("cores", "memory"), list(product((True, False), (True, False))))
    def test_the_strategy_chooses_the_host(self, cores: bool, memory: bool) -> None:
        hosts = [make_host(f"{size}-{gib}", cores=size, memory_gib=gib) for size, gib in product((8, 64), (32, 256))]
        policy = make_policy(host_booking_strategy=HostBookingStrategy(core_saturation=cores, memory_saturation=memory))

        planned = plan_layer(make_layer(), *hosts, policy=policy)

        expected = f"{8 if cores else 64}-{32 if memory else 256}"
        assert placed(planned) == [("l1-f1", expected)]

    def test_a_score_chooses_among_the_candidates(self) -> None:
        hosts = [make_host(f"h{number}", cores=8) for number in range(5)]
        policy = make_policy(score=lambda host, _taken: 0.0 if host.id == "h3" else 1.0)

        assert placed(plan_layer(make_layer(), *hosts, policy=policy)) == [("l1-f1", "h3")]

    def test_admission_keeps_a_layer_off_a_host(self) -> None:
        policy = make_policy(admissions=(lambda _job, _layer, host, _taken: KEPT if host.id == "h1" else None,))

        planned = plan_layer(make_layer(frames=3), make_host("h1", cores=2), make_host("h2", cores=2), policy=policy)

        assert [host for _, host in placed(planned)] == ["h2", "h2"]
        assert (only_verdict(planned).verdict, only_verdict(planned).detail) == KEPT

    def test_only_hosts_with_a_tag_of_both_layer_and_cluster_are_used(self) -> None:
        hosts = [make_host(tag, tags=frozenset({tag})) for tag in ("layer-only", "cluster-only", "both")]
        layer = make_layer(frames=20, tags=frozenset({"layer-only", "both"}))

        planned = plan_layer(layer, *hosts, cluster=make_cluster("cluster-only", "both"))

        assert {host for _, host in placed(planned)} == {"both"}

    def test_a_host_of_another_facility_is_not_used(self) -> None:
        planned = plan_layer(make_layer(), make_host(facility_id="elsewhere"))

        assert only_verdict(planned).verdict is Verdict.NO_HOST

    def test_layers_share_what_is_left_of_a_host(self) -> None:
        job = make_job(layers=[make_layer("a", cores=5), make_layer("b", cores=3), make_layer("c", cores=1)])

        pool = FrozenPool([make_host(cores=8)])
        planned = plan(make_snapshot(job), pool)

        assert [proc.layer.id for proc in planned.procs] == ["a", "b"]
        assert (host := pool.get("h1")) is not None
        assert host.idle_cores == 0
        assert [verdict.verdict for verdict in planned.verdicts] == [
            Verdict.FLOWING,
            Verdict.FLOWING,
            Verdict.CAPACITY,
        ]

    def test_every_os_of_a_host_counts(self) -> None:
        # Trap D-d: host_stat.str_os is a list.
        host = make_host(os_names=("rocky9", "linux"))

        assert len(plan_layer(make_layer(), host).procs) == 1
        assert only_verdict(plan_layer(make_layer(), make_host(os_names=("windows",)))).verdict is Verdict.NO_FIT

    def test_a_negative_minimum_finds_hosts(self) -> None:
        # Trap D-c: upstream used it as an unsigned index key, and the layer never found a host.
        planned = plan_layer(make_layer(cores=-2), make_host(cores=8))

        assert [proc.resources.cores for proc in planned.procs] == [6]

    def test_a_whole_host_layer_looks_past_the_busy_hosts(self) -> None:
        # Best fit meets the fullest hosts first: more of them than attempts must not hide the idle one.
        busy = [make_host(f"busy{number}", cores=8, idle_centicores=400) for number in range(30)]

        planned = plan_layer(make_layer(cores=0), *busy, make_host("idle", cores=8))

        assert placed(planned) == [("l1-f1", "idle")]
        assert planned.procs[0].resources.cores == 8

    def test_a_fractional_minimum_is_one_core_and_not_the_whole_host(self) -> None:
        # Trap D-b.
        planned = plan_layer(make_layer(frames=2, cores=0.5), make_host(cores=8))

        assert [proc.resources.cores for proc in planned.procs] == [1, 1]

    def test_thread_mode_all_takes_threaded_layers_only(self) -> None:
        host = make_host(cores=8, thread_mode=ThreadMode.ALL)

        threaded = plan_layer(make_layer(cores=2), host)
        single = plan_layer(make_layer(threadable=False), host)

        assert [proc.resources.cores for proc in threaded.procs] == [8]
        assert only_verdict(single).verdict is Verdict.NO_FIT
        assert "thread" in only_verdict(single).detail

    def test_gpu_frames_go_to_gpu_hosts_and_others_spare_them(self) -> None:
        gpu_host = make_host("gpu", cores=4, idle_gpus=2, idle_gpu_memory_kb=16 * GIB)
        job = make_job(
            layers=[
                make_layer("plain", frames=2),
                make_layer("render", frames=3, gpus_min=1, gpu_memory_min_kb=8 * GIB),
            ]
        )

        pool = FrozenPool([gpu_host, make_host("plain", cores=64)])
        planned = plan(make_snapshot(job), pool)

        assert [host for _, host in placed(planned)] == ["plain", "plain", "gpu", "gpu"]
        assert planned.verdicts[1].verdict is Verdict.CAPACITY
        assert (host := pool.get("gpu")) is not None
        assert host.idle_gpus == 0


class TestCaps:
    def test_an_allocation_without_subscription_is_not_booked(self) -> None:
        planned = plan_layer(make_layer(), make_host(alloc_id="theirs"), subscriptions={"ours": make_caps(100)})

        verdict = only_verdict(planned)
        assert verdict.verdict is Verdict.OVER_SUBSCRIPTION
        assert "subscription" in verdict.detail

    @pytest.mark.parametrize(("left", "placed_frames"), [(4, 2), (3, 1), (2, 1), (1, 0)])
    @pytest.mark.parametrize("over", ["subscription", "folder", "job", "folder_gpus", "job_gpus"])
    def test_the_last_frame_may_take_all_that_a_cap_has_left(self, over: str, left: int, placed_frames: int) -> None:
        gpus = over.endswith("gpus")
        caps = make_caps(None, left) if gpus else make_caps(left)
        snapshot = {
            "subscriptions": {"alloc": caps if over == "subscription" else make_caps(100)},
            "folders": {"folder": caps} if over.startswith("folder") else {},
            "job_caps": {"j1": caps} if over.startswith("job") else {},
        }
        layer = make_layer(frames=2, cores=2, gpus_min=2 if gpus else 0)
        planned = plan_layer(layer, make_host(cores=64, total_gpus=8, idle_gpus=8), **snapshot)
        assert len(planned.procs) == placed_frames

    def test_a_show_without_subscriptions_books_nothing(self) -> None:
        assert only_verdict(plan_layer(make_layer(), make_host(), subscriptions={})).verdict is (
            Verdict.OVER_SUBSCRIPTION
        )

    def test_the_burst_counts_what_is_booked_and_what_the_plan_adds(self) -> None:
        planned = plan_layer(
            make_layer(frames=10, cores=2), make_host(cores=64), subscriptions={"alloc": make_caps(10, booked=3)}
        )

        verdict = only_verdict(planned)
        assert len(planned.procs) == 3
        assert verdict.verdict is Verdict.OVER_SUBSCRIPTION
        assert (verdict.frames, verdict.waiting) == (3, 7)
        assert not lacks(verdict.detail, "2 cores", " 1 ")

    def test_burst_zero_books_nothing(self) -> None:
        planned = plan_layer(make_layer(), make_host(), subscriptions={"alloc": make_caps(0)})

        assert planned.procs == []
        assert only_verdict(planned).verdict is Verdict.OVER_SUBSCRIPTION

    def test_a_full_allocation_leaves_the_others_in_use(self) -> None:
        planned = plan_layer(
            make_layer(frames=8),
            make_host("h1", alloc_id="small"),
            make_host("h2", alloc_id="large", cores=64),
            subscriptions={"small": make_caps(2), "large": make_caps(100)},
        )

        assert [host for _, host in placed(planned)] == ["h1"] * 2 + ["h2"] * 6

    def test_hosts_of_a_full_allocation_are_not_looked_at(self) -> None:
        asked: list[str] = []

        def admit(_job: Job, _layer: Layer, host: Host, _taken: Resources) -> None:
            asked.append(host.alloc_id)

        plan_layer(
            make_layer(frames=3),
            *(make_host(f"f{number}", alloc_id="full", cores=1) for number in range(50)),
            make_host("h2", alloc_id="open"),
            subscriptions={"full": make_caps(4, booked=4), "open": make_caps(100)},
            policy=make_policy(admissions=(admit,)),
        )

        assert set(asked) == {"open"}

    def test_a_folder_cap_is_shared_by_its_jobs(self) -> None:
        jobs = [make_job(name, [make_layer(f"{name}-l", frames=4)]) for name in ("a", "b")]
        snapshot = make_snapshot(*jobs, folders={"folder": make_caps(6)})

        planned = plan(snapshot, FrozenPool([make_host(cores=64, memory_gib=256)]))

        assert [(verdict.verdict, verdict.frames) for verdict in planned.verdicts] == [
            (Verdict.FLOWING, 4),
            (Verdict.OVER_FOLDER, 2),
        ]

    def test_a_threaded_frame_is_cut_down_to_what_its_job_may_still_take(self) -> None:
        # f29d5819d: it grabbed the whole host, and a small job cap rejected it for ever.
        rules = Rules(memory_stranded_threshold_kb=64 * GIB)

        planned = plan_layer(
            make_layer(cores=2), make_host(cores=64), job_caps={"j1": make_caps(5)}, policy=make_policy(rules)
        )

        assert [proc.resources.cores for proc in planned.procs] == [5]

    @pytest.mark.parametrize("cap", ["subscriptions", "folders"])
    def test_a_threaded_frame_is_cut_down_to_every_other_cap_too(self, cap: str) -> None:
        rules = Rules(memory_stranded_threshold_kb=64 * GIB)
        caps: dict[str, dict[str, Caps]] = {
            cap: {"subscriptions": {"alloc": make_caps(5)}, "folders": {"folder": make_caps(5)}}[cap]
        }

        planned = plan_layer(make_layer(cores=2), make_host(cores=64), policy=make_policy(rules), **caps)

        assert [proc.resources.cores for proc in planned.procs] == [5]

    @pytest.mark.parametrize("cores", [0, -60, 0.5, 2], ids=["whole host", "all but", "fraction", "plain"])
    def test_a_job_at_its_cap_is_not_tried_on_any_host_whatever_its_minimum(self, cores: float) -> None:
        # f29d5819d: a sentinel minimum slipped past the at-cap test, and an at-cap job was retried on ten hosts.
        planned = plan_layer(make_layer(cores=cores), make_host(cores=64), job_caps={"j1": make_caps(10, booked=10)})

        assert only_verdict(planned).verdict is Verdict.OVER_JOB
        assert not planned.attempts
        assert planned.cache_misses == 0

    def test_a_cap_below_one_core_refuses_and_is_not_unlimited(self) -> None:
        planned = plan_layer(make_layer(), make_host(), job_caps={"j1": make_caps(0.5)})

        assert only_verdict(planned).verdict is Verdict.OVER_JOB

    def test_a_whole_host_layer_uses_the_hosts_that_fit_its_jobs_cap(self) -> None:
        planned = plan_layer(
            make_layer(frames=2, cores=0),
            make_host("large", cores=64),
            make_host("small", cores=8),
            job_caps={"j1": make_caps(20)},
            policy=make_policy(host_booking_strategy=HostBookingStrategy(core_saturation=False)),
        )

        assert placed(planned) == [("l1-f1", "small")]
        assert only_verdict(planned).verdict is Verdict.OVER_JOB
        assert re.findall(r"\d+", only_verdict(planned).detail) == ["64", "12"]

    @pytest.mark.parametrize(
        ("caps", "expected"),
        [
            ({"folders": {"folder": make_caps(gpus=3)}}, Verdict.OVER_FOLDER_GPUS),
            ({"job_caps": {"j1": make_caps(gpus=3)}}, Verdict.OVER_JOB_GPUS),
        ],
    )
    def test_gpu_caps_count_gpus(self, caps: dict[str, dict[str, Caps]], expected: Verdict) -> None:
        planned = plan_layer(make_layer(frames=5, gpus_min=2), make_host(cores=64, idle_gpus=8), **caps)

        assert len(planned.procs) == 1
        assert only_verdict(planned).verdict is expected

    def test_gpu_caps_do_not_concern_layers_without_gpus(self) -> None:
        full = Caps(Headroom(None, 0), Headroom(2, 2))

        assert len(plan_layer(make_layer(frames=3), make_host(), job_caps={"j1": full}).procs) == 3

    def test_all_limits_of_a_layer_must_have_room(self) -> None:
        # Upstream passes a layer if any of its limits has; licences are then overrun.
        planned = plan_layer(
            make_layer(frames=5, limit_ids=("nuke", "vray")),
            make_host(cores=64),
            limits={"nuke": Headroom(100, 0), "vray": Headroom(4, 2, "V-Ray")},
        )

        assert len(planned.procs) == 2
        assert only_verdict(planned).verdict is Verdict.OVER_LIMIT
        assert not lacks(only_verdict(planned).detail, " 4 ", "V-Ray")

    def test_a_limit_is_shared_by_layers_and_jobs(self) -> None:
        jobs = [make_job(name, [make_layer(f"{name}-l", frames=3, limit_ids=("nuke",))]) for name in ("a", "b")]

        planned = plan(make_snapshot(*jobs, limits={"nuke": Headroom(4, 0)}), FrozenPool([make_host(cores=64)]))

        assert [verdict.frames for verdict in planned.verdicts] == [3, 1]

    def test_vertices_name_every_counter(self) -> None:
        layer = make_layer(limit_ids=("nuke",))
        proc = plan_layer(layer, make_host(alloc_id="alloc"), limits={"nuke": Headroom(4, 0)}).procs[0]

        vertices = proc.vertices
        assert (vertices.show_id, vertices.alloc_id, vertices.folder_id) == ("show", "alloc", "folder")
        assert (vertices.job_id, vertices.layer_id, vertices.dept_id) == ("j1", "l1", "dept")
        assert vertices.limit_ids == ("nuke",)


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


def test_the_settings_give_the_policy() -> None:
    queue = Queue.model_validate(
        {
            "memory_stranded_threshold": "1GiB",
            "selfish_services": ["arnold"],
        }
    )

    policy = policy_for(queue)

    assert policy.rules == Rules(GIB, frozenset({"arnold"}))
    assert (policy.queue, policy.max_frames) == (queue, 1000)


class TestShares:
    @staticmethod
    def of_shows(planned: list[Plan]) -> list[int]:
        return [sum(proc.resources.cores for proc in plan.procs) for plan in planned]

    @staticmethod
    def snapshot(sizes: Mapping[str, float], *, booked: Mapping[str, int] | None = None, frames: int = 100) -> Snapshot:
        """A cluster of each show, with work for all its cores."""
        work, caps = [], {}
        for show in sizes:
            job = make_job(f"{show}-j", [make_layer(f"{show}-l", frames=frames)], show_id=show)
            work.append(GivenWork((replace(make_cluster(), show_id=show),), (job,)))
            caps[show, "alloc"] = make_caps(10_000, booked=(booked or {}).get(show, 0))
        return Snapshot(tuple(work), caps, {}, sizes={(show, "alloc"): size for show, size in sizes.items()})

    @staticmethod
    def plan(snapshot: Snapshot, *hosts: Host, **changes: Any) -> list[Plan]:
        policy = make_policy(**changes)
        return plan_pass(snapshot, FrozenPool(hosts), policy, new_id=counting_ids())

    def test_cores_follow_the_sizes(self) -> None:
        hosts = [make_host(f"h{number}", cores=2) for number in range(20)]
        assert self.of_shows(self.plan(self.snapshot({"a": 30, "b": 10}), *hosts)) == [30, 10]
        # the control: one cluster after another
        assert self.of_shows(self.plan(self.snapshot({"a": 30, "b": 10}), *hosts, shares=False)) == [40, 0]

    def test_the_bound_on_a_layer_gives_a_shows_share_to_nobody(self) -> None:
        hosts = [make_host(f"h{number}", cores=2) for number in range(20)]
        planned = self.plan(self.snapshot({"a": 30, "b": 10}), *hosts, dispatch_frames_per_layer_limit=4)
        assert self.of_shows(planned) == [30, 10]

    def test_a_show_that_came_late_catches_up(self) -> None:
        hosts = [make_host(f"h{number}", cores=1) for number in range(10)]
        snapshot = self.snapshot({"early": 20, "late": 20}, booked={"early": 40})
        assert self.of_shows(self.plan(snapshot, *hosts)) == [0, 10]

    def test_what_nobody_below_its_share_can_use_goes_to_whoever_can(self) -> None:
        hosts = [make_host(f"h{number}", cores=1) for number in range(10)]
        snapshot = self.snapshot({"over": 1, "under": 1000}, booked={"over": 900}, frames=4)
        assert self.of_shows(self.plan(snapshot, *hosts)) == [4, 4]

    def test_a_show_without_a_size_comes_last(self) -> None:
        hosts = [make_host(f"h{number}", cores=1) for number in range(10)]
        snapshot = self.snapshot({"none": 0, "some": 1}, booked={"some": 50}, frames=7)
        assert self.of_shows(self.plan(snapshot, *hosts)) == [3, 7]

    def test_a_show_over_its_size_is_told_why_others_were_served(self) -> None:
        snapshot = self.snapshot({"over": 10, "under": 10}, booked={"over": 30}, frames=4)
        over, under = self.plan(snapshot, make_host(cores=4))
        assert self.of_shows([over, under]) == [0, 4]
        assert only_verdict(over).verdict is Verdict.OVER_SHARE
        assert "3.00 " in only_verdict(over).detail


class TestRounds:
    LAYERS = ("l1", "l2")

    def frames(self, *, whole_rounds: bool = True, cores: int = 12) -> dict[str, int]:
        layers = [make_layer(name, frames=10) for name in self.LAYERS]
        policy = make_policy(dispatch_frames_per_layer_limit=4, whole_rounds=whole_rounds)
        planned = plan(make_snapshot(make_job(layers=layers)), FrozenPool([make_host(cores=cores)]), policy=policy)
        return {it.layer_id: it.frames for it in planned.verdicts}

    def test_each_layer_gets_its_part_before_any_gets_more(self) -> None:
        assert self.frames(cores=6) == {"l1": 4, "l2": 2}

    def test_what_is_idle_then_goes_on(self) -> None:
        assert self.frames() == {"l1": 8, "l2": 4}
        assert self.frames(whole_rounds=False) == {"l1": 4, "l2": 4}

    def test_a_soft_admission_holds_while_others_want_the_host(self) -> None:
        def at_most_two(_job: Job, layer: Layer, host: Host, _taken: Resources) -> Refusal | None:
            return Refusal(Verdict.LAYER_SHARE, "enough") if host.running.get(layer.id, 0) >= 2 else None

        layers = [make_layer(name, frames=10) for name in self.LAYERS]
        snapshot = make_snapshot(make_job(layers=layers))
        policy = make_policy(soft_admissions=(at_most_two,))

        def frames(cores: int) -> list[int]:
            planned = plan(snapshot, FrozenPool([make_host(cores=cores)]), policy=policy)
            return [it.frames for it in planned.verdicts]

        assert frames(4) == [2, 2]
        assert frames(8) == [6, 2], "what nobody else takes is not kept idle"

    def test_a_layer_that_two_clusters_reach_is_placed_once(self) -> None:
        job = make_job(layers=[make_layer(frames=5, tags=frozenset({"general", "other"}))])
        work = (GivenWork((make_cluster("general"), make_cluster("other")), (job,)),)
        hosts = [make_host("h1", cores=3), make_host("h2", cores=9, tags=frozenset({"other"}))]
        planned = TestShares.plan(replace(make_snapshot(), work=work), *hosts)
        frames = [proc.frame.id for plan in planned for proc in plan.procs]
        assert len(frames) == len(set(frames)) == 5
        assert TestShares.of_shows(planned) == [5, 0], "it counts for the first of them"


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


@pytest.mark.parametrize("score", [None, convex])
def test_a_new_seat_goes_to_the_host_that_takes_most_of_all_frames_that_wait_for_it(score: Score | None) -> None:
    # given a limit that one machine may hold, six layers of a frame each under it, and many hosts that fit one well
    hosts = [*(make_host(f"h{number}", cores=1) for number in range(30)), make_host("big", cores=8)]
    hosts += [make_host("knows", cores=2, recent=("a",)), make_host("huge", cores=64)]
    jobs = [make_job(f"j-{name}", layers=[make_layer(name, limit_ids=("nuke",))]) for name in "abcdef"]
    seats = {"nuke": Seats(frozenset(), 1)}

    planned = plan(make_snapshot(*jobs, seats=seats), FrozenPool(hosts), policy=make_policy(score=score, locality=True))

    # then the seat goes to the smallest on which all of them fit
    assert {proc.host.id for proc in planned.procs} == {"big"}
    assert len(planned.procs) == 6


def test_a_limit_without_seats_idles_no_core_that_other_work_can_use() -> None:
    # given a limit that one of two hosts holds, frames under it that fill that one, and behind them other work
    hosts = [make_host("holder", cores=2), make_host("h2", cores=4)]
    layers = [make_layer("under", frames=9, limit_ids=("nuke",)), make_layer("other", frames=9)]
    seats = {"nuke": Seats(frozenset({"holder"}), 0)}

    planned = plan(make_snapshot(make_job(layers=layers), seats=seats), FrozenPool(hosts))

    assert placed(planned) == [
        *((f"under-f{number}", "holder") for number in (1, 2)),
        *((f"other-f{number}", "h2") for number in (1, 2, 3, 4)),
    ]


@pytest.mark.parametrize(("shard", "others", "starts"), [("", True, True), ("w1", True, False), ("w1", False, True)])
def test_where_hosts_are_divided_those_of_other_shards_may_take_it(shard: str, others: bool, starts: bool) -> None:
    # given a frame that failed on the only host of this shard that could take it, and perhaps others elsewhere
    layer = failed(make_layer(), f1="h1")
    layer = replace(layer, frames=tuple(replace(frame, others=others) for frame in layer.frames))
    cluster, pool = replace(make_cluster(), shard=shard), FrozenPool([make_host("h1")])
    pool.refresh(cluster.facility_id, cluster.tags, shard)
    planned = plan(make_snapshot(make_job(layers=[layer])), pool, cluster=cluster)
    assert placed(planned) == ([("l1-f1", "h1")] if starts else [])


class TestPlansUnderWay:
    """Other passes of the process book on what they left of a host; the two commits would meet at its row."""

    class Busy(FrozenPool):
        others: frozenset[str] = frozenset()

        def being_booked(self, host_id: str) -> bool:
            return host_id in self.others or super().being_booked(host_id)

    def hosts_of(self, layers: list[Layer], others: set[str], hosts: list[Host]) -> list[str]:
        pool = self.Busy(hosts)
        pool.others = frozenset(others)
        return [proc.host.id for proc in plan(make_snapshot(make_job(layers=layers)), pool).procs]

    def test_hosts_that_no_other_plan_books_on_come_first_and_then_the_others(self) -> None:
        # given the host that fits best in another plan's hands
        hosts = [make_host("tight", cores=2), make_host("h2", cores=4), make_host("h3", cores=4)]

        used = self.hosts_of([make_layer(frames=6, cores=2)], {"tight"}, hosts)

        assert set(used[:4]) == {"h2", "h3"}
        assert used[4:] == ["tight"]

    def test_a_machine_that_holds_the_limit_comes_before_a_new_seat_also_in_another_plans_hands(self) -> None:
        # given a limit that one more machine may hold, and the one that does in another plan's hands
        pool = self.Busy([make_host("holder", cores=4), make_host("h2", cores=4)])
        pool.others = frozenset({"holder"})
        job = make_job(layers=[make_layer(frames=6, cores=2, limit_ids=("nuke",))])
        seats = {"nuke": Seats(frozenset({"holder"}), 1)}

        used = [proc.host.id for proc in plan(make_snapshot(job, seats=seats), pool).procs]

        assert used == ["holder"] * 2 + ["h2"] * 2

    def test_under_a_limit_without_seats_no_host_is_looked_at_that_does_not_hold_it(self) -> None:
        # given a hundred idle hosts, of which two hold one limit, that is full, and one of these another, that is not
        looked_at = []

        class Watched(FrozenPool):
            def being_booked(self, host_id: str) -> bool:
                looked_at.append(host_id)
                return super().being_booked(host_id)

        hosts = [make_host(f"h{number}", cores=2) for number in range(100)]
        seats = {"full": Seats(frozenset({"h7", "h8", "artist"}), 0), "open": Seats(frozenset({"h8"}), 5)}
        layers = [
            make_layer("l1", frames=3, limit_ids=("full", "open")),
            make_layer("wide", cores=3, limit_ids=("full",)),
            make_layer("l2", frames=3, limit_ids=("full",)),
        ]

        # when its layers are planned, then on those two alone, that which holds both first, and they say why they wait
        planned = plan(make_snapshot(make_job(layers=layers), seats=seats), Watched(hosts))

        assert placed(planned) == [("l1-f1", "h8"), ("l1-f2", "h8"), ("l1-f3", "h7"), ("l2-f1", "h7")]
        assert set(looked_at) == {"h7", "h8"}
        assert {verdict.verdict for verdict in planned.verdicts[1:]} == {Verdict.OVER_LIMIT}

    def test_a_layer_without_a_host_does_not_mix_plans(self) -> None:
        # given a layer that no host can take, before one that any can
        hosts = [make_host("tight", cores=2), make_host("h2", cores=4)]
        layers = [make_layer("wide", cores=9), make_layer("narrow", cores=2)]

        assert self.hosts_of(layers, {"tight"}, hosts) == ["h2"]

    def test_a_layer_with_no_other_host_does_not_mix_plans(self) -> None:
        # given a layer whose only host is in another plan's hands, before one that has others
        hosts = [make_host("large", cores=16), make_host("tight", cores=2), make_host("h2", cores=4)]
        layers = [make_layer("wide", cores=9), make_layer("narrow", cores=2)]

        assert self.hosts_of(layers, {"large", "tight"}, hosts) == ["large", "h2"]

    def test_the_plans_own_hosts_are_filled_as_ever(self) -> None:
        # given hosts that are alike, three layers, and another plan elsewhere
        hosts = [make_host(name, cores=4) for name in ("h1", "h2", "h3")]
        layers = [make_layer(name, cores=1) for name in ("a", "b", "c")]

        assert len(set(self.hosts_of(layers, {"h3"}, hosts))) == 1
