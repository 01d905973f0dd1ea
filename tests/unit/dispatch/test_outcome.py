"""Verdicts after the ledger and the commit have had their say."""

from __future__ import annotations

import pytest

from opencue_sched.accounting.ledger import BookingRefused
from opencue_sched.dispatch.verdicts import after_booking
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.errors import FrameLost
from tests.kit.values import make_host, make_job, make_layer
from tests.kit.wording import lacks

LAYER = make_layer(frames=5)
PROCS = [
    PlannedProc(
        f"p{number}",
        make_job(layers=[LAYER]),
        LAYER,
        frame,
        make_host(),
        Resources(1, 1024),
        Vertices("show", "alloc", "folder", "j1", "l1", "dept"),
    )
    for number, frame in enumerate(LAYER.frames[:3])
]
PLANNED = LayerVerdict("j1", "l1", Verdict.CAPACITY, 3, 2, "no host")
OTHER = LayerVerdict("j2", "l2", Verdict.NO_HOST, 0, 4)


def test_what_was_booked_leaves_the_verdict_as_it_is() -> None:
    assert after_booking([PLANNED, OTHER], PROCS, {}, {}) == (PLANNED, OTHER)


@pytest.mark.parametrize(
    ("table", "verdict", "words"),
    [
        ("subscription", Verdict.OVER_SUBSCRIPTION, ["4 of 5", "cap of its subscription"]),
        ("folder", Verdict.OVER_FOLDER, ["4 of 5", "cap of its folder"]),
        ("folder_gpus", Verdict.OVER_FOLDER_GPUS, ["4 of 5", "cap of its folder"]),
        ("job", Verdict.OVER_JOB, ["4 of 5", "cap of its job"]),
        ("job_gpus", Verdict.OVER_JOB_GPUS, ["4 of 5", "cap of its job"]),
        ("limit", Verdict.OVER_LIMIT, ["4 of 5", "cap of its limit"]),
        ("unseeded", Verdict.FAILED, ["acct:job:j1", "no row"]),
        ("error", Verdict.FAILED, ["acct:job:j1", "damaged"]),
        ("tombstoned", Verdict.FLOWING, ["taken back"]),
    ],
)
def test_a_layer_that_the_ledger_refuses_says_what_is_in_its_way(
    table: str, verdict: Verdict, words: list[str]
) -> None:
    refused = BookingRefused(table, 4.0, 5.0, "acct:job:j1")
    (judged, other) = after_booking([PLANNED, OTHER], PROCS, {"p1": refused, "p2": refused}, {})
    assert (judged.verdict, judged.frames, judged.waiting, other) == (verdict, 1, 4, OTHER)
    assert not lacks(judged.detail, *words)


def test_frames_that_were_lost_wait_again() -> None:
    losses = {proc.proc_id: FrameLost("taken") for proc in PROCS}
    (all_lost,) = after_booking([PLANNED], PROCS, {}, losses)
    (some_lost,) = after_booking([PLANNED], PROCS, {}, {"p0": losses["p0"]})
    assert [(it.frames, it.waiting) for it in (all_lost, some_lost)] == [(0, 5), (2, 3)]
    assert all(fact in all_lost.detail for fact in ("3 ", "frame_lost"))


def test_a_layer_of_which_some_frames_were_refused_and_the_others_lost_was_refused() -> None:
    lost = {proc.proc_id: FrameLost("taken") for proc in PROCS[1:]}
    (judged,) = after_booking([PLANNED], PROCS, {"p0": BookingRefused("job", 5, 5, "acct:job:j1")}, lost)
    assert (judged.verdict, judged.frames, judged.waiting) == (Verdict.OVER_JOB, 0, 5)
