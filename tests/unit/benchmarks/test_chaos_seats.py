"""The chaos benchmark's judge of licences, on bookings made by hand: what each limit forbade, and what it did not."""

from __future__ import annotations

import pytest

from benchmarks.chaos.seats import Seated, SeatJudge

NUKE = "nuke"
ASKED = 100.0
OLD, YOUNG = 50.0, 99.9


def proc(name: str, machine: str, at: float, *, started: float | None = None) -> Seated:
    return Seated(name, machine, frozenset({NUKE}), at if started is None else started, at)


def limit(most: int, *names: str, asked: float | None = None, frames: bool = False, at: float = 0.0, held: int = 0):
    """``names`` that begin with an a are of no host; each has a token."""
    reported = [[name, not name.startswith("a"), 1] for name in names]
    life = 900
    return {
        "limit": NUKE, "machines": not frames, "most": most, "asked": asked, "life": life, "at": at,
        "reported": reported, "held": held,
    }  # fmt: skip


def forbidden(*samples: tuple[list[Seated], dict]) -> list[str]:
    judge = SeatJudge()
    for number, (procs, row) in enumerate(samples):
        judge.look(procs, [row], float(number))
    return [booking.proc_id for booking in judge.forbidden]


def test_machines_up_to_the_maximum_take_any_number_of_frames():
    procs = [proc("p", "r1", 1), proc("q", "r1", 2), proc("r", "r2", 3), proc("s", "r1", 4)]
    assert forbidden((procs, limit(2))) == []


def test_a_machine_too_many_is_found_whenever_it_is_seen():
    first = [proc("p", "r1", 1), proc("q", "r2", 2)]
    assert forbidden((first, limit(2)), ([*first, proc("r", "r3", 3)], limit(2))) == ["r"]
    assert forbidden(([*first, proc("r", "r3", 3)], limit(2))) == ["r"]


def test_frames_that_come_together_on_a_machine_too_many_do_not_hide_one_another():
    procs = [proc("p", "r1", 1), proc("q", "r2", 2), proc("q2", "r2", 2)]
    assert forbidden((procs, limit(1))) == ["q", "q2"]
    assert forbidden((procs[1:], limit(1))) == []


def test_one_machine_for_another_is_found_though_their_number_stands_still():
    before, after = [proc("p", "r1", 1), proc("q", "r2", 2)], [proc("p", "r1", 1), proc("r", "r3", 3)]
    assert forbidden((before, limit(2)), (after, limit(2))) == []
    assert forbidden((before, limit(2)), (before, limit(1, at=2.5)), (after, limit(1, at=2.5))) == ["r"]


def test_above_a_lowered_maximum_the_first_machines_go_on_alone():
    held = [proc("p", "r1", 1), proc("q", "r2", 2), proc("r", "r3", 3)]
    later = [*held, proc("s", "r1", 5), proc("t", "r3", 6)]
    assert forbidden((held, limit(3)), (held, limit(2, at=4)), (later, limit(2, at=4))) == ["t"]


def test_a_frame_on_a_machine_whose_last_frame_has_ended_since_the_last_look_is_none():
    held = [proc("p", "r1", 1), proc("q", "r2", 2)]
    assert forbidden((held, limit(2)), ([held[0], proc("s", "r2", 3)], limit(2))) == []


def test_what_is_reported_counts_and_holds():
    row = limit(2, "artist", "r1", asked=ASKED)
    assert forbidden(([proc("p", "r1", 101)], row)) == []
    assert forbidden(([proc("p", "r1", 101), proc("q", "r2", 102)], row)) == ["q"]


def test_a_frame_that_the_report_would_show_and_does_not_counts_for_nothing():
    row = limit(2, "artist", asked=ASKED)
    for started, found in ((OLD, []), (YOUNG, ["q"])):
        procs = [proc("p", "r1", 100, started=started), proc("q", "r2", 102)]
        assert forbidden((procs, row)) == found
    # but it holds, so that at the maximum its machine may start another.
    more = [proc("o", "r1", 90, started=OLD), proc("p", "r2", 100, started=YOUNG), proc("q", "r1", 102)]
    assert forbidden((more, row)) == []


def test_bookings_of_one_commit_are_allowed_where_they_were_in_some_order():
    # given a reported limit that is full, and a machine, the first by id, that holds it without counting
    row = limit(2, "artist", "r1", asked=ASKED, at=101)
    held = [proc("o", "r0", 90, started=OLD)]
    given = [(held, limit(2)), (held, row)]
    counted, not_counted = proc("s", "r1", 102), proc("t", "r0", 102)
    # then both machines may get a frame in one commit: first the one that counts already, as that adds nothing
    assert forbidden(*given, ([*held, counted, not_counted], row)) == []
    # and not one after the other: the second is above the maximum, and not the first by id
    assert forbidden(*given, ([*held, not_counted, proc("s", "r1", 103)], row)) == ["s"]
    # nor may a third machine beside them
    assert forbidden(*given, ([*held, counted, not_counted, proc("u", "r2", 102)], row)) == ["u"]


def test_artists_who_come_take_seats_from_the_last_machines():
    held = [proc("p", "r1", 99, started=YOUNG), proc("q", "r2", 99, started=YOUNG)]
    row = limit(2, "artist", asked=ASKED, at=101)
    assert forbidden((held, limit(2)), (held, row), ([*held, proc("s", "r1", 102)], row)) == []
    assert forbidden((held, limit(2)), (held, row), ([*held, proc("t", "r2", 102)], row)) == ["t"]


def test_above_the_maximum_one_that_is_first_may_go_on_until_the_fleet_has_heard_of_its_last_end():
    held = [proc("p", "r1", 1), proc("q", "r2", 2), proc("r", "r3", 3)]
    low = limit(2, at=4)
    assert forbidden((held, limit(3)), (held, low), (held[1:], low), ([*held[1:], proc("s", "r1", 6)], low)) == []
    assert forbidden((held, limit(3)), (held, low), (held[:2], low), ([*held[:2], proc("s", "r3", 6)], low)) == ["s"]
    late = [(held[1:], low)] * 10
    assert forbidden((held, limit(3)), (held, low), *late, ([*held[1:], proc("s", "r1", 12)], low)) == ["s"]


def test_frames_are_used_by_tokens_and_by_what_the_report_need_not_show():
    row = limit(3, "artist", "r1", asked=ASKED, frames=True)
    old, young = proc("p", "r1", 90, started=OLD), proc("q", "r1", 101)
    assert forbidden(([old, young], row)) == []
    assert forbidden(([old, young, proc("r", "r1", 102)], row)) == ["r"]


@pytest.mark.parametrize(("at", "found"), [(950.0, ["q"]), (999.5, [])])
def test_of_a_report_that_may_be_too_old_nothing_is_said(at, found):
    row = limit(1, "artist", asked=ASKED)
    assert forbidden(([proc("q", "r2", at)], row)) == found


def test_terms_that_changed_since_the_last_look_forbid_only_with_those_before_them():
    held = [proc("p", "r1", 1), proc("q", "r2", 2)]
    more = [*held, proc("r", "r3", 3)]
    assert forbidden((held, limit(2)), (more, limit(3, at=3.5))) == []
    assert forbidden((held, limit(2)), (more, limit(1, at=2.5))) == ["r"]


def test_machines_are_counted_as_postgresql_counts_them_too():
    rows = [limit(3, held=3), limit(2, held=3), limit(2, held=2), limit(2, held=3)]
    judge = SeatJudge()
    for number, row in enumerate(rows):
        judge.look([], [row], float(number))
    assert [(booking.use, booking.most, booking.at) for booking in judge.forbidden] == [(3, 2, 3.0)]
