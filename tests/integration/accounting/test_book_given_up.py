"""A plan that cannot be booked to its end: PostgreSQL has no caps to tell, or a counter is spoilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.errors import NotReady
from tests.kit.counters import Store, booking

SUB = keys.subscription("show", "alloc")


def database_is_away(_vertices: Sequence[str]) -> None:
    raise OperationalError("SELECT caps", {}, Exception("the server closed the connection"))


def test_caps_that_cannot_be_loaded_refuse_what_waits_for_them_and_nothing_else(store: Store) -> None:
    # given a plan of two procs that fit, and one under a job whose caps nobody has loaded
    store.ledger.load_caps = database_is_away
    plan = [booking(4, 1), booking(2), booking(1, job_id="new")]

    # when PostgreSQL fails in the middle of the booking
    with capture_logs() as said:
        answers = store.ledger.book(plan)

    # then the two are the caller's to commit, or to roll back, and the third is refused
    assert answers.accepted == store.ids() == {plan[0].proc_id, plan[1].proc_id}
    assert {proc_id: refusal.table for proc_id, refusal in answers.refusals.items()} == {plan[2].proc_id: "unseeded"}
    assert store.counter(SUB) == (6, 1)
    assert [(line["event"], line["procs"]) for line in said] == [("caps_not_loaded", 1)]


def test_a_store_that_is_lost_meanwhile_is_not_asked_once_more(store: Store) -> None:
    def store_is_lost(_vertices: Sequence[str]) -> None:
        store.client.delete(keys.EPOCH)
        raise NotReady("lost")

    store.ledger.load_caps = store_is_lost
    with capture_logs() as said, pytest.raises(NotReady):
        store.ledger.book([booking(4), booking(1, job_id="new")])
    assert said == []


@pytest.fixture
def without_replicas(store: Store) -> Iterator[None]:
    """The store is a master that takes no write, because too few replicas follow it."""
    store.client.config_set("min-replicas-to-write", 1)
    yield
    store.client.config_set("min-replicas-to-write", 0)


def test_a_master_that_too_few_replicas_follow_is_waited_for(store: Store, request: pytest.FixtureRequest) -> None:
    """It refuses each booking by itself: taken for refusals, these would be verdicts on frames that nothing is wrong
    with, and a worker would go on planning."""
    # given a proc that was booked before
    before = booking(2)
    store.ledger.book([before])
    request.getfixturevalue("without_replicas")
    # when a plan is booked, and what was booked is settled, released or rolled back
    calls: list[Callable[[], object]] = [
        lambda: store.ledger.book([booking(1), booking(4)]),
        lambda: store.ledger.book([booking(1)]),
        lambda: store.ledger.settle([before]),
        lambda: store.ledger.release([before.proc_id]),
        lambda: store.ledger.rollback([before]),
    ]
    # then each is answered as when no store is there, and nothing is booked
    for call in calls:
        with pytest.raises(NotReady, match=r"(?i)replicas"):
            call()
    assert store.ids() == {before.proc_id}
    assert store.counter(SUB) == (2, 0)
    # and the store is none that was lost: once replicas follow again, it goes on
    store.client.config_set("min-replicas-to-write", 0)
    again = booking(1)
    assert store.ledger.book([again]).accepted == {again.proc_id}


@pytest.mark.parametrize("spoil", ["no number", "another type"])
@pytest.mark.parametrize("vertex", ["job", "layer"])
def test_a_spoilt_counter_stops_only_the_bookings_that_it_would_decide(store: Store, spoil: str, vertex: str) -> None:
    # given a job with a cap whose counter, or layer's, somebody has spoilt, in a plan with another job
    store.seed(job=100)
    key = keys.job("job") if vertex == "job" else keys.layer("layer")
    store.caps(keys.job("other"), int_max_cores=-1, int_max_gpus=-1)
    if spoil == "no number":
        store.client.hset(key, "int_cores", "abc")
    else:
        store.client.delete(key)
        store.client.set(key, "abc")
    plan = [booking(1, proc_id="ours"), booking(2, proc_id="theirs", job_id="other", layer_id="else")]

    # when the plan is booked
    answers = store.ledger.book(plan)

    # then the other job is booked, and a job's own counter refuses; what a layer counts decides nothing
    refused = {"ours"} if vertex == "job" else set()
    assert answers.refusals.keys() == refused
    assert answers.accepted == store.ids() == {"ours", "theirs"} - refused
    assert {refusal.table for refusal in answers.refusals.values()} == ({"error"} if refused else set())
    assert store.counter(keys.job("other")) == (2, 0)

    # and the consistency check puts the counter right, after which the job is booked
    check_consistency(store.ledger, heal=True)
    assert drift(check_consistency(store.ledger)) == {}
    store.caps(keys.job("job"), int_max_cores=-1, int_max_gpus=-1)
    assert store.ledger.book([booking(4, proc_id="later")]).accepted == {"later"}


def test_a_release_beside_a_spoilt_counter_takes_off_all_others(store: Store) -> None:
    store.caps(keys.job("other"), int_max_cores=-1, int_max_gpus=-1)
    store.ledger.book([booking(1, proc_id="ours"), booking(2, proc_id="theirs", job_id="other")])
    store.client.hset(keys.job("job"), "int_cores", "abc")
    assert store.ledger.release(["ours", "theirs"]) == 2
    assert (store.ids(), store.counter(keys.job("other")), store.counter(SUB)) == (set(), (0, 0), (0, 0))
    check_consistency(store.ledger, heal=True)
    assert store.counter(keys.job("job")) == (0, 0)
