"""Plans under caps: of subscriptions, folders, jobs and limits, and the seats of limits that count machines."""

from __future__ import annotations

import re

import pytest

from opencue_sched.domain.caps import Caps, Headroom, Seats
from opencue_sched.domain.frame_needs import Rules
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import Score
from opencue_sched.placement.policies.order import convex
from opencue_sched.settings import HostBookingStrategy
from tests.kit.values import GIB, make_caps, make_host, make_job, make_layer, make_policy, make_snapshot, plan
from tests.kit.wording import lacks
from tests.unit.placement.frozen_pool import FrozenPool
from tests.unit.placement.planned_layers import only_verdict, placed, plan_layer


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
