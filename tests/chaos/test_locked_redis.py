"""A fleet on a Redis some of whose commands were taken away."""

from __future__ import annotations

import json

from opencue_sched.embedded.servers.services import EmbeddedRedis
from tests.chaos.conftest import site_on
from tests.chaos.planted_site import booked, plant, steer
from tests.kit.polling import eventually
from tests.kit.redis_log import Call, RedisLog


def locked(log: RedisLog) -> list[Call]:
    """The times that somebody took the lock under which kombu puts messages back."""
    return [call for call in log.since(0) if call.text.startswith("SET unacked_mutex")]


def test_a_fleet_starts_and_books_on_a_redis_without_the_command_script(database_url, engine, tmp_path):
    """Kubernetes operators and hosted Redis take it away by name. The lock under which kombu puts messages back ends by
    a script, too."""
    with (
        EmbeddedRedis(configuration={"rename-command": 'SCRIPT ""'}) as server,
        RedisLog(server.url) as log,
        site_on(database_url, engine, tmp_path, server=server) as site,
    ):
        plant(site, frames=1)
        site.fleet.worker("w1")
        site.fleet.beat()
        eventually(lambda: booked(site) == 1, 60, "the frame")
        assert json.loads(steer(site, "pause", "--json").stdout) == {"w1@localhost": {"ok": "paused"}}
        eventually(lambda: len(locked(log)) > 1, 60, "kombu's second look for messages to put back")
        assert "unknown command" not in site.fleet.log("w1").read_text()
        assert site.fleet.ended() == []
