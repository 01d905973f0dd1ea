"""Messages that nobody takes, and rests at whose end nobody sends one: sent by any worker, without a sweep."""

from __future__ import annotations

import pytest

from opencue_sched.coordination.names import BoardKeys
from opencue_sched.coordination.postings import LOOK_SECONDS, RESEND_SECONDS, ClusterPostings, Enqueued, MessageWatch
from opencue_sched.domain.cluster import Cluster, ClusterKind
from tests.integration.conftest import RESEND_MS
from tests.redis_log import RedisLog

KEYS = BoardKeys("cue", "clusters")
CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
STRANDED_SECONDS = 3.0


class Watch(MessageWatch):
    """That of one worker, and what it sent."""

    def __init__(self, postings: ClusterPostings) -> None:
        self.sent: list[Enqueued] = []
        super().__init__(postings, send=self.sent.append)


@pytest.fixture
def postings(redis_client) -> ClusterPostings:
    return ClusterPostings(redis_client, KEYS)


@pytest.fixture
def enqueued(postings) -> Enqueued:
    """A posting whose message was sent, or should have been."""
    return postings.enqueue([CLUSTER])[0]


def was_sent(redis_client, uuid: str, *, ms_ago: int) -> None:
    """As if the last message for it had been sent so long ago."""
    seconds, micros = redis_client.time()
    at = seconds * 1000 + micros // 1000 - ms_ago
    redis_client.hset(KEYS.job(uuid), "sent", at)
    redis_client.zadd(KEYS.of("awaited"), {uuid: at}, xx=True)


def rest_ended(redis_client, uuid: str, *, ms_ago: int) -> None:
    """As if its rest had been over so long ago."""
    seconds, micros = redis_client.time()
    for part in ("delayed", "awaited"):
        redis_client.zadd(KEYS.of(part), {uuid: seconds * 1000 + micros // 1000 - ms_ago}, xx=True)


def test_a_message_nobody_took_is_sent_again_by_one_of_many_and_no_sweep_does_it_too(postings, redis_client, enqueued):
    assert RESEND_SECONDS + LOOK_SECONDS < STRANDED_SECONDS
    watches = [Watch(postings) for _ in range(3)]
    for ms_ago, expected in ((RESEND_MS // 2, 0), (RESEND_MS, 1)):
        was_sent(redis_client, enqueued.uuid, ms_ago=ms_ago)
        assert {watch.look() for watch in watches} == {LOOK_SECONDS}
        assert sum(len(watch.sent) for watch in watches) == expected
    (sent,) = [sent for watch in watches for sent in watch.sent]
    assert (sent.cluster, sent.again) == (CLUSTER, True), "to the whole group"
    assert not postings.enqueue([CLUSTER])[0].send
    assert postings.claim(sent.uuid, "w1", ttl_seconds=10, ticket=sent.ticket) is not None


def test_what_is_sent_in_vain_is_sent_ever_less_often_by_sweeps_and_watches_together(postings, redis_client, enqueued):
    watch, was = Watch(postings), RESEND_MS
    for number, longer in enumerate((1, 2, 4, 8, 16, 16)):
        was_sent(redis_client, enqueued.uuid, ms_ago=longer * RESEND_MS - was // 2)
        watch.look()
        assert not watch.sent
        was_sent(redis_client, enqueued.uuid, ms_ago=longer * RESEND_MS)
        if number % 2:
            assert postings.enqueue([CLUSTER])[0].send
        else:
            watch.look()
            assert watch.sent.pop()


@pytest.mark.parametrize("how", ["sleep", "put_off", "fail", "told to rest", "told to rest while at work"])
def test_a_rest_at_whose_end_nobody_sent_a_message_is_followed_by_one_of_many(postings, redis_client, enqueued, how):
    """Whoever began it is dead, or it was left to the sweeps, and no beat leads."""
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
    if how == "told to rest while at work":
        postings.scripts.update(enqueued.uuid, "rest", 60_000)
    ends = {"told to rest": "idle", "told to rest while at work": "sleep"}
    postings.end(claim, ends.get(how, how), delay_seconds=60)
    if how == "told to rest":
        postings.scripts.update(enqueued.uuid, "rest", 60_000)
    watches = [Watch(postings) for _ in range(3)]
    for ms_ago, expected in ((-30_000, 0), (RESEND_MS // 2, 0), (RESEND_MS, 1)):
        rest_ended(redis_client, enqueued.uuid, ms_ago=ms_ago)
        for watch in watches:
            watch.look()
        postings.counts()  # any call on the board makes it ready
        assert sum(len(watch.sent) for watch in watches) == expected
    (sent,) = [sent for watch in watches for sent in watch.sent]
    assert (sent.cluster, sent.again) == (CLUSTER, False), "to the instance with the warm host cache"
    assert postings.job(sent.uuid).fields["tries"] == "0", "no repetition"
    assert not postings.enqueue([CLUSTER])[0].send
    assert postings.claim(sent.uuid, "w2", ttl_seconds=10, ticket=sent.ticket) is not None


@pytest.mark.parametrize("how", ["restored", "its rest ended by command"])
def test_what_an_operator_lets_go_on_is_sent_for(postings, redis_client, enqueued, how):
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
    postings.end(claim, "trash" if how == "restored" else "sleep", delay_seconds=60)
    postings.scripts.update(enqueued.uuid, *(["restore"] if how == "restored" else ["rest", 0]))
    watch = Watch(postings)
    watch.look()
    assert watch.sent == [], "the sweep has its time"
    rest_ended(redis_client, enqueued.uuid, ms_ago=RESEND_MS)
    watch.look()
    assert [sent.uuid for sent in watch.sent] == [enqueued.uuid]


def test_a_cluster_without_work_is_sent_for_by_nobody_when_its_rest_is_over(postings, redis_client, enqueued):
    """There are many, and a sweep or an event tells when one has some; woken meanwhile it is sent for at once."""
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
    assert postings.end(claim, "idle", delay_seconds=60) == 0
    redis_client.zadd(KEYS.of("delayed"), {enqueued.uuid: 1})
    watch = Watch(postings)
    watch.look()
    assert postings.counts().ready == 1
    watch.look()
    assert watch.sent == []
    (again,) = postings.enqueue([CLUSTER])
    assert (again.send, again.again) == (True, False), "a sweep that sees work"
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60, ticket=again.ticket)
    postings.enqueue([CLUSTER], wake=True)
    assert postings.end(claim, "idle", delay_seconds=60) > 0


@pytest.mark.parametrize("how", ["claimed", "resting", "told to rest", "trash", "consumed", "withdrawn"])
def test_what_waits_for_no_message_gets_none(postings, redis_client, enqueued, how):
    if how == "told to rest":
        postings.scripts.update(enqueued.uuid, "rest", 60_000)
    elif how == "withdrawn":
        assert postings.withdraw([enqueued.uuid]) == 1
    else:
        claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
        ends = {"resting": "sleep", "trash": "trash", "consumed": "consume"}
        if how in ends:
            postings.end(claim, ends[how], delay_seconds=60)
    redis_client.zadd(KEYS.of("awaited"), {enqueued.uuid: 1})  # at worst it is still noted
    watch = Watch(postings)
    watch.look()
    assert watch.sent == []
    assert not redis_client.exists(KEYS.of("awaited"))


def test_a_claim_that_ran_out_is_followed_though_no_watch_saw_it_before(postings, redis_client, enqueued):
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
    redis_client.zadd(KEYS.of("claimed"), {enqueued.uuid: 1}, xx=True)
    assert postings.counts().ready == 1, "any call on the board makes it ready, and none of them sends a message"
    watch = Watch(postings)
    watch.look()
    (sent,) = watch.sent
    assert postings.claim(sent.uuid, "w2", ttl_seconds=10, ticket=sent.ticket).fence > claim.fence


def test_while_no_message_is_waited_for_a_look_costs_one_command(postings, redis_client, redis_server, enqueued):
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=60), "idle", delay_seconds=60)
    with RedisLog(redis_server.url) as log:
        began = redis_client.time()[0]
        Watch(postings).look()
        asked = [call.text for call in log.since(began) if KEYS.prefix in call.text]
    assert len(asked) == 1, asked


def test_one_that_nobody_can_read_keeps_no_other_from_being_sent(postings, redis_client, enqueued):
    other = postings.enqueue([Cluster("fac", "other", ClusterKind.ALLOC, ("general",), "alloc")])[0]
    for uuid in (enqueued.uuid, other.uuid):
        was_sent(redis_client, uuid, ms_ago=RESEND_MS)
    redis_client.hset(KEYS.job(enqueued.uuid), "details", "no json")
    watch = Watch(postings)
    watch.look()
    assert [sent.uuid for sent in watch.sent] == [other.uuid]
