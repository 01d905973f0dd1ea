"""A show that somebody else hands over, by changing its flag and nothing else, as a Cuebot does for cueadmin."""

from __future__ import annotations

import pytest

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.counted import CountedShows, Note, note_counted
from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.ledger import NotReady
from opencue_sched.operate.flip import HANDED_BACK, notice_flips
from tests.integration.accounting.world import AGE, World


def counted(world: World, *, cuebots: bool = True) -> CountedShows:
    return CountedShows(world.engine, world.ledger, cuebots=cuebots, age_seconds=AGE)


def flag(world: World, managed: bool) -> None:
    world.sql("UPDATE show SET b_scheduler_managed = :managed", managed=managed)


def pause_is_over(world: World) -> None:
    note = Note.parse(str(world.store.client.hget(keys.COUNTED, world.show.id)))
    assert note is not None
    assert note.due > 0
    world.store.client.hset(keys.COUNTED, world.show.id, Note(note.version, 1.0).text)


def test_what_cuebot_runs_is_counted_twice_with_a_pause_before_anything_is_booked(world: World) -> None:
    # given a show of Cuebot's with a burst of ten cores, of which six are used
    flag(world, False)
    world.sql("UPDATE subscription SET int_burst = 1000")
    first, *_ = world.run(3)
    flag(world, True)
    shows = counted(world)

    # then nothing is booked at once, nor by another process, though all is counted
    assert not shows.admits(world.show.id)
    assert not counted(world).admits(world.show.id)
    assert world.job_cores() == 6

    # and after the pause what a Cuebot booked late is counted too, so that what is left is left
    world.run(1)
    pause_is_over(world)
    assert shows.admits(world.show.id)
    assert world.job_cores() == 8
    booked = [Booking(f"new-{i}", world.entry(first).vertices, 2) for i in range(2)]
    assert world.ledger.book(booked).accepted == {"new-0"}


def test_without_a_cuebot_or_without_procs_there_is_no_pause(world: World) -> None:
    assert counted(world).admits(world.show.id)
    world.run(2)
    world.store.client.delete(keys.COUNTED)
    assert counted(world, cuebots=False).admits(world.show.id)
    assert world.job_cores() == 4


def test_a_show_that_was_away_and_is_back_is_counted_again_at_once(world: World) -> None:
    shows = counted(world)
    assert shows.admits(world.show.id)
    flag(world, False)
    world.run(2)
    flag(world, True)
    assert shows.admits(world.show.id)
    assert world.job_cores() == 4
    world.exact()


def test_a_show_that_is_counted_costs_nothing_more(world: World) -> None:
    shows = counted(world)
    assert shows.admits(world.show.id)
    commands = world.store.client.info("stats")["total_commands_processed"]
    assert shows.admits(world.show.id)
    assert world.store.client.info("stats")["total_commands_processed"] == commands + 1, "the look itself"


def test_flips_of_ours_and_a_filled_store_have_counted(world: World) -> None:
    world.run(2)
    note_counted(world.store.client, [world.show.id])
    assert counted(world).admits(world.show.id)
    world.store.client.flushdb()
    ensure_bootstrapped(world.engine, world.ledger, wait_age=0)
    assert counted(world).admits(world.show.id)


def test_a_store_that_is_lost_admits_nobody(world: World) -> None:
    shows = counted(world)
    assert shows.admits(world.show.id)
    world.store.client.flushdb()
    world.ledger.forget_epoch()
    with pytest.raises(NotReady):
        shows.admits(world.show.id)
    assert not shows.admits("nobody")


def test_a_show_taken_back_by_cuebot_is_looked_after_and_has_to_be_counted_again(world: World) -> None:
    world.run(1)
    note_counted(world.store.client, [world.show.id])
    assert notice_flips(world.engine, world.store.client) == []
    flag(world, False)
    assert notice_flips(world.engine, world.store.client) == [world.show.id]
    assert world.store.client.zscore(HANDED_BACK, world.show.id) is not None
    flag(world, True)
    assert not counted(world).admits(world.show.id)
