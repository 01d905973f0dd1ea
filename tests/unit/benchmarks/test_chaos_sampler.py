"""The chaos benchmark's witness, on bookings made by hand: what it must call a violation and what it must not."""

from __future__ import annotations

import json

import pytest

from benchmarks.chaos.sampler import CapHistory, Held, Judge

SUB, FOLDER, LIMIT = "sub:show:alloc", "folder:shots", "limit:nuke"
NO_CAP = float("inf")


def proc(name: str, at: float, *, cores: int = 100, frames: int = 0) -> Held:
    """A booking of 100 centicores under every vertex, committed at ``at``."""
    takes = {SUB: cores, FOLDER: cores, **({LIMIT: frames} if frames else {})}
    return Held(name, takes, at)


def caps(sub: float = 300, *, at: float = 0.0, folder: float = NO_CAP, limit: float = 99) -> list:
    return [(SUB, sub, at), (FOLDER, folder, 0.0), (LIMIT, limit, 0.0)]


def judge(*samples: tuple[list[Held], list]) -> Judge:
    found = Judge()
    for procs, limits in samples:
        found.look(procs, limits)
    return found


def offenders(found: Judge) -> list[tuple[str, str]]:
    return [(excess.proc_id, excess.vertex) for excess in found.violations]


def test_bookings_up_to_the_cap_are_none():
    three = [proc("a", 1.0), proc("b", 1.1), proc("c", 1.2)]
    found = judge((three, caps(300)))
    assert found.violations == []


def test_the_booking_that_passes_the_cap_is_one_and_those_before_it_are_not():
    found = judge(([proc("a", 1.0), proc("b", 1.1), proc("c", 1.2), proc("d", 1.3)], caps(300)))
    assert offenders(found) == [("d", SUB)]
    (excess,) = found.violations
    assert (excess.held, excess.cap, excess.at) == (400, 300, 1.3)


def test_one_that_is_seen_in_a_later_sample_is_found_as_well():
    first = [proc("a", 1.0), proc("b", 1.1), proc("c", 1.2)]
    found = judge((first, caps(300)), ([*first, proc("d", 2.0)], caps(300)))
    assert offenders(found) == [("d", SUB)]


def test_each_cap_that_is_passed_is_told():
    found = judge(([proc("a", 1.0, cores=800)], caps(300, folder=500)))
    assert sorted(offenders(found)) == [("a", FOLDER), ("a", SUB)]


def test_a_limit_counts_frames_not_cores():
    two = [proc("a", 1.0, frames=1), proc("b", 1.1, frames=1)]
    assert offenders(judge((two, caps(9999, limit=2)))) == []
    assert offenders(judge((two, caps(9999, limit=1)))) == [("b", LIMIT)]


def test_one_core_for_another_while_above_a_lowered_cap_is_found_though_the_sum_stands_still():
    """A sum that is read now and then would not show it: a was released and d booked between two samples."""
    before = [proc("a", 1.0), proc("b", 1.1), proc("c", 1.2)]
    after = [*before[1:], proc("d", 5.0)]
    found = judge((before, caps(300)), (before, caps(200, at=3.0)), (after, caps(200, at=3.0)))
    assert offenders(found) == [("d", SUB)]
    assert found.violations[0].late == pytest.approx(2.0)


def test_being_above_a_lowered_cap_is_none():
    three = [proc("a", 1.0), proc("b", 1.1), proc("c", 1.2)]
    found = judge((three, caps(300)), (three, caps(100, at=2.0)), (three[:2], caps(100, at=2.0)))
    assert found.violations == []


def test_a_booking_committed_right_after_its_cap_was_lowered_is_one():
    """Both are seen at once; the transaction may have read the cap before."""
    held = [proc("a", 1.0), proc("b", 1.1)]
    found = judge((held, caps(300)), ([*held, proc("c", 3.02)], caps(200, at=3.0)))
    assert offenders(found) == [("c", SUB)]
    assert found.violations[0].late == pytest.approx(0.02)


def test_a_booking_committed_right_before_its_cap_was_lowered_is_none():
    held = [proc("a", 1.0), proc("b", 1.1)]
    found = judge((held, caps(300)), ([*held, proc("c", 2.98)], caps(200, at=3.0)))
    assert found.violations == []


def test_a_booking_under_a_raised_cap_is_none_though_both_are_seen_at_once():
    three = [proc("a", 1.0), proc("b", 1.1), proc("c", 1.2)]
    found = judge((three, caps(300)), ([*three, proc("d", 3.1)], caps(400, at=3.0)))
    assert found.violations == []


def test_a_raised_cap_whose_row_was_written_again_before_anybody_looked_counts_since_the_last_look():
    three = [proc("a", 1.0), proc("b", 1.1), proc("c", 1.2)]
    five = [*three, proc("d", 3.1), proc("e", 3.2)]
    found = judge((three, caps(300)), (five, caps(400, at=3.15)))
    assert offenders(found) == [("e", SUB)]
    assert offenders(judge((three, caps(300)), (three, caps(400, at=3.15)), (five, caps(400, at=3.15)))) == [
        ("d", SUB),
        ("e", SUB),
    ]


def test_a_row_that_is_written_without_a_change_of_its_cap_does_not_make_the_cap_younger():
    """The recompute writes the count into the row of the cap; the booking after it is judged by the cap as ever."""
    held = [proc("a", 1.0), proc("b", 1.1)]
    found = judge((held, caps(200, at=0.5)), ([*held, proc("c", 3.02)], caps(200, at=3.0)))
    assert offenders(found) == [("c", SUB)]


def test_a_proc_rewritten_after_its_booking_keeps_the_moment_it_was_booked():
    """A host report updates the row: its new writer is no booking, and later than the lowered cap."""
    a, b = proc("a", 1.0), proc("b", 1.1)
    rewritten = [proc("a", 6.0), proc("b", 6.0)]
    found = judge(([a, b], caps(200)), (rewritten, caps(100, at=5.0)))
    assert found.violations == []


def test_an_uncapped_vertex_and_an_unknown_one_allow_anything():
    found = judge(([proc("a", 1.0, cores=10**6)], [(SUB, NO_CAP, 0.0)]))
    assert found.violations == []


def test_a_cap_history_knows_what_was_in_force_when():
    history = CapHistory()
    for value, at in ((300.0, 0.0), (300.0, 4.0), (100.0, 5.0), (200.0, 8.0)):
        history.note(value, at)
    assert [history.at(moment)[1] for moment in (1.0, 5.0, 7.9, 8.0)] == [300, 100, 100, 200]


def test_a_row_of_the_sample_is_read_with_every_cap_it_counts_under():
    row = {
        "pk_proc": "p", "cores": 250, "gpus": 0, "pk_show": "s", "pk_alloc": "a", "pk_folder": "f", "pk_job": "j",
        "limits": ["l1", "l2"], "committed": 1.5,
    }  # fmt: skip
    held = Held.read(json.loads(json.dumps(row)))
    assert held.takes == {"sub:s:a": 250, "folder:f": 250, "job:j": 250, "limit:l1": 1, "limit:l2": 1}
    assert held.committed == 1.5
    with_gpus = Held.read(row | {"gpus": 2})
    assert with_gpus.takes == {**held.takes, "folder_gpus:f": 2, "job_gpus:j": 2}
