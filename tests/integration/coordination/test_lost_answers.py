"""Answers of Redis that are lost on their way: the client calls again, and the board must not take that for another."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from opencue_sched.coordination.board import NEVER
from opencue_sched.coordination.jobboard import Job, JobBoard, JobFailure, JobState, NotFound
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import Claim, ClaimEnd, ClusterPostings
from opencue_sched.domain.clusters import Cluster, ClusterKind

CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")


@pytest.fixture
def board(proxied) -> Iterator[JobBoard]:
    with JobBoard(proxied, "cue") as board:
        yield board
        assert not [fields for _, fields in board.trashed() if fields["error"].startswith("unreadable")]


def test_a_worker_has_the_claim_whose_answer_was_lost(proxy, proxied):
    postings = ClusterPostings(proxied, BoardKeys("cue", "clusters"))
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.end(postings.claim(enqueued.uuid, "w0", ttl_seconds=10), "abandon")
    (again,) = postings.enqueue([CLUSTER])
    proxy.lose("EVALSHA")
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10, ticket=again.ticket)
    assert proxy.lost == 1
    assert isinstance(claim, Claim), claim
    assert claim.fence == 2
    assert postings.extend([claim], ttl_seconds=10) == [claim]
    assert postings.claim(enqueued.uuid, "w1", ttl_seconds=10).owner == "w1", "another call is another claim"
    assert postings.end(claim, "again") > 0


def test_a_worker_has_the_claims_taken_along_whose_answer_was_lost(proxy, proxied):
    postings = ClusterPostings(proxied, BoardKeys("cue", "clusters"))
    clusters = [Cluster("fac", "show", ClusterKind.MANUAL, (tag,), None, "w1") for tag in "abc"]
    first, *_ = postings.enqueue(clusters)
    claim = postings.claim(first.uuid, "w1", ttl_seconds=10)
    postings.end_many([ClaimEnd(it, "abandon") for it in postings.claim_with(claim, "w1", ttl_seconds=10)])
    proxy.lose("EVALSHA")
    claims = postings.claim_with(claim, "w1", ttl_seconds=10)
    assert proxy.lost == 1
    assert {(it.cluster, it.fence) for it in claims} == {(cluster, 2) for cluster in clusters[1:]}
    assert postings.extend(claims, ttl_seconds=10) == claims


def test_the_next_job_is_claimed_once_though_the_answer_was_lost(proxy, board):
    """A second job claimed for ever by a caller who does not know of it would never be done."""
    first, second = board.post("first"), board.post("second")
    board.abandon(board.claim_next("me"), "me")
    proxy.lose("EVALSHA")
    job = board.claim_next("me", NEVER)
    assert proxy.lost == 1
    assert job.uuid == first.uuid
    assert [found.uuid for found in board.iterjobs(only_unclaimed=True)] == [second.uuid]
    board.consume(job, "me")
    assert board.claim_next("me").uuid == second.uuid


def test_a_job_is_claimed_though_the_answer_was_lost(proxy, board):
    job = board.post("render")
    board.abandon(board.claim(job, "me"), "me")
    proxy.lose("EVALSHA")
    board.consume(board.claim(job, "me"), "me")
    assert proxy.lost == 1


def test_a_job_is_posted_once_though_the_answer_was_lost(proxy, board):
    board.post("warm")
    proxy.lose("EVALSHA")
    job = board.post("render")
    assert proxy.lost == 1
    assert board.job_count == 2
    assert job.sequence == 2


@pytest.mark.parametrize("key", ["", "frame-1"])
def test_a_post_made_again_posts_nothing_though_the_job_was_claimed_or_done_meanwhile(
    board, redis_client, key, monkeypatch
):
    """The same call twice and three times, and what a quick worker does in between."""

    def post() -> Job:
        with monkeypatch.context() as patched:
            patched.setattr("uuid.uuid4", lambda: UUID(int=0))
            return board.post("render", details={"n": 1}, key=key)

    first = post()
    claim = board.claim_next("me")
    assert post().uuid == first.uuid
    assert (board.job_count, board.find_owner(claim)) == (1, "me")
    board.consume(claim, "me")
    again = post()
    assert board.job_count == 0, "it would be done twice"
    for said in ("uuid", "name", "details", "priority", "sequence", "created_on"):
        assert getattr(again, said) == getattr(first, said)
    assert again.state is JobState.COMPLETE
    assert 0 < redis_client.pttl(BoardKeys("cue", "jobs").call(first.uuid)) <= 60_000
    assert board.post("render", key=key).uuid != first.uuid, "another call is another job"


ENDS = ("consume", "abandon", "trash")


def end(board: JobBoard, job: Job, how: str, who: str = "me") -> None:
    getattr(board, how)(job, who)


@pytest.mark.parametrize("how", ENDS)
def test_a_job_is_ended_though_the_answer_was_lost(proxy, board, how):
    """The second try finds the job gone or nobody's; that was its own doing."""
    job, other = board.post("render"), board.post("other")
    end(board, board.claim(other, "me"), how)
    board.claim(job, "me")
    proxy.lose("EVALSHA")
    end(board, job, how)
    assert proxy.lost == 1
    assert job.state is {"consume": JobState.COMPLETE, "abandon": JobState.UNCLAIMED, "trash": JobState.TRASHED}[how]


@pytest.mark.parametrize("how", ENDS)
def test_a_job_that_another_has_claimed_meanwhile_was_still_ended(proxy, board, redis_client, how):
    """The answer of the first try stands, and the second changes nothing of what came after it."""
    keys, job = BoardKeys("cue", "jobs"), board.claim(board.post("render"), "me")
    arguments = (job.uuid, "me", job.fence, job.token, how, 0, 0, 1, "why", keys.call("this call"))
    first = board.call("board_end", *arguments)
    if how == "trash":
        board.restore(job.uuid)
    if how != "consume":
        successor = board.claim_next("somebody")
        assert successor.uuid == job.uuid
    assert board.call("board_end", *arguments) == first
    assert board.find_owner(job) == (None if how == "consume" else "somebody")
    assert 0 < redis_client.pttl(keys.call("this call")) <= 60_000


@pytest.mark.parametrize("again", ENDS)
@pytest.mark.parametrize("how", ENDS)
def test_ending_a_job_twice_on_purpose_is_still_refused(proxy, board, how, again):
    job = board.claim(board.post("render"), "me")
    proxy.lose("EVALSHA")
    end(board, job, how)
    with pytest.raises(NotFound):
        end(board, job, again)


@pytest.mark.parametrize("how", ENDS)
def test_what_was_refused_stays_refused_when_it_is_asked_again(proxy, board, how):
    job = board.claim(board.post("render"), "somebody")
    proxy.lose("EVALSHA")
    with pytest.raises(JobFailure, match="'somebody'"):
        end(board, job, how)
    assert proxy.lost == 1
    end(board, job, how, "somebody")


def test_a_job_leaves_the_trash_though_the_answer_was_lost(proxy, board):
    job, other = board.claim(board.post("render"), "me"), board.claim(board.post("other"), "me")
    board.trash(job, "me")
    board.trash(other, "me")
    board.restore(other.uuid)
    proxy.lose("EVALSHA")
    board.restore(job.uuid)
    assert proxy.lost == 1
    assert list(board.trashed()) == []
    with pytest.raises(NotFound):
        board.restore(job.uuid)


def test_a_message_is_sent_for_a_posting_though_the_answer_to_its_end_was_lost(proxy, proxied):
    """Else nobody sends one before the next sweep finds that out."""
    postings = ClusterPostings(proxied, BoardKeys("cue", "clusters"))
    (enqueued,) = postings.enqueue([CLUSTER])
    postings.end(postings.claim(enqueued.uuid, "w1", ttl_seconds=10), "abandon")
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    proxy.lose("EVALSHA")
    ticket = postings.end(claim, "again")
    assert proxy.lost == 1
    assert ticket == int(postings.job(enqueued.uuid).fields["ticket"]) == 2
