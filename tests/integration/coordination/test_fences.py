"""Fences and ticks in PostgreSQL: what they keep for each other, and that nobody who stops halfway is in the way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, event

from opencue_sched.store.fences import PersistentFences
from tests.kit.polling import MOST_SECONDS

NAME = "cue:beat"
CALLS: dict[str, Callable[[PersistentFences], object]] = {
    "claim": lambda fences: fences.claim(NAME, 2),
    "claim_tick": lambda fences: fences.claim_tick(NAME, 1, "reap@30", 8),
    "leader": lambda fences: fences.leader(NAME),
    "renew": lambda fences: fences.renew(NAME, 1, store=7),
}


@pytest.fixture
def fences(engine: Engine) -> PersistentFences:
    """Led by 1, which fired tick 7."""
    found = PersistentFences(engine)
    assert found.claim(NAME, 1)
    assert found.claim_tick(NAME, 1, "reap@30", 7) == (True, 1)
    return found


def test_each_fence_is_given_once_and_none_below_the_highest(fences: PersistentFences) -> None:
    assert [fences.claim(NAME, fence) for fence in (1, 5, 5, 4, 6)] == [False, True, False, False, True]
    assert fences.leader(NAME).fence == 6
    assert fences.leader("cue:beat.alpha").fence == 0


def test_each_tick_is_given_once_in_their_order_and_to_the_latest_leader(fences: PersistentFences) -> None:
    asked = [(1, 7), (1, 6), (1, 8), (2, 9)]
    assert [fences.claim_tick(NAME, fence, "reap@30", tick)[0] for fence, tick in asked] == [False, False, True, False]
    assert fences.claim(NAME, 2)
    assert fences.claim_tick(NAME, 1, "reap@30", 9) == (False, 2)
    assert fences.claim_tick(NAME, 2, "reap@30", 9) == (True, 2)
    assert fences.claim_tick(NAME, 2, "recompute@120", 1) == (True, 2)
    assert (fences.leader(NAME).fence, fences.leader(NAME).ticks) == (2, {"reap@30": 9, "recompute@120": 1})
    assert (fences.leader("cue:bea").fence, fences.leader("cue:bea").ticks) == (0, {})
    asked = [(1, "reap@30", 9), (2, "reap@30", 8), (2, "reap@30", 9), (2, "nightly", 1)]
    assert [fences.leader(NAME).why_stale(*it) for it in asked] == ["former_leader", "overtaken", "", ""]


def test_the_redis_of_the_latest_leader_is_recorded_and_none_of_a_former_one(fences: PersistentFences) -> None:
    assert (fences.leader(NAME).fence, fences.leader(NAME).store) == (1, None)
    assert fences.renew(NAME, 1, store=7) == 1
    first = fences.leader(NAME)
    assert (first.fence, first.store) == (1, 7)
    assert 0 <= first.age_seconds < MOST_SECONDS
    assert fences.claim(NAME, 2)
    assert fences.renew(NAME, 1, store=8) == 2
    assert fences.leader(NAME).store == 7


def test_of_many_at_once_one_gets_the_fence_and_one_call_the_tick(engine: Engine, fences: PersistentFences) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: fences.claim(NAME, 9), range(12))) == 1
        assert sum(pool.map(lambda _: fences.claim_tick(NAME, 9, "reap@30", 8)[0], range(12))) == 1


@pytest.mark.parametrize("call", CALLS)
def test_who_is_frozen_in_the_middle_holds_nobody_up(
    database_url: str, engine: Engine, fences: PersistentFences, call: str
) -> None:
    """A leader that is stopped keeps its sessions, and any lock in them, for as long as it is stopped."""
    frozen = create_engine(database_url)
    seen = []

    @event.listens_for(frozen, "after_cursor_execute")
    def stopped_here(*_: object) -> None:
        seen.append((fences.claim(NAME, 3), fences.claim_tick(NAME, 3, "reap@30", 9)))

    with engine.connect() as connection:
        connection.exec_driver_sql("SET lock_timeout = '1s'")
        connection.commit()
    CALLS[call](PersistentFences(frozen))
    frozen.dispose()
    assert seen == [(True, (True, 3))]
