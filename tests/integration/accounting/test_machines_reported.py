"""Limits that a licence server reports, by a settle window of two minutes and a commit deadline of ten seconds: what is
settled and what is pending.
"""

from __future__ import annotations

import math

import pytest

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps, make_ledger
from opencue_sched.accounting.recompute import follow_layers
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Accounting
from tests.integration.accounting.seats import become, may_book, note, say
from tests.kit.limits import has_types
from tests.kit.world import World


@pytest.fixture
def reported(world: World, limited: str) -> str:
    """The same limit, in a schema that has reports."""
    with world.engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
    return limited


def old(world: World, *procs: str) -> None:
    """Their frames run for so long that a report shows them, in the ledger too."""
    world.sql("UPDATE proc SET ts_dispatched = now() - interval '1 hour' WHERE pk_proc = ANY(:ids)", ids=list(procs))
    for proc_id in procs:
        world.store.age(proc_id, 3600)


def test_frames_are_used_by_what_is_reported_and_by_what_it_need_not_show(world: World, reported: str) -> None:
    # given a limit of six frames, three of which run, one of them for an hour
    world.sql("UPDATE limit_record SET int_max_value = 6")
    procs = world.run(3)
    world.recompute()
    note(world)
    assert may_book(world, reported, *["r1"] * 4) == [True] * 3 + [False]
    # when a licence server says that two artists have two each, then one of ours counts as reported already
    say(world, reported, "artist1", "Artist2.studio.example", tokens=2)
    assert may_book(world, reported, "r1") == [False], "three are pending"
    old(world, procs[0])
    assert may_book(world, reported, "r1") == [False], "four and two"
    old(world, procs[1])
    assert may_book(world, reported, "r1", "r1") == [True, False]
    # and the end of an old frame gives nothing back before the next report, that of a young one does at once.
    world.ledger.release([procs[0]])
    assert may_book(world, reported, "r1", "r1") == [True, False]
    world.ledger.release([procs[2]])
    assert may_book(world, reported, *["r1"] * 3) == [True, True, False]
    say(world, reported)
    assert may_book(world, reported, *["r1"] * 7) == [True] * 6 + [False]


@pytest.mark.parametrize("before", ["FRAME", "HOST"])
def test_a_reported_limit_that_counts_something_else_now_counts_at_once(
    world: World, reported: str, before: str
) -> None:
    # given a limit of five of which an artist has one, by a report, and three frames of ours that have started since
    world.sql("UPDATE limit_record SET int_max_value = 5")
    become(world, reported, before)
    world.run(3)
    note(world)
    say(world, reported, "artist")
    world.recompute()
    # when it is to count machines, or frames, then its frames count for one each until their layer is read,
    after = "HOST" if before == "FRAME" else "FRAME"
    become(world, reported, after)
    assert may_book(world, reported, "r1", "r2") == [True, False]
    if after == "HOST":
        assert world.ledger.seats({reported: (5, "nuke")})[reported].left == 1
    else:
        assert world.ledger.reported_frames({reported: (5, "nuke")})[reported].left == 1
    # which is known to be necessary, and after that as they are to be counted.
    assert world.ledger.limits_lacking_machines([reported]) == [reported]
    follow_layers(world.engine, world.ledger, [world.job.layers[0].id])
    assert world.ledger.limits_lacking_machines([reported]) == []
    assert may_book(world, reported, *["r1", "r2", "r3", "r4"]) == (
        [True] * 3 + [False] if after == "HOST" else [True] + [False] * 3
    )
    world.exact()


def test_young_frames_of_other_shows_count_beside_a_report(world: World, reported: str) -> None:
    world.sql("UPDATE limit_record SET int_max_value = 4")
    with world.engine.begin() as connection:
        farm = Farm(connection)
        theirs = farm.job([LayerSpec(frames=5, limits=[reported])], show=farm.show("theirs", managed=False))
        procs = farm.run(theirs.frames[:3], world.host)
    note(world)
    say(world, reported, "artist")
    assert may_book(world, reported, "r1") == [False]
    world.sql("UPDATE proc SET ts_dispatched = now() - interval '1 hour' WHERE pk_proc <> :young", young=procs[0])
    assert may_book(world, reported, *["r1"] * 3) == [True, True, False]


def test_a_limit_of_frames_opens_as_its_report_and_its_enforcement_say(world: World, reported: str) -> None:
    say(world, reported, "artist", tokens=2)

    def left() -> float:
        return world.ledger.reported_frames({reported: (2, "nuke")})[reported].left

    assert (may_book(world, reported, "r1"), left()) == ([False], 0)
    # by the clock alone, also for who plans by what was loaded before,
    world.store.client.hincrby(keys.limit(reported), "opens_at", -1000)
    assert left() == math.inf
    world.sql("UPDATE limit_record SET ts_reported = now() - interval '1000 seconds'")
    assert (may_book(world, reported, "r1"), left()) == ([True], math.inf)
    # never where it lives for ever,
    world.sql("UPDATE limit_record SET int_report_ttl = 0")
    assert may_book(world, reported, "r1") == [False]
    # and whatever was reported where it is advice, or ignored.
    for enforcement, opens in (("ADVISORY", True), ("DISABLED", True), ("ENFORCED", False)):
        world.sql("UPDATE limit_record SET str_enforcement = :said", said=enforcement)
        assert may_book(world, reported, "r1") == [opens]
    # A soft value is one of machines.
    world.sql("UPDATE limit_record SET int_soft_value = 1, int_max_value = 3")
    assert may_book(world, reported, "r1", "r1") == [True, False]


def test_a_machine_whose_frame_is_old_and_not_reported_counts_for_nothing_and_holds(
    world: World, reported: str
) -> None:
    become(world, reported, "HOST")
    procs = world.run(2)
    world.recompute()
    note(world)
    say(world, reported, "artist")
    assert may_book(world, reported, "r1", world.host.id) == [False, True]
    # when its frames are older than the bound, its seat is somebody else's to take,
    old(world, *procs)
    load_caps(world.engine, world.ledger, [keys.limit(reported)])
    assert may_book(world, reported, "r1", "r2") == [True, False]
    # and at the threshold it takes more itself, which makes it count.
    say(world, reported, "artist1", "artist2")
    assert may_book(world, reported, "r1", world.host.id) == [False, True]
    world.exact()


def test_a_machine_of_others_that_is_old_and_not_reported_holds_and_does_not_count(world: World, reported: str) -> None:
    become(world, reported, "HOST")
    with world.engine.begin() as connection:
        farm = Farm(connection)
        theirs = farm.job([LayerSpec(frames=5, limits=[reported])], show=farm.show("theirs", managed=False))
        farm.run(theirs.frames[:1], world.host)
    note(world)
    say(world, reported, "artist")
    assert may_book(world, reported, "r1", world.host.id) == [False, True]
    world.sql("UPDATE proc SET ts_dispatched = now() - interval '1 hour'")
    assert may_book(world, reported, "r1", "r2", world.host.id) == [True, False, True]


def test_a_reported_machine_with_two_rows_of_a_host_counts_once(world: World, reported: str) -> None:
    # given a machine that came back under another name, so that the farm has two hosts of the name that is reported
    become(world, reported, "HOST")
    with world.engine.begin() as connection:
        former, host = (Farm(connection).host(name=f"r9.{domain}") for domain in ("old.example", "farm.example"))
    world.sql("UPDATE host_stat SET str_state = 'DOWN' WHERE pk_host = :host", host=former.id)
    say(world, reported, "R9")
    # then the report takes one of two seats, also when frames of ours start there
    assert may_book(world, reported, "r1", "r2") == [True, False]
    assert may_book(world, reported, host.id, "r1", "r2") == [True, True, False]
    assert may_book(world, reported, "r1", former.id) == [True, True], "it holds the limit under either name"
    with world.engine.begin() as connection:
        (proc,) = Farm(connection).run(world.job.layers[0].frames[:1], host)
    world.recompute()
    assert may_book(world, reported, "r1", "r2") == [True, False]
    world.ledger.release([proc])


def test_a_limit_that_is_reported_knows_since_when_its_frames_run(world: World, reported: str) -> None:
    # given frames that were booked before there was any report, one of them long ago
    world.sql("UPDATE limit_record SET int_max_value = 9")
    procs = world.run(3)
    world.recompute()
    note(world)
    old(world, procs[0])
    # when there is one, then the young ones alone count beside it,
    say(world, reported)
    assert world.ledger.reported_frames({reported: (9, "nuke")})[reported].booked == 2
    world.exact()
    # and where it is withdrawn, all count again.
    world.sql("UPDATE limit_record SET ts_reported = NULL")
    assert may_book(world, reported, *["r1"] * 7) == [True] * 6 + [False]
    world.recompute()
    world.exact()


def test_the_window_is_a_setting(world: World, reported: str) -> None:
    procs = world.run(2)
    world.recompute()
    note(world)
    world.sql("UPDATE proc SET ts_dispatched = now() - interval '60 seconds'")
    for proc_id in procs:
        world.store.age(proc_id, 60)
    say(world, reported)
    assert may_book(world, reported, "r1") == [False]
    settings = Accounting(limit_settle_window_seconds=10)
    world.ledger = make_ledger(world.engine, world.store.client, owner="test", accounting=settings)
    assert may_book(world, reported, *["r1"] * 3) == [True, True, False]
