"""A master, its replica and a Sentinel that watches them, for tests of a failover."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis

from opencue_sched.embedded.servers.processes import GuardedProcess, free_port
from opencue_sched.embedded.servers.services import EmbeddedRedis, bundled_redis
from tests.kit.polling import eventually


@dataclass(frozen=True)
class WatchedPair:
    """``url`` names the master by way of the Sentinel on ``port``, which has its own password. ``first`` leads until it
    fails."""

    url: str
    port: int
    first: EmbeddedRedis
    second: EmbeddedRedis


@contextmanager
def watched_pair(directory: Path) -> Iterator[WatchedPair]:
    """Start the three; the Sentinel alone decides (quorum 1), a second and a half after the master fell silent."""
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        port = free_port()
        master, password = urlsplit(first.url), urlsplit(first.url).password
        with redis.Redis.from_url(first.url) as main:
            main.config_set("masterauth", password)
        with redis.Redis.from_url(second.url) as replica:
            replica.config_set("masterauth", password)
            replica.config_set("requirepass", password)
            replica.auth(password)
            replica.replicaof(master.hostname, master.port)
            eventually(lambda: replica.info("replication").get("master_link_status") == "up", 30, "a replica's link")
        config = directory / "sentinel.conf"
        config.write_text(
            f"bind 127.0.0.1\nport {port}\ndir {directory}\nsentinel monitor farm {master.hostname} {master.port} 1\n"
            f"sentinel auth-pass farm {password}\nrequirepass of-the-sentinel\n"
            "sentinel down-after-milliseconds farm 1500\nsentinel failover-timeout farm 3000\n",
            encoding="utf-8",
        )
        sentinel = GuardedProcess([bundled_redis(), config, "--sentinel"], log=directory / "sentinel.log")
        sentinel.start()
        try:
            url = f"sentinel://:{password}@127.0.0.1:{port}/farm?sentinel_password=of-the-sentinel"
            yield WatchedPair(url, port, first, second)
        finally:
            sentinel.stop()
