"""Limits that count machines: which machines hold one, whoever moves their entries, and what a booking is refused."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError
from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import Action, ensure_bootstrapped
from opencue_sched.accounting.caps import load_caps, make_ledger
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.keys import Booking, EntryState
from opencue_sched.accounting.ledger import Change, book_call, id_calls, reconcile_calls
from opencue_sched.accounting.recompute import follow_layers
from opencue_sched.clients.lua_scripts import LuaScript, ScriptCall, load_script
from opencue_sched.domain.caps import Vertices
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Accounting
from opencue_sched.store.accounting import managed_show_versions
from tests.kit.counters import Store, booking
from tests.kit.examples import examples
from tests.kit.forced import force
from tests.kit.limits import as_v49, before_v49, has_types, report, set_type
from tests.kit.mutants import changed_script
from tests.kit.world import World


def on(machine: str, *limits: str, proc_id: str | None = None, **rest: Any) -> Booking:
    return booking(1, proc_id=proc_id, machine=machine, limit_ids=limits or ("nuke",), **rest)


def book(store: Store, *bookings: Booking) -> list[bool]:
    """Whether each is accepted, in one call."""
    accepted = store.ledger.book(bookings).accepted
    return [it.proc_id in accepted for it in bookings]


class TestBooking:
    def test_a_machine_takes_one_seat_however_many_frames_run_there(self, store: Store) -> None:
        store.seats("nuke", 2)
        assert book(store, *(on("r1") for _ in range(5)), on("r2")) == [True] * 6
        refused = on("r3", proc_id="p")
        answers = store.ledger.book([refused, on("r2")])
        assert (answers.refusals["p"].table, answers.refusals["p"].current, answers.refusals["p"].limit) == (
            "limit",
            2,
            2,
        )
        assert (len(answers.accepted), store.machines("nuke"), store.running("nuke")) == (1, {"r1", "r2"}, 7)

    def test_no_seat_is_for_nobody_and_any_number_is_for_all(self, store: Store) -> None:
        store.seats("nuke", 0)
        assert book(store, on("r1")) == [False]
        store.seats("nuke", -1)
        assert book(store, *(on(f"r{n}") for n in range(9))) == [True] * 9

    def test_the_limits_of_a_layer_are_decided_together_whatever_they_count(self, store: Store) -> None:
        store.seats("nuke", 1)
        store.limit("arnold", 2)
        store.seats("ocula", 2)
        limits = ("arnold", "nuke", "ocula")
        assert book(store, on("r1", *limits)) == [True]
        # ocula has room for r2, nuke has not: neither knows of it
        assert book(store, on("r2", *limits), on("r1", *limits), on("r1", *limits)) == [False, True, False]
        assert [store.machines("nuke"), store.machines("ocula")] == [{"r1"}] * 2
        assert [store.running(limit) for limit in limits] == [2, 2, 2]

    def test_what_others_hold_counts_once_and_is_held(self, store: Store) -> None:
        store.seats("nuke", 3, others=["artist", "r1"])
        assert book(store, on("r1"), on("r2"), on("r3"), on("artist")) == [True, True, False, True]
        store.seats("nuke", 3, others=[])
        assert book(store, on("r4")) == [False], "r1, r2 and the artist's machine have frames of ours"
        store.seats("nuke", 4, others=["another"])
        assert book(store, on("r4")) == [False]
        store.seats("nuke", 4, others=[])
        assert book(store, on("r4")) == [True], "the other has gone"

    def test_a_frame_whose_machine_nobody_knows_counts_as_one_more(self, store: Store) -> None:
        store.seats("nuke", 3)
        assert book(store, on(""), on(""), on("r1"), on("r2"), on("r1")) == [True, True, True, False, True]
        assert (store.machines("nuke"), store.running("nuke")) == ({"r1"}, 4)

    def test_the_answer_says_under_which_terms_it_was_accepted(self, store: Store) -> None:
        store.seats("nuke", 1, terms="HOST as it is")
        store.limit("arnold", 5)
        first, second, plain = on("r1", "arnold", "nuke"), on("r2", "arnold", "nuke"), on("r1", "arnold")
        answers = store.ledger.book([first, second, plain])
        assert answers.terms == {first.proc_id: {"nuke": "HOST as it is"}}
        assert answers.caps[keys.limit("nuke")].counts_machines

    def test_a_limit_counts_frames_again_as_soon_as_it_says_so(self, store: Store) -> None:
        store.seats("nuke", 1)
        assert book(store, on("r1"), on("r1"), on("r1")) == [True] * 3
        store.caps(keys.limit("nuke"), int_max_value=4, int_foreign=0, int_machines="", terms="")
        assert book(store, on("r2"), on("r1")) == [True, False]

    def test_booked_by_force_it_counts_where_it_runs(self, store: Store) -> None:
        store.seats("nuke", 0)
        force(store.ledger, [on("r1")])
        assert store.machines("nuke") == {"r1"}


class TestComingAndGoing:
    """A machine comes with its first entry and goes with its last."""

    def test_of_two_bookings_in_flight_on_a_new_machine_one_is_rolled_back(self, store: Store) -> None:
        store.seats("nuke", 1)
        one, two = on("r1"), on("r1")
        assert book(store, one, two) == [True, True]
        store.ledger.rollback([one])
        assert (store.machines("nuke"), book(store, on("r2"))) == ({"r1"}, [False])
        store.ledger.rollback([two])
        assert (store.machines("nuke"), book(store, on("r2"))) == (set(), [True])

    def test_the_last_frame_of_a_machine_ends(self, store: Store) -> None:
        store.seats("nuke", 1)
        frames = [on("r1") for _ in range(3)]
        book(store, *frames)
        store.ledger.settle(frames)
        store.ledger.release([it.proc_id for it in frames[:2]])
        assert store.machines("nuke") == {"r1"}
        store.ledger.release([it.proc_id for it in frames])
        assert (store.machines("nuke"), store.running("nuke")) == (set(), 0)
        assert not store.client.exists("acct:limit:nuke@r1"), "no key is left of a machine"

    def test_an_entry_that_moves_takes_its_machine_along(self, store: Store) -> None:
        store.seats("nuke", 5)
        book(store, on("r1", proc_id="p"))
        (record,) = store.ledger.records()
        there = record.entry.replace("r1", "r2")
        store.ledger.apply([Change("p", record.changed_seq, there, EntryState.CONFIRMED)], epoch=store.ledger.epoch())
        assert store.machines("nuke") == {"r2"}
        (record,) = store.ledger.records()
        store.ledger.apply([Change("p", record.changed_seq, None)], epoch=store.ledger.epoch())
        assert store.machines("nuke") == set()

    def test_a_dual_store_drops_an_entry_with_its_machine(self, store: Store) -> None:
        store.open(dual=True)
        store.seats("nuke", 5)
        book(store, on("r1", proc_id="p"))
        (record,) = store.ledger.records()
        store.ledger.apply([Change("p", record.changed_seq, None)], epoch=store.ledger.epoch())
        assert store.machines("nuke") == set()

    def test_every_counter_is_the_sum_of_its_entries_and_machines_follow(self, store: Store) -> None:
        store.seats("nuke", 5)
        book(store, on("r1"), on("r1"), on("r2"), on(""))
        check = check_consistency(store.ledger)
        assert (drift(check), check.wrong_machines) == ({}, [])
        assert {key: check.readings[key][1][0] for key in check.readings if key.startswith(keys.LIMIT_PREFIX)} == {
            "acct:limit:nuke": 4,
            "acct:limit:nuke@": 3,
            "acct:limit:nuke@r1": 2,
            "acct:limit:nuke@r2": 1,
        }

    @pytest.mark.parametrize(
        "harm",
        [
            ("ZREM", "acct:machines:nuke", "r1"),
            ("ZADD", "acct:machines:nuke", "5", "ghost"),
            ("DEL", "acct:machines:nuke"),
            ("SET", "acct:machines:nuke", "junk"),
            ("DEL", "acct:limit:nuke@r1"),
            ("DEL", "acct:started:nuke@r1"),
            ("SET", "acct:started:nuke@r2", "junk"),
            ("HSET", "acct:limit:nuke@r2", "int_running", "junk"),
            ("HINCRBY", "acct:limit:nuke@r3", "int_running", "2"),
        ],
    )
    def test_what_another_program_does_to_machines_is_put_right(self, store: Store, harm: tuple[str, ...]) -> None:
        store.seats("nuke", 5)
        book(store, on("r1"), on("r2"))
        store.client.execute_command(*harm)
        looked = check_consistency(store.ledger)
        assert drift(looked) or looked.wrong_machines
        check_consistency(store.ledger, heal=True)
        assert (store.machines("nuke"), store.running("nuke@")) == ({"r1", "r2"}, 2)
        again = check_consistency(store.ledger)
        assert (drift(again), again.wrong_machines) == ({}, [])

    def test_starts_and_machines_that_are_lost_are_made_anew_as_they_were(self, store: Store) -> None:
        # given confirmed frames, one of them old, on machines of which one is called as another begins
        store.seats("nuke", 5)
        frames = on("r1", proc_id="p"), on("r11", proc_id="q")
        book(store, *frames)
        store.ledger.settle(frames)
        store.age("p", 500)
        sets = ("acct:machines:nuke", "acct:started:nuke@r1", "acct:started:nuke@r11")
        before = [store.client.zrange(key, 0, -1, withscores=True) for key in sets]
        # when another program loses them, or takes one for the other
        store.client.delete("acct:machines:nuke", "acct:started:nuke@r1")
        store.client.zadd("acct:started:nuke@r1", {"q": store.now()})
        store.client.zadd("acct:started:nuke@r11", {"p": store.now()})
        # then they are as before
        check_consistency(store.ledger, heal=True)
        assert [store.client.zrange(key, 0, -1, withscores=True) for key in sets] == before

    def test_what_is_counted_nowhere_leaves_no_key(self, store: Store) -> None:
        store.seats("nuke", 5)
        store.client.hincrby("acct:limit:nuke@r3", "int_running", 2)
        check_consistency(store.ledger, heal=True)
        assert not store.client.exists("acct:limit:nuke@r3")

    def test_a_machine_whose_counter_is_damaged_holds_until_a_recompute(self, store: Store) -> None:
        store.seats("nuke", 1)
        frames = [on("r1"), on("r1")]
        book(store, *frames)
        store.client.hset("acct:limit:nuke@r1", "int_running", "junk")
        store.ledger.release([it.proc_id for it in frames])
        assert (store.machines("nuke"), book(store, on("r2"))) == ({"r1"}, [False])
        check_consistency(store.ledger, heal=True)
        assert (store.machines("nuke"), book(store, on("r2"))) == (set(), [True])

    def test_a_machine_whose_last_frame_has_ended_is_remembered_for_an_hour(self, store: Store) -> None:
        store.seats("nuke", 5)
        frames = [on("r1"), on("r2")]
        book(store, *frames)
        store.ledger.release([it.proc_id for it in frames])
        ended = {"r1": -(store.now() - 3700), "r2": -(store.now() - 3000)}
        store.client.zadd("acct:machines:nuke", ended)
        # also where another program counts there meanwhile
        store.client.hincrby("acct:limit:nuke@r2", "int_running", 2)
        for _ in range(2):
            check_consistency(store.ledger, heal=True)
        assert store.client.zrange("acct:machines:nuke", 0, -1, withscores=True) == [("r2", ended["r2"])]

    def test_starts_of_procs_that_are_no_more_are_forgotten(self, store: Store) -> None:
        store.seats("nuke", 5)
        store.frames("arnold", 5, after=0)
        frames = on("r1", "nuke", "arnold", proc_id="p"), on("r1", "nuke", "arnold", proc_id="q")
        book(store, *frames)
        for key in ("acct:started:nuke@r1", "acct:started:arnold"):
            store.client.zadd(key, {"ghost": store.now()})
        assert check_consistency(store.ledger, heal=True).wrong_machines == []
        assert [store.client.zrange(f"acct:started:{at}", 0, -1) for at in ("nuke@r1", "arnold")] == [["p", "q"]] * 2
        store.client.delete("acct:started:arnold")
        assert check_consistency(store.ledger, heal=True).wrong_machines == ["acct:limit:arnold@"]
        assert store.client.zrange("acct:started:arnold", 0, -1) == ["p", "q"]

    def test_what_is_no_set_of_machines_ends_no_release_midway_and_nothing_is_booked_by_it(self, store: Store) -> None:
        store.seats("nuke", 2)
        frames = [on("r1"), on("r2")]
        book(store, *frames)
        store.client.set("acct:machines:nuke", "junk")
        store.ledger.release([it.proc_id for it in frames])
        assert (store.running("nuke"), store.running("nuke@")) == (0, 0)
        assert book(store, on("r3")) == [False]
        # A recompute makes it anew, also where no frame is left.
        check_consistency(store.ledger, heal=True)
        assert (store.machines("nuke"), book(store, on("r3"))) == (set(), [True])


class TestARollingUpgrade:
    """Workers of the release before know frames alone: their scripts are ours without machines."""

    @staticmethod
    def old(name: str) -> LuaScript:
        text = load_script(name).text
        for ours, before in (
            ("add_frames(key, sum[1] + 0)", "add(key, 'int_running', sum[1] + 0)"),
            ("(read[4] or '') ~= '' or (read[5] or '') ~= ''", "false"),
            ("note_start(id, limits, sign > 0 and booked)", ""),
        ):
            text = text.replace(ours, before)
        assert text != load_script(name).text
        return LuaScript(text, "0" * 40)

    def run(self, store: Store, call: ScriptCall) -> Any:
        return store.client.eval(self.old(call.name).text, len(call.keys), *call.keys, *call.args)

    def old_book(self, store: Store, entry: Booking) -> bool:
        call = book_call(store.ledger.epoch().text, "check", entry, "old")
        return int(self.run(store, ScriptCall(call.name, call.keys, call.args[:-1]))[0]) == 1

    def old_release(self, store: Store, *ids: str) -> None:
        for call in id_calls("release", ids, store.ledger.epoch().text):
            self.run(store, call)

    def test_what_they_book_counts_as_a_machine_each(self, store: Store) -> None:
        store.seats("nuke", 3)
        store.caps(keys.limit("nuke"), int_max_value=3, int_foreign=0)
        assert [self.old_book(store, on("", proc_id=name)) for name in ("a", "b")] == [True, True]
        assert book(store, on("r1"), on("r2"), on("r1")) == [True, False, True]
        # They count frames, of which there are never fewer than machines.
        assert not self.old_book(store, on("", proc_id="c"))
        self.old_release(store, "a")
        assert book(store, on("r2")) == [True]

    def test_what_they_release_keeps_its_seat_until_a_recompute_at_the_latest(self, store: Store) -> None:
        store.seats("nuke", 2)
        frames = [on("r1"), on("r1"), on("r2")]
        book(store, *frames)
        self.old_release(store, frames[0].proc_id)
        assert check_consistency(store.ledger).wrong_machines == []
        self.old_release(store, frames[1].proc_id)
        assert (store.running("nuke"), store.running("nuke@"), book(store, on("r3"))) == (1, 1, [False])
        # A machine that is used again is exact at once,
        back = on("r1")
        assert book(store, back) == [True]
        store.ledger.release([back.proc_id])
        assert store.machines("nuke") == {"r2"}
        # and one that is not, when the machines are compared.
        self.old_release(store, frames[2].proc_id)
        assert check_consistency(store.ledger, heal=True).wrong_machines == ["acct:limit:nuke@r2"]
        assert book(store, on("r3"), on("r4")) == [True, True]

    def test_what_they_book_and_release_in_turn_is_never_too_little(self, store: Store) -> None:
        store.seats("nuke", 3)
        store.caps(keys.limit("nuke"), int_max_value=3, int_foreign=0)
        ours = [on("r1"), on("r1")]
        book(store, *ours)
        self.old_release(store, ours[0].proc_id)
        assert self.old_book(store, on("", proc_id="a"))
        # r1 and the one that nobody knows: one seat is left
        assert book(store, on("r2"), on("r3")) == [True, False]

    def test_a_machine_whose_last_frame_they_released_holds_no_more(self, store: Store) -> None:
        store.seats("nuke", 2)
        store.caps(keys.limit("nuke"), int_max_value=2, int_foreign=0)
        ours = [on("r1"), on("r2")]
        book(store, *ours)
        store.ledger.settle(ours)
        # given r1 left among the machines by a worker that books a frame elsewhere
        self.old_release(store, ours[0].proc_id)
        assert self.old_book(store, on("", proc_id="a"))
        # then r1 would be a third one, for the planner too
        assert store.ledger.seats({"nuke": (2, "nuke")})["nuke"].holding == {"r2"}
        assert book(store, on("r1"), on("r2")) == [False, True]

    def test_machines_that_their_recompute_takes_from_the_entries_hold_no_more(self, store: Store) -> None:
        store.seats("nuke", 2)
        store.caps(keys.limit("nuke"), int_max_value=2, int_foreign=0)
        ours = [on("r1"), on("r2")]
        book(store, *ours)
        # given entries that list the limit alone, as the release before reads them from the proc table
        changes = [
            Change(it.proc_id, it.changed_seq, it.entry.partition(",")[0], EntryState.CONFIRMED)
            for it in store.ledger.records()
        ]
        for call in reconcile_calls(store.ledger.epoch().text, changes, "old"):
            self.run(store, call)
        assert (store.machines("nuke"), store.running("nuke"), store.running("nuke@")) == ({"r1", "r2"}, 2, 0)
        # when these end, and two are booked on other machines
        self.old_release(store, *(it.proc_id for it in ours))
        assert [self.old_book(store, on("", proc_id=name)) for name in ("a", "b")] == [True, True]
        # then no seat is left
        assert book(store, on("r1"), on("r2")) == [False, False]
        assert store.ledger.seats({"nuke": (2, "nuke")})["nuke"].holding == set()

    def test_what_they_release_under_a_reported_limit_of_frames_counts_no_more(self, store: Store) -> None:
        store.frames("arnold", 2, settled=0, after=0)
        frames = on("r1", "arnold"), on("r1", "arnold")
        book(store, *frames)
        self.old_release(store, frames[0].proc_id)
        # a start of it is left, and counts for nothing
        assert book(store, on("r1", "arnold"), on("r1", "arnold")) == [True, False]

    def test_a_machine_that_they_released_counts_while_it_is_reported(self, store: Store) -> None:
        store.seats("nuke", 2)
        frames = [on(f"r{n}") for n in (1, 2)]
        book(store, *frames)
        store.ledger.settle(frames)
        self.old_release(store, frames[1].proc_id)
        store.seats("nuke", 1, others=["r2", "artist"], after=store.now() - 130)
        # r1, r2 and the artist hold it: one of ours could go on only if there were a seat for either
        assert book(store, on("r1"), on("r2")) == [False, False]
        store.seats("nuke", 2, others=["r2", "artist"], after=store.now() - 130)
        assert book(store, on("r2"), on("r1")) == [False, True]


BOOKED = {"evalsha": 1, "mget": 1, "time": 1, "sismember": 1, "incr": 1, "hsetnx": 1, "hmget": 6, "hincrby": 5}
RELEASED = {"evalsha": 1, "mget": 1, "time": 1, "sadd": 2, "expire": 2, "unlink": 1, "incr": 1, "hmget": 1, "hdel": 1}


@pytest.mark.parametrize("frames_of", [(), ("nuke",), ("arnold", "nuke")])
def test_a_booking_under_no_limit_that_counts_machines_costs_what_it_did(
    store: Store, frames_of: tuple[str, ...]
) -> None:
    """Counted before there were any: for each limit of frames its caps twice, and a counter up and down."""
    for limit in frames_of:
        store.limit(limit, 9)

    def commands(work: Callable[[], object]) -> dict[str, int]:
        store.client.config_resetstat()
        work()
        stats: dict[str, dict[str, int]] = store.client.info("commandstats")  # type: ignore[assignment]
        counted = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
        return {name: calls for name, calls in counted.items() if not name.startswith(("config", "info"))}

    def cycle(proc_id: str) -> tuple[dict[str, int], dict[str, int]]:
        taken = booking(1, proc_id=proc_id, machine="r1", limit_ids=frames_of)
        return commands(lambda: store.ledger.book([taken])), commands(lambda: store.ledger.release([proc_id]))

    cycle("first")  # Redis learns the scripts, and vertices get their fields
    booked, released = cycle("second")
    more = len(frames_of)
    # At a vertex that nothing is counted at any more its GPUs are written again.
    assert booked == BOOKED | {"hmget": 6 + 2 * more, "hincrby": 10 + more}
    assert released == RELEASED | {"hincrby": 5 + more}


# With PostgreSQL.


@pytest.fixture
def limited(world: World) -> str:
    """A limit of two, of the layer of which the world runs frames."""
    with world.engine.begin() as connection:
        limit = Farm(connection).limit("nuke", 2)
    bind(world, limit)
    return limit


def bind(world: World, limit: str) -> None:
    world.sql(
        "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES (:id, :layer, :limit)",
        id=f"bound-{limit}"[:36],
        layer=world.job.layers[0].id,
        limit=limit,
    )


def note(world: World) -> None:
    """What runs of the managed shows is in the ledger."""
    with world.engine.begin() as connection:
        note_imported(world.store.client, managed_show_versions(connection))


def become(world: World, limit: str, limit_type: str) -> None:
    with world.engine.begin() as connection:
        set_type(connection, limit, limit_type)


def may_book(world: World, limit: str, *machines: str) -> list[bool]:
    """Whether the limit lets a frame start on each machine, one after the other; what it lets is given back."""
    load_caps(world.engine, world.ledger, [keys.limit(limit)])
    of_limit_alone = Vertices("show", "", "", "", "", "", (limit,))
    asked = [Booking(f"asked-{uuid.uuid4()}", of_limit_alone, 1, machine=machine) for machine in machines]
    accepted = world.ledger.book(asked).accepted
    world.ledger.rollback([it for it in asked if it.proc_id in accepted])
    return [it.proc_id in accepted for it in asked]


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


# Reports: what is settled and what is pending, by a settle window of two minutes and a commit deadline of ten seconds.


@pytest.fixture
def reported(world: World, limited: str) -> str:
    """The same limit, in a schema that has reports."""
    with world.engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
    return limited


def say(world: World, limit: str, *names: str, tokens: int = 1, seconds_ago: float = 0.0) -> None:
    with world.engine.begin() as connection:
        report(connection, limit, *names, tokens=tokens, seconds_ago=seconds_ago)
    load_caps(world.engine, world.ledger, [keys.limit(limit)])
    lacking = world.ledger.limits_lacking_machines([limit])
    follow_layers(world.engine, world.ledger, [world.job.layers[0].id] if lacking else [])


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


def test_what_a_worker_of_the_release_before_writes_of_a_limit_hides_nobody_who_holds_it(store: Store) -> None:
    store.seats("nuke", 1, others=[])
    # given caps that such a worker has read later, of which it writes what it knows
    load = store.ledger.write_caps
    load("test|1000", [(keys.limit("nuke"), ["int_max_value", "2", "int_foreign", "0"])])
    # when an earlier read says who else holds it
    load("test|900", [(keys.limit("nuke"), [*SEATS_OF_TWO, ["artist", "r2"], []])])
    # then that is known, and the later maximum stays.
    assert book(store, on("r1"), on("r2")) == [False, True]
    assert store.client.hget(keys.limit("nuke"), "int_max_value") == "2"


def test_terms_that_were_read_earlier_replace_none_that_were_read_later(store: Store) -> None:
    load = store.ledger.write_caps
    for version, others in ((1000, ["artist", "r2"]), (900, [])):
        load(f"test|{version}", [(keys.limit("nuke"), [*SEATS_OF_TWO, others, []])])
    assert book(store, on("r1"), on("r2")) == [False, True]


def test_entries_of_before_a_change_of_type_count_for_themselves(store: Store) -> None:
    # given two frames of a reported limit, which say since when they run; made one of machines, each counts as one more
    store.frames("nuke", 9, after=0)
    book(store, on("r1"), on("r1"))
    store.seats("nuke", 4)
    assert book(store, on("r2"), on("r3"), on("r4"), on("r2")) == [True, True, False, True]
    # when it is one of frames again, the three that say where they run count beside any report.
    for most, accepted in ((3, False), (4, True)):
        store.frames("nuke", most, after=store.now() + 60)
        assert book(store, on("r9")) == [accepted]


SEATS_OF_TWO = ["int_max_value", "5", "int_foreign", "0", "int_machines", "2", "terms", "HOST", "after", ""]


# Above the maximum.


class TestAboveTheMaximum:
    """As many machines as are too many take no more frames, the same ones whoever asks; the others go on."""

    def test_a_lowered_maximum_gets_its_seats_back(self, store: Store) -> None:
        store.seats("nuke", 6)
        frames = {f"r{n}": on(f"r{n}") for n in (4, 2, 6, 1, 3, 5)}
        book(store, *frames.values())
        store.ledger.settle(list(frames.values()))
        store.seats("nuke", 3)
        for _ in range(2):
            assert book(store, *(on(f"r{n}") for n in range(1, 8))) == [True] * 3 + [False] * 4
        assert store.ledger.seats({"nuke": (3, "nuke")})["nuke"].holding == {"r1", "r2", "r3"}
        # when one of those that go on ends all its frames, one less is too many
        store.ledger.release([record.proc_id for record in store.ledger.records() if record.entry.endswith("@r2")])
        assert book(store, *(on(f"r{n}") for n in range(1, 8))) == [True, False, True, True] + [False] * 3
        # and when use is down, a new machine is one too many again, until there is a seat.
        store.ledger.release([frames["r5"].proc_id, frames["r6"].proc_id])
        assert book(store, on("r2"), on("r4")) == [False, True]

    def test_artists_who_come_get_theirs(self, store: Store) -> None:
        store.seats("nuke", 3)
        frames = [on(f"r{n}") for n in (3, 2, 1)]
        book(store, *frames)
        store.ledger.settle(frames)
        store.seats("nuke", 3, others=["artist1", "artist2", "r1"])
        assert book(store, on("r1"), on("r2"), on("r3"), on("artist1")) == [True, False, False, False]
        seats = store.ledger.seats({"nuke": (3, "nuke")})["nuke"]
        assert (seats.holding, seats.left) == ({"r1"}, 0)

    def test_those_that_go_on_do_while_a_report_still_shows_the_others(self, store: Store) -> None:
        store.seats("nuke", 2)
        frames = on("r1"), on("r2")
        book(store, *frames)
        store.ledger.release([frames[1].proc_id])
        store.seats("nuke", 1, others=["r1", "r2"], after=store.now() - 130)
        assert book(store, on("r1"), on("r2")) == [True, False]
        assert store.ledger.seats({"nuke": (1, "nuke")})["nuke"].holding == {"r1"}

    def test_a_soft_value_stops_new_machines_alone_and_none_at_zero(self, store: Store) -> None:
        store.seats("nuke", 3)
        frames = on("r1"), on("r2")
        book(store, *frames)
        store.ledger.settle(frames)
        for soft in (1, 0):
            store.seats("nuke", soft, maximum=3)
            assert book(store, on("r1"), on("r2"), on("r3")) == [True, True, False]

    def test_what_is_in_flight_where_the_maximum_is_lowered_makes_no_machine_go_on(self, store: Store) -> None:
        # given a frame of r1 that runs no more, and one in flight, of r2 one that runs, and one seat too many by now
        store.seats("nuke", 2)
        doomed, running = on("r1"), on("r2")
        book(store, doomed, running)
        store.ledger.settle([running])
        store.seats("nuke", 2, others=["artist"], terms="HOST reported since")
        # when the commit refuses what was accepted under other terms, r1 holds nothing: none may start there meanwhile
        assert book(store, on("r1")) == [False]
        store.ledger.rollback([doomed])
        assert book(store, on("r1"), on("r2")) == [False, True]

    def test_what_is_in_flight_alone_takes_more_up_to_the_maximum(self, store: Store) -> None:
        store.seats("nuke", 2)
        assert book(store, on("r1"), on("r2"), on("r1"), on("r2"), on("r3")) == [True] * 4 + [False]


# Any order of what may happen to two limits of machines and one of frames, reported or not.

_LIMITS, _MACHINES = ("nuke", "ocula", "arnold"), ("r1", "r2", "r3", "")
_OLD, _YOUNG_SINCE = 1000, 500
_STEPS = st.one_of(
    st.tuples(st.just("book"), st.sampled_from(_MACHINES), st.sets(st.sampled_from(_LIMITS), min_size=1)),
    st.tuples(st.just("force"), st.sampled_from(_MACHINES), st.sets(st.sampled_from(_LIMITS), min_size=1)),
    st.tuples(st.sampled_from(["roll back", "release", "confirm", "drop", "move", "age"]), st.integers(0, 9)),
    st.tuples(
        st.just("seats"),
        st.sampled_from(_LIMITS[:2]),
        st.integers(-1, 3),
        st.sets(st.sampled_from(_MACHINES[:3])),
        st.sets(st.sampled_from(_MACHINES[:3])),
        st.integers(0, 2),
        st.booleans(),
    ),
    st.tuples(st.just("frames"), st.integers(-1, 4), st.integers(0, 2), st.booleans()),
)
_NOBODY: frozenset[str] = frozenset()
_NUKE = frozenset({"nuke"})
_TOLD = (
    # An old frame on a reported machine, a young one on another, and one machine too many.
    (
        ("seats", "nuke", 3, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r3", "r1")),
        *(("confirm", 0), ("confirm", 1), ("age", 0)),
        ("seats", "nuke", 1, {"r3"}, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r1", "r3", "r2")),
    ),
    # A machine too many is reported still after its last frame has ended.
    (
        ("seats", "nuke", 2, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
        ("release", 1),
        ("seats", "nuke", 1, {"r1", "r2"}, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
    ),
    # A machine whose frame is old and not reported has given its licence back.
    (
        ("book", "r1", _NUKE),
        *(("confirm", 0), ("age", 0)),
        ("seats", "nuke", 1, _NOBODY, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r2", "r3", "r1")),
    ),
    # So has an old frame under a limit of frames.
    (("frames", 2, 0, True), ("book", "r1", {"arnold"}), ("age", 0), *(("book", "r1", {"arnold"}) for _ in range(3))),
    # A young frame that has ended waits for no report any more, beside an old one that runs on.
    (
        ("frames", 2, 0, True),
        *(("book", "r1", {"arnold"}), ("age", 0)),
        *(("book", "r1", {"arnold"}), ("release", 1)),
        *(("book", "r1", {"arnold"}) for _ in range(2)),
    ),
    # A machine with frames in flight alone holds a limit no more than one without, where it is lowered meanwhile.
    (
        ("seats", "nuke", 2, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r1", "r2", "r2")),
        ("seats", "nuke", 1, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
        ("confirm", 0),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
    ),
    # A machine counts by its youngest frame, and one with an old one in flight alone does not.
    (
        *(("book", "r1", _NUKE), ("confirm", 0), ("age", 0)),
        ("seats", "nuke", 1, _NOBODY, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
    ),
    (
        *(("book", "r1", _NUKE), ("age", 0)),
        ("seats", "nuke", 1, {"r3"}, _NOBODY, 0, True),
        ("book", "r1", _NUKE),
    ),
    # Any number of frames.
    (("frames", -1, 0, True), ("book", "r1", {"arnold"})),
    # A frame that no report knows takes a licence beside those that one counts; so do the ones counted alone.
    (("book", "r1", {"arnold"}), ("frames", 1, 0, True), ("book", "r1", {"arnold"})),
    (("frames", 1, 1, True), ("book", "r1", {"arnold"})),
    # A machine that is past starts nothing, and a frame without a machine holds a limit of one.
    (("seats", "nuke", 0, _NOBODY, {"r1"}, 0, False), ("book", "r1", _NUKE)),
    (("book", "", _NUKE), ("book", "r1", _NUKE)),
)
"""What a search comes upon rarely."""


@dataclass
class Terms:
    """How a limit counts by now: so many may hold it, what the ledger has not, and whether it was reported."""

    most: int
    others: set[str] = field(default_factory=set)
    past: set[str] = field(default_factory=set)
    maximum: int = 0
    reported: bool = False
    settled: int = 0


@dataclass
class Expected:
    """What should be booked, said anew: sets of machines and sums of frames, and nothing that is moved along."""

    limits: dict[str, Terms]
    booked: dict[str, Booking] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    aged: set[str] = field(default_factory=set)
    dated: set[tuple[str, str]] = field(default_factory=set)
    """Frames and limits of frames that were reported when they were booked."""
    left: set[tuple[str, str]] = field(default_factory=set)
    """Limits and machines whose last frame has ended."""

    def of(self, limit: str) -> list[Booking]:
        return [booked for booked in self.booked.values() if limit in booked.vertices.limit_ids]

    def machines(self, limit: str) -> set[str]:
        return {booked.machine for booked in self.of(limit) if booked.machine}

    def counts(self, limit: str, booked: Booking) -> bool:
        """Whether a frame counts beside a report."""
        known = booked.machine or limit == "arnold"
        dated = limit != "arnold" or (booked.proc_id, limit) in self.dated
        return not (self.limits[limit].reported and known and dated and booked.proc_id in self.aged)

    def refuses(self, limit: str, machine: str) -> bool:
        terms, young = self.limits[limit], [booked for booked in self.of(limit) if self.counts(limit, booked)]
        if limit == "arnold":
            return terms.most >= 0 and terms.settled + len(young) >= terms.most
        counted = {booked.machine for booked in young if booked.machine} | terms.others
        use = len(counted) + sum(not booked.machine for booked in young)
        if terms.most < 0 or use < terms.most:
            return False
        running = {booked.machine for booked in self.of(limit) if booked.proc_id in self.confirmed}
        if machine not in running | terms.others | terms.past or not machine:
            alone = bool(machine) and machine in counted - terms.others
            return use - alone >= terms.most
        too_many = use - terms.maximum
        if too_many <= 0:
            return False
        left = {name for of, name in self.left if of == limit and terms.reported}
        ours = sorted((counted - terms.others) | (terms.others & (self.machines(limit) | left)))
        return machine not in ours[: max(0, len(ours) - too_many)]

    def change(self, change: Callable[[], object]) -> None:
        """Do it, and note which machines have no frame any more."""
        before = {(limit, machine) for limit in self.limits for machine in self.machines(limit)}
        change()
        after = {(limit, machine) for limit in self.limits for machine in self.machines(limit)}
        self.left = (self.left | before) - after


@example(_TOLD[0])
@example(_TOLD[1])
@example(_TOLD[2])
@example(_TOLD[3])
@example(_TOLD[4])
@example(_TOLD[5])
@example(_TOLD[6])
@example(_TOLD[7])
@example(_TOLD[8])
@example(_TOLD[9])
@example(_TOLD[10])
@example(_TOLD[11])
@example(_TOLD[12])
@given(st.lists(_STEPS, max_size=25))
@hypothesis_settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_machines_are_the_hosts_of_the_entries_whatever_happens(store: Store, steps: Sequence[tuple[Any, ...]]) -> None:
    store.client.flushdb()
    store.open()
    store.seed()
    limits = {"nuke": Terms(1, maximum=1), "ocula": Terms(2, {"r3"}, maximum=2), "arnold": Terms(4)}
    expected = Expected(limits)
    for limit in _LIMITS[:2]:
        store.seats(limit, limits[limit].most, limits[limit].others)
    store.frames("arnold", 4)
    booked = expected.booked

    def book_(asked: Booking) -> None:
        booked[asked.proc_id] = asked
        expected.dated |= {(asked.proc_id, "arnold")} if limits["arnold"].reported else set()

    def step(what: str, *rest: Any) -> None:
        if what in ("book", "force"):
            asked = on(rest[0], *sorted(rest[1]))
            if what == "force":
                force(store.ledger, [asked])
                return book_(asked)
            accepted = not any(expected.refuses(limit, rest[0]) for limit in rest[1])
            assert book(store, asked) == [accepted], (steps, asked)
            return book_(asked) if accepted else None
        if what == "seats":
            limit, most, others, past, more, reported = rest
            maximum = max(0, most) + more
            limits[limit] = Terms(most, others, past, maximum, reported)
            after = store.now() - _YOUNG_SINCE if reported else None
            return store.seats(limit, most, others, past=past, maximum=maximum, after=after)
        if what == "frames":
            most, settled, reported = rest
            limits["arnold"] = Terms(most if reported else max(0, most), settled=settled * reported, reported=reported)
            return store.frames("arnold", most, settled, store.now() - _YOUNG_SINCE if reported else None)
        if not booked:
            return None
        taken = list(booked.values())[rest[0] % len(booked)]
        (record,) = store.ledger.records_of([taken.proc_id])
        if what == "confirm":
            store.ledger.settle([taken])
            expected.confirmed.add(taken.proc_id)
        elif what == "age":
            store.age(taken.proc_id, _OLD)
            expected.aged.add(taken.proc_id)
            expected.left |= {
                (limit, taken.machine) for limit in _LIMITS[:2] if limit in taken.vertices.limit_ids and taken.machine
            } - {(limit, machine) for limit in _LIMITS for machine in expected.machines(limit)}
        elif what == "roll back":
            store.ledger.rollback([booked.pop(taken.proc_id)])
        elif what == "release":
            store.ledger.release([booked.pop(taken.proc_id).proc_id])
        elif what == "drop":
            del booked[taken.proc_id]
            gone = Change(taken.proc_id, record.changed_seq, None)
            store.ledger.apply([gone], epoch=store.ledger.epoch())
        elif taken.machine:
            there = record.entry.replace(f"@{taken.machine}", "@r9")
            booked[taken.proc_id] = replace(taken, machine="r9")
            moved = Change(taken.proc_id, record.changed_seq, there, record.state)
            store.ledger.apply([moved], epoch=store.ledger.epoch())
        return None

    for taken in steps:
        expected.change(partial(step, *taken))
        for limit in _LIMITS[:2]:
            assert store.machines(limit) == expected.machines(limit), (limit, steps)
    check = check_consistency(store.ledger)
    assert (drift(check), check.wrong_machines) == ({}, [])


@pytest.mark.parametrize(
    ("path", "ours", "mistake"),
    [
        (
            "includes/seats.lua",
            "if use < threshold then return end\n  -- A machine",
            "if use <= threshold then return end\n  -- A machine",
        ),
        ("includes/seats.lua", "runs or reported or", "runs or"),
        ("includes/seats.lua", "local runs = frames > 0 and runs_there(limit, machine)", "local runs = frames > 0"),
        ("includes/seats.lua", "use - (counted_alone and 1 or 0) < threshold", "use < threshold"),
        ("includes/seats.lua", "local runs = frames > 0 and", "local runs = frames > 1 and"),
        ("includes/seats.lua", "      use = use - 1\n    elseif", "    elseif"),
        ("includes/seats.lua", "+ math.max(0, unknown)", ""),
        ("includes/seats.lua", "+ call('SCARD', others)", ""),
        ("includes/seats.lua", "call('SISMEMBER', holding .. ':past', machine) == 1", "false"),
        ("includes/seats.lua", "if use <= maximum then return end\n  -- Ours", "if true then return end\n  -- Ours"),
        ("includes/seats.lua", "#ours - (use - maximum)", "#ours - (use - maximum) + 1"),
        ("includes/seats.lua", "  table.sort(ours)\n", ""),
        ("includes/seats.lua", "since > 0 or (after", "(after"),
        ("includes/seats.lua", "-since > tonumber(after)", "false"),
        ("book.lua", "try('ZADD', 'acct:machines:' .. limit, 'GT', now, machine)", "local _"),
        ("book.lua", "note_start(id, ARGV[13], now)", "local _"),
        ("includes/seats.lua", "call('ZCOUNT', holding, bound, '+inf')", "call('ZCOUNT', holding, '(0', '+inf')"),
        ("includes/seats.lua", "settled + pending", "pending"),
        ("includes/seats.lua", "pending + math.max(0, running - known)", "pending"),
        ("includes/seats.lua", "'(' .. after, '+inf')", "0, '+inf')"),
        ("includes/machines.lua", "last[2] or clock()", "clock()"),
        ("includes/machines.lua", "if key and booked then", "if false then"),
        ("includes/machines.lua", "try('ZADD', machines, '-' .. clock(), machine)", "local _"),
        ("includes/machines.lua", "try('ZREM', key, id)", "local _"),
        ("includes/machines.lua", "type(sum) == 'table' or sum > 0", "sum ~= 1"),
    ],
)
def test_each_rule_left_out_is_found(store: Store, path: str, ours: str, mistake: str) -> None:
    """The control of the test above: the script is broken on purpose, and that test fails."""
    inner = test_machines_are_the_hosts_of_the_entries_whatever_happens.hypothesis.inner_test
    search = hypothesis_settings(
        max_examples=400,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    with changed_script(path, {ours: mistake}), pytest.raises((AssertionError, ResponseError)):
        for steps in _TOLD:
            inner(store, steps)
        search(given(st.lists(_STEPS, max_size=25))(lambda steps: inner(store, steps)))()
