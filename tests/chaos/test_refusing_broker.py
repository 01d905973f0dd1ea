"""A Redis that answers, and refuses what a worker asks of it: the worker goes on when that is over."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from opencue_sched.embedded.servers.services import EmbeddedRedis
from tests.chaos.test_coordination_queues import TYPE, order, sender, start_worker
from tests.kit.polling import eventually

__all__ = ["sender", "start_worker"]


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url, decode_responses=True, socket_timeout=10.0) as client:
        yield client


def becomes_a_replica(client: redis.Redis) -> Callable[[], object]:
    """As the old master of a switch that was asked for; who waits for a message there is told at once."""
    client.replicaof("127.0.0.1", "1")
    return lambda: client.replicaof("NO", "ONE")


def cannot_save(client: redis.Redis) -> Callable[[], object]:
    """It takes no writes, and to fetch a message is one."""
    home = Path(str(client.config_get("dir")["dir"]))
    gone = home / "gone"
    gone.mkdir()
    client.config_set("dir", str(gone))
    shutil.rmtree(gone)
    client.config_set("save", "3600 1")
    client.bgsave()
    eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", what="a save that failed")
    return lambda: (client.config_set("save", ""), client.config_set("dir", str(home)))


def is_full(client: redis.Redis) -> Callable[[], object]:
    """A message may be fetched, but not kept for the case that the worker dies."""
    with client.pipeline(transaction=True) as pipe:
        pipe.lmove("staging:prio:1", f"{TYPE}:prio:1", "RIGHT", "LEFT")
        pipe.config_set("maxmemory", "1")
        pipe.execute()
    return lambda: client.config_set("maxmemory", "0")


def done(client: redis.Redis) -> list[str]:
    """What the worker did and has said so of. A worker that may not say so begins anew, and fetches nothing then."""
    return [] if client.exists("unacked") else order(client)


def refused(client: redis.Redis) -> bool:
    """Whether a worker was refused a message, or to keep one."""
    commands = client.info("commandstats")
    rejected = [commands.get(f"cmdstat_{name}", {}).get("rejected_calls") for name in ("brpop", "zadd")]
    return any(rejected) or "errorstat_UNBLOCKED" in client.info("errorstats")


@pytest.mark.parametrize("trouble", [becomes_a_replica, cannot_save, is_full])
def test_a_redis_that_refuses_a_worker_does_not_end_it(redis_client, sender, start_worker, trouble):
    """Celery counts that among errors of its own, which end a worker: all of a fleet at once."""
    worker = start_worker("threads")
    sender(TYPE, "before")
    eventually(lambda: done(redis_client) == ["before"], 60, "the message before")
    sender("staging", "lost, or done later")
    redis_client.config_resetstat()
    relieve = trouble(redis_client)
    eventually(lambda: refused(redis_client), 60, "a refusal")
    relieve()
    sender(TYPE, "after")
    eventually(lambda: not worker.running or "after" in order(redis_client), 60, "the message after")
    assert worker.running
