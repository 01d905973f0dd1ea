"""Candidates for one role with clocks under the test's control, and what they leave in the stores."""

from __future__ import annotations

from contextlib import closing

import redis
from sqlalchemy import text

from opencue_sched.coordination.leader import LeaderGate
from tests.kit.frozen_clock import Clock


def gate_of(client, keys, *, fences, clock=None, ttl=15.0) -> LeaderGate:
    return LeaderGate(
        client,
        keys,
        ttl_seconds=ttl,
        retry_seconds=0.0,
        fences=fences,
        clock=clock or Clock(),
    )


class Copy:
    """What Redis holds of one role at one moment: as a lagging replica, or a snapshot, has it later."""

    def __init__(self, client, keys) -> None:
        self._client, self._prefix = client, keys.lease.removesuffix("lease")
        with closing(redis.Redis.from_url(url_of(client))) as raw:
            self._values = {key: (raw.dump(key), max(0, raw.pttl(key))) for key in raw.keys(f"{self._prefix}*")}

    def comes_back(self) -> None:
        """The failover: all since is forgotten."""
        for key in self._client.keys(f"{self._prefix}*"):
            self._client.delete(key)
        with closing(redis.Redis.from_url(url_of(self._client))) as raw:
            for key, (value, ttl) in self._values.items():
                raw.restore(key, ttl, value)


def url_of(client) -> str:
    """The URL of the client's Redis."""
    options = client.connection_pool.connection_kwargs
    password = f":{options['password']}@" if options.get("password") else ""
    return f"redis://{password}{options['host']}:{options['port']}/{options['db']}"


def fired_seconds_ago(engine, keys, seconds) -> None:
    """Have the last tick fired so long ago, by the clock of PostgreSQL."""
    statement = (
        "UPDATE opencue_sched_fence SET fence = 1000000 * (extract(epoch FROM clock_timestamp()) - :seconds)"
        " WHERE name = :name"
    )
    with engine.begin() as connection:
        assert connection.execute(text(statement), {"name": f"{keys.name}|fired", "seconds": seconds}).rowcount == 1
