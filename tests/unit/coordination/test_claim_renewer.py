"""Claims are prolonged at a third of their life, and given up before anybody else can have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched.coordination.postings import ClaimRenewer
from tests.kit.frozen_clock import Clock
from tests.kit.polling import eventually


@dataclass(frozen=True)
class Claim:
    uuid: str
    fence: int = 1
    token: str = ""


class Board:
    """Prolongs whatever is asked, unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.refused: set[Claim] = set()
        self.prolonged: list[Claim] = []

    def extend(self, claims: Sequence[Claim], *, ttl_seconds: float) -> list[Claim]:
        self.asked.append(time.monotonic())
        self.before_answer()
        self.prolonged = list(claims)
        return [claim for claim in claims if claim not in self.refused]


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr("opencue_sched.coordination.postings.boot_clock", clock)
    return clock


@pytest.fixture
def make_renewer(board, clock):
    made: list[ClaimRenewer] = []

    def make(ttl_seconds: float, **how: float) -> ClaimRenewer:
        made.append(ClaimRenewer(board, ttl_seconds=ttl_seconds, **how))
        return made[-1]

    yield make
    for renewer in made:
        renewer.stop()


def answer_with_an_error() -> None:
    raise RedisConnectionError("gone")


def test_a_claim_is_prolonged_every_third_of_its_life(board, clock, make_renewer):
    make_renewer(0.3).keep(Claim("a"), claimed_at=clock.now)
    eventually(lambda: len(board.asked) >= 4)
    pauses = [later - earlier for earlier, later in zip(board.asked, board.asked[1:], strict=False)]
    assert all(pause >= 0.09 for pause in pauses)


def test_without_a_confirmed_prolongation_the_holder_stops_before_the_claims_end(board, clock, make_renewer):
    board.before_answer = answer_with_an_error
    renewer, claim = make_renewer(10), Claim("a")
    renewer.keep(claim, claimed_at=clock.now)
    eventually(lambda: board.asked)
    clock.now += 7.4
    assert renewer.alive(claim)
    clock.now += 0.1
    assert not renewer.alive(claim)
    assert renewer.held() == [claim], "it asks again, and may get it back if nobody took it"


def test_the_life_counts_from_before_the_call_that_prolonged_it(board, clock, make_renewer):
    """A call that takes long, or whose answer does, must not make the claim seem younger than it is."""

    def slowly() -> None:
        clock.now += 0.1
        board.before_answer = answer_with_an_error

    board.before_answer = slowly
    renewer, claim = make_renewer(0.3), Claim("a")
    renewer.keep(claim, claimed_at=clock.now)
    eventually(lambda: len(board.asked) >= 2)
    clock.now = 100.22
    assert renewer.alive(claim)
    clock.now = 100.23
    assert not renewer.alive(claim)


def test_a_refused_claim_is_lost_at_once_and_others_are_not(board, clock, make_renewer):
    board.refused = {Claim("lost")}
    renewer = make_renewer(0.3)
    for uuid in ("lost", "kept"):
        renewer.keep(Claim(uuid), claimed_at=clock.now)
    eventually(lambda: not renewer.alive(Claim("lost")))
    assert renewer.alive(Claim("kept"))
    assert not renewer.alive(Claim("kept", fence=2))
    renewer.drop(Claim("kept"))
    assert not renewer.alive(Claim("kept"))


def test_an_answer_that_makes_no_sense_ends_no_later_prolongation(board, clock, make_renewer):
    # given a board whose first answer cannot be understood
    def nonsense() -> None:
        if len(board.asked) == 1:
            raise ValueError("not an answer")

    board.before_answer = nonsense
    renewer = make_renewer(0.15)

    # when a claim is kept, then it is prolonged all the same, the next time
    renewer.keep(Claim("one"), claimed_at=clock.now)
    eventually(lambda: len(board.asked) >= 3)
    assert renewer.alive(Claim("one"))


def test_a_claim_whose_work_makes_no_step_is_given_up(board, clock, make_renewer):
    # given two claims, and the work under one of them stands still
    renewer, hung, busy = make_renewer(0.15, patience_seconds=10.0), Claim("hung"), Claim("busy")
    for claim in (hung, busy):
        renewer.keep(claim, claimed_at=clock.now)
    clock.now += 9.0
    renewer.progress(busy)
    clock.now += 2.0

    # then that one is prolonged no more, and the other is
    eventually(lambda: board.prolonged == [busy])
    assert not renewer.alive(hung)
    assert renewer.held() == [busy]
    assert renewer.hangs

    # nor is it when the work goes on
    renewer.progress(hung)
    asked = len(board.asked)
    eventually(lambda: len(board.asked) > asked + 1)
    assert board.prolonged == [busy]
    assert not renewer.alive(hung)
    renewer.drop(hung)
    assert not renewer.hangs


def test_a_claim_is_kept_however_long_its_work_takes_while_each_step_is_short(board, clock, make_renewer):
    renewer, claim = make_renewer(0.15, patience_seconds=10.0), Claim("one")
    renewer.keep(claim, claimed_at=clock.now)
    for _ in range(5):
        clock.now += 9.0
        board.asked.clear()
        eventually(lambda: len(board.asked) > 1)
        assert renewer.alive(claim)
        renewer.progress(claim)
