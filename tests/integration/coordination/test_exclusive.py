"""Work that one process of the fleet does at a time."""

from __future__ import annotations

import pytest
import redis
from structlog.testing import capture_logs

from opencue_sched.coordination.keys import reap_lease
from opencue_sched.coordination.leader import exclusive
from tests.kit.lossy_proxy import LossyProxy

KEY = reap_lease("cue", None)


def test_one_has_its_turn_and_the_next_when_it_has_ended(redis_client: redis.Redis) -> None:
    with exclusive(redis_client, KEY, seconds=90.0) as first:
        with exclusive(redis_client, KEY, seconds=90.0) as second:
            assert (first, second) == (True, False)
        with exclusive(redis_client, KEY, seconds=90.0) as third:
            assert not third, "the second ended without a turn, and ended nobody else's"
        with exclusive(redis_client, reap_lease("cue", "far"), seconds=90.0) as other_work:
            assert other_work
    with exclusive(redis_client, KEY, seconds=90.0) as fourth:
        assert fourth


def test_a_turn_whose_answer_was_lost_is_had(proxy: LossyProxy, proxied: redis.Redis) -> None:
    with exclusive(proxied, KEY, seconds=90.0):
        pass
    proxy.lose("EVALSHA")
    with exclusive(proxied, KEY, seconds=90.0) as mine:
        assert (proxy.lost, mine) == (1, True)


def test_a_turn_ends_when_its_work_fails(redis_client: redis.Redis) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(redis_client, KEY, seconds=90.0):
        raise ZeroDivisionError
    assert not redis_client.exists(KEY)


def test_a_turn_ends_by_itself_when_its_process_died(redis_client: redis.Redis) -> None:
    with exclusive(redis_client, KEY, seconds=90.0):
        assert 80_000 < redis_client.pttl(KEY) <= 90_000


def test_one_that_outlived_its_turn_ends_nobody_elses(redis_client: redis.Redis) -> None:
    with exclusive(redis_client, KEY, seconds=90.0):
        redis_client.set(KEY, "another")
    assert redis_client.get(KEY) == "another"


def test_work_that_is_done_stays_done_though_its_turn_cannot_be_given_back(redis_client: redis.Redis) -> None:
    with capture_logs() as logs, exclusive(redis_client, KEY, seconds=90.0):
        redis_client.delete(KEY)
        redis_client.lpush(KEY, "of another type")
    assert [entry["event"] for entry in logs] == ["lease_left_to_expire"]
