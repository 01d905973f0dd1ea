"""Verdicts after the ledger and the commit have had their say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opencue_sched.accounting.ledger import BookingRefused
from opencue_sched.dispatch.cluster_pass import given_back
from opencue_sched.dispatch.report import after_booking
from opencue_sched.domain.cluster import LayerVerdict, Verdict
from opencue_sched.domain.farm import PlannedProc, Reservation, Vertices
from opencue_sched.errors import FrameLost
from tests.unit.placement.values import make_host, make_job, make_layer

LAYER = make_layer(frames=5)
PROCS = [
    PlannedProc(
        f"p{number}",
        make_job(layers=[LAYER]),
        LAYER,
        frame,
        make_host(),
        Reservation(1, 1024),
        Vertices("show", "alloc", "folder", "j1", "l1", "dept"),
    )
    for number, frame in enumerate(LAYER.frames[:3])
]
PLANNED = LayerVerdict("j1", "l1", Verdict.CAPACITY, 3, 2, "no host")
OTHER = LayerVerdict("j2", "l2", Verdict.NO_HOST, 0, 4)


def test_what_was_booked_leaves_the_verdict_as_it_is() -> None:
    booked = after_booking([PLANNED, OTHER], PROCS, {}, {})
    assert booked.verdicts == (PLANNED, OTHER)
    assert (booked.refused, booked.lost) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    ("table", "verdict", "words"),
    [
        ("subscription", Verdict.OVER_SUBSCRIPTION, "4 of 5 in use under the cap of its subscription"),
        ("folder", Verdict.OVER_FOLDER, "its folder"),
        ("folder_gpus", Verdict.OVER_FOLDER_GPUS, "its folder"),
        ("job", Verdict.OVER_JOB, "its job"),
        ("job_gpus", Verdict.OVER_JOB_GPUS, "its job"),
        ("limit", Verdict.OVER_LIMIT, "its limit"),
        ("unseeded", Verdict.FAILED, "acct:job:j1"),
        ("error", Verdict.FAILED, "counters in Redis are spoilt"),
        ("tombstoned", Verdict.FLOWING, "taken back"),
    ],
)
def test_a_layer_that_the_ledger_refuses_says_what_is_in_its_way(table: str, verdict: Verdict, words: str) -> None:
    refused = BookingRefused(table, 4.0, 5.0, "acct:job:j1")
    booked = after_booking([PLANNED, OTHER], PROCS, {"p1": refused, "p2": refused}, {})
    (judged, other) = booked.verdicts
    assert (judged.verdict, judged.frames, judged.waiting, other) == (verdict, 1, 4, OTHER)
    assert words in judged.detail
    assert (booked.refused, booked.lost) == ({"l1"}, frozenset())


def test_a_layer_that_lost_all_its_frames_is_told_from_one_that_kept_some() -> None:
    losses = {proc.proc_id: FrameLost("taken") for proc in PROCS}
    all_lost = after_booking([PLANNED], PROCS, {}, losses)
    some_lost = after_booking([PLANNED], PROCS, {}, {"p0": losses["p0"]})
    assert (all_lost.lost, some_lost.lost) == ({"l1"}, frozenset())
    assert [(it.frames, it.waiting) for it in (*all_lost.verdicts, *some_lost.verdicts)] == [(0, 5), (2, 3)]
    assert "3 of its frames were lost before they were booked (frame_lost)" in all_lost.verdicts[0].detail


def test_a_layer_of_which_frames_were_refused_is_not_one_that_lost_all_to_others() -> None:
    lost = {proc.proc_id: FrameLost("taken") for proc in PROCS}
    assert after_booking([PLANNED], PROCS, {}, lost).lost == {"l1"}
    refused = {"p0": BookingRefused("job", 5, 5, "acct:job:j1")}
    booked = after_booking([PLANNED], PROCS, refused, {"p1": lost["p1"], "p2": lost["p2"]})
    assert (booked.refused, booked.lost) == ({"l1"}, frozenset())
    assert (booked.verdicts[0].frames, booked.verdicts[0].waiting) == (0, 5)


def test_a_host_is_given_back_as_it_is_without_what_was_not_kept() -> None:
    host, other = make_host("host", cores=16), make_host("other", cores=8)
    plan = []
    for number, at in enumerate((host, other, host, host)):
        earlier = sum(proc.host.id == at.id for proc in plan)
        now = at.less(Reservation(4 * earlier, 1024 * earlier))
        plan.append(replace(PROCS[0], proc_id=f"p{number}", host=now, reservation=Reservation(4, 1024)))

    assert given_back(plan, {"p0", "p1", "p2", "p3"}) == ()
    (back,) = given_back(plan, {"p0", "p1"})
    assert (back.id, back.idle_cores, back.idle_memory_kb) == ("host", 12, host.idle_memory_kb - 1024)
    assert [(it.id, it.idle_cores) for it in given_back(plan, ())] == [("host", 16), ("other", 8)]
