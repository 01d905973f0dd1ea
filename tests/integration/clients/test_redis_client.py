"""The Redis client: URLs, time-outs, and a Sentinel that fails over."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import Action, StoreState, ensure_bootstrapped, server_run_id, store_state
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch, guarded_redis
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.embedded.servers.processes import GuardedProcess
from opencue_sched.embedded.servers.services import EmbeddedRedis, bundled_redis
from opencue_sched.errors import InvalidInput, NotReady
from opencue_sched.settings import Accounting, Settings
from tests.integration.accounting.conftest import settings_url, store
from tests.kit.counters import Store
from tests.kit.polling import eventually
from tests.kit.sentinel import WatchedPair, watched_pair
from tests.kit.tls import tls_instead_of
from tests.kit.world import World

__all__ = ["settings_url", "store"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:6379/0",
        "sentinel://127.0.0.1:26379",
        "sentinel://127.0.0.1:x/service",
        "sentinel://127.0.0.1:26379/service?db=one",
    ],
)
def test_a_url_that_makes_no_sense_names_the_setting(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"accounting\.redis_url"):
        guarded_redis(url, Settings())


def test_tls_and_credentials_come_by_url() -> None:
    client = guarded_redis("rediss://user:secret@redis.internal:6390/3", Settings())
    options = client.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"], options["port"]) == ("user", "secret", 3, 6390)
    assert issubclass(client.connection_pool.connection_class, redis.SSLConnection)


def test_sentinel_urls_name_every_sentinel_and_the_database() -> None:
    client = guarded_redis("sentinel://:secret@a:1,b/service?db=4&ssl=true", Settings())
    pool = client.connection_pool
    sentinels = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(s["host"], s["port"]) for s in sentinels] == [("a", 1), ("b", 26379)]
    assert (pool.service_name, pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == (
        "service",
        4,
        "secret",
    )


def test_a_unix_socket_is_connected_to_and_its_loss_is_an_error_of_redis(tmp_path: Path) -> None:
    # A socket's path may have a hundred bytes or so: pytest's own directories are longer in some places.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "redis.sock"
        options = ["--port", "0", "--unixsocket", path, "--save", ""]
        client = guarded_redis(f"unix://{path}?db=1", Settings())
        with GuardedProcess([bundled_redis(), *options], log=tmp_path / "redis.log") as server:
            eventually(path.exists, what="the socket")
            client.set("key", "value")
            assert client.get("key") == "value"
            server.kill()
            with pytest.raises(RedisConnectionError):
                client.get("key")
        client.close()


@pytest.mark.long(10)
def test_a_redis_that_hangs_is_given_up_after_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = guarded_redis(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", Settings())
        try:
            with pytest.raises(NotReady):
                store_state(client)
        finally:
            client.close()


def test_a_replica_can_be_connected_to_but_not_booked_in(settings_url: str) -> None:
    with EmbeddedRedis() as replica:
        master = urlsplit(settings_url)
        plain = redis.Redis.from_url(replica.url, decode_responses=True)
        client = guarded_redis(replica.url, Settings())

        def assert_answers_as_replica() -> None:
            assert client.ping()
            assert plain.info("replication")["role"] == "slave"

        try:
            plain.set(keys.EPOCH, Epoch.new("0" * 40).text)
            plain.config_set("masterauth", master.password or "")
            plain.replicaof(master.hostname, master.port)
            eventually(lambda: plain.info("replication")["role"] == "slave")
            with pytest.raises(NotReady):
                Ledger(client, owner="test").release(["p"])
            assert_answers_as_replica()
            plain.replicaof("NO", "ONE")
            store = Store(client)
            store.open()
            plain.replicaof(master.hostname, master.port)
            eventually(lambda: plain.info("replication")["role"] == "slave")
            with pytest.raises(NotReady):
                store.ledger.release(["p"])
            assert_answers_as_replica()
        finally:
            client.close()
            plain.close()


def test_a_connection_leaves_a_server_that_has_become_a_replica(
    settings_url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain URL whose name moves to the new master, while the old one still answers."""
    with EmbeddedRedis() as old:
        ours, new = urlsplit(old.url), urlsplit(settings_url)
        named = {"master": ours.port}
        found = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, port, *how: found("127.0.0.1", named.get(host, port), *how)
        )
        plain = redis.Redis.from_url(old.url, decode_responses=True)
        plain.config_set("requirepass", new.password or "")
        client = guarded_redis(f"redis://:{new.password or ''}@master:1/0", Settings())
        try:
            ledger = Store(client).ledger
            Store(client).open()
            assert ledger.release(["p"]) == 0
            plain.config_set("masterauth", new.password or "")
            plain.replicaof("127.0.0.1", new.port)
            eventually(lambda: plain.info("replication")["role"] == "slave")
            named["master"] = new.port
            assert ledger.release(["q"]) == 0
            assert server_run_id(client) == server_run_id(store.client)
        finally:
            client.close()
            plain.close()


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[WatchedPair]:
    with watched_pair(tmp_path) as pair:
        yield pair


@pytest.fixture
def tls(sentinel: WatchedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the pair's URL has to say besides: all three are reached by TLS only, under a private authority."""
    ports = (sentinel.port, sentinel.first.port, sentinel.second.port)
    with tls_instead_of(ports, tmp_path, monkeypatch) as authority:
        yield f"&ssl=true&ssl_ca_certs={authority}"


def test_after_a_failover_nobody_books_on_the_replicas_copy(engine: object, sentinel: WatchedPair, tls: str) -> None:
    first = sentinel.first
    client = guarded_redis(sentinel.url + tls, Settings())

    def answers() -> bool:
        try:
            return bool(client.ping())
        except RedisError:
            return False

    try:
        eventually(answers)
        world = World.make(engine, Store(client))  # type: ignore[arg-type]
        world.run(2)
        ensure_bootstrapped(world.engine, world.ledger, wait_age=0)
        client.wait(1, 5000)
        before = server_run_id(client)
        first.pause()
        try:
            eventually(lambda: answers() and server_run_id(client) != before)
            assert client.hlen(keys.LEDGER) == 2, "the replica had the entries"
            with pytest.raises(NotReady):
                world.ledger.book([world.entry(world.procs[0])])
            assert store_state(client) is StoreState.LOST
            ledger = make_ledger(world.engine, client, owner="next", accounting=Accounting())
            assert ensure_bootstrapped(world.engine, ledger, wait_age=0) is Action.FILLED
            world.exact()
        finally:
            first.resume()
    finally:
        client.close()
