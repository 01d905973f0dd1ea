"""Claims that nobody prolongs: the work goes on the moment they end, without a sweep."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched.coordination.names import BoardKeys
from opencue_sched.coordination.postings import Claim, ClaimWatch, ClusterPostings, Enqueued
from opencue_sched.domain.cluster import Cluster, ClusterKind
from tests.polling import eventually

KEYS = BoardKeys("cue", "clusters")
CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
# Longer than any machine stands still.
TTL_SECONDS = 300.0


class Watch(ClaimWatch):
    """That of one worker, and what it sent."""

    def __init__(self, postings: ClusterPostings) -> None:
        self.sent: list[Enqueued] = []
        super().__init__(postings, ttl_seconds=TTL_SECONDS, send=self.sent.append)


@pytest.fixture
def postings(redis_client) -> ClusterPostings:
    return ClusterPostings(redis_client, KEYS)


@pytest.fixture
def claim(postings) -> Claim:
    (enqueued,) = postings.enqueue([CLUSTER])
    return postings.claim(enqueued.uuid, "w1", ttl_seconds=TTL_SECONDS, ticket=enqueued.ticket)


def ends_in(redis_client, claim: Claim, seconds: float) -> None:
    """As if its holder had prolonged it for the last time when this much of its life was left."""
    now, micros = redis_client.time()
    redis_client.zadd(KEYS.of("claimed"), {claim.uuid: 1000 * now + micros // 1000 + round(1000 * seconds)}, xx=True)


def test_a_claim_that_is_prolonged_is_left_alone(postings, claim):
    watch = Watch(postings)
    assert watch.look() == TTL_SECONDS / 3
    postings.extend([claim], ttl_seconds=TTL_SECONDS)
    assert watch.look() == TTL_SECONDS / 3
    assert watch.sent == []


def test_one_that_is_not_prolonged_leads_to_a_message_when_it_ends_and_not_before(postings, redis_client, claim):
    watch = Watch(postings)
    ends_in(redis_client, claim, 60)
    pause = watch.look()
    assert 0 < pause <= 60.002, "the next look is at its end"
    assert watch.sent == []
    ends_in(redis_client, claim, -0.001)
    watch.look()
    (sent,) = watch.sent
    assert sent.again, "to the whole group, not to the instance that died"
    following = postings.claim(sent.uuid, "w2", ttl_seconds=TTL_SECONDS, ticket=sent.ticket)
    assert following.fence > claim.fence
    watch.look()
    assert len(watch.sent) == 1


def test_one_whose_end_somebody_elses_call_came_upon_first_is_not_missed(postings, redis_client, claim):
    watch = Watch(postings)
    ends_in(redis_client, claim, 60)
    watch.look()
    ends_in(redis_client, claim, -0.001)
    assert postings.counts().ready == 1, "any call on the board makes it ready, and none of them sends a message"
    watch.look()
    assert [enqueued.cluster for enqueued in watch.sent] == [CLUSTER]


def test_of_many_that_watch_one_sends(postings, redis_client, claim):
    watches = [Watch(postings) for _ in range(4)]
    for seconds in (60, -0.001):
        ends_in(redis_client, claim, seconds)
        for watch in watches:
            watch.look()
    assert sum(len(watch.sent) for watch in watches) == 1


@pytest.mark.parametrize("how", ["again", "sleep", "trash", "consume"])
def test_one_that_its_holder_ended_after_all_leads_to_no_message(postings, redis_client, claim, how):
    watch = Watch(postings)
    ends_in(redis_client, claim, 60)
    watch.look()
    postings.end(claim, how, delay_seconds=60)
    watch.look()
    assert watch.sent == []
    assert len(postings.posted()) == (how != "consume")


def test_the_watch_goes_on_after_redis_was_away(postings, redis_client, claim, monkeypatch):
    watch = ClaimWatch(postings, ttl_seconds=0.03, send=(sent := []).append)
    ending, failures = postings.ending, iter([RedisConnectionError("away"), RuntimeError("a bug")])

    def unlucky(within_seconds: float) -> dict[str, float]:
        if (error := next(failures, None)) is not None:
            raise error
        return ending(within_seconds)

    monkeypatch.setattr(postings, "ending", unlucky)
    ends_in(redis_client, claim, -0.001)
    watch.start()
    eventually(lambda: sent, 10, "the message")
    assert watch.stop()
