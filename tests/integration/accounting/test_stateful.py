"""The real ledger under anything that can happen to it: nothing above a cap, sums right, and the truth in the end."""

from __future__ import annotations

import pytest
import redis

from tests.integration.accounting.games import machine_on, play, play_deep
from tests.kit.examples import DEEP


@pytest.mark.timeout(7200)
def test_the_ledger_holds_whatever_happens(database_url: str, redis_client: redis.Redis, settings_url: str) -> None:
    with machine_on(database_url, settings_url) as machine:
        if DEEP:
            play_deep(machine)
        else:
            # More than what finds each rule left out (test_stateful_mutants.py); `make test-deep` plays on.
            play(machine, games=62, steps=30, number=0)
    assert machine.done["accepted"] > 100
