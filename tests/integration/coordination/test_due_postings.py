"""Postings that are due - a message nobody took, a claim nobody prolongs, a rest that is over - are sent by one of many
workers, without a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from opencue_sched.coordination.board import RESEND_SECONDS
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import LOOK_SECONDS, SHORT_SECONDS, Claim, ClusterPostings, DueThread, Enqueued
from opencue_sched.domain.clusters import Cluster, ClusterKind
from tests.kit.patient_postings import RESEND_MS, patient_postings
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog

KEYS = BoardKeys("cue", "clusters")
CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
STRANDED_SECONDS = 3.0
# Longer than any machine stands still.
TTL_SECONDS = 300.0
REST_SECONDS = 0.05


class Watch(DueThread):
    """That of one worker, and what it sent. The tests look themselves."""

    def __init__(self, postings: ClusterPostings, look_seconds: float = LOOK_SECONDS) -> None:
        self.sent: list[Enqueued] = []
        super().__init__(postings, send=self.sent.append, look_seconds=look_seconds)

    def start(self) -> None:
        """Not in these tests."""


@pytest.fixture
def postings(redis_client) -> ClusterPostings:
    return patient_postings(redis_client)


@pytest.fixture
def enqueued(postings) -> Enqueued:
    """A posting whose message was sent, or should have been."""
    return postings.enqueue([CLUSTER])[0]


def redis_ms(redis_client) -> int:
    seconds, micros = redis_client.time()
    return seconds * 1000 + micros // 1000


def was_sent(redis_client, uuid: str, *, ms_ago: int, wait_ms: int = RESEND_MS) -> None:
    """As if the last message for it had been sent so long ago, and the next one were due ``wait_ms`` later."""
    at = redis_ms(redis_client) - ms_ago
    redis_client.hset(KEYS.job(uuid), "sent", at)
    redis_client.zadd(KEYS.of("awaited"), {uuid: at + wait_ms}, xx=True)


def rest_ended(redis_client, uuid: str, *, ms_ago: int) -> None:
    """As if its rest had been over so long ago."""
    for part in ("delayed", "awaited"):
        redis_client.zadd(KEYS.of(part), {uuid: redis_ms(redis_client) - ms_ago}, xx=True)


def test_a_message_nobody_took_is_sent_again_by_one_of_many_and_no_sweep_does_it_too(postings, redis_client, enqueued):
    assert RESEND_SECONDS + LOOK_SECONDS < STRANDED_SECONDS
    watches = [Watch(postings) for _ in range(3)]
    for ms_ago, expected in ((RESEND_MS // 2, 0), (RESEND_MS, 1)):
        was_sent(redis_client, enqueued.uuid, ms_ago=ms_ago)
        assert {watch.look() for watch in watches} == {LOOK_SECONDS}
        assert sum(len(watch.sent) for watch in watches) == expected
    (sent,) = [sent for watch in watches for sent in watch.sent]
    assert (sent.cluster, sent.again) == (CLUSTER, True), "to the whole group"
    assert not postings.enqueue([CLUSTER])[0].ticket
    assert isinstance(postings.claim(sent.uuid, "w1", ttl_seconds=10, ticket=sent.ticket), Claim)


def test_what_is_sent_in_vain_is_sent_ever_less_often_by_sweeps_and_watches_together(postings, redis_client, enqueued):
    watch = Watch(postings)
    for number, longer in enumerate((1, 2, 4, 8, 16, 16)):
        sent = int(redis_client.hget(KEYS.job(enqueued.uuid), "sent"))
        assert redis_client.zscore(KEYS.of("awaited"), enqueued.uuid) - sent == longer * RESEND_MS
        watch.look()
        assert not watch.sent
        was_sent(redis_client, enqueued.uuid, ms_ago=longer * RESEND_MS, wait_ms=longer * RESEND_MS)
        if number % 2:
            assert postings.enqueue([CLUSTER])[0].ticket
        else:
            watch.look()
            assert watch.sent.pop()


@pytest.mark.parametrize("how", ["sleep", "put_off", "fail", "told to rest", "told to rest while at work"])
def test_a_rest_that_is_over_is_followed_by_a_message_of_one_of_many(postings, redis_client, enqueued, how):
    """Whoever began it is dead, or it was long, and no beat leads."""
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
    if how == "told to rest while at work":
        postings.update(enqueued.uuid, "rest", 60_000)
    ends = {"told to rest": "idle", "told to rest while at work": "sleep"}
    postings.end(claim, ends.get(how, how), delay_seconds=60)
    if how == "told to rest":
        postings.update(enqueued.uuid, "rest", 60_000)
    watches = [Watch(postings) for _ in range(3)]
    for ms_ago, expected in ((-30_000, 0), (0, 1)):
        rest_ended(redis_client, enqueued.uuid, ms_ago=ms_ago)
        for watch in watches:
            watch.look()
        postings.counts()  # any call on the board makes it ready
        assert sum(len(watch.sent) for watch in watches) == expected
    (sent,) = [sent for watch in watches for sent in watch.sent]
    assert (sent.cluster, sent.again) == (CLUSTER, False), "to the instance with the warm host cache"
    assert postings.job(sent.uuid).fields["tries"] == "0", "no repetition"
    assert not postings.enqueue([CLUSTER])[0].ticket
    assert isinstance(postings.claim(sent.uuid, "w2", ttl_seconds=10, ticket=sent.ticket), Claim)


@pytest.mark.parametrize("how", ["restored", "its rest ended by command"])
def test_what_an_operator_lets_go_on_is_sent_for(postings, redis_client, enqueued, how):
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
    postings.end(claim, "trash" if how == "restored" else "sleep", delay_seconds=60)
    postings.update(enqueued.uuid, *(["restore"] if how == "restored" else ["rest", 0]))
    watch = Watch(postings)
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
    assert (again.ticket > 0, again.again) == (True, False), "a sweep that sees work"
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60, ticket=again.ticket)
    postings.enqueue([CLUSTER], wake=True)
    assert postings.end(claim, "idle", delay_seconds=60) > 0


@pytest.mark.parametrize("how", ["claimed", "resting", "told to rest", "trash", "consumed", "withdrawn"])
def test_what_waits_for_no_message_gets_none(postings, redis_client, enqueued, how):
    if how == "told to rest":
        postings.update(enqueued.uuid, "rest", 60_000)
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


def test_a_look_costs_one_call(postings, redis_client, redis_server, enqueued):
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=60), "idle", delay_seconds=60)
    with RedisLog(redis_server.url) as log:
        began = redis_client.time()[0]
        Watch(postings).look()
        asked = [call.text for call in log.since(began) if call.text.startswith("EVAL")]
    assert len(asked) == 1, asked


def test_one_that_nobody_can_read_keeps_no_other_from_being_sent(postings, redis_client, enqueued):
    other = postings.enqueue([Cluster("fac", "other", ClusterKind.ALLOC, ("general",), "alloc")])[0]
    for uuid in (enqueued.uuid, other.uuid):
        was_sent(redis_client, uuid, ms_ago=RESEND_MS)
    redis_client.hset(KEYS.job(enqueued.uuid), "details", "no json")
    watch = Watch(postings)
    watch.look()
    assert [sent.uuid for sent in watch.sent] == [other.uuid]


# Claims that nobody prolongs


@pytest.fixture
def claim(postings) -> Claim:
    (enqueued,) = postings.enqueue([CLUSTER])
    return postings.claim(enqueued.uuid, "w1", ttl_seconds=TTL_SECONDS, ticket=enqueued.ticket)


def ends_in(redis_client, claim: Claim, seconds: float) -> None:
    """As if its holder had prolonged it for the last time when this much of its life was left."""
    redis_client.zadd(KEYS.of("claimed"), {claim.uuid: redis_ms(redis_client) + round(1000 * seconds)}, xx=True)


def test_a_claim_that_is_prolonged_is_left_alone(postings, claim):
    watch = Watch(postings)
    assert watch.look() == LOOK_SECONDS
    postings.extend([claim], ttl_seconds=TTL_SECONDS)
    assert watch.look() == LOOK_SECONDS
    assert watch.sent == []


def test_one_that_is_not_prolonged_leads_to_a_message_when_it_ends_and_not_before(postings, redis_client, claim):
    watch = Watch(postings, look_seconds=TTL_SECONDS)
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


def refused(redis_client) -> int:
    """How many calls Redis has refused because a key is of another kind."""
    return int(redis_client.info("errorstats").get("errorstat_WRONGTYPE", {}).get("count", 0))


def test_the_watch_goes_on_after_redis_was_away(redis_client, proxy, proxied, claim):
    watch = DueThread(ClusterPostings(proxied, KEYS), send=(sent := []).append, look_seconds=0.01)
    ends_in(redis_client, claim, -0.001)
    # given a board that nobody can read, and answers that are lost, also those to the second try
    redis_client.rename(KEYS.of("claimed"), "aside")
    redis_client.set(KEYS.of("claimed"), "no sorted set")
    before = refused(redis_client)
    watch.start()
    eventually(lambda: refused(redis_client) > before, what="a look that fails")
    proxy.lose("EVALSHA", times=2)
    eventually(lambda: proxy.lost == 2, what="a look that gets no answer")
    assert sent == []
    # when the board is mended, then what is due is sent
    redis_client.rename("aside", KEYS.of("claimed"))
    eventually(lambda: sent, 10, "the message")
    assert watch.stop()


# Short rests


class Rests(DueThread):
    """That of the child of a pool, whose parent was started."""

    def __init__(self, postings: ClusterPostings) -> None:
        self.sent: list[Enqueued] = []
        self.looks = 0
        super().__init__(postings, send=self.sent.append)

    def look(self) -> float:
        pause = super().look()
        self.looks += 1
        return pause


@pytest.fixture
def rests(postings) -> Iterator[Rests]:
    rests = Rests(postings)
    yield rests
    assert rests.stop()


def put_to_rest(postings: ClusterPostings, seconds: float) -> str:
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60, ticket=enqueued.ticket)
    assert claim is not None
    assert postings.end(claim, "sleep", delay_seconds=seconds) == 0
    return enqueued.uuid


def test_a_message_is_sent_when_the_rest_is_over_and_once(postings, redis_client, rests):
    posting = put_to_rest(postings, 60)
    rests.look_in(REST_SECONDS)
    eventually(lambda: rests.looks >= 2, what="a look at once, and one at what the end was to be")
    assert rests.sent == []
    rest_ended(redis_client, posting, ms_ago=0)
    rests.look_in(REST_SECONDS)
    eventually(lambda: rests.sent)
    (sent,) = rests.sent
    assert not sent.again, "to the instance with the warm host cache"
    assert isinstance(postings.claim(posting, "w2", ttl_seconds=60, ticket=sent.ticket), Claim)
    looks = rests.looks
    rests.look_in(REST_SECONDS)
    eventually(lambda: rests.looks > looks)
    assert len(rests.sent) == 1


@pytest.mark.parametrize("since", ["woken", "withdrawn", "told to rest"])
def test_none_is_sent_for_one_that_was(since, postings, rests):
    posting = put_to_rest(postings, REST_SECONDS)
    if since == "woken":
        assert postings.enqueue([CLUSTER], wake=True)[0].ticket
    elif since == "withdrawn":
        postings.withdraw([posting])
    else:
        postings.update(posting, "rest", 60_000)
    rests.look_in(REST_SECONDS)
    eventually(lambda: rests.looks >= 2)
    assert rests.sent == []


def test_each_short_rest_has_a_look_at_its_end_and_the_long_ones_are_left_to_others(postings, monkeypatch):
    timers: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, act: Callable[[], None]) -> None:
            timers.append(round(seconds, 1))
            assert act == rests.wake

        def start(self) -> None:
            assert self.daemon

    monkeypatch.setattr("threading.Timer", Timer)
    rests = Watch(postings)
    for seconds in (SHORT_SECONDS + 0.1, SHORT_SECONDS, 1.0, 0.5):
        rests.look_in(seconds)
    assert timers == [SHORT_SECONDS, 1.0, 0.5]
