"""The planner's decisions, one by one: whose turn it is, and on which host. With the other files of its name, also the
upstream traps that it must not repeat (docs/contributors/upstream-traps.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from opencue_sched.domain.caps import Seats
from opencue_sched.domain.frame_needs import Rules
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.plans import Snapshot
from opencue_sched.domain.states import ThreadMode
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.plan_state import Plan
from opencue_sched.placement.planner import plan_pass
from opencue_sched.placement.policies import Refusal
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
from tests.unit.placement.frozen_pool import FrozenPool
from tests.unit.placement.planned_layers import KEPT, only_verdict, placed, plan_layer


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
