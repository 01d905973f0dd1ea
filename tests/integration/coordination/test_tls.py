"""TLS to Redis: the counters' client and the broker's are given the same, and both verify the server."""

from __future__ import annotations

from contextlib import closing

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.transport import Transport, broker_settings
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.settings import Settings
from tests.kit.polling import MOST_SECONDS
from tests.kit.tls import tls_front, tls_that_asks


@pytest.fixture
def front(tmp_path):
    with EmbeddedRedis() as server, tls_front(server, tmp_path) as found:
        yield found


def broker(url: str) -> Connection:
    named = broker_settings(url)
    return Connection(named.url, ssl=named.use_ssl or False, transport=Transport)


def test_a_server_whose_authority_is_named_is_talked_to(front):
    client = guarded_redis(front.trusting_url, Settings())
    assert client.ping()
    client.close()
    with broker(front.trusting_url) as connection, connection.SimpleQueue("queue") as queue:
        queue.put({"said": "x" * 100_000})
        message = queue.get(timeout=MOST_SECONDS)
        assert message.payload == {"said": "x" * 100_000}
        message.ack()


@pytest.mark.parametrize("url", ["url", "another_host"])
def test_a_server_that_cannot_be_verified_is_not(front, url):
    """Left to itself, kombu verifies nothing for a ``rediss://``."""
    given = front.url if url == "url" else front.trusting_url.replace("127.0.0.1", "localhost")
    client = guarded_redis(given, Settings())
    with pytest.raises(RedisConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        client.ping()
    client.close()
    with broker(given) as connection, pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def test_a_key_with_a_password_and_a_directory_of_authorities_reach_both_libraries(tmp_path):
    with EmbeddedRedis() as server, tls_that_asks(server, tmp_path, "hush") as strict:
        url = f"{strict}&ssl_password=hush"
        with closing(guarded_redis(url, Settings(redis_url=url))) as client:
            assert client.ping()
        with broker(url) as connection, connection.SimpleQueue("queue") as queue:
            queue.put("said")
            message = queue.get(timeout=MOST_SECONDS)
            assert message.payload == "said"
            message.ack()
    assert "hush" not in repr(broker_settings(url))
