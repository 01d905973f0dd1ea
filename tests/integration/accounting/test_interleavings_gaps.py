"""What the newest way of counting leaves open, and a process that was stopped.

Each interleaving is played twice: by production code, which must hold, and by counters inside of one process, which
must break.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opencue_sched.accounting import caps, keys, recompute
from tests.integration.accounting.interleaved import (
    BOOK,
    BOOKED,
    BURST,
    COMMIT,
    CORRECTION,
    JUDGED,
    OVER_BOOKED,
    PLANNED,
    SNAPSHOT,
    UNDOING,
    Figures,
    Side,
    finish,
    until,
)
from tests.integration.accounting.interleaved_naive import InEachProcess, InProcess, OnRedis
from tests.integration.accounting.interleaved_ours import Ours
from tests.kit.mutants import changed_code

Play = Callable[..., Side]


@pytest.fixture(params=[Ours, InProcess], ids=["ours", "naive"])
def side(request: pytest.FixtureRequest, play: Play) -> Side:
    return play(request.param)


def test_a_release_told_after_the_overwrite_that_left_it_out(side: Side) -> None:
    """Gap (a): the notification takes a proc off that the recompute had already not counted."""
    first, *_ = side.run(BURST)
    side.submit(2)
    side.end(first)
    finish(side.recompute())
    side.release(first)
    assert side.counted() == (BURST - 1 if side.ours else BURST - 2)
    finish(side.worker())
    side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


def test_a_failed_launch_is_given_back_when_its_proc_is_gone(side: Side) -> None:
    """Gap (b): the counter is rolled back before the compensating DELETE commits; the room is not there yet."""
    side.run(BURST - 1)
    side.submit()
    other = until(side.worker(), BOOK)
    side.submit()
    side.launches_fail = True
    failing = until(side.worker(), UNDOING)
    side.launches_fail = False
    assert side.counted() == (BURST if side.ours else BURST - 1)
    finish(other)
    peak = side.figures()
    assert peak == ((4, 4) if side.ours else (5, 4)), "until the DELETE commits, its cores are in use"
    finish(failing)
    assert side.figures() == ((3, 3) if side.ours else (4, 4))
    side.settle_down()
    side.judge(side.figures() if side.ours else peak, breaks=OVER_BOOKED, cap=BURST, room=BURST)


def test_a_failed_launch_that_cannot_be_undone_keeps_its_room(side: Side) -> None:
    """Gap (b), longer: the compensation fails, so the row stays; and nobody counts it."""
    side.run(BURST - 1)
    side.submit()
    other = until(side.worker(), BOOK)
    side.submit()
    side.launches_fail = True
    side.refuse_compensations()
    finish(side.worker())
    side.launches_fail = False
    finish(other)
    side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


def test_a_cap_lowered_by_hand_binds_what_is_not_committed(side: Side) -> None:
    """Gap (c): nobody was told of the lowered cap, and the next reseed is minutes away."""
    finish(side.load_caps())
    side.submit(BURST)
    worker = until(side.worker(), BOOKED)
    side.set_burst(2)
    finish(worker)
    side.check(ours=Figures(2, 2), naive=Figures(4, 4), breaks=OVER_BOOKED, cap=2)


def test_a_commit_of_unknown_outcome_that_happened(side: Side) -> None:
    """Gap (d): the connection broke after the COMMIT was sent; rolled back in memory, running in fact."""
    side.run(BURST - 1)
    side.submit()
    other = until(side.worker(), BOOK)
    side.submit()
    deaf = until(side.worker(), BOOKED)
    deaf.deaf = True
    finish(deaf)
    assert side.figures() == (4, 4 if side.ours else 3)
    finish(other)
    side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


def test_a_commit_of_unknown_outcome_that_did_not_happen(play: Play) -> None:
    """Gap (d), the other half: what was left in flight is looked up, not found, and given back after an age."""
    side = play(Ours)
    side.run(BURST - 1)
    side.submit()
    cut_off = until(side.worker(), BOOKED, COMMIT)
    side.cut_transactions()
    finish(cut_off)
    assert side.figures() == (3, 4)
    finish(side.recompute())
    assert side.figures() == (3, 4), "nobody knows yet"
    side.settle_down()
    side.judge(side.figures(), breaks="", cap=BURST, room=BURST)
    assert side.figures() == (3, 3)


@pytest.mark.parametrize("player", [Ours, OnRedis], ids=["ours", "naive"])
def test_a_process_stopped_between_its_look_at_the_clock_and_the_commit(play: Play, player: type[Side]) -> None:
    """A commit without an end: its row may come at any time, unless the server refuses it from some time on.

    A stopped process keeps no deadline. The server ends its transaction; its booking is given up an age later, and
    somebody else has the room when it goes on.
    """
    side = play(player, deadline=16.0)
    side.run(BURST - 1)
    side.submit()
    stopped = until(side.worker(), BOOKED, COMMIT)
    side.wait_until_cut()
    for _ in range(2):
        finish(side.recompute())
        side.pass_an_age()
    finish(side.recompute())
    assert side.figures() == (3, 3)
    side.submit()
    finish(side.worker())
    finish(stopped)
    side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


@pytest.mark.parametrize("moments", [(BOOKED,), (BOOKED, COMMIT)], ids=[BOOKED, COMMIT])
def test_a_show_handed_back_with_a_booking_in_flight(side: Side, moments: tuple[str, ...]) -> None:
    """Gap (e): the booking commits after the accounting tables were written for the last time.

    From then on Cuebot only adds to them and takes from them.
    """
    side.run(BURST - 1)
    side.submit()
    worker = until(side.worker(), *moments)
    side.hand_back(lambda: finish(worker))
    side.cuebot_fills()
    running = side.running()
    table = side.scalar("SELECT int_cores / 100 FROM subscription")
    assert (running, table) == ((4, 4) if side.ours else (5, 4))
    if side.ours:
        assert side.counted() == 0, "its entries are retired"


def test_a_show_handed_back_before_a_plan_is_booked(side: Side) -> None:
    """Gap (e): a process that was stopped since it planned books and commits for a show that is Cuebot's by now."""
    side.run(BURST - 1)
    side.submit()
    worker = until(side.worker(), PLANNED)
    side.hand_back(lambda: None)
    side.cuebot_fills()
    finish(worker)
    assert (side.running(), side.counted()) == ((4, 0) if side.ours else (5, 1))


def test_a_show_handed_back_and_over_again_with_a_booking_in_flight(side: Side) -> None:
    """Gap (e), both ways: meanwhile Cuebot gave the room to another frame."""
    side.run(BURST - 1)
    side.submit()
    worker = until(side.worker(), BOOKED)
    side.hand_back(lambda: None)
    side.cuebot_fills()
    side.hand_over(lambda: None)
    finish(worker)
    assert side.running() == (4 if side.ours else 5)
    peak = side.figures()
    side.settle_down()
    side.judge(peak, breaks=OVER_BOOKED, cap=BURST, room=BURST)


@pytest.mark.parametrize("player", [Ours, OnRedis], ids=["ours", "naive"])
@pytest.mark.parametrize("moment", [SNAPSHOT, JUDGED])
def test_a_stalled_recompute_that_saw_a_show_unmanaged(play: Play, player: type[Side], moment: str) -> None:
    """Gap (e): by the time it acts the show is managed again, and nothing has moved."""
    side = play(player)
    side.run(BURST - 1)
    side.set_managed(False)
    stalled = until(side.recompute(), moment)
    side.hand_over(lambda: None)
    finish(stalled)
    assert side.figures() == (3, 3 if side.ours else 0)
    side.submit(2)
    finish(side.worker())
    side.check(ours=Figures(4, 4), naive=Figures(5, 2), breaks=OVER_BOOKED)


LENT_LATE = {"    _lend_before_retiring(engine, ledger, check, changes)\n": ""}
"""Entries of a show that goes back are retired, and no limit counts its frames as foreign yet."""
_MANAGED = "        imported = dict(store.managed_show_versions(connection))\n"
MANAGED_AT_ONCE = {
    "        rows = [\n": f"{_MANAGED}        rows = [\n",
    "        rows = cap_rows_of_shows(": f"{_MANAGED}        rows = cap_rows_of_shows(",
}
"""Frames of a show that comes over are foreign no more once it has the flag, imported or not."""


@pytest.mark.parametrize("naive", [False, True], ids=["ours", "naive"])
@pytest.mark.parametrize("managed", [True, False], ids=["over", "back"])
@pytest.mark.parametrize("load", [True, False], ids=["limits loaded", "limits of before"])
def test_a_licence_is_not_lent_twice_while_its_show_is_flipped(
    play: Play, managed: bool, load: bool, naive: bool
) -> None:
    """Gap (e) with a limit that two shows share: its frames are foreign, or in the ledger, and never neither.

    After each step of the flip somebody books; with the limits of before that step, or of before the flip. Naive, the
    control, is production code broken on purpose: what is managed is not foreign, what is not is not in the ledger, and
    one comes after the other; only whoever loads the limits of a show that goes back sees in time that it is foreign.
    """
    side = play(Ours)
    shared = side.share_a_licence(managed=not managed)
    with changed_code(recompute, LENT_LATE if naive else {}), changed_code(caps, MANAGED_AT_ONCE if naive else {}):
        flip = side.flip(shared.show, managed=managed)
        lent = [flip.boundary for _ in iter(flip.step, False) if shared.taken_again(load=load)]
        lent_at_last = shared.taken_again(load=load)
    assert side.scalar("SELECT b_scheduler_managed FROM show WHERE pk_show = :show", show=shared.show) == managed
    assert bool(lent or lent_at_last) == (naive and (managed or not load)), lent


@pytest.mark.parametrize("player", [Ours, InEachProcess], ids=["ours", "naive"])
def test_two_processes_book_at_once(play: Play, player: type[Side]) -> None:
    """Gap (f): counters of one process are right as long as there is one."""
    side = play(player)
    finish(side.load_caps())
    side.submit(BURST)
    one = until(side.worker(), BOOK)
    side.submit(BURST)
    other = until(side.worker(), BOOK)
    until(one, BOOKED)
    until(other, BOOKED)
    finish(other)
    finish(one)
    running = side.running()
    assert running == (BURST if side.ours else 2 * BURST)
    if side.ours:
        side.settle_down()
        side.judge(side.figures(), breaks="", cap=BURST, room=BURST)


def test_two_recomputes_at_once(side: Side) -> None:
    """Gap (f) again: one recompute takes away what another still needs; which one began first is no matter here."""
    side.run(BURST - 1)
    side.submit()
    one = until(side.worker(), BOOK)
    side.submit()
    other = until(side.worker(), BOOK)
    until(one, BOOKED)
    stalled = until(side.recompute(), SNAPSHOT)
    finish(one)
    finish(side.recompute())
    finish(stalled)
    finish(other)
    side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


@pytest.mark.parametrize("naive", [False, True], ids=["ours", "naive"])
def test_two_recomputes_find_the_same_drift(play: Play, naive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gap (f) again, of our own: somebody wrote to a counter; what two have found is taken off once.

    The first took longer than its check may. Naive: it puts right what it found, though the check has run out.
    """
    side = play(Ours)
    side.run(2)
    side.client.hincrby(side.key, "int_cores", 5)
    slow = until(side.recompute(), CORRECTION)
    token = str(side.client.get(keys.AUDIT))
    side.client.delete(keys.AUDIT)
    finish(side.recompute())
    if naive:
        side.client.set(keys.AUDIT, token)
    finish(slow)
    assert side.figures() == (2, -3 if naive else 2)
