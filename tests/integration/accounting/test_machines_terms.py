"""Limits whose terms are read in another order, written by a worker of the release before, or of another type now."""

from __future__ import annotations

from opencue_sched.accounting import keys
from tests.integration.accounting.seats import book, on
from tests.kit.counters import Store

SEATS_OF_TWO = ["int_max_value", "5", "int_foreign", "0", "int_machines", "2", "terms", "HOST", "after", ""]


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
