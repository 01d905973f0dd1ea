"""A show handed over and back by our command: with frames running, or cut off on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.show_handover import Flip, ImportedShows, hand_back, hand_over
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Accounting, Settings
from tests.kit.import_notes import pass_quarantines


class Show:
    """The show ``demo`` with a subscription and two frames running."""

    def __init__(self, engine: Engine, client: redis.Redis) -> None:
        self.engine = engine
        self.ledger = make_ledger(engine, client, owner="test", accounting=Accounting())

    def make(self, **spec: Any) -> None:
        with self.engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("demo", **spec)
            farm.subscription(show, farm.alloc("general"), size=10)
            farm.run(farm.job([LayerSpec(frames=5)], show=show).frames[:2], farm.host())
            self.id = show.id

    def flip(self, *, managed: bool, wait: float = 0.1, sleep: Callable[[float], None] = time.sleep) -> Flip:
        move = hand_over if managed else hand_back
        return move(self.engine, self.ledger, self.id, wait_seconds=wait, age_seconds=0.1, sleep=sleep)

    def imported(self) -> ImportedShows:
        return ImportedShows(self.engine, self.ledger, quarantine_seconds=30, age_seconds=0.1)

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


@pytest.mark.parametrize("back", [True, False], ids=["taken back meanwhile", "cut off"])
def test_a_hand_over_that_does_not_come_to_its_end_needs_nobody(
    show: Show, engine: Engine, settings: Settings, redis_client: redis.Redis, back: bool
) -> None:
    # given a hand-over that ends within the quarantine, because somebody takes the show back or interrupts it
    def ends(_seconds: float) -> None:
        assert show.flags() == (True, True)
        assert not show.imported().admits(show.id), "nobody books it"
        if not back:
            raise KeyboardInterrupt
        show.flip(managed=False)

    show.make(managed=False)
    ensure_bootstrapped(engine, show.ledger, wait_age=0.1)
    with contextlib.nullcontext() if back else pytest.raises(KeyboardInterrupt):
        show.flip(managed=True, wait=30, sleep=ends)
    # then it is Cuebot's again, or ours as soon as its quarantine is over
    assert show.flags() == (not back, True)
    pass_quarantines(redis_client)
    assert show.imported().admits(show.id) == (not back)
    assert len(list(show.ledger.records())) == (0 if back else 2)
    assert not run_audit(engine, redis_client, settings).failed


def test_booking_that_a_person_switched_off_stays_off(show: Show) -> None:
    # given a show whose booking somebody switched off
    show.make(managed=False, booking_enabled=False)
    # when it is handed over, twice, and back, then its booking is as it was
    for enabled in (True, True, False):
        show.flip(managed=enabled)
        assert show.flags() == (enabled, False)
