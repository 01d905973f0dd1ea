"""Limits that more machines hold than may."""

from __future__ import annotations

from tests.integration.accounting.seats import book, on
from tests.kit.counters import Store


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
