"""A plan that cannot be booked to its end, because PostgreSQL has no caps to tell: nothing of it stays in flight."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from redis.exceptions import NoPermissionError
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from opencue_sched import lua_scripts
from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.errors import NotReady
from opencue_sched.lua_scripts import ScriptCall
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


def test_what_was_accepted_is_taken_out_again_when_redis_forbids_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = lua_scripts._pipelined

    def forbidden(client: object, calls: Sequence[ScriptCall], reads: object) -> list[object]:
        answers = send(client, calls, reads)  # type: ignore[arg-type]
        return [NoPermissionError("may not"), *answers[1:]] if len(calls) == 2 else answers

    monkeypatch.setattr(lua_scripts, "_pipelined", forbidden)
    with pytest.raises(NoPermissionError):
        store.ledger.book([booking(1, proc_id="first"), booking(2, proc_id="second")])
    assert "second" not in store.ids()
