"""The reference's contract: somebody else's script takes released cores off the counters, without proc ids."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.foreign_decrements import PUBLISH_GRACE_SECONDS
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import id_calls, reseed_cas_calls
from tests.kit.cuebot_publish import PUBLISH
from tests.kit.redis_log import RedisLog
from tests.kit.statements import after_each_snapshot
from tests.kit.world import World


@pytest.fixture
def dual(world: World) -> World:
    """A store into which another program publishes."""
    world.store.open(dual=True)
    world.ledger.learn_epoch()
    return world


def publish(world: World, booked: Booking) -> None:
    five = keys.counted(booked.vertices)[:5]
    world.store.client.eval(PUBLISH, 6, *five, keys.SEQ, -booked.cores, -booked.gpus)


def foreign(world: World) -> int:
    booked, ledger = world.store.client.hmget(keys.job(world.job.id), "int_cores", "ledger_cores")  # type: ignore[misc]
    return int(booked) - int(ledger)


def never_quiet(world: World) -> AbstractContextManager[None]:
    """Something always moves between the snapshot and the swap."""
    return after_each_snapshot(world.engine, lambda: world.store.client.incr(keys.SEQ))


def grace_is_over(world: World) -> None:
    """As if the entries of the job had been dropped so long ago that no decrement for one can come any more."""
    assert world.store.client.hincrby(keys.job(world.job.id), "dropped_at", -round(PUBLISH_GRACE_SECONDS)) > 0


def tries(log: RedisLog) -> int:
    """How often counters and entries were compared, to swap them after that."""
    return len(log.calls("lease_take", naming=keys.AUDIT))


def test_a_published_release_frees_cores_at_once_and_the_pass_drops_the_entry(dual: World, settings_url: str) -> None:
    one, two = dual.run(2)
    dual.recompute()
    booked = dual.entry(one)
    dual.delete(one)
    publish(dual, booked)
    assert dual.job_cores() == 2
    with RedisLog(settings_url) as log:
        assert dual.recompute().causes == {"missed_release": 1}
        assert tries(log) == 1
    assert dual.job_cores() == 2
    assert dual.store.ids() == {two}
    dual.exact()


@pytest.mark.parametrize("busy", [False, True])
def test_what_ended_without_its_decrement_is_found(dual: World, busy: bool) -> None:
    # given four procs of two cores, in a store that is quiet or always busy
    ended = dual.run(4)
    dual.recompute()
    booked = [dual.entry(proc) for proc in ended]
    with never_quiet(dual) if busy else nullcontext():
        # when the releases of all that ended were published, then nothing is missing
        dual.delete(ended[0])
        publish(dual, booked[0])
        assert dual.recompute().unpublished_cores == 0
        # and when that of one of two was, then the other is, once
        for proc in ended[1:3]:
            dual.delete(proc)
        publish(dual, booked[1])
        assert dual.recompute().unpublished_cores == 2
        assert dual.recompute().unpublished_cores == 0


def test_a_lost_publish_is_healed_by_the_swap(dual: World) -> None:
    (one,) = dual.run()
    dual.recompute()
    dual.delete(one)
    dual.store.client.hincrby(keys.job(dual.job.id), "ledger_cores", -3)
    dual.recompute()
    assert (dual.job_cores(), foreign(dual)) == (0, 0)
    dual.exact()


@pytest.mark.parametrize("counters", ["kept", "lost"])
def test_what_was_published_while_no_scheduler_ran_counts_once_when_the_first_worker_starts(
    dual: World, counters: str
) -> None:
    """Also onto counters that are not there any more, which are below 0 then."""
    ended = dual.run(3)[:2]
    dual.recompute()
    booked = [dual.entry(proc) for proc in ended]
    if counters == "lost":
        dual.store.client.flushdb()
    for proc, booking in zip(ended, booked, strict=True):
        dual.delete(proc)
        publish(dual, booking)
    assert dual.job_cores() == (2 if counters == "kept" else -4)
    ensure_bootstrapped(dual.engine, dual.ledger, fleet_start=True, dual=True, wait_age=0)
    assert (dual.job_cores(), foreign(dual)) == (2, 0)
    dual.exact()


def test_a_vertex_whose_decrements_came_before_its_entries_went_is_not_freed(dual: World) -> None:
    (one,) = dual.run()
    dual.recompute()
    publish(dual, dual.entry(one))
    assert dual.job_cores() == 0
    (answer,) = dual.ledger.call_under(id_calls("free", [keys.job(dual.job.id)], dual.ledger.epoch().text, "idle"))
    assert answer == [1, 0]


def test_bookings_in_flight_survive_the_overwrite(dual: World, settings_url: str) -> None:
    (one,) = dual.run()
    dual.recompute()
    dual.ledger.book([Booking("straddle", dual.entry(one).vertices, 4)])
    with RedisLog(settings_url) as log:
        dual.recompute()
        assert tries(log) == 1
    assert dual.job_cores() == 6


def test_a_swap_is_refused_when_anything_moved(dual: World) -> None:
    (one,) = dual.run()
    dual.recompute()
    seq = dual.store.seq()
    publish(dual, dual.entry(one))
    epoch = dual.ledger.epoch().text
    (answer,) = dual.ledger.call_under(reseed_cas_calls(epoch, seq, [(keys.job(dual.job.id), 99, 0)]))
    assert answer[:2] == [0, "retry"]
    assert dual.job_cores() == 0


def test_retries_are_bounded_and_the_cycle_is_finished_all_the_same(dual: World, settings_url: str) -> None:
    one, two = dual.run(2)
    dual.recompute()
    booked = dual.entry(one)
    dual.delete(one)
    publish(dual, booked)
    with never_quiet(dual), RedisLog(settings_url) as log:
        dual.recompute(cas_max_retries=2)
        assert tries(log) == 3
    assert dual.job_cores() == 2, "the decrement is not subtracted twice"
    assert foreign(dual) == 0
    assert dual.store.ids() == {two}


def test_a_lost_publish_is_taken_off_after_the_grace_even_under_load(dual: World) -> None:
    (one,) = dual.run()
    dual.recompute()
    dual.delete(one)
    with never_quiet(dual):
        dual.recompute()
        assert (dual.job_cores(), foreign(dual)) == (2, 2), "its decrement may still be under way"
        dual.recompute()
        assert dual.job_cores() == 2
        grace_is_over(dual)
        dual.recompute()
    assert (dual.job_cores(), foreign(dual)) == (0, 0)


def test_a_publish_within_the_grace_is_matched_to_the_entry_that_was_dropped(dual: World) -> None:
    (one,) = dual.run()
    dual.recompute()
    booked = dual.entry(one)
    dual.delete(one)
    with never_quiet(dual):
        dual.recompute()
        publish(dual, booked)
        grace_is_over(dual)
        dual.recompute()
    assert (dual.job_cores(), foreign(dual)) == (0, 0)


@pytest.mark.parametrize("somebody_else_takes_stock", [False, True])
def test_a_decrement_for_nothing_we_know_is_given_back_at_the_second_pass(
    dual: World, somebody_else_takes_stock: bool
) -> None:
    (one,) = dual.run()
    dual.recompute()
    publish(dual, dual.entry(one))
    if somebody_else_takes_stock:
        dual.store.client.set(keys.AUDIT, "somebody else")
    with never_quiet(dual):
        dual.recompute()
        assert dual.job_cores() == 0
        dual.recompute()
    assert (dual.job_cores(), foreign(dual)) == (2, 0)


def test_a_release_by_id_in_a_dual_store_leaves_no_foreign_delta(dual: World) -> None:
    (one,) = dual.run()
    dual.recompute()
    dual.ledger.release([one])
    assert (dual.job_cores(), foreign(dual)) == (0, 0)


def test_a_swap_while_somebody_else_takes_stock_leaves_no_vertex_out(dual: World, settings_url: str) -> None:
    """Also not one that has no entry any more, of which this pass reads no counter."""
    (one,) = dual.run()
    dual.recompute()
    dual.delete(one)
    dual.store.client.set(keys.AUDIT, "somebody else")
    with RedisLog(settings_url) as log:
        dual.recompute()
        assert tries(log) == 1
    assert (dual.job_cores(), foreign(dual)) == (0, 0)


def test_a_licence_that_somebody_wrote_to_is_put_right_in_a_dual_store_too(dual: World) -> None:
    """No decrement of a Cuebot is about licences, so what is off there is explained by nothing."""
    dual.store.limit("nuke", 5)
    dual.store.client.hincrby(keys.limit("nuke"), "int_running", 3)
    report = dual.recompute()
    assert report.drifted == {"limit": 1}
    assert dual.store.running("nuke") == 0
