"""Limits that count machines, of a farm in PostgreSQL whose frames run."""

from __future__ import annotations

import math

import pytest
from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import Action, ensure_bootstrapped
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.recompute import follow_layers
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.integration.accounting.seats import become, bind, may_book, note, say
from tests.kit.limits import as_v49, before_v49, has_types
from tests.kit.world import World


def test_a_recompute_gives_running_frames_their_machines(world: World, limited: str) -> None:
    become(world, limited, "HOST")
    procs = world.run(3)
    load_caps(world.engine, world.ledger, [keys.limit(limited)])
    world.recompute()
    assert world.store.machines(limited) == {world.host.id}
    world.exact()
    # A host that is DOWN keeps its seat as long as it has procs.
    world.sql("UPDATE host_stat SET str_state = 'DOWN'")
    world.recompute()
    assert world.store.machines(limited) == {world.host.id}
    for proc in procs:
        world.delete(proc)
    world.recompute()
    assert world.store.machines(limited) == set()
    world.exact()


def test_a_limit_made_one_of_machines_and_back_counts_at_once(world: World, limited: str) -> None:
    # given three frames on one machine, of a limit that counts frames
    world.run(3)
    world.recompute()
    assert may_book(world, limited, "r1") == [False]
    # when it is to count machines, then frames of unknown machines count for themselves until their layer is read
    become(world, limited, "HOST")
    assert may_book(world, limited, "r1") == [False]
    assert world.ledger.limits_lacking_machines([limited]) == [limited]
    assert follow_layers(world.engine, world.ledger, [world.job.layers[0].id]) == 3
    assert world.store.machines(limited) == {world.host.id}
    assert may_book(world, limited, "r1", "r2", world.host.id) == [True, False, True]
    assert world.ledger.limits_lacking_machines([limited]) == []
    world.exact()
    # and back
    become(world, limited, "FRAME")
    assert may_book(world, limited, world.host.id) == [False]
    follow_layers(world.engine, world.ledger, [world.job.layers[0].id])
    assert world.store.machines(limited) == set()
    world.exact()


def test_a_layer_bound_while_its_frames_run_counts_at_once(world: World) -> None:
    with world.engine.begin() as connection:
        limit = Farm(connection).limit("nuke", 2)
    become(world, limit, "HOST")
    world.run(3)
    world.recompute()
    bind(world, limit)
    follow_layers(world.engine, world.ledger, [world.job.layers[0].id])
    assert may_book(world, limit, "r1", "r2", world.host.id) == [True, False, True]
    world.exact()
    world.sql("DELETE FROM layer_limit")
    follow_layers(world.engine, world.ledger, [world.job.layers[0].id])
    assert (world.store.machines(limit), world.store.running(limit)) == (set(), 0)
    world.exact()


def test_renamed_lowered_to_nothing_and_deleted(world: World, limited: str) -> None:
    become(world, limited, "HOST")
    world.run(1)
    load_caps(world.engine, world.ledger, [keys.limit(limited)])
    world.recompute()
    world.sql("UPDATE limit_record SET str_name = 'another'")
    assert may_book(world, limited, "r1") == [True]
    # As many as are too many take no more: all.
    world.sql("UPDATE limit_record SET int_max_value = NULL")
    assert may_book(world, limited, "r1", world.host.id) == [False, False]
    world.sql("DELETE FROM limit_record")
    world.recompute()
    assert world.store.machines(limited) == set()
    world.exact()


def test_frames_that_the_ledger_does_not_have_hold_their_machine_once(world: World, limited: str) -> None:
    # given a limit that a Cuebot's show uses on the world's host and on another, and ours on the first
    become(world, limited, "HOST")
    with world.engine.begin() as connection:
        farm = Farm(connection)
        elsewhere = farm.host(cores=8, name="elsewhere")
        theirs = farm.job([LayerSpec(frames=5, limits=[limited])], show=farm.show("theirs", managed=False))
        farm.run(theirs.frames[:3], world.host)
        farm.run(theirs.frames[3:], elsewhere)
    world.run(2)
    note(world)
    world.recompute()
    assert may_book(world, limited, world.host.id, elsewhere.id, "r1") == [True, True, False]
    # when it may be held by three, there is one seat
    world.sql("UPDATE limit_record SET int_max_value = 3")
    assert may_book(world, limited, "r1", "r2", elsewhere.id) == [True, False, True]


def test_a_local_frame_holds_its_machine_before_a_recompute_finds_it(world: World, limited: str) -> None:
    become(world, limited, "HOST")
    world.run(1)
    note(world)
    world.sql("UPDATE proc SET b_local = true")
    assert may_book(world, limited, world.host.id, "r1", "r2") == [True, True, False]


def test_a_show_that_is_given_back_keeps_its_seats(world: World, limited: str) -> None:
    # given a show of ours that holds one seat of two, and another the other
    become(world, limited, "HOST")
    world.run(2)
    with world.engine.begin() as connection:
        farm = Farm(connection)
        other = farm.job([LayerSpec(frames=5, limits=[limited])], show=farm.show("other"))
        farm.run(other.frames[:1], farm.host(cores=8, name="elsewhere"))
    load_caps(world.engine, world.ledger, [keys.limit(limited)])
    world.recompute()
    note(world)
    assert len(world.store.machines(limited)) == 2
    # when the first is a Cuebot's again, its entries go, and its machine holds by what runs there
    world.sql("UPDATE show SET b_scheduler_managed = false WHERE pk_show = :show", show=world.show.id)
    world.recompute()
    assert world.host.id not in world.store.machines(limited)
    assert may_book(world, limited, "r1", world.host.id) == [False, True]
    # and when it is ours once more, they come back
    world.sql("UPDATE show SET b_scheduler_managed = true WHERE pk_show = :show", show=world.show.id)
    world.recompute()
    note(world)
    assert len(world.store.machines(limited)) == 2
    assert may_book(world, limited, "r1", world.host.id) == [False, True]
    world.exact()


def test_an_emptied_redis_is_filled_with_machines(world: World, limited: str) -> None:
    become(world, limited, "HOST")
    world.run(2)
    world.store.client.flushdb()
    assert ensure_bootstrapped(world.engine, world.ledger, wait_age=0) is Action.FILLED
    assert world.store.machines(limited) == {world.host.id}
    assert may_book(world, limited, "r1", "r2") == [True, False]
    world.exact()


def test_a_licence_servers_report_holds_machines_also_those_that_are_no_hosts(world: World, limited: str) -> None:
    with world.engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
        name = connection.scalar(text("SELECT str_name FROM host"))
    become(world, limited, "HOST")
    world.sql("UPDATE limit_record SET int_max_value = 3, ts_reported = now()")
    for number, reported in enumerate((f"{name.upper()}.studio.example", "Artist7.studio.example", "10.0.0.7")):
        world.sql(
            "INSERT INTO limit_host (pk_limit_host, pk_limit_record, str_host_name, str_reported_name)"
            " VALUES (:id, :limit, :id, :reported)",
            id=f"held-{number}",
            limit=limited,
            reported=reported,
        )
    assert may_book(world, limited, "r1", world.host.id) == [False, True]

    # A report that is too old opens the limit, by the clock alone, also for who plans by what was loaded before; and so
    # do the other enforcements.
    def left() -> float:
        return world.ledger.seats({limited: (3, "nuke")})[limited].left

    assert left() == 0
    world.store.client.hincrby(keys.limit(limited), "opens_at", -1000)
    assert left() == math.inf
    world.sql("UPDATE limit_record SET ts_reported = now() - interval '1000 seconds'")
    assert may_book(world, limited, "r1") == [True]
    world.sql("UPDATE limit_record SET int_report_ttl = 0")
    assert may_book(world, limited, "r1") == [False]
    world.sql("UPDATE limit_record SET str_enforcement = 'ADVISORY'")
    assert may_book(world, limited, "r1") == [True]
    # A soft value below the maximum is the threshold, one above counts as the maximum.
    world.sql("UPDATE limit_record SET str_enforcement = 'ENFORCED', int_max_value = 5, int_soft_value = 4")
    assert may_book(world, limited, "r1", "r2") == [True, False]
    world.sql("UPDATE limit_record SET int_soft_value = 9")
    assert may_book(world, limited, "r1", "r2", "r3") == [True, True, False]


def test_a_cuebot_that_is_upgraded_beside_a_running_fleet_brings_types_and_reports(world: World, limited: str) -> None:
    # given a limit that counts machines by the column of Cuebots before V49, held by one of two
    with world.engine.begin() as connection:
        before_v49(connection)
    become(world, limited, "HOST")
    world.run(2)
    world.recompute()
    note(world)
    assert may_book(world, limited, world.host.id, "r1", "r2") == [True, True, False]
    # when V49 comes, then it counts as before,
    with world.engine.begin() as connection:
        as_v49(connection)
    assert may_book(world, limited, world.host.id, "r1", "r2") == [True, True, False]
    # a licence server's report is heard, and the type may change.
    say(world, limited, "artist")
    assert may_book(world, limited, world.host.id, "r1") == [True, False]
    become(world, limited, "FRAME")
    assert may_book(world, limited, world.host.id) == [False]
    world.recompute()
    world.exact()
