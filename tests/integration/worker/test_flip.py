"""A show handed over and back by flip_show(): with frames running, by one at a time, completed when it was cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.show_handover import Flip, FlipUnderWay, flip_show
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Settings
from tests.farm import Farm, LayerSpec
from tests.polling import eventually


class Show:
    """The show ``demo`` with a subscription and two frames running."""

    def __init__(self, engine: Engine, client: redis.Redis) -> None:
        self.engine = engine
        self.ledger = make_ledger(engine, client, owner="test")

    def make(self, **spec: Any) -> None:
        with self.engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("demo", **spec)
            farm.subscription(show, farm.alloc("general"), size=10)
            farm.run(farm.job([LayerSpec(frames=5)], show=show).frames[:2], farm.host())
            self.id = show.id

    def flip(self, *, managed: bool, sleep: Callable[[float], None] = lambda _: None) -> Flip:
        return flip_show(
            self.engine, self.ledger, self.id, managed=managed, wait_seconds=0.1, age_seconds=0.1, sleep=sleep
        )

    def flags(self) -> tuple[bool, bool]:
        """(managed, booking) as the database has them."""
        with self.engine.connect() as connection:
            query = text("SELECT b_scheduler_managed, b_booking_enabled FROM show WHERE str_name = 'demo'")
            managed, booking = connection.execute(query).one()
        return managed, booking


@pytest.fixture
def show(engine: Engine, redis_client: redis.Redis) -> Show:
    return Show(engine, redis_client)


def test_a_show_with_frames_running_goes_both_ways(
    show: Show, settings: Settings, engine: Engine, redis_client: redis.Redis
) -> None:
    # given a show of Cuebot's with frames running, and a store that is open
    show.make(managed=False)
    ensure_bootstrapped(engine, show.ledger, wait_age=0.1)
    # when it is handed over, then it is ours, what runs is counted, and the audit passes
    show.flip(managed=True)
    assert show.flags() == (True, True)
    assert len(list(show.ledger.records())) == 2
    assert not run_audit(engine, redis_client, settings).failed
    # and when it goes back, then the tables are right and the entries retired
    show.flip(managed=False)
    assert show.flags() == (False, True)
    assert not list(show.ledger.records())
    with engine.connect() as connection:
        assert connection.execute(text("SELECT int_cores FROM subscription")).scalar_one() == 200
    assert not run_audit(engine, redis_client, settings).failed


def test_a_show_is_flipped_by_one_at_a_time(show: Show) -> None:
    # given a show in its quarantine
    show.make(managed=False)
    waiting, enough = threading.Event(), threading.Event()

    def quarantine(_seconds: float) -> None:
        waiting.set()
        enough.wait(30)

    first = threading.Thread(target=lambda: show.flip(managed=True, sleep=quarantine))
    first.start()
    try:
        assert waiting.wait(30)
        assert show.flags() == (True, False)
        # when somebody else flips it, then that is refused
        with pytest.raises(FlipUnderWay, match="by somebody else"):
            show.flip(managed=False)
        assert show.flags() == (True, False)
    finally:
        enough.set()
        first.join(30)
    eventually(lambda: show.flags() == (True, True), what="booking again")


@pytest.mark.parametrize("then", [True, False], ids=["on again", "off instead"])
def test_a_flip_that_was_cut_off_is_completed_by_the_next(show: Show, then: bool) -> None:
    # given a flip that ended within the quarantine
    def cut_off(_seconds: float) -> None:
        raise KeyboardInterrupt

    show.make(managed=False)
    with pytest.raises(KeyboardInterrupt):
        show.flip(managed=True, sleep=cut_off)
    assert show.flags() == (True, False)
    # when it is flipped again, then it books, whichever way it went
    show.flip(managed=then)
    assert show.flags() == (then, True)


def test_booking_that_a_person_switched_off_stays_off(show: Show, redis_client: redis.Redis) -> None:
    # given a show whose booking somebody switched off
    show.make(managed=False, booking_enabled=False)
    # when it is handed over, twice, and back, then its booking is as it was
    for enabled in (True, True, False):
        show.flip(managed=enabled)
        assert show.flags() == (enabled, False)
    assert not list(redis_client.scan_iter("flip:*"))
