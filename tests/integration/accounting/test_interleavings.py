"""How the counters of the accounting reference drift, mechanism by mechanism.

Each interleaving is played twice: by production code, which must hold, and by the reference's way of counting, which
must break. What the newest scheduler still leaves open is in test_interleavings_gaps.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.accounting.interleaved import (
    BOOK,
    BOOKED,
    BURST,
    CAPS_READ,
    DRIFTED,
    OVER_BOOKED,
    ROLLBACK,
    SNAPSHOT,
    STARVED,
    Figures,
    Side,
    Watched,
    finish,
    until,
)
from tests.integration.accounting.interleaved_naive import OnRedis
from tests.integration.accounting.interleaved_ours import Ours


@pytest.fixture(params=[Ours, OnRedis], ids=["ours", "naive"])
def side(request: pytest.FixtureRequest, play: Callable[[type[Side]], Side]) -> Side:
    return play(request.param)


class TestLimits:
    """Caps that are not there yet, or not the right ones."""

    def test_a_subscription_nobody_seeded_does_not_refuse_everything(self, side: Side) -> None:
        """Burst seeded only now and then; until then it reads as 0."""
        side.submit()
        finish(side.worker())
        side.check(ours=Figures(1, 1), naive=Figures(0, 0), breaks=STARVED)

    def test_a_folder_made_after_the_last_reseed_has_its_cap_at_once(self, side: Side) -> None:
        """The opposite hole: unseeded folder and job caps count as unlimited.

        Both plans were made while nothing ran, so that only the counters can tell.
        """
        finish(side.load_caps())
        side.watched = Watched(folder=side.folder(2))
        side.submit(2, folder=side.watched.folder)
        one = until(side.worker(), BOOK)
        side.submit(2, folder=side.watched.folder)
        other = until(side.worker(), BOOK)
        finish(one)
        finish(other)
        side.check(ours=Figures(2, 2), naive=Figures(4, 4), breaks=OVER_BOOKED, cap=2)

    def test_a_booking_does_not_keep_raised_caps_out(self, side: Side) -> None:
        """Caps written by compare-and-swap are skipped, because rollbacks move acct:seq too."""
        side.guards_caps = True
        side.run(BURST - 1)
        side.set_burst(BURST + 2)
        reseed = until(side.load_caps(), CAPS_READ)
        side.stir()
        finish(reseed)
        side.submit(3)
        finish(side.worker())
        side.check(ours=Figures(6, 6), naive=Figures(4, 4), breaks=STARVED, cap=BURST + 2)

    def test_caps_that_were_read_before_newer_ones_come_too_late(self, side: Side) -> None:
        """A limit seeded late: the remedy, writing without compare-and-swap, lets a stalled reseed win."""
        finish(side.load_caps())
        side.submit(BURST)
        worker = until(side.worker(), BOOK)
        stalled = until(side.load_caps(), CAPS_READ)
        side.set_burst(2)
        finish(side.load_caps())
        finish(stalled)
        assert side.burst() == (2 if side.ours else BURST)
        finish(worker)
        side.check(ours=Figures(2, 2), naive=Figures(4, 4), breaks=OVER_BOOKED, cap=2)

    def test_a_flush_between_booking_and_commit(self, side: Side) -> None:
        """A flush resets the counters; what is filled in from the proc table lacks what is being committed."""
        side.run(2)
        side.submit(2)
        one = until(side.worker(), BOOK)
        side.submit(2)
        other = until(side.worker(), BOOK)
        until(one, BOOKED)
        side.client.flushdb()
        side.refill(lambda: (finish(one), finish(other)))
        finish(side.worker())
        side.check(ours=Figures(4, 4), naive=Figures(6, 4), breaks=OVER_BOOKED)

    def test_a_rollback_that_arrives_after_a_flush(self, side: Side) -> None:
        """What it gives back is not in the counters any more. Somebody else has got the frame meanwhile."""
        side.run(BURST - 1)
        job = side.submit()
        worker = until(side.worker(), BOOKED)
        side.start(job)
        until(worker, ROLLBACK)
        side.client.flushdb()
        side.refill(lambda: None)
        finish(worker)
        assert side.figures() == (4, 4 if side.ours else 3)
        side.submit()
        finish(side.worker())
        side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


def test_a_recompute_completes_while_something_moves_in_every_window(side: Side) -> None:
    """One global sequence number, moved by everybody; the compare-and-swap never finds a quiet moment."""
    (proc,) = side.run(1)
    side.end(proc)
    for _ in range(3):
        recompute = side.recompute()
        while recompute.step():
            if recompute.boundary == SNAPSHOT:
                side.stir()
    figures = side.figures()
    assert figures == ((0, 0) if side.ours else (0, 1)), "the word of its end was lost, and no recompute gets through"


class TestLostUpdate:
    """The sum is read on one side of a commit, and the sequence number on the other."""

    def test_a_booking_counted_before_the_mark_and_committed_after_the_snapshot(self, side: Side) -> None:
        """Acct:seq moves at the booking, the row comes later; the reseed sees an equal number and a lower sum."""
        side.run(BURST - 1)
        side.submit()
        one = until(side.worker(), BOOK)
        side.submit()
        other = until(side.worker(), BOOK)
        until(one, BOOKED)
        finish(side.recompute())
        finish(other)
        finish(one)
        side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)

    def test_a_booking_in_the_window_of_a_stalled_snapshot(self, side: Side) -> None:
        """The race the reference guards against: a whole booking between reading the sum and writing it."""
        side.guarded = False
        side.run(BURST - 1)
        side.submit()
        one = until(side.worker(), BOOK)
        side.submit()
        other = until(side.worker(), BOOK)
        stalled = until(side.recompute(), SNAPSHOT)
        finish(one)
        finish(stalled)
        finish(other)
        side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)

    def test_a_release_told_after_the_recompute_that_saw_it(self, side: Side) -> None:
        """Mirrored: the row is deleted, the sum without it is written, then the decrement takes it off again."""
        first, *_ = side.run(BURST)
        side.submit(2)
        side.end(first)
        finish(side.recompute())
        side.release(first)
        assert side.counted() == (BURST - 1 if side.ours else BURST - 2)
        finish(side.worker())
        side.check(ours=Figures(4, 4), naive=Figures(5, 4), breaks=OVER_BOOKED)


@pytest.mark.parametrize("leak", ["release lost", "worker dies", "booking sent again"])
def test_what_leaks_upwards_comes_back(side: Side, leak: str) -> None:
    """A lost publish, a crash between script and INSERT, a client's retry; a key without procs is never reset."""
    side.zero_baseline = False
    side.submit()
    finish(side.load_caps())
    worker = until(side.worker(), BOOK)
    if leak == "worker dies":
        until(worker, BOOKED).kill()
        assert side.figures() == (0, 1)
    else:
        worker.twice = leak == "booking sent again"
        counted_twice = worker.twice and not side.ours
        finish(worker)
        assert side.figures() == (1, 2 if counted_twice else 1)
        (proc,) = side.procs()
        side.end(proc)
        if leak != "release lost":
            side.release(proc)
    side.settle_down()
    side.check(ours=Figures(0, 0), naive=Figures(0, 1), breaks=DRIFTED)


class TestAttribution:
    """Who gets the cores back."""

    def test_a_job_that_moved_gives_back_where_it_took(self, side: Side) -> None:
        """The release decrements the folder the job is in now, which never had those cores."""
        old, new = side.folder(4), side.folder(1)
        (proc,) = side.run(1, folder=old)
        side.sql("UPDATE job SET pk_folder = :new", new=new)
        side.end(proc)
        side.release(proc)
        side.watched = Watched(folder=new)
        side.submit(2, folder=new)
        finish(side.load_caps())
        finish(side.worker())
        side.check(ours=Figures(1, 1), naive=Figures(2, 1), breaks=OVER_BOOKED, cap=1)

    def test_a_host_that_moved_gives_back_where_it_took(self, side: Side) -> None:
        """The same with the subscription, by the host's allocation."""
        (proc,) = side.run(1)
        other = side.subscribe("other", 1)
        side.sql("UPDATE host SET pk_alloc = :other", other=other.id)
        side.end(proc)
        side.release(proc)
        side.watched = Watched(alloc=other.id)
        side.submit(2)
        finish(side.load_caps())
        finish(side.worker())
        side.check(ours=Figures(1, 1), naive=Figures(2, 1), breaks=OVER_BOOKED, cap=1)

    def test_a_stalled_recompute_does_not_move_back_what_another_moved(self, side: Side) -> None:
        """The older sum is written last, and nothing has moved acct:seq."""
        side.run(1)
        other = side.subscribe("other", 1)
        finish(side.load_caps())
        stalled = until(side.recompute(), SNAPSHOT)
        side.sql("UPDATE host SET pk_alloc = :other", other=other.id)
        finish(side.recompute())
        finish(stalled)
        side.watched = Watched(alloc=other.id)
        assert side.figures() == (1, 1 if side.ours else 0)
        side.submit()
        finish(side.worker())
        side.check(ours=Figures(1, 1), naive=Figures(2, 1), breaks=OVER_BOOKED, cap=1)

    def test_fractions_of_a_core_are_counted_per_proc(self, side: Side) -> None:
        """A Cuebot's half cores are divided as a sum when counted, and one by one when released."""
        procs = side.start(side.submit(2), cores=0.5)
        side.zero_baseline = False
        finish(side.load_caps())
        finish(side.recompute())
        assert side.figures() == (2, 2 if side.ours else 1)
        for proc in procs:
            side.end(proc)
            side.release(proc)
        side.check(ours=Figures(0, 0), naive=Figures(0, 1), breaks=DRIFTED)

    def test_procs_of_finished_jobs_count_as_long_as_they_are_there(self, side: Side) -> None:
        """Sums skip FINISHED jobs, even those of subscriptions."""
        finish(side.load_caps())
        side.submit(BURST)
        late = until(side.worker(), BOOK)
        side.start(side.submit(BURST))
        side.sql("UPDATE job SET str_state = 'FINISHED' WHERE pk_job = :job", job=side.jobs[-1].id)
        finish(side.recompute())
        finish(late)
        side.check(ours=Figures(4, 4), naive=Figures(8, 4), breaks=OVER_BOOKED)


def test_a_show_handed_over_with_frames_of_cuebots_running(side: Side) -> None:
    """Only limits were seeded, so what Cuebot had running, or started before it knew, counted nothing."""
    side.set_managed(False)
    side.start(side.submit(BURST - 1))
    late = side.submit()
    waiting = side.submit(2)
    side.hand_over(lambda: (side.start(late), finish(side.worker())))
    finish(side.worker())
    assert len(waiting.frames) == 2
    side.check(ours=Figures(4, 4), naive=Figures(6, 2), breaks=OVER_BOOKED)
