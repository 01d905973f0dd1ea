"""Limits that count machines: which machines hold one, what a booking is refused, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opencue_sched.accounting import keys
from tests.integration.accounting.seats import book, on
from tests.kit.counters import Store, booking
from tests.kit.forced import force


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
