"""A jobboard, a role with its candidates, and a Redis some of whose replies are lost on their way, or that some
commands reach late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from urllib.parse import urlsplit

import pytest
import redis

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.jobboard import JobBoard
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.store.fences import PersistentFences
from tests.integration.coordination.candidates import gate_of
from tests.kit.lossy_proxy import LossyProxy


@pytest.fixture
def proxy(redis_server) -> Iterator[LossyProxy]:
    parts = urlsplit(redis_server.url)
    with closing(LossyProxy(parts.hostname, parts.port)) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy, redis_server, redis_client, settings) -> Iterator[redis.Redis]:
    """The client of a worker or a beat, by way of the proxy."""
    parts = urlsplit(redis_server.url)
    url = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()
    with closing(guarded_redis(url, settings)) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["plain keys", "one hash tag"])
def board(redis_client, request) -> Iterator[JobBoard]:
    """A board that is open, without a job, in each way its keys may be named."""
    with JobBoard(redis_client, "cue", name="tests", clustered=request.param) as opened:
        yield opened


@pytest.fixture
def keys() -> LeaderKeys:
    return LeaderKeys("cue", "beat")


@pytest.fixture
def fences(engine) -> PersistentFences:
    return PersistentFences(engine)


@pytest.fixture
def gate(fences):
    """Makes a candidate for the role (gate_of), whose fences are kept in PostgreSQL unless others are given."""
    return partial(gate_of, fences=fences)
