"""Limits that count machines, beside a worker of the release before."""

from __future__ import annotations

from typing import Any

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import check_consistency
from opencue_sched.accounting.keys import Booking, EntryState
from opencue_sched.accounting.ledger import Change, book_call, id_calls, reconcile_calls
from opencue_sched.clients.lua_scripts import LuaScript, ScriptCall, load_script
from tests.integration.accounting.seats import book, on
from tests.kit.counters import Store


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
