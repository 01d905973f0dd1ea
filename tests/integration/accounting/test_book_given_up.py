"""A plan that cannot be booked to its end, because PostgreSQL has no caps to tell: nothing of it stays in flight."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from opencue_sched.accounting import keys
from opencue_sched.domain.errors import NotReady
from tests.integration.accounting.conftest import Store, booking

SUB = keys.subscription("show", "alloc")


def database_is_away(_vertices: Sequence[str]) -> None:
    raise OperationalError("SELECT caps", {}, Exception("the server closed the connection"))


def test_what_was_accepted_is_taken_out_again_when_caps_cannot_be_loaded(store: Store) -> None:
    # given a plan of two procs that are accepted, and one under a job whose caps nobody has loaded
    store.ledger.load_caps = database_is_away
    running = booking(8, proc_id="running")
    store.ledger.book([running])
    plan = [booking(4, 1), booking(2), booking(1, job_id="new")]

    # when PostgreSQL fails in the middle of the booking
    with pytest.raises(OperationalError):
        store.ledger.book(plan)

    # then only what runs is counted, and the same procs are not booked by anybody's late message
    assert store.ids() == {"running"}
    assert store.counter(SUB) == store.counter(keys.job("job")) == (8, 0)
    assert store.ledger.book(plan[:1]).refusals[plan[0].proc_id].table == "tombstoned"


def test_what_an_earlier_call_had_booked_stays(store: Store) -> None:
    """It may be committed by now."""
    store.ledger.load_caps = database_is_away
    before = booking(8, proc_id="before")
    store.ledger.book([before])
    with pytest.raises(OperationalError):
        store.ledger.book([before, booking(4), booking(1, job_id="new")])
    assert store.ids() == {"before"}
    assert store.counter(SUB) == (8, 0)


def test_a_rollback_that_fails_too_is_told_and_left_to_recompute(store: Store) -> None:
    def everything_is_away(_vertices: Sequence[str]) -> None:
        store.client.delete(keys.EPOCH)
        database_is_away(())

    store.ledger.load_caps = everything_is_away
    with capture_logs() as said, pytest.raises(OperationalError):
        store.ledger.book([booking(4, proc_id="p"), booking(1, job_id="new")])
    assert [(line["event"], line["procs"]) for line in said] == [("rollback_left_to_recompute", 1)]
    assert store.ids() == {"p"}


def test_a_store_that_is_lost_meanwhile_is_not_asked_once_more(store: Store) -> None:
    def store_is_lost(_vertices: Sequence[str]) -> None:
        store.client.delete(keys.EPOCH)
        raise NotReady("lost")

    store.ledger.load_caps = store_is_lost
    with capture_logs() as said, pytest.raises(NotReady):
        store.ledger.book([booking(4), booking(1, job_id="new")])
    assert said == []
