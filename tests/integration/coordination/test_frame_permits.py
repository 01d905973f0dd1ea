"""Permits of frames: one owner each, for a while, many in one round trip."""

from __future__ import annotations

import pytest
import redis

from opencue_sched.coordination.permits import PERMITS_PER_CALL, FramePermits, Permitted
from tests.kit.lossy_proxy import LossyProxy
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog

LONG_SECONDS = 300.0
"""Longer than any machine stands still."""


@pytest.fixture
def permits(redis_client: redis.Redis) -> FramePermits:
    return FramePermits(redis_client, "cue")


def frames(count: int, version: int = 1) -> list[Permitted]:
    return [(f"frame{number}", version) for number in range(count)]


def test_a_frame_is_one_owners_at_a_time(permits: FramePermits) -> None:
    assert permits.take([("a", 1), ("b", 7)], "w1", seconds=LONG_SECONDS) == {"a", "b"}
    assert permits.take([("c", 1), ("b", 7)], "w2", seconds=LONG_SECONDS) == {"c"}
    assert permits.take([], "w2", seconds=LONG_SECONDS) == frozenset()


def test_an_owner_has_its_permits_anew_when_it_asks_again(permits: FramePermits, redis_client: redis.Redis) -> None:
    permits.take([("a", 1), ("b", 1)], "w1", seconds=LONG_SECONDS)

    assert permits.take([("a", 1)], "w1", seconds=10 * LONG_SECONDS) == {"a"}

    assert 9 * LONG_SECONDS < redis_client.ttl("cue:permit:a:1") <= 10 * LONG_SECONDS
    assert 0 < redis_client.ttl("cue:permit:b:1") <= LONG_SECONDS


def test_a_permit_ends_by_itself_and_leaves_nothing(permits: FramePermits, redis_client: redis.Redis) -> None:
    permits.take([("a", 1)], "died", seconds=0.05)

    eventually(lambda: permits.take([("a", 1)], "next", seconds=0.05) == {"a"}, 10, "the permit of the dead to end")
    eventually(lambda: list(redis_client.scan_iter("*")) == [], 10, "the last permit to end")


def test_a_frame_that_is_retried_needs_no_permit_back(permits: FramePermits) -> None:
    permits.take([("a", 1), ("new", None)], "w1", seconds=LONG_SECONDS)

    assert permits.take([("a", 2), ("new", 0)], "w2", seconds=LONG_SECONDS) == {"a", "new"}
    assert permits.take([("a", 1), ("new", None)], "w2", seconds=LONG_SECONDS) == frozenset()


def test_only_its_owner_gives_a_permit_back(permits: FramePermits) -> None:
    permits.take([("a", 1), ("b", 1)], "w1", seconds=LONG_SECONDS)
    permits.take([("c", 1)], "w2", seconds=LONG_SECONDS)

    assert permits.drop([("a", 1), ("b", 2), ("c", 1), ("gone", 1)], "w1") == 1
    assert permits.drop([], "w1") == 0

    assert permits.take([("a", 1), ("b", 1), ("c", 1)], "w3", seconds=LONG_SECONDS) == {"a"}


def test_namespaces_are_apart(permits: FramePermits, redis_client: redis.Redis) -> None:
    permits.take([("a", 1)], "w1", seconds=LONG_SECONDS)

    assert FramePermits(redis_client, "other").take([("a", 1)], "w2", seconds=LONG_SECONDS) == {"a"}


def test_a_thousand_frames_are_asked_for_at_once_in_calls_that_keep_nobody_waiting(
    permits: FramePermits, redis_client: redis.Redis, redis_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits.drop([("known", 1)], "w1")
    permits.take([("known", 1)], "w1", seconds=LONG_SECONDS)
    some = frames(1000)[::3]
    permits.take(some, "other", seconds=LONG_SECONDS)
    round_trips: list[int] = []
    get_connection = redis_client.connection_pool.get_connection
    monkeypatch.setattr(
        redis_client.connection_pool,
        "get_connection",
        lambda *args, **options: round_trips.append(1) or get_connection(*args, **options),
    )
    with RedisLog(redis_server.url) as log:
        granted = permits.take(frames(1000), "w1", seconds=LONG_SECONDS)
        assert granted == {frame_id for frame_id, _ in frames(1000)} - {frame_id for frame_id, _ in some}
        assert permits.drop(frames(1000), "w1") == len(granted)
        assert len(round_trips) == 2
        for script in ("permits_take", "permits_drop"):
            calls = log.calls(script)
            assert len(calls) == 1000 // PERMITS_PER_CALL
            assert max(call.text.count("cue:permit:") for call in calls) <= PERMITS_PER_CALL


def test_a_permit_is_had_though_the_answer_was_lost(proxy: LossyProxy, proxied: redis.Redis) -> None:
    permits = FramePermits(proxied, "cue")
    permits.take([("known", 1)], "w1", seconds=LONG_SECONDS)
    proxy.lose("EVALSHA")
    assert permits.take(frames(3), "w1", seconds=LONG_SECONDS) == {"frame0", "frame1", "frame2"}
    assert proxy.lost == 1


def test_a_redis_that_forgot_its_scripts_grants_as_ever(permits: FramePermits, redis_client: redis.Redis) -> None:
    permits.take([("a", 1)], "w1", seconds=LONG_SECONDS)
    redis_client.script_flush()

    assert permits.take([("a", 1), ("b", 1)], "w2", seconds=LONG_SECONDS) == {"b"}
    assert permits.drop([("a", 1)], "w1") == 1
