"""A Redis behind a unix socket: broker and counters log in alike, and use the same database."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import flower.utils.broker
import pytest
import redis
from kombu import Connection

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.page.flower import show_queues_of_sockets
from opencue_sched.settings import Settings
from tests.kit.polling import MOST_SECONDS

QUEUE = "cue:q:work:type:sweep"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    # A socket's path may have a hundred bytes or so: pytest's own directories are longer in some places.
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedRedis(configuration={"unixsocket": f"{directory}/redis.sock"})
        with server, closing(redis.Redis.from_url(server.url)) as admin:
            admin.execute_command("ACL", "SETUSER", "farm", "on", ">s/cr@t", "+@all", "~*", "&*")
            yield server


def path_of(server: EmbeddedRedis) -> str:
    with closing(redis.Redis.from_url(server.url, decode_responses=True)) as admin:
        return str(admin.config_get("unixsocket")["unixsocket"])


@pytest.mark.parametrize(
    "written",
    [
        "unix://{path}?db=3&password={password}",
        "unix://:{password}@{path}?db=3",
        "unix://farm:s%2Fcr%40t@{path}?db=3",
        "unix://{path}?username=farm&password=s%2Fcr%40t&db=3",
    ],
)
def test_user_password_and_database_reach_the_broker_and_the_counters(server: EmbeddedRedis, written: str) -> None:
    url = written.format(path=path_of(server), password=urlsplit(server.url).password)
    guard_transports()
    named = broker_settings(url)
    with (
        closing(guarded_redis(url, Settings())) as client,
        Connection(named.url) as connection,
        connection.SimpleQueue(QUEUE) as queue,
    ):
        queue.put({"said": "hello"})
        assert client.llen(QUEUE) == 1
        assert client.get_connection_kwargs()["db"] == 3
        message = queue.get(timeout=MOST_SECONDS)
        assert message.payload == {"said": "hello"}
        message.ack()
    assert "s/cr@t" not in repr(named)


def test_flower_shows_the_queues_of_that_user_and_database(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower.utils.broker, "RedisSocket", flower.utils.broker.RedisSocket)
    url = f"unix://farm:s%2Fcr%40t@{path_of(server)}?db=3"
    with closing(guarded_redis(url, Settings())) as client:
        client.lpush(QUEUE, "one", "two")
    show_queues_of_sockets(Settings(redis_url=url))
    page = flower.utils.broker.Broker(broker_settings(url).url, broker_options={})
    assert asyncio.run(page.queues([QUEUE])) == [{"name": QUEUE, "messages": 2}]
