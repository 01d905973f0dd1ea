"""Clusters that rest for a moment: gone on with at its end, without a sweep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opencue_sched.coordination import postings as short_rests
from opencue_sched.coordination.names import BoardKeys
from opencue_sched.coordination.postings import SHORT_SECONDS, ClusterPostings, Enqueued, ShortRests
from opencue_sched.domain.cluster import Cluster, ClusterKind
from tests.polling import eventually

KEYS = BoardKeys("cue", "clusters")
CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
REST_SECONDS = 0.05


class Rests(ShortRests):
    """Those of one worker by a clock that stands still, and what it sent."""

    def __init__(self, postings: ClusterPostings) -> None:
        self.sent: list[Enqueued] = []
        self.now = 100.0
        super().__init__(postings, send=self.sent.append, clock=lambda: self.now)

    def start(self) -> None:
        """The tests look themselves."""


@pytest.fixture
def postings(redis_client) -> ClusterPostings:
    return ClusterPostings(redis_client, KEYS)


@pytest.fixture
def rests(postings) -> Iterator[Rests]:
    rests = Rests(postings)
    yield rests
    rests.stop()


def put_to_rest(postings: ClusterPostings, seconds: float) -> str:
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60, ticket=enqueued.ticket)
    assert claim is not None
    assert postings.end(claim, "sleep", delay_seconds=seconds) == 0
    return enqueued.uuid


def test_a_message_is_sent_when_the_rest_is_over_and_once(postings, rests):
    posting = put_to_rest(postings, REST_SECONDS)
    rests.ends_in(posting, REST_SECONDS)
    assert REST_SECONDS < rests.look() < 2 * REST_SECONDS
    assert rests.sent == []
    eventually(lambda: postings.sleeping([posting]) and postings.job(posting).fields["state"] == "ready")
    rests.now += 2 * REST_SECONDS
    assert rests.look() is None
    (sent,) = rests.sent
    assert not sent.again, "to the instance with the warm host cache"
    assert postings.claim(posting, "w2", ttl_seconds=60, ticket=sent.ticket)
    assert rests.look() is None
    assert len(rests.sent) == 1


@pytest.mark.parametrize("since", ["woken", "withdrawn", "told to rest"])
def test_none_is_sent_for_one_that_was(since, postings, rests):
    posting = put_to_rest(postings, REST_SECONDS)
    rests.ends_in(posting, REST_SECONDS)
    if since == "woken":
        assert postings.enqueue([CLUSTER], wake=True)[0].send
    elif since == "withdrawn":
        postings.withdraw([posting])
    else:
        postings.scripts.update(posting, "rest", 60_000)
    rests.now += 2 * REST_SECONDS
    assert rests.look() is None
    assert rests.sent == []


def test_one_that_nobody_can_read_keeps_no_other_from_being_sent(postings, redis_client, rests):
    odd = put_to_rest(postings, 0.0)
    redis_client.hset(KEYS.job(odd), "details", "no json")
    (other,) = postings.enqueue([Cluster("fac", "other", ClusterKind.ALLOC, ("general",), "alloc")])
    claim = postings.claim(other.uuid, "w1", ttl_seconds=60, ticket=other.ticket)
    postings.end(claim, "sleep", delay_seconds=0.0)
    for posting in (odd, other.uuid):
        rests.ends_in(posting, 0.0)
    rests.now += 1
    assert rests.look() is None
    assert [sent.uuid for sent in rests.sent] == [other.uuid]


def test_the_rests_end_in_their_order_and_the_long_ones_are_left_to_the_sweeps(postings, rests):
    posting = put_to_rest(postings, 0.0)
    rests.ends_in(posting, SHORT_SECONDS + 0.1)
    assert rests.look() is None
    rests.ends_in("later", 1.0)
    rests.ends_in(posting, 0.5)
    assert 0.5 < rests.look() < 0.6
    rests.now += 0.6
    assert 0.4 < rests.look() < 0.5
    assert [enqueued.uuid for enqueued in rests.sent] == [posting]


def test_the_thread_begins_with_the_first_rest_and_a_shorter_one_cuts_its_wait_short(postings, monkeypatch):
    monkeypatch.setattr(short_rests, "SHORT_SECONDS", 1000.0)
    sent: list[Enqueued] = []
    rests = ShortRests(postings, send=sent.append)
    try:
        rests.ends_in("another", 900.0)
        posting = put_to_rest(postings, REST_SECONDS)
        rests.ends_in(posting, REST_SECONDS)
        eventually(lambda: [enqueued.uuid for enqueued in sent] == [posting])
    finally:
        assert rests.stop()
