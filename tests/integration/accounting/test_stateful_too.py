"""The second half of the games of test_stateful.py."""

from __future__ import annotations

import redis

from tests.integration.accounting.games import machine_on, play


def test_the_ledger_holds_whatever_happens_too(database_url: str, redis_client: redis.Redis, settings_url: str) -> None:
    with machine_on(database_url, settings_url) as machine:
        play(machine, games=150, steps=30, number=1)
    assert machine.done["accepted"] > 300
