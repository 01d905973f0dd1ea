"""Limits that count machines: which machines hold one, whoever moves their entries."""

from __future__ import annotations

import pytest

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.keys import EntryState
from opencue_sched.accounting.ledger import Change
from tests.integration.accounting.seats import book, on
from tests.kit.counters import Store


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
