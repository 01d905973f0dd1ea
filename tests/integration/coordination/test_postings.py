"""Cluster postings on the board: once each, claims that expire, wake-ups that are never lost."""

from __future__ import annotations

import time

import pytest

from opencue_sched.coordination.keys import consumed_queues
from opencue_sched.coordination.postings import (
    CLAIMED_TOGETHER,
    Claim,
    ClaimEnd,
    ClaimRefused,
    ClaimRenewer,
    ClusterPostings,
    with_messages,
)
from opencue_sched.coordination.presence import Presence
from opencue_sched.coordination.routing import Router
from opencue_sched.domain.clusters import Cluster, ClusterKind
from tests.kit.patient_postings import RESEND_MS, patient_postings
from tests.kit.polling import eventually

CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
OTHER = Cluster("fac", "show", ClusterKind.MANUAL, ("a", "b"))


@pytest.fixture
def postings(redis_client) -> ClusterPostings:
    return patient_postings(redis_client)


def states(client) -> dict[str, int]:
    return {part: client.zcard(f"cue:board:clusters:{part}") for part in ("ready", "delayed", "claimed", "trash")}


def claimed(answer):
    return answer if isinstance(answer, Claim) else None


def test_offering_twice_posts_once_and_sends_once(postings, redis_client):
    first = postings.enqueue([CLUSTER, OTHER])
    again = postings.enqueue([CLUSTER, OTHER])
    assert [o.ticket > 0 for o in first] == [True, True]
    assert [o.ticket > 0 for o in again] == [False, False]
    assert [o.uuid for o in first] == [o.uuid for o in again]
    assert states(redis_client)["ready"] == 2


HOUR_MS = 3_600_000


def clock_put_back(client, uuid: str) -> None:
    """As if the clock of Redis had been put back by an hour: all that was noted is an hour later than it is."""
    key = f"cue:board:clusters:job:{uuid}"
    for field in ("sent", "modified", "expires"):
        if (noted := client.hget(key, field)) not in ("", "0"):
            client.hset(key, field, int(noted) + HOUR_MS)
    for part in ("delayed", "claimed", "awaited"):
        if client.zscore(f"cue:board:clusters:{part}", uuid) is not None:
            client.zincrby(f"cue:board:clusters:{part}", HOUR_MS, uuid)


def let_expire(client, uuid: str) -> None:
    """As if the life of the claim were over."""
    client.hset(f"cue:board:clusters:job:{uuid}", "expires", 1)
    client.zadd("cue:board:clusters:claimed", {uuid: 1})


def test_no_message_claim_or_rest_waits_for_a_clock_that_was_put_back(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    clock_put_back(redis_client, enqueued.uuid)
    (lost,) = postings.enqueue([CLUSTER])
    assert lost.ticket, "its message may be lost"
    assert not postings.enqueue([CLUSTER])[0].ticket
    dead = postings.claim(enqueued.uuid, "w1", ttl_seconds=60, ticket=lost.ticket)
    clock_put_back(redis_client, enqueued.uuid)
    postings.enqueue([CLUSTER])
    expires = redis_client.zscore("cue:board:clusters:claimed", enqueued.uuid)
    assert expires == float(redis_client.hget(f"cue:board:clusters:job:{enqueued.uuid}", "expires"))
    assert expires <= (redis_client.time()[0] + 61) * 1000
    let_expire(redis_client, enqueued.uuid)
    claim = claimed(postings.claim(enqueued.uuid, "w2", ttl_seconds=10))
    assert claim
    assert claim.fence > dead.fence
    postings.end(claim, "sleep", delay_seconds=30)
    assert not postings.enqueue([CLUSTER])[0].ticket
    clock_put_back(redis_client, enqueued.uuid)
    assert postings.enqueue([CLUSTER])[0].ticket


def test_a_claim_that_was_prolonged_since_the_clock_was_put_back_is_left_as_it_is(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    clock_put_back(redis_client, enqueued.uuid)
    assert postings.extend([claim], ttl_seconds=200) == [claim]
    for _ in range(2):
        postings.enqueue([CLUSTER], wake=True)
        assert 100_000 < postings.job(enqueued.uuid).left_ms <= 200_000
    assert postings.end(claim, "sleep", delay_seconds=30) > 0, "the wake-up"


def test_a_cluster_told_to_rest_does_so_though_the_clock_was_put_back(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), "abandon")
    postings.update(enqueued.uuid, "rest", 600_000)
    clock_put_back(redis_client, enqueued.uuid)
    assert not postings.enqueue([CLUSTER])[0].ticket


def test_a_lost_message_is_sent_again(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    message_is_lost(redis_client, enqueued.uuid)
    assert postings.enqueue([CLUSTER])[0].ticket


def test_a_claim_excludes_others_and_carries_the_cluster(postings, redis_client):
    (enqueued,) = postings.enqueue([OTHER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    assert claim.cluster == OTHER
    assert isinstance(postings.claim(enqueued.uuid, "w2", ttl_seconds=10), ClaimRefused)
    assert not postings.enqueue([OTHER])[0].ticket
    assert states(redis_client) == {"ready": 0, "delayed": 0, "claimed": 1, "trash": 0}


def test_a_dead_owners_claim_ends_and_its_late_writes_are_refused(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    dead = postings.claim(enqueued.uuid, "w1", ttl_seconds=0.05)
    alive = eventually(lambda: claimed(postings.claim(enqueued.uuid, "w1", ttl_seconds=10)))
    assert alive.fence > dead.fence
    assert postings.end(dead, "consume") == 0
    assert postings.extend([dead, alive], ttl_seconds=10) == [alive]


def test_an_expired_claim_is_sent_again_by_the_next_offer(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.claim(enqueued.uuid, "w1", ttl_seconds=0.05)
    eventually(lambda: postings.enqueue([CLUSTER])[0].ticket)


def test_sleeping_postings_are_not_sent_until_their_time(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    assert postings.end(claim, "sleep", delay_seconds=60) == 0
    assert not postings.enqueue([CLUSTER])[0].ticket
    assert isinstance(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), ClaimRefused)
    redis_client.zincrby("cue:board:clusters:delayed", -60_000, enqueued.uuid)
    assert postings.enqueue([CLUSTER])[0].ticket


def test_a_posting_that_rested_goes_to_its_warm_instance_when_it_is_due(postings, redis_client):
    """Nothing was sent in vain: its message was answered, by the claim that let it rest."""
    consumed = consumed_queues("cue", "dispatch", "default", "warm")
    presence = Presence(
        redis_client,
        "cue",
        types=("dispatch",),
        group="default",
        instance="warm",
        capacity=2,
        capabilities=consumed,
    )
    presence.announce()
    router = Router(redis_client, "cue", "default")
    (first,) = postings.enqueue([CLUSTER])
    claim = postings.claim(first.uuid, "w1", ttl_seconds=10, ticket=first.ticket)
    postings.end(claim, "sleep", delay_seconds=0.05)
    due = eventually(lambda: next((o for o in postings.enqueue([CLUSTER]) if o.ticket), None))
    assert not due.again
    assert router.queue_for(due.cluster, again=due.again).instance == "warm"
    # and if that message is lost, the next one is due after the first wait, to the whole group
    key = f"cue:board:clusters:job:{due.uuid}"
    assert _sent_again(postings, redis_client, key, age_ms=RESEND_MS)
    assert redis_client.hget(key, "tries") == "1"


def test_a_wake_up_rouses_a_sleeper(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    postings.end(claim, "sleep", delay_seconds=600)
    assert postings.enqueue([CLUSTER], wake=True)[0].ticket
    assert isinstance(postings.claim(enqueued.uuid, "w2", ttl_seconds=10), Claim)


def test_a_wake_up_during_a_claim_is_not_lost(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    assert not postings.enqueue([CLUSTER], wake=True)[0].ticket
    assert postings.end(claim, "sleep", delay_seconds=600) > 0
    assert isinstance(postings.claim(enqueued.uuid, "w2", ttl_seconds=10), Claim)


def test_work_left_is_sent_at_once(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    assert postings.end(claim, "again") > 0
    assert isinstance(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), Claim)


def test_for_an_abandoned_posting_the_next_sweep_sends(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10, ticket=enqueued.ticket)
    assert postings.end(claim, "abandon") == 0
    (sent,) = postings.enqueue([CLUSTER])
    assert sent.ticket
    assert not sent.again, "none was sent in vain"


def test_a_failed_cluster_is_woken_by_nothing_and_listed_with_its_reason_until_it_works(postings, redis_client):
    enqueued, _ = postings.enqueue([CLUSTER, OTHER])
    for attempt in range(12):
        claim = eventually(lambda: claimed(postings.claim(enqueued.uuid, "w1", ttl_seconds=10)))
        assert postings.failures(claim) == attempt
        postings.enqueue([CLUSTER], wake=True)
        seconds = 600 if attempt == 11 else 0.001
        postings.end(claim, "fail", delay_seconds=seconds, reason=f"redis: no {attempt}", error=f"Traceback {attempt}")

    # given a cluster that failed again and again, when it is woken
    assert not any(it.ticket for it in postings.enqueue([CLUSTER], wake=True))

    # then it goes on resting, and whoever looks is told why
    assert postings.claim(enqueued.uuid, "w1", ttl_seconds=10).reason == "not_yet"
    assert redis_client.hget(f"cue:board:clusters:job:{enqueued.uuid}", "error") == "Traceback 11"
    (cooldown,) = postings.skipped()
    assert (cooldown.key, cooldown.cluster, cooldown.failures) == (CLUSTER.key, CLUSTER, 12)
    assert (cooldown.kind, cooldown.reason) == ("redis", "no 11")
    assert cooldown.since + 599 < cooldown.until <= float(redis_client.time()[0]) + 601

    # when a person puts it into the trash and back, and the pass works, then it has failed no more
    postings.update(enqueued.uuid, "trash", "odd")
    assert [it.until for it in postings.skipped()] == [None], "it is in the trash instead"
    postings.update(enqueued.uuid, "restore")
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), "sleep", delay_seconds=10)
    assert postings.skipped() == []
    assert states(redis_client)["trash"] == 0


def test_the_trash_is_listed_with_its_reasons(postings, redis_client):
    enqueued = postings.enqueue([CLUSTER, OTHER])
    assert postings.skipped() == []
    for number, it in enumerate(enqueued):
        postings.update(it.uuid, "trash", f"Traceback\nodd {number}\n")
        redis_client.hset(f"cue:board:clusters:job:{it.uuid}", "modified", 1000 + number)
    assert [(it.key, it.since, it.reason) for it in postings.skipped()] == [
        (CLUSTER.key, 1.0, "odd 0"),
        (OTHER.key, 1.001, "odd 1"),
    ]


def test_claims_that_run_out_trash_nothing_however_often(postings, redis_client):
    """A fleet that is killed again and again, or a Redis that comes and goes, must not cost healthy clusters."""
    (enqueued,) = postings.enqueue([CLUSTER])
    for _ in range(8):
        eventually(lambda: claimed(postings.claim(enqueued.uuid, "w1", ttl_seconds=0.01)))
    eventually(lambda: postings.counts().ready == 1)
    assert redis_client.hget(f"cue:board:clusters:job:{enqueued.uuid}", "failures") == "0"


def test_a_consumed_posting_can_be_posted_anew(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), "consume")
    (anew,) = postings.enqueue([CLUSTER])
    assert anew.ticket
    assert anew.uuid != enqueued.uuid


def test_the_renewer_holds_a_claim_past_its_ttl_and_notices_its_loss(postings, redis_client):
    renewer = ClaimRenewer(postings, ttl_seconds=4.0)
    (enqueued,) = postings.enqueue([CLUSTER])
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=4.0)
    ends = redis_client.zscore("cue:board:clusters:claimed", enqueued.uuid)
    renewer.keep(claim, claimed_at=before)
    eventually(lambda: redis_client.zscore("cue:board:clusters:claimed", enqueued.uuid) > ends)
    assert isinstance(postings.claim(enqueued.uuid, "w2", ttl_seconds=1), ClaimRefused)
    redis_client.flushdb()
    eventually(lambda: not renewer.alive(claim))
    renewer.stop()


def test_a_message_is_stale_once_a_claim_has_answered_it(postings):
    """Copies of a message, and messages sent again while the first waited, do nothing."""
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10, ticket=enqueued.ticket)
    assert postings.claim(enqueued.uuid, "w2", ttl_seconds=10, ticket=enqueued.ticket).reason == "stale"
    ticket = postings.end(claim, "again")
    assert ticket > enqueued.ticket
    assert postings.claim(enqueued.uuid, "w2", ttl_seconds=10, ticket=enqueued.ticket).reason == "stale"
    assert isinstance(postings.claim(enqueued.uuid, "w2", ttl_seconds=10, ticket=ticket), Claim)


def test_the_oldest_of_several_messages_is_good_and_the_rest_are_stale(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    message_is_lost(redis_client, enqueued.uuid)
    (again,) = postings.enqueue([CLUSTER])
    assert again.again
    assert again.ticket > enqueued.ticket
    assert isinstance(postings.claim(enqueued.uuid, "w1", ttl_seconds=10, ticket=enqueued.ticket), Claim)
    assert postings.claim(enqueued.uuid, "w2", ttl_seconds=10, ticket=again.ticket).reason == "stale"


def test_messages_in_vain_are_sent_again_ever_less_often(postings, redis_client):
    """After twice the time before, up to 16 times the first. Half a wait is left for a slow machine."""
    key = f"cue:board:clusters:job:{postings.enqueue([CLUSTER])[0].uuid}"
    for wait_ms in (RESEND_MS, 2 * RESEND_MS, 4 * RESEND_MS, 8 * RESEND_MS, 16 * RESEND_MS, 16 * RESEND_MS):
        assert not _sent_again(postings, redis_client, key, age_ms=wait_ms // 2)
        assert _sent_again(postings, redis_client, key, age_ms=wait_ms // 2)


def _sent_again(postings, redis_client, key, *, age_ms) -> bool:
    """As if the last message had been sent so much earlier."""
    redis_client.hincrby(key, "sent", -age_ms)
    redis_client.zincrby("cue:board:clusters:awaited", -age_ms, key.rpartition(":")[2])
    return postings.enqueue([CLUSTER])[0].ticket


def message_is_lost(redis_client, uuid: str) -> None:
    redis_client.zadd("cue:board:clusters:awaited", {uuid: 1}, xx=True)


def test_a_claim_resets_how_often_messages_are_sent(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    key = f"cue:board:clusters:job:{enqueued.uuid}"
    redis_client.hset(key, "tries", 4)
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), "again")
    assert redis_client.hget(key, "tries") == "0"


def test_an_expired_posting_is_sent_to_the_group_at_once(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.claim(enqueued.uuid, "w1", ttl_seconds=0.05)
    sent = eventually(lambda: next((o for o in postings.enqueue([CLUSTER]) if o.ticket), None))
    assert sent.again


def test_a_cluster_told_to_rest_is_not_roused(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    assert postings.update(enqueued.uuid, "rest", 600_000)[0] == 1
    assert not postings.enqueue([CLUSTER], wake=True)[0].ticket
    assert isinstance(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), ClaimRefused)
    postings.update(enqueued.uuid, "rest", 0)
    assert postings.enqueue([CLUSTER])[0].ticket


def test_a_rest_ordered_during_a_claim_begins_with_its_end(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    postings.update(enqueued.uuid, "rest", 600_000)
    assert postings.end(claim, "again") == 0
    assert states(redis_client)["delayed"] == 1


def test_trash_by_force_costs_the_worker_its_claim(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    assert postings.update(enqueued.uuid, "trash", "odd") == [0, "held", "w1"]
    assert postings.update(enqueued.uuid, "trash", "odd", force=True)[0] == 1
    assert postings.end(claim, "again") == 0
    assert states(redis_client) == {"ready": 0, "delayed": 0, "claimed": 0, "trash": 1}
    assert not postings.enqueue([CLUSTER], wake=True)[0].ticket
    for how in ("rest", "trash"):
        assert postings.update(enqueued.uuid, how, 600_000) == [0, "trashed"]
    assert postings.withdraw([enqueued.uuid]) == 0
    assert states(redis_client) == {"ready": 0, "delayed": 0, "claimed": 0, "trash": 1}
    assert postings.update(enqueued.uuid, "restore")[0] == 1
    assert postings.enqueue([CLUSTER])[0].ticket


def test_a_cluster_that_was_told_to_rest_and_trashed_rests_no_more_when_restored(postings):
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.update(enqueued.uuid, "rest", 600_000)
    postings.update(enqueued.uuid, "trash", "odd")
    postings.update(enqueued.uuid, "restore")
    assert postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), "again") > 0


def test_an_unreadable_posting_is_taken_down_and_posted_anew(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    redis_client.hset(f"cue:board:clusters:job:{enqueued.uuid}", "details", '{"v": 7}')
    assert postings.claim(enqueued.uuid, "w1", ttl_seconds=10).reason == "unreadable"
    assert not any(states(redis_client).values())
    (again,) = postings.enqueue([CLUSTER])
    assert again.ticket > 0
    assert postings.claim(again.uuid, "w1", ttl_seconds=10).cluster == CLUSTER


def lost(client, key, uuid):
    client.delete(key)


def lost_and_woken(client, key, uuid):
    client.delete(key)
    client.hset(key, "wake", 1)


def of_another_type(client, key, uuid):
    client.delete(key)
    client.rpush(key, "no posting")


def without_a_field(client, key, uuid):
    client.hdel(key, "prio")


def of_no_number(client, key, uuid):
    client.hset(key, "sent", "yesterday")


def of_no_cluster(client, key, uuid):
    client.hset(key, "details", "{")


def on_no_list(client, key, uuid):
    for part in ("ready", "delayed", "claimed", "trash"):
        client.zrem(f"cue:board:clusters:{part}", uuid)


@pytest.mark.parametrize("wake", [False, True])
@pytest.mark.parametrize("state", ["ready", "delayed", "claimed", "trash"])
@pytest.mark.parametrize(
    "spoil", [lost, lost_and_woken, of_another_type, without_a_field, of_no_number, of_no_cluster, on_no_list]
)
def test_a_posting_that_nobody_can_read_is_replaced_by_the_next_offer(postings, redis_client, spoil, state, wake):
    # given a posting in some state, of which somebody spoilt what the board keeps
    (enqueued, other) = postings.enqueue([CLUSTER, OTHER])
    if state != "ready":
        claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=60)
        if state != "claimed":
            postings.end(claim, "sleep" if state == "delayed" else "trash", delay_seconds=60, error="poison")
    spoil(redis_client, f"cue:board:clusters:job:{enqueued.uuid}", enqueued.uuid)

    # when it is enqueued again, then there is a new one in its place, with a message to send
    (anew, _) = postings.enqueue([CLUSTER, OTHER], wake=wake)
    assert anew.ticket
    assert anew.uuid != enqueued.uuid
    assert postings.posted() == {CLUSTER.key: anew.uuid, OTHER.key: other.uuid}
    assert states(redis_client) == {"ready": 2, "delayed": 0, "claimed": 0, "trash": 0}
    assert not redis_client.exists(f"cue:board:clusters:job:{enqueued.uuid}")

    # and it is dispatched like any other
    claim = postings.claim(anew.uuid, "w2", ttl_seconds=60, ticket=anew.ticket)
    assert claim.cluster == CLUSTER
    postings.end(claim, "again")
    assert not postings.enqueue([CLUSTER])[0].ticket


@pytest.mark.parametrize("state", ["delayed", "claimed"])
@pytest.mark.parametrize("spoil", [lost, lost_and_woken, of_another_type, without_a_field])
def test_a_posting_that_nobody_can_read_stops_no_other(postings, redis_client, spoil, state):
    # given two postings that rest or are claimed, one of which is spoilt, and both are over
    bad, good = (enqueued.uuid for enqueued in postings.enqueue([CLUSTER, OTHER]))
    for uuid in (bad, good):
        claim = postings.claim(uuid, "w1", ttl_seconds=60)
        if state == "delayed":
            postings.end(claim, "sleep", delay_seconds=60)
    redis_client.zadd(f"cue:board:clusters:{state}", {bad: 1, good: 1})
    spoil(redis_client, f"cue:board:clusters:job:{bad}", bad)

    # then every look at the board goes on, and the other is claimed
    assert postings.counts().ready == 1
    assert bad not in [due.uuid for due in postings.take_due()[0]]
    assert postings.claim(bad, "w2", ttl_seconds=60).reason == "gone"
    assert postings.claim(good, "w2", ttl_seconds=60).cluster == OTHER


@pytest.mark.parametrize(
    "part", ["ready", "delayed", "claimed", "names", "seq", "events", "trash", "listed", "awaited"]
)
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "another_type"])
def test_no_lost_key_of_the_board_stops_a_cluster(postings, redis_client, part, gone):
    # given a ready, a resting and a claimed posting, and a key of the board that somebody deleted or made another
    third = Cluster("fac", "show", ClusterKind.MANUAL, ("c",))
    _, resting, claimed = postings.enqueue([CLUSTER, OTHER, third])
    postings.end(postings.claim(resting.uuid, "w1", ttl_seconds=60), "sleep", delay_seconds=60)
    postings.claim(claimed.uuid, "w1", ttl_seconds=0.05)
    key = f"cue:board:clusters:{part}"
    assert redis_client.exists(key) or part == "trash"
    redis_client.delete(key)
    if not gone:
        (redis_client.sadd if part != "events" else redis_client.set)(key, "nonsense")

    # when all are enqueued again, and woken, then each can be claimed
    for cluster in (CLUSTER, OTHER, third):
        eventually(lambda cluster=cluster: claim_offered(postings, cluster))


def claim_offered(postings, cluster):
    (enqueued,) = postings.enqueue([cluster], wake=True)
    return claimed(postings.claim(enqueued.uuid, "w2", ttl_seconds=60))


def test_trash_ends_after_its_retention(postings, redis_client):
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.update(enqueued.uuid, "trash", "odd")
    redis_client.zadd("cue:board:clusters:trash", {enqueued.uuid: 1})
    assert postings.enqueue([CLUSTER])[0].uuid != enqueued.uuid
    assert states(redis_client)["trash"] == 0


# A claim takes along the other postings of its shard.


def on(shard: str, *tags: str) -> list[Cluster]:
    return [Cluster("fac", "show", ClusterKind.MANUAL, (tag,), None, shard) for tag in tags]


def test_a_claim_takes_along_what_is_ready_of_its_shard_and_nothing_else(postings, redis_client):
    mine, others, whole = on("w1", "a", "b", "c", "d"), on("w2", "a", "b"), on("", "a")
    enqueued = postings.enqueue([*mine, *others, *whole])
    first, idle, taken = (postings.claim(it.uuid, "w1", ttl_seconds=10) for it in enqueued[:3])
    postings.end(idle, "idle", delay_seconds=60)
    more = postings.claim_with(first, "w1", ttl_seconds=10)
    assert [claim.cluster for claim in more] == [mine[3]]
    assert postings.claim_with(first, "w1", ttl_seconds=10) == []
    assert set(postings.extend([first, taken, *more], ttl_seconds=10)) == {first, taken, *more}
    assert {it.cluster for it in postings.take_due()[0]} == set(), "their messages are under way"
    whole_claim = postings.claim(enqueued[-1].uuid, "w3", ttl_seconds=10)
    assert postings.claim_with(whole_claim, "w3", ttl_seconds=10) == []
    assert states(redis_client)["ready"] == len(others)


def test_the_message_of_a_posting_that_was_taken_along_is_stale_afterwards(postings):
    first, other = postings.enqueue(on("w1", "a", "b"))
    claim = postings.claim(first.uuid, "w1", ttl_seconds=10, ticket=first.ticket)
    (taken,) = postings.claim_with(claim, "w1", ttl_seconds=10)
    assert postings.claim(other.uuid, "w2", ttl_seconds=10) == ClaimRefused("held", "w1")
    assert all(postings.end_many([ClaimEnd(claim, "again"), ClaimEnd(taken, "again")]))
    assert postings.claim(other.uuid, "w2", ttl_seconds=10, ticket=other.ticket) == ClaimRefused("stale")


def test_each_of_the_claims_ends_in_a_state_of_its_own(postings, redis_client):
    first, *_ = postings.enqueue(on("w1", "a", "b", "c", "d"))
    claim = postings.claim(first.uuid, "w1", ttl_seconds=10)
    b, c, d = postings.claim_with(claim, "w1", ttl_seconds=10)
    postings.enqueue([b.cluster], wake=True)
    lost = Claim(d.uuid, d.owner, d.fence, d.wake, d.cluster, "another's")
    endings = [
        ClaimEnd(claim, "again"),
        ClaimEnd(b, "sleep", 60.0),
        ClaimEnd(c, "fail", 60.0, "program: why", "all of it"),
        ClaimEnd(lost, "consume"),
    ]
    again, woken, failed, none = postings.end_many(endings)
    assert again > 0 < woken, "a wake-up during the pass is not lost"
    assert failed == none == 0
    assert states(redis_client) == {"ready": 2, "delayed": 1, "claimed": 1, "trash": 0}
    assert [it.key for it in postings.skipped()] == [c.cluster.key]
    assert postings.end_many([]) == []


def test_what_sleeps_for_want_of_a_place_is_taken_along_and_what_rests_otherwise_is_not(postings):
    # given a posting that is ready, and others whose passes ended in each way
    ways = ("sleep", "idle", "fail")
    enqueued = postings.enqueue(on("w1", "a", *ways))
    first = postings.claim(enqueued[0].uuid, "w1", ttl_seconds=10)
    taken = {claim.cluster.tags[0]: claim for claim in postings.claim_with(first, "w1", ttl_seconds=10)}
    postings.end_many([ClaimEnd(first, "again"), *(ClaimEnd(taken[way], way, 60.0) for way in ways)])

    # when the one has its next pass
    again = postings.claim(first.uuid, "w1", ttl_seconds=10)
    more = postings.claim_with(again, "w1", ttl_seconds=10)

    # then hosts that came free are planned for those too that had found none
    assert [claim.cluster.tags for claim in more] == [("sleep",)]


def test_nothing_is_taken_along_by_a_claim_that_is_lost(postings):
    first, _ = postings.enqueue(on("w1", "a", "b"))
    dead = postings.claim(first.uuid, "w1", ttl_seconds=0.05)
    alive = eventually(lambda: claimed(postings.claim(first.uuid, "w1", ttl_seconds=10)))
    assert postings.claim_with(dead, "w1", ttl_seconds=10) == []
    assert len(postings.claim_with(alive, "w1", ttl_seconds=10)) == 1


def test_a_claim_takes_no_more_along_than_it_may(postings):
    tags = [f"{number:04}" for number in range(CLAIMED_TOGETHER + 5)]
    first, *_ = postings.enqueue(on("w1", *tags))
    claim = postings.claim(first.uuid, "w1", ttl_seconds=60)
    taken = postings.claim_with(claim, "w1", ttl_seconds=60)
    assert [along.cluster.tags for along in taken] == [(tag,) for tag in tags[1 : CLAIMED_TOGETHER + 1]]


def test_a_posting_that_cannot_be_read_is_not_taken_along(postings, redis_client):
    first, odd, _ = postings.enqueue(on("w1", "a", "b", "c"))
    redis_client.hset(f"cue:board:clusters:job:{odd.uuid}", "details", "{")
    claim = postings.claim(first.uuid, "w1", ttl_seconds=10)
    assert [it.cluster.tags for it in postings.claim_with(claim, "w1", ttl_seconds=10)] == [("c",)]
    assert postings.job(odd.uuid) is None


def test_one_message_is_sent_for_the_postings_of_a_shard_that_one_claim_takes(postings):
    sent = with_messages(postings.enqueue([*on("w1", *"abcd"), *on("w2", "a"), *on("", "a", "b")]))
    assert [(it.cluster.shard, it.cluster.tags) for it in sent] == [("w1", ("d",)), ("w2", ("a",)), ("", ("b",))]
    claim = postings.claim(sent[0].uuid, "w1", ttl_seconds=10, ticket=sent[0].ticket)
    assert len(postings.claim_with(claim, "w1", ttl_seconds=10)) == 3
    tags = [f"{number:04}" for number in range(2 * CLAIMED_TOGETHER + 2)]
    many = with_messages(postings.enqueue(on("w3", *tags)))
    assert [sent.cluster.tags for sent in many] == [(tag,) for tag in tags[::-CLAIMED_TOGETHER]]
    assert with_messages([]) == []
