"""How a board is opened, by a client, a configuration or a URI, and closed, and what is refused."""

from __future__ import annotations

import inspect
from urllib.parse import urlsplit

import pytest
import redis

from opencue_sched.coordination.board import JobPriority
from opencue_sched.coordination.jobboard import (
    BoardClosed,
    Entity,
    Job,
    JobBoard,
    JobFailure,
    JobState,
    NotFound,
    UnclaimableJob,
    fetch,
)
from opencue_sched.domain.redis_url import UNDECODABLE
from opencue_sched.errors import StoreUnusable
from opencue_sched.insight.health import check_redis
from tests.kit.old_redis import old_redis
from tests.kit.sentinel import watched_pair


def test_a_board_is_connected_between_connect_and_close(redis_client):
    board = JobBoard(redis_client, "cue")
    assert not board.connected
    board.connect()
    assert board.connected
    board.close()
    assert not board.connected


def test_a_client_that_does_not_decode_is_refused(redis_server):
    with redis.Redis.from_url(redis_server.url) as plain, pytest.raises(ValueError, match="decode_responses=True"):
        JobBoard(plain, "cue")


def test_a_board_is_connected_again_after_it_was_closed(redis_client):
    board = JobBoard(redis_client, "cue")
    for _ in range(2):
        with board:
            board.consume(board.claim(board.post("render"), "me"), "me")
    assert redis_client.ping()


def test_the_board_has_the_names_of_taskflows():
    """What code written for TaskFlow's boards calls, with the arguments it gives."""
    operations = {
        "connect": (),
        "close": (),
        "post": ("name", "book", "details", "priority"),
        "iterjobs": ("only_unclaimed", "ensure_fresh"),
        "wait": ("timeout",),
        "find_owner": ("job",),
        "claim": ("job", "who", "expiry"),
        "abandon": ("job", "who"),
        "consume": ("job", "who"),
        "trash": ("job", "who"),
        "register_entity": ("entity",),
    }
    for name, arguments in operations.items():
        parameters = list(inspect.signature(getattr(JobBoard, name)).parameters)
        assert parameters[1 : len(arguments) + 1] == list(arguments), name
    assert isinstance(JobBoard.connected, property)
    assert isinstance(JobBoard.job_count, property)
    assert list(inspect.signature(Job.wait).parameters)[1:] == [
        "timeout",
        "delay",
        "delay_multiplier",
        "max_delay",
        "sleep_func",
    ]
    assert [state.value for state in JobState] == ["UNCLAIMED", "CLAIMED", "COMPLETE", "TRASHED"]
    assert {priority.value for priority in JobPriority} == {"VERY_HIGH", "HIGH", "NORMAL", "LOW", "VERY_LOW"}
    assert issubclass(UnclaimableJob, JobFailure)
    assert not issubclass(NotFound, JobFailure)


def test_every_call_on_a_closed_board_fails_clearly(redis_client):
    with JobBoard(redis_client, "cue") as board:
        job = board.post("render")
        board.claim(job, "me")
    calls = [
        lambda: board.post("x"),
        lambda: board.iterjobs(),
        lambda: board.wait(0.01),
        lambda: board.job_count,
        lambda: board.find_owner(job),
        lambda: board.claim(job, "me"),
        lambda: board.claim_next("me"),
        lambda: board.consume(job, "me"),
        lambda: board.abandon(job, "me"),
        lambda: board.trash(job, "me"),
        lambda: board.register_entity(Entity("conductor", "me")),
        lambda: board.entities(),
        lambda: board.find(job.uuid),
        lambda: list(board.trashed()),
        lambda: board.restore(job.uuid),
        lambda: board.notifier.register("POSTED", print),
        lambda: job.state,
        lambda: job.expires_in(),
        lambda: job.extend_expiry(1),
        lambda: job.wait(0.01),
        lambda: job.last_modified,
    ]
    for call in calls:
        with pytest.raises(BoardClosed):
            call()
    assert issubclass(BoardClosed, JobFailure)


def test_a_store_that_does_not_answer_is_a_job_failure():
    dead = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.2, decode_responses=True, retry=None)
    with pytest.raises(JobFailure, match=r"127\.0\.0\.1:1\b"):
        JobBoard(dead, "cue").connect()
    dead.close()


def test_losing_the_store_is_a_job_failure_for_those_who_look(proxy, proxied):
    with JobBoard(proxied, "cue") as board:
        job = board.post("render")
        proxy.lose("EVALSHA", times=2)  # a call is tried twice
        with pytest.raises(JobFailure):
            assert job.state
        assert proxy.lost == 2
        assert job.state is JobState.UNCLAIMED


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_redis_that_evicts_is_refused(redis_client, policy):
    try:
        redis_client.config_set("maxmemory-policy", policy)
        with pytest.raises(JobFailure, match=r"maxmemory-policy.*noeviction"):
            JobBoard(redis_client, "cue").connect()
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")


def test_a_redis_that_is_too_old_is_refused(settings):
    with old_redis("6.0.16") as client:
        with pytest.raises(JobFailure, match=r"6\.0\.16.*6\.2"):
            JobBoard(client, "cue").connect()
        with pytest.raises(StoreUnusable, match=r"6\.0\.16.*6\.2"):
            check_redis(client, settings)


def test_boards_are_fetched_by_configuration_or_uri(redis_client, redis_server):
    by_conf = fetch("mine", {"board": "redis", "namespace": "cue", "claim_ttl": 5}, client=redis_client)
    uri = f"{redis_server.url}?namespace=cue&clustered=false"
    by_uri = fetch("mine", uri)
    with by_conf, by_uri:
        job = by_conf.post("render")
        assert [found.uuid for found in by_uri.iterjobs()] == [job.uuid]
        assert by_conf.claim(job, "me").expires_in() <= 5
    by_uri.client.close()


def test_a_board_is_fetched_by_the_name_of_its_backend_alone(redis_client, redis_server):
    by_name = fetch("mine", "redis", client=redis_client)
    by_uri_in_conf = fetch("mine", {"board": f"{redis_server.url}?claim_ttl=500", "namespace": "cue", "claim_ttl": 700})
    with by_name, by_uri_in_conf:
        job = by_name.post("render")
        (found,) = by_uri_in_conf.iterjobs()
        assert found == job
        assert 500 < by_uri_in_conf.claim(found, "me").expires_in() <= 700, "what stands in the configuration wins"
    by_uri_in_conf.client.close()


def test_a_board_finds_its_redis_by_a_sentinel(tmp_path):
    with watched_pair(tmp_path) as pair:
        named = urlsplit(pair.url)
        conf = {
            "board": "redis",
            "host": "127.0.0.1",
            "port": pair.port,
            "password": named.password,
            "sentinel": "farm",
            "sentinel_fallbacks": ["127.0.0.1:1"],
            "sentinel_kwargs": {"password": "of-the-sentinel", "ssl_ca_certs": "without TLS it says nothing"},
        }
        with fetch("mine", conf) as board:
            job = board.post("render")
            assert [found.uuid for found in board.iterjobs()] == [job.uuid]
        board.client.close()


@pytest.mark.parametrize(
    ("conf", "connection"),
    [
        (
            {"board": "redis", "encoding": "latin-1", "encoding_errors": "strict", "health_check_interval": "9"},
            {"encoding": "latin-1", "encoding_errors": "strict", "health_check_interval": 9, "decode_responses": True},
        ),
        ("redis://redis/?retry_on_timeout=yes", {"retry_on_timeout": True, "encoding_errors": UNDECODABLE}),
        ("unix:///run/redis.sock?db=3", {"path": "/run/redis.sock", "db": 3}),
        ("unix://me:word@/run/redis.sock", {"path": "/run/redis.sock", "username": "me", "password": "word"}),
        ("redis://redis:6380/2?password=word", {"host": "redis", "port": 6380, "db": 2, "password": "word"}),
        ("redis://redis/?socket_connect_timeout=3", {"host": "redis", "socket_connect_timeout": 3.0}),
        ("rediss://redis/?ssl_ca_certs=/ca.pem", {"host": "redis", "ssl_ca_certs": "/ca.pem"}),
        ({"board": "redis", "ssl": "yes", "ssl_ca_certs": "/ca.pem"}, {"ssl_ca_certs": "/ca.pem"}),
        ({"board": "redis", "unix_socket_path": "/run/redis.sock"}, {"path": "/run/redis.sock"}),
        ({"board": "redis", "host": "redis", "port": "6380"}, {"host": "redis", "port": 6380}),
    ],
)
def test_a_board_is_fetched_from_where_its_configuration_says(conf, connection):
    made = fetch("mine", conf).client.connection_pool.connection_kwargs
    assert {name: made.get(name) for name in connection} == connection


def test_unknown_backends_and_settings_are_refused(redis_client):
    with pytest.raises(NotFound, match=r"'zookeeper'.*redis"):
        fetch("mine", {"board": "zookeeper"})
    with pytest.raises(ValueError, match="hots"):
        fetch("mine", {"board": "redis", "hots": "typo"}, client=redis_client)
    with pytest.raises(ValueError, match=r"sentinel.*host.*port"):
        fetch("mine", "redis://redis:26379?sentinel=farm")
    with pytest.raises(ValueError, match="'board'"):
        fetch("mine", {})
